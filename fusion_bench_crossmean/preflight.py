"""What a merge is going to need, told from one forward of one batch, and whether it is there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.memory import GIB
from fusion_bench_crossmean.weights import Weights, size_of

#: Width of the product by which the device's speed is measured.
PROBE_WIDTH = 1024
#: How much longer a sum over many batches takes than its products alone.
STATISTICS_OVERHEAD = 1.3


@dataclass(frozen=True)
class Work:
    """The work of one batch.

    Args:
        seconds: of its forward.
        rows: per layer group, how many rows its input has.
    """

    seconds: float
    rows: list[int]


def measure(network: nn.Module, batch: Batch, groups: Sequence[LayerGroup]) -> Work:
    """Times a forward of a network whose tensors are all there, and counts the rows of every group's input."""
    rows: dict[str, int] = {}

    def counting(name: str) -> object:
        def count(_: nn.Module, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> None:
            inputs = args[0] if args else next(iter(kwargs.values()))
            rows[name] = inputs.numel() // inputs.shape[-1]

        return network.get_submodule(name).register_forward_pre_hook(count, with_kwargs=True)

    hooks = [counting(group.names[0]) for group in groups]
    try:
        batch.run(network)
    finally:
        for hook in hooks:
            hook.remove()  # type: ignore[attr-defined]
    synchronise()
    began = time.perf_counter()
    batch.run(network)
    synchronise()
    return Work(time.perf_counter() - began, [rows[group.names[0]] for group in groups])


def products_per_second(device: torch.device) -> float:
    """Floating-point operations per second in a float32 product, as the process is set."""
    matrix = torch.ones(PROBE_WIDTH, PROBE_WIDTH, device=device, dtype=torch.float32)
    out = matrix @ matrix
    synchronise()
    began = time.perf_counter()
    for _ in range(4):
        torch.mm(matrix, matrix, out=out)
    synchronise()
    return 4 * 2 * PROBE_WIDTH**3 / (time.perf_counter() - began)


def synchronise() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def expected_seconds(
    work: Work,
    groups: Sequence[LayerGroup],
    tensors: Weights,
    *,
    num_batches: float,
    num_points: int,
    rate: float,
    replays: bool,
) -> float:
    """Seconds of a merge, from the first forward to the last solution; a rough number.

    Args:
        work: of one batch.
        groups: of layers.
        tensors: of a network, for their shapes.
        num_batches: of all tasks, counted in batches of the measured size.
        num_points: path points, each of which has a forward per batch.
        rate: see `products_per_second`.
        replays: whether blocks run twice.
    """
    forwards = work.seconds * num_batches * num_points * (2 if replays else 1)
    statistics = solutions = 0.0
    for group, rows in zip(groups, work.rows, strict=True):
        outputs, inputs = group.weight_of(tensors).shape
        # Half of the Gram matrix, and the bilinear statistic in the cheaper of its two orders.
        statistics += num_batches * rows * (inputs**2 + min(2 * inputs**2, 4 * inputs * outputs))
        # Two factorisations and a solution, in float64 (half as fast) for the most part.
        solutions += 2 * (2 * inputs**3 / 3 + 2 * inputs**2 * outputs)
    return forwards + (STATISTICS_OVERHEAD * statistics + solutions) / rate


def covered_bytes(groups: Sequence[LayerGroup], tensors: Weights) -> int:
    """Bytes of all weights that are solved for: what a checkpoint takes on disk."""
    return sum(group.weight_of(tensors).nbytes for group in groups)


def gram_bytes(groups: Sequence[LayerGroup], tensors: Weights) -> int:
    """Bytes of one task's Gram matrices, in float32."""
    return sum(4 * group.weight_of(tensors).shape[1] ** 2 for group in groups)


def duplicates(hashes: Mapping[str, str]) -> list[str]:
    """In words: experts whose weights are the same bit for bit."""
    by_hash: dict[str, list[str]] = {}
    for name, value in hashes.items():
        by_hash.setdefault(value, []).append(name)
    return [
        f"The models {', '.join(map(repr, names))} are the same, bit for bit."
        for names in by_hash.values()
        if len(names) > 1
    ]


def short_of_disk(needs: Mapping[Path, int]) -> list[str]:
    """In words: where a folder's disk has less room than is going to be written there."""
    found = []
    for folder, size in needs.items():
        place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(place).free
        if size > free:
            found.append(f"{folder} needs {size / GIB:.2f} GiB, its disk has {free / GIB:.2f} GiB left.")
    return found


def bytes_of(batches: Sequence[Batch]) -> int:
    """Of everything that networks are called with."""
    return sum(tensor.nbytes for batch in batches for tensor in batch.tensors())


def model_bytes(tensors: Weights, dtype: torch.dtype) -> int:
    """Of a network saved in a floating-point dtype."""
    whole = {name: t for name, t in tensors.items() if not t.is_floating_point()}
    return size_of(whole) + sum(t.numel() * dtype.itemsize for t in tensors.values() if t.is_floating_point())
