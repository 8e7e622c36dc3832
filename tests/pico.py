"""The smallest networks, experts, inputs and pools that still have every part: made from a seed, nothing downloaded.

Weights come from numpy by name, so that they are the same whatever versions of torch and transformers are installed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from fusion_bench.modelpool import CLIPVisionModelPool
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

TASKS = ("digits", "letters", "textures", "icons", "fonts", "scripts", "animals", "fashion")
SIDE = 16


def draw_weights(network: nn.Module, seed: int) -> dict[str, Tensor]:
    """A state dict for `network`: inputs of unit size stay of unit size, norms scatter around one."""
    state = {}
    for name, tensor in network.state_dict().items():
        if not tensor.is_floating_point():
            state[name] = tensor.clone()
            continue
        generator = np.random.default_rng([seed, zlib.crc32(name.removeprefix("vision_model.").encode())])
        values = generator.standard_normal(tuple(tensor.shape))
        if tensor.ndim > 1:
            values /= np.prod(tensor.shape[1:]) ** 0.5
        elif name.endswith("weight"):
            values = 1 + 0.3 * values
        else:
            values *= 0.2
        state[name] = torch.from_numpy(np.asarray(values)).to(tensor.dtype)
    return state


def pico_clip(hidden_act: str = "gelu", seed: int = 0, *, num_layers: int = 2) -> CLIPVisionModel:
    """Two blocks, width 16, two heads, five tokens; in the default dtype and in training mode."""
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=8,
        hidden_act=hidden_act,
    )
    network = CLIPVisionModel(config).to(torch.get_default_dtype())
    network.load_state_dict(draw_weights(network, seed))
    return network.train()


def experts_of(
    make: Callable[[int], nn.Module], num_tasks: int = 3, seed: int = 0, spread: float = 0.5
) -> dict[str, nn.Module]:
    """Task -> expert: a common start, and `spread` of the way to a network of the expert's own."""
    start = make(1000 * seed).state_dict()
    experts = {}
    for index, task in enumerate(TASKS[:num_tasks]):
        expert = make(1000 * seed + index + 1)
        with torch.no_grad():
            for name, tensor in expert.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(torch.lerp(start[name], tensor, spread))
        experts[task] = expert
    return experts


def pico_experts(
    num_tasks: int = 3, seed: int = 0, hidden_act: str = "gelu", *, spread: float = 0.5, num_layers: int = 2
) -> dict[str, nn.Module]:
    """CLIP experts that differ in every parameter; at the default spread their inputs drift far."""
    return experts_of(lambda s: pico_clip(hidden_act, s, num_layers=num_layers), num_tasks, seed, spread)


def pico_calibration(tasks: Iterable[str] = TASKS[:3], num_samples: int = 24, seed: int = 0) -> dict[str, Tensor]:
    """Task -> images (num_samples, 3, 16, 16) in the default dtype, with statistics of the task's own."""
    images = {}
    for task in tasks:
        generator = np.random.default_rng([seed, zlib.crc32(task.encode())])
        values = generator.standard_normal((num_samples, 3, SIDE, SIDE)) + generator.standard_normal((1, 3, 1, 1))
        images[task] = torch.from_numpy(values).to(torch.get_default_dtype())
    return images


class PicoPool(CLIPVisionModelPool):
    """FusionBench's CLIP pool with models and images in memory."""

    def __init__(self, models: Mapping[str, Any], images: Mapping[str, Sequence[Any]] | None) -> None:
        super().__init__(dict(models), train_datasets=images)

    def load_processor(self, *_: Any, **__: Any) -> Callable[[Image.Image], Tensor]:
        def process(image: Image.Image) -> Tensor:
            pixels = torch.from_numpy(np.array(image)).to(torch.get_default_dtype())
            return (pixels / 127.5 - 1).permute(2, 0, 1)

        return process

    def load_train_dataset(self, dataset_name: str, *_: Any, **__: Any) -> Sequence[Any]:
        return self._train_datasets[dataset_name]


def pico_images(tasks: Iterable[str] = TASKS[:3], num_samples: int = 24, seed: int = 0) -> dict[str, list[dict]]:
    """Task -> labelled PIL images, as a CLIP pool's training data gives them."""
    images = {}
    for task in tasks:
        generator = np.random.default_rng([seed, zlib.crc32(task.encode())])
        pixels = generator.integers(0, 256, (num_samples, SIDE, SIDE, 3), dtype=np.uint8)
        images[task] = [{"image": Image.fromarray(p), "label": int(i % 2)} for i, p in enumerate(pixels)]
    return images


def pico_pool(
    experts: Mapping[str, Any] | None = None,
    *,
    num_samples: int = 24,
    pretrained: nn.Module | None = None,
    with_training_data: bool = True,
) -> PicoPool:
    """A CLIP pool of `experts` with training images; `_pretrained_` where given."""
    experts = pico_experts() if experts is None else experts
    models = dict(experts) if pretrained is None else {"_pretrained_": pretrained, **experts}
    return PicoPool(models, pico_images(experts, num_samples) if with_training_data else None)


class PicoText(nn.Module):
    """A text encoder that pools over the tokens its attention mask keeps: padding changes nothing it returns."""

    def __init__(self, vocabulary: int = 20, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.pooler = nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        hidden = hidden + self.mlp(hidden)
        mask = attention_mask.unsqueeze(-1).to(hidden)
        return self.pooler((hidden * mask).sum(1) / mask.sum(1))


class PicoMLP(nn.Module):
    """Any number of residual MLP layers on plain vectors; `mlp` in the names, so that both coverages find them."""

    def __init__(self, width: int = 6, depth: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.mlp = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.to(torch.get_default_dtype())
        self.load_state_dict(draw_weights(self, seed))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.mlp:
            x = x + layer(x).tanh()
        return x


def vectors(tasks: Iterable[str] = TASKS[:3], num_samples: int = 24, width: int = 6) -> dict[str, Tensor]:
    """Task -> inputs (num_samples, width) of a `PicoMLP`."""
    inputs = {}
    for task in tasks:
        values = np.random.default_rng(zlib.crc32(task.encode())).standard_normal((num_samples, width))
        inputs[task] = torch.from_numpy(values).to(torch.get_default_dtype())
    return inputs


def hooks_of(network: nn.Module) -> Iterator[Any]:
    """Every forward hook of every module."""
    for module in network.modules():
        yield from module._forward_pre_hooks.values()
        yield from module._forward_hooks.values()
