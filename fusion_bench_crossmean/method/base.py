"""The loop that every activation-based merge shares, and the settings that come with it. No formula here."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from fusion_bench import auto_register_config
from fusion_bench.modelpool import BaseModelPool
from torch import Tensor, nn

from fusion_bench_crossmean.checkpoint import Checkpoint
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.expert_checks import activation_of
from fusion_bench_crossmean.fingerprint import hash_tensors
from fusion_bench_crossmean.linear_system import LinearSystem, Solution
from fusion_bench_crossmean.method.calibrated import CalibratedAlgorithm
from fusion_bench_crossmean.method.material import Material, as_pool, hashes_of, indices_of
from fusion_bench_crossmean.method.settings import check_choice, check_flag, check_number
from fusion_bench_crossmean.networks import Networks
from fusion_bench_crossmean.paired_statistics import InputPair
from fusion_bench_crossmean.preflight import covered_bytes, duplicates, model_bytes
from fusion_bench_crossmean.report import environment, mean, table, write_json
from fusion_bench_crossmean.walker import Inputs, Walker
from fusion_bench_crossmean.weights import tensors_of
from fusion_bench_crossmean.workspace import Workspace

log = logging.getLogger(__name__)

#: Settings that no bit of the result depends on.
WITHOUT_EFFECT = ("report_path", "checkpoint_dir", "strict", "preflight_only", "num_workers", "max_memory_gib")


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
        folder = Path(self.checkpoint_dir) if self.checkpoint_dir and self._is_rank_zero() else None
        with Checkpoint(folder) as checkpoint, self.computing(), self.prepared(pool, calibration) as material:
            with self.profile("hashes"):
                hashes = hashes_of(material, self.progress)
            checkpoint.begin(self._identity(material, hashes))
            with self.profile("average"):
                networks = self.networks(material, self.network_points)
            self.prepare(material, networks)
            with self.walking(material, networks, checkpoint.settle) as walker:
                if self.preflight_only:
                    self.preflight(material, networks, walker, hashes, self._disk_use(material, walker))
                    return None
                layers = self._merge(walker, networks, material, checkpoint)
            experts = material.experts
            merged = networks.finish(
                getattr(torch, self.dtype) if self.dtype else experts.template_dtype or torch.float32
            )
            self._report(material, walker, layers, hashes | {"merged": hash_tensors(tensors_of(merged))})
        return merged

    def _merge(
        self, walker: Walker, networks: Networks, material: Material, checkpoint: Checkpoint
    ) -> list[dict[str, Any]]:
        layers, workspace = [], Workspace()
        # Depth order; all forwards wait here, if there is anything left to do.
        is_solved = all(self._stored(checkpoint, networks, *group) for group in enumerate(walker.course.groups))
        steps = ((group, {}) for group in walker.course.groups) if is_solved else self.walked(walker)
        for index, (group, inputs) in enumerate(steps):
            if (stored := self._stored(checkpoint, networks, index, group)) is not None:
                weight, record = stored
                networks.write(group, weight)
                layers.append(record)
                continue
            system = self.linear_system(name=group.name, workspace=workspace)
            origin = self.origin(material, networks, group)
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
            layers.append(layer_record(group, records, solution))
            checkpoint.store(index, networks.merged_weight(group), layers[-1], system.sums())
        return layers

    def _stored(
        self, checkpoint: Checkpoint, networks: Networks, index: int, group: LayerGroup
    ) -> tuple[Tensor, dict[str, Any]] | None:
        return checkpoint.load(index, group.name, like=networks.merged_weight(group))

    def _report(
        self, material: Material, walker: Walker, layers: list[dict[str, Any]], hashes: Mapping[str, Any]
    ) -> None:
        common = self.common_report(material, walker, walker.replay_seconds)
        doubts = [f"{layer['name']}: {text}" for layer in layers for text in layer["warnings"]]
        warnings = {"warnings": duplicates(hashes["experts"]) + doubts}
        self.report = common | warnings | {"hashes": hashes, "layers": layers} | indices_of(material)
        if self._is_rank_zero():
            seconds = self.report["seconds"]
            log.info("%s merged %d experts:\n%s", type(self).__name__, len(material.tasks), summary(layers))
            log.info("Seconds: %s", ", ".join(f"{stage} {time:.1f}" for stage, time in seconds.items()))
            if (path := self.output_path()) is not None:
                write_json(path, self.report)

    def _disk_use(self, material: Material, walker: Walker) -> dict[Path, int]:
        """Folder -> bytes that are going to be written there."""
        template, saved = tensors_of(material.experts.template), getattr(self._program, "merged_model_save_path", None)
        found = {}
        if self.checkpoint_dir:
            found[Path(self.checkpoint_dir).absolute()] = covered_bytes(walker.course.groups, template)
        if saved is not None:
            dtype = getattr(torch, self.dtype) if self.dtype else material.experts.template_dtype or torch.float32
            found[Path(saved.format(log_dir=self.log_dir)).absolute().parent] = model_bytes(template, dtype)
        return found

    def _identity(self, material: Material, hashes: Mapping[str, Any]) -> dict[str, Any]:
        """All that the result depends on, to the last bit, besides the number of threads and the schedule."""
        return {
            "method": type(self).__name__,
            "settings": {key: value for key, value in self.settings().items() if key not in WITHOUT_EFFECT},
            "versions": environment(),
            "device": [str(self.device), torch.backends.cpu.get_cpu_capability()],
            "activation": activation_of(material.experts.template),
            **hashes,
        }

    def _check_task_weights(self, tasks: list[str]) -> None:
        if unknown := [task for task in self.task_weights if task not in tasks]:
            raise ValueError(f"task_weights names {unknown}, the pool has {tasks}.")
        if tasks and not any(self.task_weights.get(task, 1.0) > 0 for task in tasks):
            raise ValueError("task_weights are zero for every task: there is nothing to merge.")


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
