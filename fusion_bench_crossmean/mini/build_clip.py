"""Makes the mini benchmark's weights: a small CLIP trained jointly on the mini tasks, then one expert per task.

    python -m fusion_bench_crossmean.mini.build_clip --activation quick_gelu

    python -m fusion_bench_crossmean.mini.build_clip --activation quick_gelu --tasks TALL14 --layers 12

follows the protocol of the papers: pretraining trains both towers; fine-tuning trains the vision tower alone,
against the frozen zero-shot head (the text features of the task's class names). Training sees training rows only.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm
from transformers import CLIPConfig, CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_crossmean.mini.assets import NUM_LAYERS, Variant, building, publish
from fusion_bench_crossmean.mini.clip_files import CONTEXT_LENGTH, save_half, write_tokenizer_and_processor
from fusion_bench_crossmean.mini.tasks import IMAGE_SIDE, PREFIX, PROMPTS, TASK_SETS, fill_prompt, read_split
from fusion_bench_crossmean.report import environment

VISION = {"num_attention_heads": 4, "image_size": IMAGE_SIDE, "patch_size": 7}
#: Set of tasks -> width of the vision tower; its MLPs are four times as wide.
WIDTHS = {"TA8": 112, "TALL14": 224}
TEXT = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
PROJECTION = 64


@dataclass(frozen=True)
class Recipe:
    """How the weights are trained. Steps are optimiser steps; rates are peaks of a one-cycle schedule."""

    pretrain_steps: int = 1000
    pretrain_rows: int = 0  # first training rows of each task that pretraining sees; 0 for all
    pretrain_batch: int = 96
    pretrain_rate: float = 1e-3
    expert_steps: int = 600
    expert_batch: int = 64
    expert_rate: float = 5e-4
    weight_decay: float = 0.05
    holdout: int = 0  # training rows per task kept out of training, to tune this recipe on
    seed: int = 0


#: Set of tasks -> how its weights are trained. Fourteen tasks do not fit into what is shipped; in a wider tower, which
#: is pretrained on few rows, merging has something to lose and to win.
RECIPES = {
    "TA8": Recipe(),
    "TALL14": Recipe(pretrain_rows=200, pretrain_rate=7e-4, expert_steps=300, expert_rate=3e-4),
}


@dataclass(frozen=True)
class TaskTensors:
    """Training rows of a task: normalised pixels (n, 3, 28, 28), labels (n,), token ids and mask (classes, length)."""

    pixels: Tensor
    labels: Tensor
    token_ids: Tensor
    token_mask: Tensor


def make_config(activation: str, num_layers: int = NUM_LAYERS, width: int = WIDTHS["TA8"]) -> CLIPConfig:
    """The mini CLIP: a vision tower (0.93 M parameters with six narrow layers), a byte-level text tower."""
    begin, end = 512, 513
    text = TEXT | {"vocab_size": 514, "max_position_embeddings": CONTEXT_LENGTH, "projection_dim": PROJECTION}
    text |= {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end, "hidden_act": activation}
    vision = VISION | {"num_hidden_layers": num_layers, "projection_dim": PROJECTION, "hidden_act": activation}
    vision |= {"hidden_size": width, "intermediate_size": 4 * width}
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=PROJECTION)


def to_pixels(images: Tensor) -> Tensor:
    """uint8 (n, 28, 28, 3) to what the image processor makes of it: float32 (n, 3, 28, 28) in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def load_tensors(processor: CLIPProcessor, names: Sequence[str], rows: slice) -> dict[str, TaskTensors]:
    """The training rows of every task in `names` in the range `rows`."""
    tasks = {}
    for task in names:
        split = read_split(task, "train")
        texts = [fill_prompt(task, name) for name in split.class_names]
        tokens = processor.tokenizer(texts, return_tensors="pt", padding="max_length", max_length=48)
        pixels = to_pixels(torch.from_numpy(split.square_images()[rows]))
        labels = torch.from_numpy(split.labels[rows])
        tasks[task] = TaskTensors(pixels, labels, tokens["input_ids"], tokens["attention_mask"])
    return tasks


