"""The loop that every activation-based merge shares. No formula here."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from torch import Tensor, nn

from fusion_bench_crossmean.checkpoint import Checkpoint
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.kept_statistics import KeptStatistics
from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.method.again import merge_again
from fusion_bench_crossmean.method.layers import LayerSolver
from fusion_bench_crossmean.method.material import Material, as_pool, hashes_of
from fusion_bench_crossmean.method.records import disk_use, identity_of
from fusion_bench_crossmean.networks import Networks
from fusion_bench_crossmean.paired_statistics import PairedStatistics
from fusion_bench_crossmean.self_check import SelfCheck
from fusion_bench_crossmean.walker import BatchInputs, Walker
from fusion_bench_crossmean.workspace import Workspace

log = logging.getLogger(__name__)


class LayerwiseMerge(LayerSolver):
    """Merges linear layers in depth order, each before the next is measured; for settings see `LayerSolver`."""

    def run(  # pyright: ignore[reportIncompatibleMethodOverride]  (FusionBench's returns nothing)
        self, modelpool: BaseModelPool | Mapping[str, nn.Module], calibration: Mapping[str, Any] | None = None
    ) -> nn.Module | None:
        """Merges the experts of a pool.

        Args:
            modelpool: FusionBench's pool, or a dict of modules (`_pretrained_` is optional). Experts are not changed.
            calibration: task -> inputs (tensor, dict of tensors, dataset, DataLoader); None takes the pool's own.

        Returns:
            The merged model, a new module; None after a preflight.

        Raises:
            ValueError, TypeError, OSError: the pool, the settings or an output do not fit, before any forward.
            MemoryError: the merge does not fit `max_memory_gib`; known after one forward.
            SingularSystemError, WalkError: a layer could not be solved or reached; the message names it.
            ArithmeticError: the merged weights overflow their dtype.
        """
        pool = as_pool(modelpool)
        self._check_task_weights(pool.model_names)
        self.profiler.recorded_durations.clear()
        if self.load_statistics is not None:
            return merge_again(self, pool, Path(self.load_statistics))
        is_kept = self._is_rank_zero() and not self.preflight_only
        folder = Path(self.checkpoint_dir) if self.checkpoint_dir and is_kept else None
        kept = KeptStatistics(Path(self.save_statistics) if self.save_statistics and is_kept else None)
        with Checkpoint(folder) as checkpoint, self.computing(), self.prepared(pool, calibration) as material:
            with self.profile("hashes"):
                hashes = hashes_of(material, self.progress)
            identity = identity_of(self.method_name, self.settings(), self.device, material, hashes)
            checkpoint.begin(identity)
            with self.profile("average"):
                networks = self.networks(material, self.network_points)
            beside = {} if self.preflight_only else self.prepare(material, networks)
            with self.walking(material, networks, checkpoint.settle) as walker:
                if self.preflight_only:
                    disk = disk_use(
                        material, walker, self.settings(), self.saved_path(pool), self._merged_dtype(material)
                    )
                    self.preflight(material, networks, walker, hashes, disk)
                    return None
                source = {"path_points": self.network_points, "calibration_indices": material.calibration.indices}
                kept.begin(identity | source, material.tasks, walker.course.groups)
                kept.keep_beside(beside)
                with self.profile("self-check"):
                    check = SelfCheck(networks, material.probes)
                layers = self._merge(walker, networks, material, checkpoint, kept)
                with self.profile("self-check"):
                    checked, complaints = check.finish(strict=self.strict)
            common = self.common_report(material, walker, walker.replay_seconds)
            complaints += kept.complaints
            return self.finish(material, networks, layers, hashes, common | {"self_check": checked}, complaints)

    def _merge(
        self,
        walker: Walker,
        networks: Networks,
        material: Material,
        checkpoint: Checkpoint,
        kept: KeptStatistics,
    ) -> list[dict[str, Any]]:
        layers, workspace = [], Workspace()
        groups = walker.course.groups
        # One at a time: all weights at once would be a second model in memory.
        num_stored = sum(self._stored(checkpoint, kept, networks, *group) is not None for group in enumerate(groups))
        if num_stored:
            log.info("%d of %d layer groups are read from %s.", num_stored, len(groups), self.checkpoint_dir)
        # Depth order; all forwards wait here, if there is anything left to do.
        steps = ((group, {}) for group in groups) if num_stored == len(groups) else self.walked(walker)
        for index, (group, inputs) in enumerate(steps):
            if (found := self._stored(checkpoint, kept, networks, index, group)) is not None:
                weight, record = found
                networks.write(group, weight)
                layers.append(record)
                continue
            system = self.linear_system(name=group.name, workspace=workspace)
            add = functools.partial(self._add, system, inputs, kept, index)
            layers.append(self.solve(group, add, system, networks, self.origin(material, networks, group)))
            checkpoint.store(index, networks.merged_weight(group), layers[-1], system.sums())
        return layers

    def _stored(
        self, checkpoint: Checkpoint, kept: KeptStatistics, networks: Networks, index: int, group: LayerGroup
    ) -> tuple[Tensor, dict[str, Any]] | None:
        if not kept.holds(index):
            return None  # measured again, for its statistics
        return checkpoint.load(index, group.name, like=networks.merged_weight(group))

    def _add(
        self,
        system: LinearSystem,
        inputs: Mapping[str, BatchInputs],
        kept: KeptStatistics,
        index: int,
        task: str,
        target: Tensor,
        factor: float,
    ) -> PairedStatistics:
        """Adds a task's inputs to the system of a group with the number `index`, and keeps the sums."""
        pairs = (self.input_pair(batch) for batch in inputs[task])
        num_batches = None if kept else len(inputs[task])  # None: the bilinear statistic itself is formed
        sums = system.add_task(pairs, target, factor, task, num_batches=num_batches)
        kept.keep(index, task, sums)
        return sums
