"""A merge from statistics that another one has kept: no calibration inputs, no forward."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from torch import Tensor, nn

from fusion_bench_crossmean.expert_checks import activation_of
from fusion_bench_crossmean.kept_statistics import StoredStatistics
from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.method.layers import LayerSolver
from fusion_bench_crossmean.method.material import hashes_of
from fusion_bench_crossmean.paired_statistics import PairedStatistics
from fusion_bench_crossmean.workspace import Workspace


def merge_again(method: LayerSolver, pool: BaseModelPool, folder: Path) -> nn.Module:
    """Merges the experts of a pool, all or some of those that were measured, at the settings of `method`.

    Args:
        method: one that measures experts alone.
        pool: of the same experts.
        folder: of the statistics.

    Raises:
        ValueError: the statistics are not there, damaged, or of other experts or layers.
    """
    stored = StoredStatistics(folder)
    stored.check_tasks(pool.model_names)
    with method.computing(), method.prepared_again(pool, stored) as material:
        groups = stored.numbered(material.tasks, material.layers)
        with method.profile("hashes"):
            hashes: dict[str, Any] = hashes_of(material, method.progress)
        stored.check_experts(hashes["experts"], activation_of(material.experts.template))
        hashes["calibration"] = {task: stored.identity["calibration"][task] for task in material.tasks}
        with method.profile("average"):
            networks = method.networks(material, ())
        method.prepare(material, networks)
        layers, workspace = [], Workspace()
        for index, group in method.progress(groups, method.method_name):
            system = method.linear_system(name=group.name, workspace=workspace)
            add = functools.partial(add_stored, stored, index, system)
            layers.append(method.solve(group, add, system, networks, method.origin(material, networks, group)))
        source = {"loaded_from": str(folder), "settings": stored.identity["settings"]}
        common = method.common_report(material) | {"statistics": source}
        return method.finish(material, networks, layers, hashes, common, [])


def add_stored(
    stored: StoredStatistics, index: int, system: LinearSystem, task: str, target: Tensor, factor: float
) -> PairedStatistics:
    """Adds a task's stored sums to the system of the group with the number `index`."""
    sums = stored.sums(index, task, target)
    system.add_statistics(sums, target, factor, task)
    return sums
