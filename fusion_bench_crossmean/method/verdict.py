"""What comes of a preflight: what a run needs, what is there, and what is doubtful about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_crossmean.memory import GIB, MemoryUse
from fusion_bench_crossmean.method.material import Material
from fusion_bench_crossmean.networks import Networks
from fusion_bench_crossmean.preflight import (
    duplicates,
    expected_seconds,
    measure,
    products_per_second,
    short_of_disk,
)
from fusion_bench_crossmean.report import peak_memory
from fusion_bench_crossmean.walker import Walker
from fusion_bench_crossmean.weights import tensors_of


def expected_peak(material: Material, walker: Walker, memory: MemoryUse, *, on_host: bool) -> int:
    """Bytes in use on the device at the worst moment of a walk that is about to begin."""
    need = material.need(walker.course, len(walker.networks.path_points))
    return memory.with_more(material.missing_bytes).used + need.bytes_for(walker.schedule, on_host=on_host)


def verdict(
    material: Material,
    networks: Networks,
    walker: Walker,
    memory: MemoryUse,
    hashes: Mapping[str, Any],
    disk: Mapping[Path, int],
) -> dict[str, Any]:
    """What a run needs, from one batch of it; for arguments see `Running.preflight`."""
    on_host = networks.device.type == "cpu"
    task, batches = next(iter(walker.calibration.items()))
    point = networks.path_points[0]
    networks.load(task, point)
    groups, template = walker.course.groups, tensors_of(material.experts.template)
    seconds = expected_seconds(
        measure(networks.network(task, point), batches[0], groups),
        groups,
        template,
        num_batches=material.num_inputs / batches[0].size,
        num_points=len(networks.path_points),
        rate=products_per_second(networks.device),
        replays=walker.schedule.kind == "replay",
    )
    peak = expected_peak(material, walker, memory, on_host=on_host)
    if on_host:  # loading may have taken more already
        peak = max(peak, int(peak_memory()["resident_gib"] * GIB))
    warnings = [*duplicates(hashes["experts"]), *short_of_disk(disk)]
    if peak > memory.limit:
        warnings.append(
            f"The memory needed, {peak / GIB:.2f} GiB, is more than the {memory.limit / GIB:.2f} GiB there are."
        )
    return {
        "seconds": seconds,
        "peak_memory_gib": peak / GIB,
        "free_memory_gib": memory.free / GIB,
        "disk_gib": {str(folder): size / GIB for folder, size in disk.items()},
        "warnings": warnings,
        "in_words": [
            f"{len(material.tasks)} experts of {len(template)} tensors; {len(material.layers)} layers in {len(groups)} "
            f"groups are solved, from {material.num_samples} inputs per task.",
            f"Schedule {walker.schedule.kind}, activations on {walker.schedule.store}: about {peak / GIB:.1f} GiB of "
            f"memory at the worst moment, {memory.free / GIB:.1f} GiB are free now.",
            f"About {in_words(seconds)} after loading.",
            *(f"{size / GIB:.2f} GiB are going to be written to {folder}." for folder, size in disk.items()),
        ],
    }


def in_words(seconds: float) -> str:
    """A rough time.

    Example:
        >>> in_words(42.3), in_words(4000.0)
        ('42 seconds', '67 minutes')
    """
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