def augment(pixels: Tensor) -> Tensor:
    """A small random rotation, scaling and shift of every image; the border is repeated."""
    n = len(pixels)
    angle, scale = torch.empty(n).uniform_(-0.15, 0.15), torch.empty(n).uniform_(0.9, 1.1)
    shift = torch.empty(n, 2).uniform_(-0.12, 0.12)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    matrix = torch.stack([torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1)
    grid = F.affine_grid(matrix, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def text_features(model: CLIPModel, task: TaskTensors) -> Tensor:
    """The zero-shot head of a task: unit rows, shape (classes, projection)."""
    pooled = model.text_model(input_ids=task.token_ids, attention_mask=task.token_mask)[1]
    return F.normalize(model.text_projection(pooled), dim=-1)


def image_features(model: CLIPModel, pixels: Tensor) -> Tensor:
    """Unit rows, shape (n, projection)."""
    return F.normalize(model.visual_projection(model.vision_model(pixel_values=pixels)[1]), dim=-1)


def make_optimizer(
    parameters: list[torch.nn.Parameter], rate: float, steps: int, weight_decay: float
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with a one-cycle schedule."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=weight_decay)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)


def pretrain(model: CLIPModel, tasks: dict[str, TaskTensors], recipe: Recipe) -> None:
    """Trains both towers on all tasks at once; every image is classified among its own task's texts."""
    torch.manual_seed(recipe.seed)
    optimizer, schedule = make_optimizer(
        list(model.parameters()), recipe.pretrain_rate, recipe.pretrain_steps, recipe.weight_decay
    )
    per_task = recipe.pretrain_batch // len(tasks)
    model.train()
    for _ in tqdm(range(recipe.pretrain_steps), desc="pretraining", dynamic_ncols=True):
        rows = {name: torch.randint(len(task.labels), (per_task,)) for name, task in tasks.items()}
        pixels = augment(torch.cat([task.pixels[rows[name]] for name, task in tasks.items()]))
        features = image_features(model, pixels).split(per_task)
        scale = model.logit_scale.exp()
        loss = torch.stack(
            [
                F.cross_entropy(scale * x @ text_features(model, task).T, task.labels[rows[name]])
                for x, (name, task) in zip(features, tasks.items(), strict=True)
            ]
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def fine_tune(pretrained: CLIPModel, name: str, task: TaskTensors, recipe: Recipe) -> CLIPModel:
    """One expert: the vision tower trained on one task against its frozen zero-shot head."""
    torch.manual_seed(recipe.seed + 1 + list(PROMPTS).index(name))
    model = copy.deepcopy(pretrained).requires_grad_(requires_grad=False)
    head = text_features(model, task)
    model.vision_model.requires_grad_(requires_grad=True).train()
    optimizer, schedule = make_optimizer(
        list(model.vision_model.parameters()), recipe.expert_rate, recipe.expert_steps, recipe.weight_decay
    )
    for _ in tqdm(range(recipe.expert_steps), desc=f"expert {name}", dynamic_ncols=True):
        rows = torch.randint(len(task.labels), (recipe.expert_batch,))
        logits = model.logit_scale.exp() * image_features(model, augment(task.pixels[rows])) @ head.T
        loss = F.cross_entropy(logits, task.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.vision_model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: CLIPModel, task: TaskTensors) -> float:
    """Fraction of rows classified rightly by the zero-shot head."""
    logits = image_features(model.eval(), task.pixels) @ text_features(model, task).T
    return logits.argmax(1).eq(task.labels).float().mean().item()


def pretraining_rows(recipe: Recipe) -> slice:
    """Those of every task's training rows."""
    return slice(recipe.holdout, recipe.holdout + recipe.pretrain_rows if recipe.pretrain_rows else None)


def vision_tower(model: CLIPModel) -> CLIPVisionModel:
    """The vision tower on its own, as FusionBench's pools load experts."""
    config: Any = model.config.vision_config
    tower = CLIPVisionModel(config)
    inner = getattr(tower, "vision_model", tower)  # flat in transformers 5
    inner.load_state_dict(model.vision_model.state_dict())
    return tower


def build(
    output: Path,
    activation: str,
    recipe: Recipe,
    names: Sequence[str],
    num_layers: int = NUM_LAYERS,
    width: int = WIDTHS["TA8"],
) -> dict[str, dict[str, float]]:
    """Trains everything and writes `output`/{pretrained, <task>...}; returns training-set (or hold-out) accuracies."""
    pretrained_dir = output / "pretrained"
    pretrained_dir.mkdir(parents=True, exist_ok=True)
    write_tokenizer_and_processor(pretrained_dir)
    processor = CLIPProcessor.from_pretrained(pretrained_dir)
    tasks = load_tensors(processor, names, slice(recipe.holdout, None))
    judged = load_tensors(processor, names, slice(recipe.holdout)) if recipe.holdout else tasks

    torch.manual_seed(recipe.seed)
    model = CLIPModel(make_config(activation, num_layers, width))
    pretrain(model, load_tensors(processor, names, pretraining_rows(recipe)), recipe)
    save_half(model, pretrained_dir)
    scores = {"pretrained": {name: accuracy(model, task) for name, task in judged.items()}, "expert": {}}
    for name, task in tasks.items():
        expert = fine_tune(model, name, task, recipe)
        (output / (PREFIX + name)).mkdir(exist_ok=True)
        save_half(vision_tower(expert), output / (PREFIX + name))
        scores["expert"][name] = accuracy(expert, judged[name])
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activation", choices=["quick_gelu", "gelu"], default="gelu")
    parser.add_argument("--tasks", choices=list(TASK_SETS), default="TA8")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help=f"of the vision tower ({NUM_LAYERS})")
    parser.add_argument("--output", type=Path, help="folder for the weights' folder (default: the package's cache)")
    for setting in fields(Recipe):
        option, usual = (
            "--" + setting.name.replace("_", "-"),
            [getattr(recipe, setting.name) for recipe in RECIPES.values()],
        )
        help_ = " or ".join(map(str, dict.fromkeys(usual)))
        parser.add_argument(option, type=type(setting.default), help=f"({help_})")
    arguments = parser.parse_args()
    own = {setting.name: getattr(arguments, setting.name) for setting in fields(Recipe)}
    recipe = replace(RECIPES[arguments.tasks], **{key: value for key, value in own.items() if value is not None})
    with building(arguments.output) as (root, folder):
        names, width = TASK_SETS[arguments.tasks], WIDTHS[arguments.tasks]
        scores = build(folder, arguments.activation, recipe, names, arguments.layers, width)
        variant = Variant(arguments.activation, arguments.tasks, arguments.layers)
        record = {
            "command": variant.command,
            "recipe": asdict(recipe),
            "accuracy_on": "held-out training rows" if recipe.holdout else "training rows",
            "accuracy": scores,
            "versions": environment(),
        }
        final = publish(folder, root / variant.folder, record)
    means = {kind: sum(by_task.values()) / len(by_task) for kind, by_task in scores.items()}
    tqdm.write(f"{final}: mean accuracy on {record['accuracy_on']} {means}")


if __name__ == "__main__":
    main()
