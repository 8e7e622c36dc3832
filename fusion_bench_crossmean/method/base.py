"""The loop that every activation-based merge shares, and the settings that come with it. No formula here."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from fusion_bench import auto_register_config
from fusion_bench.modelpool import BaseModelPool
from torch import Tensor, nn

from fusion_bench_crossmean.checkpoint import Checkpoint
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.fingerprint import hash_tensors
from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.method.calibrated import CalibratedAlgorithm
from fusion_bench_crossmean.method.material import Material, as_pool, hashes_of, indices_of
from fusion_bench_crossmean.method.outputs import saved_at
from fusion_bench_crossmean.method.records import (
    TaskRecord,
    disk_use,
    identity_of,
    layer_record,
    summary,
    warnings_of,
)
from fusion_bench_crossmean.method.settings import check_choice, check_flag, check_number
from fusion_bench_crossmean.networks import Networks
from fusion_bench_crossmean.paired_statistics import InputPair
from fusion_bench_crossmean.preflight import duplicates
from fusion_bench_crossmean.report import write_json
from fusion_bench_crossmean.self_check import SelfCheck
from fusion_bench_crossmean.walker import BatchInputs, Inputs, Walker
from fusion_bench_crossmean.weights import tensors_of
from fusion_bench_crossmean.workspace import Workspace

log = logging.getLogger(__name__)


@auto_register_config
class LayerwiseMerge(CalibratedAlgorithm):
    """Merges linear layers in depth order by one linear system each; a method decides which inputs are paired.

    Args:
        reduce_non_diagonal_ratio: off-diagonal entries of every statistic are multiplied by this, in [0, 1].
        relative_ridge: ridge in multiples of the mean diagonal of the summed Gram matrices, at least 0.
        task_weighting: `sum` adds the tasks' sums over tokens, `mean` their means.
        task_weights: task -> factor of its statistics; tasks left out have 1.
        dtype: of the merged model, e.g. `float32`. None: the pretrained model's, without one the experts' common one.
        strict: makes errors of numerical warnings: fewer tokens than features, a ridge that has to grow, a residual.
        checkpoint_dir: folder where every solved layer group is kept until the merge is done; a run that was killed
            goes on there, to the same model bit for bit (on a CPU). None: nothing is kept.
        kwargs: see `CalibratedAlgorithm`.
    """

    #: How a layer's weight is solved for.
    system: type[LinearSystem] = LinearSystem

    # Stored by `auto_register_config`:
    reduce_non_diagonal_ratio: float
    relative_ridge: float
    task_weighting: Literal["sum", "mean"]
    strict: bool
    checkpoint_dir: str | None

    def __init__(
        self,
        *,
        reduce_non_diagonal_ratio: float = 0.9,
        relative_ridge: float = 1e-4,
        task_weighting: Literal["sum", "mean"] = "sum",
        task_weights: Mapping[str, float] | None = None,
        dtype: str | None = None,
        strict: bool = False,
        checkpoint_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_number("reduce_non_diagonal_ratio", reduce_non_diagonal_ratio, 0, 1)
        check_number("relative_ridge", relative_ridge, 0)
        check_choice("task_weighting", task_weighting, ("sum", "mean"))
        check_flag("strict", strict)
        self.task_weights = dict(task_weights or {})
        for task, weight in self.task_weights.items():
            check_number(f"task_weights.{task}", weight, 0)
        self.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        named = None if self.dtype is None else getattr(torch, self.dtype, None)
        if self.dtype is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):
            raise ValueError(f"dtype must name a floating-point type such as float32, not {dtype!r}.")

    @property
    @abstractmethod
    def network_points(self) -> tuple[float, ...]:
        """Path points whose networks run: 0 is the merged network, 1 the expert."""

    @abstractmethod
    def input_pair(self, inputs: Inputs) -> InputPair:
        """Left and right inputs of one batch: what the merged layer receives and what it is fitted to."""

    def linear_system(self, **options: Any) -> LinearSystem:
        """The empty system of one layer group, with this method's settings."""
        settings = {"task_weighting": self.task_weighting, "strict": self.strict, **options}
        return self.system(self.reduce_non_diagonal_ratio, self.relative_ridge, **settings)

    def prepare(self, material: Material, networks: Networks) -> None:
        """What a method does to the averaged network before the walk: nothing."""

    def origin(self, material: Material, networks: Networks, group: LayerGroup) -> Tensor | None:
        """What the experts' weights of a group are counted from, shape (out, in); None is zero."""
        return None

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
        is_kept = self._is_rank_zero() and not self.preflight_only
        folder = Path(self.checkpoint_dir) if self.checkpoint_dir and is_kept else None
        with Checkpoint(folder) as checkpoint, self.computing(), self.prepared(pool, calibration) as material:
            with self.profile("hashes"):
                hashes = hashes_of(material, self.progress)
            checkpoint.begin(identity_of(type(self).__name__, self.settings(), self.device, material, hashes))
            with self.profile("average"):
                networks = self.networks(material, self.network_points)
            self.prepare(material, networks)
            with self.walking(material, networks, checkpoint.settle) as walker:
                if self.preflight_only:
                    saved = saved_at(getattr(self._program, "merged_model_save_path", None), self.log_dir)
                    disk = disk_use(material, walker, self.checkpoint_dir, saved, self._merged_dtype(material))
                    self.preflight(material, networks, walker, hashes, disk)
                    return None
                with self.profile("self-check"):
                    check = SelfCheck(networks, material.probes)
                layers = self._merge(walker, networks, material, checkpoint)
                with self.profile("self-check"):
                    checked, complaints = check.finish(strict=self.strict)
            merged = networks.finish(self._merged_dtype(material))
            warnings = [*duplicates(hashes["experts"]), *warnings_of(layers), *complaints]
            extra = {"warnings": warnings, "self_check": checked, "hashes": hashes}
            extra["hashes"] |= {"merged": hash_tensors(tensors_of(merged))}
            self._report(material, walker, layers, extra)
        return merged

    def _merge(
        self, walker: Walker, networks: Networks, material: Material, checkpoint: Checkpoint
    ) -> list[dict[str, Any]]:
        layers, workspace = [], Workspace()
        groups = walker.course.groups
        num_stored = sum(self._stored(checkpoint, networks, *group) is not None for group in enumerate(groups))
        if num_stored:
            log.info("%d of %d layer groups are read from %s.", num_stored, len(groups), self.checkpoint_dir)
        # Depth order; all forwards wait here, if there is anything left to do.
        steps = ((group, {}) for group in groups) if num_stored == len(groups) else self.walked(walker)
        for index, (group, inputs) in enumerate(steps):
            if (stored := self._stored(checkpoint, networks, index, group)) is not None:
                weight, record = stored
                networks.write(group, weight)
                layers.append(record)
                continue
            system = self.linear_system(name=group.name, workspace=workspace)
            layers.append(self._solve(group, inputs, system, networks, self.origin(material, networks, group)))
            checkpoint.store(index, networks.merged_weight(group), layers[-1], system.sums())
        return layers

    def _solve(
        self,
        group: LayerGroup,
        inputs: Mapping[str, BatchInputs],
        system: LinearSystem,
        networks: Networks,
        origin: Tensor | None,
    ) -> dict[str, Any]:
        """Solves one group and writes its weight; returns its row in the report."""
        records = {}
        with self.profile("statistics"):
            for task in networks.experts:
                pairs = (self.input_pair(batch) for batch in inputs[task])
                weight = networks.expert_weight(task, group)
                target = weight if origin is None else weight.to(origin) - origin
                factor = self.task_weights.get(task, 1.0)
                sums = system.add_task(pairs, target, factor, task, num_batches=len(inputs[task]))
                records[task] = TaskRecord(sums.rows, sums.alignment(), sums.drift())
        with self.profile("solve"):
            if origin is None:
                solution = system.solve(fallback=networks.merged_weight(group))
                networks.write(group, solution.weight)
            else:
                solution = system.solve(fallback=torch.zeros_like(origin))
                networks.write(group, origin + solution.weight)
        return layer_record(group, records, solution)

    def _stored(
        self, checkpoint: Checkpoint, networks: Networks, index: int, group: LayerGroup
    ) -> tuple[Tensor, dict[str, Any]] | None:
        return checkpoint.load(index, group.name, like=networks.merged_weight(group))

    def _report(self, material: Material, walker: Walker, layers: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        common = self.common_report(material, walker, walker.replay_seconds)
        self.report = common | extra | {"layers": layers} | indices_of(material)
        if self._is_rank_zero():
            seconds = self.report["seconds"]
            log.info("%s merged %d experts:\n%s", type(self).__name__, len(material.tasks), summary(layers))
            log.info("Seconds: %s", ", ".join(f"{stage} {time:.1f}" for stage, time in seconds.items()))
            if (path := self.output_path()) is not None:
                write_json(path, self.report)

    def _merged_dtype(self, material: Material) -> torch.dtype:
        return getattr(torch, self.dtype) if self.dtype else material.experts.template_dtype or torch.float32

    def _check_task_weights(self, tasks: list[str]) -> None:
        if unknown := [task for task in self.task_weights if task not in tasks]:
            raise ValueError(f"task_weights names {unknown}, the pool has {tasks}.")
        if tasks and not any(self.task_weights.get(task, 1.0) > 0 for task in tasks):
            raise ValueError("task_weights are zero for every task: there is nothing to merge.")
