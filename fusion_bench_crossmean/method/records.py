"""What is written down about a merge: its layers, what it depends on, what it leaves on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.expert_checks import activation_of
from fusion_bench_crossmean.kept_statistics import EXPERTS_ALONE
from fusion_bench_crossmean.linear_system import Solution
from fusion_bench_crossmean.method.material import Material
from fusion_bench_crossmean.preflight import covered_bytes, gram_bytes, model_bytes
from fusion_bench_crossmean.report import environment, mean, table
from fusion_bench_crossmean.walker import Walker
from fusion_bench_crossmean.weights import tensors_of

#: Settings that no bit of the result depends on.
WITHOUT_EFFECT = ("report_path", "checkpoint_dir", "strict", "preflight_only", "num_workers", "max_memory_gib")


@dataclass(frozen=True)
class TaskRecord:
    """What the report keeps of one task's statistics; see `PairedStatistics`."""

    rows: int
    alignment: float
    drift: float


def layer_record(group: LayerGroup, records: Mapping[str, TaskRecord], solution: Solution) -> dict[str, Any]:
    """One layer group in the report; `alignment` is that of the statistics the system was built from."""
    return {
        "layers": list(group.names),
        "name": group.name,
        "tokens": sum(record.rows for record in records.values()),
        "features": solution.features,
        "rank": solution.rank,
        "relative_pivot": solution.relative_pivot,
        "dead_features": solution.dead_features,
        "ridge": solution.ridge,
        "relative_ridge": solution.relative_ridge,
        "relative_residual": solution.relative_residual,
        "warnings": solution.warnings,
        "alignment": {task: record.alignment for task, record in records.items()},
        "prefix_drift": {task: record.drift for task, record in records.items()},
    }


def summary(layers: list[dict[str, Any]]) -> str:
    """A short table of the solved layers."""
    header = ["layer", "features", "rank", "dead", "ridge", "residual", "alignment", "drift"]
    rows = [
        [
            layer["name"],
            layer["features"],
            layer["rank"],
            len(layer["dead_features"]),
            f"{layer['relative_ridge']:.0e}",
            f"{layer['relative_residual']:.0e}",
            f"{mean(list(layer['alignment'].values())):.4f}",
            f"{mean(list(layer['prefix_drift'].values())):.4f}",
        ]
        for layer in layers
    ]
    return table(header, rows)


def warnings_of(layers: list[dict[str, Any]]) -> list[str]:
    """Those of all layers, each with its layer's name."""
    return [f"{layer['name']}: {text}" for layer in layers for text in layer["warnings"]]


def identity_of(
    method: str, settings: Mapping[str, Any], device: torch.device, material: Material, hashes: Mapping[str, Any]
) -> dict[str, Any]:
    """All that a merge depends on, to the last bit, besides the number of threads and the schedule."""
    return {
        "method": method,
        "settings": {key: value for key, value in settings.items() if key not in WITHOUT_EFFECT},
        "versions": environment(),
        "device": [str(device), torch.backends.cpu.get_cpu_capability()],
        "activation": activation_of(material.experts.template),
        **hashes,
    }


def disk_use(
    material: Material, walker: Walker, settings: Mapping[str, Any], saved: Path | None, dtype: torch.dtype
) -> dict[Path, int]:
    """Folder -> bytes that a merge is going to write there.

    Args:
        material: of the merge.
        walker: that knows the layer groups.
        settings: of the method, with the folders of a checkpoint and of statistics, if there are to be any.
        saved: where the model is going to be saved, if it is.
        dtype: of the merged model.
    """
    template, found = tensors_of(material.experts.template), {}
    groups = walker.course.groups
    if checkpoint := settings["checkpoint_dir"]:
        found[Path(checkpoint).absolute()] = covered_bytes(groups, template)
    if statistics := settings["save_statistics"]:
        kinds = 1 if walker.networks.path_points == EXPERTS_ALONE else 2  # the Gram matrix and, apart, the bilinear one
        folder = Path(statistics).absolute()
        found[folder] = found.get(folder, 0) + kinds * len(material.tasks) * gram_bytes(groups, template)
    if saved is not None:
        found[saved.absolute().parent] = model_bytes(template, dtype)
    return found
