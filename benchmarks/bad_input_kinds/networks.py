"""The small networks, inputs and merges that the bad inputs of `bad_inputs` are made from."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fusion_bench_crossmean import (
    AlignmentCriterionAnalyzer,
    CrossMeanAlgorithm,
    LOTAlgorithm,
    LOTCrossMeanAlgorithm,
    ProgressiveRegMeanAlgorithm,
    RegMeanAlgorithm,
)

WIDTH, NUM_INPUTS = 4, 8
MERGES: tuple[type, ...] = (CrossMeanAlgorithm, RegMeanAlgorithm, ProgressiveRegMeanAlgorithm)
TASK_VECTORS: tuple[type, ...] = (LOTAlgorithm, LOTCrossMeanAlgorithm)
METHODS: tuple[type, ...] = (*MERGES, *TASK_VECTORS, AlignmentCriterionAnalyzer)

Item = TypeVar("Item")


class OnPurpose(RuntimeError):
    """What a user's own code raises here."""


@dataclass(frozen=True)
class Attempt:
    """One bad input, ready to be tried.

    Args:
        about: in words, what is odd about it.
        run: tries it; returns the merged model, or raises.
        like: has the tensors that a right result has too; None: there is no right result.
        may_be_none: whether None is a right result, as of a preflight.
        exactly: the tensors of the only right result, where that is known.
    """

    about: str
    run: Callable[[], Any]
    like: nn.Module | None
    may_be_none: bool = False
    exactly: Mapping[str, Tensor] | None = None


#: Makes an attempt, from a generator and an empty folder, which is the current one.
Kind = Callable[[np.random.Generator, Path], Attempt]


def generator_of(kind: str, seed: int) -> np.random.Generator:
    """The generator of one case."""
    return np.random.default_rng([zlib.crc32(kind.encode()), seed])


def one_of(generator: np.random.Generator, items: Sequence[Item]) -> Item:
    """One of the items, as it is: numpy's own choice would make arrays of them."""
    return items[int(generator.integers(len(items)))]


class Block(nn.Module):
    """A residual MLP behind a norm, as a transformer has them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Two blocks and a head on vectors or tokens."""

    def __init__(self, width: int = WIDTH, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TextNet(nn.Module):
    """Token numbers and an attention mask in, the mean over the tokens out."""

    def __init__(self, vocabulary: int = 10, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = Block(width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.block(self.embedding(input_ids))
        mask = attention_mask.unsqueeze(-1).to(hidden)
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


def networks(make: Callable[[], nn.Module] = Net, tasks: Sequence[str] = ("a", "b")) -> dict[str, nn.Module]:
    """Task -> expert, drawn from torch's generator."""
    return {task: make() for task in tasks}


def vectors(tasks: Sequence[str] = ("a", "b"), count: int = NUM_INPUTS, width: int = WIDTH) -> dict[str, Any]:
    """Task -> inputs (count, width)."""
    return {task: torch.randn(count, width) for task in tasks}


def texts(tasks: Sequence[str] = ("a", "b"), count: int = NUM_INPUTS) -> dict[str, Any]:
    """Task -> the arguments of a `TextNet`."""
    ids = {task: torch.randint(10, (count, 3)) for task in tasks}
    return {task: {"input_ids": ids[task], "attention_mask": torch.ones(count, 3)} for task in tasks}


def settings_of(generator: np.random.Generator) -> dict[str, Any]:
    """Good settings, any of the ways through a merge."""
    found: dict[str, Any] = {
        "num_calibration_samples": NUM_INPUTS,
        "batch_size": one_of(generator, [3, NUM_INPUTS]),
        "coverage": one_of(generator, ["mlp", "full"]),
        "schedule": one_of(generator, ["auto", "paused", "replay"]),
    }
    rare = {"precision": "mixed", "token_dropout": 0.3, "seed": 7, "dtype": "bfloat16", "strict": True}
    return found | {name: value for name, value in rare.items() if generator.random() < 0.08}


def attempt_of(
    generator: np.random.Generator,
    about: str,
    experts: Any,
    inputs: Any,
    methods: Sequence[type] = METHODS,
    **settings: Any,
) -> Attempt:
    """A merge of `experts` on `inputs` by one of `methods`, at random settings and those given."""
    method = one_of(generator, methods)
    chosen = settings_of(generator) | settings
    if method is AlignmentCriterionAnalyzer:
        chosen = {name: value for name, value in chosen.items() if name not in ("dtype", "strict")}
        chosen["return_averaged_model"] = True
    like = None
    if isinstance(experts, Mapping):
        if method in TASK_VECTORS and experts and "_pretrained_" not in experts:
            first = next(iter(experts.values()))
            experts = {"_pretrained_": first, **experts}  # task vectors need one
        model = experts.get("_pretrained_", next(iter(experts.values()), None))
        like = model if isinstance(model, nn.Module) else None

    def run() -> Any:
        return method(**chosen).run(experts, inputs)

    return Attempt(f"{method.__name__}, {about}", run, like)
