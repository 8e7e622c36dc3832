"""Experts that cost what real ones cost: CLIP vision towers of a given size with random weights, and a pool of them.

What a merge costs depends on the shapes and not on the values, so nothing is downloaded. The experts are a random
network plus noise, far enough apart to be different and close enough for the systems to be ordinary ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import OmegaConf
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel

#: Standard deviation of what an expert adds to a tensor, in multiples of the tensor's own.
NOISE = 0.3


@dataclass(frozen=True)
class Size:
    """The shape of a vision tower; widths in features, `patch` and `image` in pixels."""

    width: int
    mlp_width: int
    layers: int
    heads: int
    patch: int
    image: int

    def network(self, layers: int) -> CLIPVisionModel:
        """A network of this size and `layers` blocks, its weights drawn from torch's global generator."""
        config = CLIPVisionConfig(
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            patch_size=self.patch,
            image_size=self.image,
        )
        return CLIPVisionModel(config)


SIZES = {
    "vit-b-32": Size(width=768, mlp_width=3072, layers=12, heads=12, patch=32, image=224),
    "vit-l-14": Size(width=1024, mlp_width=4096, layers=24, heads=16, patch=14, image=224),
    "tiny": Size(width=64, mlp_width=256, layers=2, heads=4, patch=16, image=64),
}


def task_names(count: int) -> list[str]:
    """The names of the first `count` tasks."""
    return [f"task_{index}" for index in range(count)]


def save_experts(folder: Path, size: Size, *, layers: int, tasks: int, seed: int = 0) -> None:
    """Writes a pretrained model and `tasks` experts as safetensors checkpoints below `folder`."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        pretrained = size.network(layers)
        pretrained.save_pretrained(folder / "_pretrained_")
        for task in task_names(tasks):
            expert = size.network(layers)
            for own, base in zip(expert.parameters(), pretrained.parameters(), strict=True):
                own.copy_(base + NOISE * base.std() * torch.randn_like(base))
            expert.save_pretrained(folder / task)


def random_images(size: Size, *, tasks: int, samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Task -> images as a processor leaves them, shape (samples, 3, image, image)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, 3, size.image, size.image)
    return {task: torch.randn(shape, generator=generator) for task in task_names(tasks)}


class RandomExpertPool(CLIPVisionModelPool):
    """FusionBench's pool over saved experts, its training data tensors in memory that no processor touches.

    Args:
        folder: where `save_experts` wrote.
        images: task -> images, see `random_images`; its keys say which experts belong to the pool.
    """

    def __init__(self, folder: Path, images: Mapping[str, Tensor]) -> None:
        paths = {name: str(folder / name) for name in ("_pretrained_", *images)}
        datasets: Any = {task: [(image, 0) for image in tensor] for task, tensor in images.items()}
        super().__init__(OmegaConf.create(paths), train_datasets=datasets)
        self.images_by_task = datasets

    def load_processor(self, *_: Any, **__: Any) -> Any:
        return unchanged

    def load_train_dataset(self, dataset_name: str, *_: Any, **__: Any) -> Any:
        return self.images_by_task[dataset_name]


def unchanged(image: Tensor) -> Tensor:
    """The processor of images that are processed already."""
    return image
