"""Fine-tunes one text encoder per task, for people who have no experts.

    python -m fusion_bench_crossmean.text.finetune --encoder bert-base-uncased --task cola mrpc --output experts

writes a folder per GLUE task with model and tokenizer, as `modelpool.experts.<task>=experts/<task>` takes it.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

from fusion_bench_crossmean.report import check_writable
from fusion_bench_crossmean.text.rows import encode, load_text

log = logging.getLogger(__name__)

GLUE = ("cola", "mrpc", "qnli", "qqp", "rte", "sst2")


@dataclass(frozen=True)
class Recipe:
    """How an expert is trained: AdamW, a linear schedule, gradients clipped at 1.

    Args:
        epochs: over the training rows.
        batch_size: rows per step.
        rate: peak of the learning rate.
        warmup: fraction of the steps in which it rises.
        weight_decay: of every parameter.
        max_length: tokens of a row; longer ones are cut.
        max_rows: of the training set, drawn at random; None is all.
        seed: of the head, the order of the rows and dropout.
    """

    epochs: int = 3
    batch_size: int = 32
    rate: float = 2e-5
    warmup: float = 0.06
    weight_decay: float = 0.01
    max_length: int = 128
    max_rows: int | None = None
    seed: int = 0


def fine_tune(encoder: str | Path, rows: datasets.Dataset, num_labels: int, recipe: Recipe, title: str = "") -> Any:
    """A classifier on `encoder`, trained on rows of `text`, `text_b` and `label`.

    Returns:
        (model, tokenizer), the model in eval mode and on the device where it was trained.
    """
    torch.manual_seed(recipe.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(encoder, model_max_length=recipe.max_length)
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=num_labels)
    model = model.float().to(device).train()
    if recipe.max_rows is not None and recipe.max_rows < len(rows):
        rows = rows.shuffle(seed=recipe.seed).select(range(recipe.max_rows))
    loader = DataLoader(rows, recipe.batch_size, shuffle=True, collate_fn=lambda items: with_labels(tokenizer, items))  # pyright: ignore[reportArgumentType]
    steps = recipe.epochs * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.rate, weight_decay=recipe.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, int(recipe.warmup * steps), steps)
    with tqdm(total=steps, desc=title, dynamic_ncols=True) as bar:
        for _ in range(recipe.epochs):
            for inputs in loader:
                loss = model(**{key: value.to(device) for key, value in inputs.items()}).loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                bar.set_postfix(loss=f"{loss.item():.3f}")
                bar.update()
    return model.eval(), tokenizer


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: datasets.Dataset, batch_size: int = 64) -> float:
    """Fraction of rows classified rightly, on the device where the model is."""
    right = 0
    for start in tqdm(range(0, len(rows), batch_size), desc="accuracy", leave=False, dynamic_ncols=True):
        items = [rows[index] for index in range(start, min(start + batch_size, len(rows)))]
        inputs = {key: value.to(model.device) for key, value in with_labels(tokenizer, items).items()}
        labels = inputs.pop("labels")
        right += int((model(**inputs).logits.argmax(-1) == labels).sum())
    return right / len(rows)


def with_labels(tokenizer: Any, items: Sequence[Any]) -> dict[str, Any]:
    """Token ids, masks and `labels` of some rows."""
    return dict(encode(tokenizer, items)) | {"labels": torch.tensor([item["label"] for item in items])}


def save_expert(folder: Path, model: Any, tokenizer: Any) -> None:
    """Writes `folder`, whole or not at all; one that is there already is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving-") as temporary:
        model.save_pretrained(Path(temporary) / "new")
        tokenizer.save_pretrained(Path(temporary) / "new")
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        (Path(temporary) / "new").rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="bert-base-uncased", help="path or name on the hub")
    parser.add_argument("--task", nargs="+", choices=GLUE, default=list(GLUE))
    parser.add_argument("--output", type=Path, required=True)
    for setting in fields(Recipe):
        option, kind = "--" + setting.name.replace("_", "-"), float if isinstance(setting.default, float) else int
        parser.add_argument(option, type=kind, default=setting.default, help=f"({setting.default})")
    arguments = parser.parse_args()
    recipe = Recipe(**{setting.name: getattr(arguments, setting.name) for setting in fields(Recipe)})
    check_writable(arguments.output / "expert")  # not after hours of training
    for task in arguments.task:
        own = replace(recipe, seed=recipe.seed + GLUE.index(task))  # whatever the other tasks are
        rows = load_text("nyu-mll/glue", task, split="train")
        labels = rows.features["label"].num_classes
        model, tokenizer = fine_tune(arguments.encoder, rows, labels, own, task)
        save_expert(arguments.output / task, model, tokenizer)
        score = accuracy(model, tokenizer, load_text("nyu-mll/glue", task, split="validation"))
        tqdm.write(f"{arguments.output / task}: validation accuracy {score:.3f}")


if __name__ == "__main__":
    main()
