"""How one layer is solved and what a merge reports, with the settings of both; `base` has the loop over the layers."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from fusion_bench import auto_register_config
from torch import Tensor, nn

from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.fingerprint import hash_tensors
from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.method.calibrated import CalibratedAlgorithm
from fusion_bench_crossmean.method.material import Beside, Material, closing
from fusion_bench_crossmean.method.records import TaskRecord, layer_record, summary, warnings_of
from fusion_bench_crossmean.method.settings import check_choice, check_flag, check_number, check_path
from fusion_bench_crossmean.networks import Networks
from fusion_bench_crossmean.paired_statistics import InputPair, PairedStatistics
from fusion_bench_crossmean.preflight import duplicates
from fusion_bench_crossmean.report import write_json
from fusion_bench_crossmean.walker import Inputs
from fusion_bench_crossmean.weights import tensors_of

log = logging.getLogger(__name__)

#: Largest relative ridge and weight of a task: beyond, sums overflow.
LARGEST_FACTOR = 1e6
#: What is given a task, its target of shape (out, in) and its factor, and adds its statistics to a system.
AddTask = Callable[[str, Tensor, float], PairedStatistics]


@auto_register_config
class LayerSolver(CalibratedAlgorithm):
    """Solves linear layers by one linear system each; which inputs are paired, a method decides.

    Args:
        reduce_non_diagonal_ratio: off-diagonal entries of every statistic are multiplied by this, in [0, 1].
        relative_ridge: ridge in multiples of the mean diagonal of the summed Gram matrices, at least 0.
        task_weighting: `sum` adds the tasks' sums over tokens, `mean` their means.
        task_weights: task -> factor of its statistics; tasks left out have 1.
        dtype: of the merged model, e.g. `float32`. None: the pretrained model's, without one the experts' common one.
        strict: makes errors of numerical warnings: fewer tokens than features, a ridge that has to grow, a residual.
        checkpoint_dir: folder where every solved layer group is kept until the merge is done; a run that was killed
            goes on there, to the same model bit for bit (on a CPU). None: nothing is kept.
        save_statistics: folder where every layer group's Gram matrix and bilinear statistic are kept, task by task.
        load_statistics: such a folder, to merge from it without a forward; for methods that measure experts alone.
        kwargs: see `CalibratedAlgorithm`.
    """

    #: Whether statistics depend on nothing that was merged, hence can be used again.
    measures_experts_alone = False
    #: How a layer's weight is solved for.
    system: type[LinearSystem] = LinearSystem

    # Stored by `auto_register_config`:
    reduce_non_diagonal_ratio: float
    relative_ridge: float
    task_weighting: Literal["sum", "mean"]
    strict: bool
    checkpoint_dir: str | None
    save_statistics: str | None
    load_statistics: str | None

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
        save_statistics: str | None = None,
        load_statistics: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_number("reduce_non_diagonal_ratio", reduce_non_diagonal_ratio, 0, 1)
        check_number("relative_ridge", relative_ridge, 0, LARGEST_FACTOR)
        check_choice("task_weighting", task_weighting, ("sum", "mean"))
        check_flag("strict", strict)
        self.checkpoint_dir = check_path("checkpoint_dir", checkpoint_dir)
        self.save_statistics = check_path("save_statistics", save_statistics)
        self.load_statistics = check_path("load_statistics", load_statistics)
        self._check_statistics()
        if task_weights is not None and not isinstance(task_weights, Mapping):
            raise ValueError(f"task_weights must be task -> factor, {{mnist: 2.0}}, not {task_weights!r}.")
        self.task_weights = dict(task_weights or {})
        for task, weight in self.task_weights.items():
            check_number(f"task_weights.{task}", weight, 0, LARGEST_FACTOR)
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

    def prepare(self, material: Material, networks: Networks) -> Beside:
        """What a method does to the averaged network before the walk: nothing. Returns what it measured for it."""
        return {}

    def origin(self, material: Material, networks: Networks, group: LayerGroup) -> Tensor | None:
        """What the experts' weights of a group are counted from, shape (out, in); None is zero."""
        return None

    def solve(
        self, group: LayerGroup, add: AddTask, system: LinearSystem, networks: Networks, origin: Tensor | None
    ) -> dict[str, Any]:
        """Solves one group and writes its weight.

        Args:
            group: of layers.
            add: adds a task's statistics to `system`.
            system: empty.
            networks: to write to.
            origin: see the method of that name.

        Returns:
            The group's row in the report.
        """
        records = {}
        with self.profile("statistics"):
            for task in networks.experts:
                weight = networks.expert_weight(task, group)
                target = weight if origin is None else weight.to(origin) - origin
                sums = add(task, target, self.task_weights.get(task, 1.0))
                records[task] = TaskRecord(sums.rows, sums.alignment(), sums.drift())
        with self.profile("solve"):
            if origin is None:
                solution = system.solve(fallback=networks.merged_weight(group))
                networks.write(group, solution.weight)
            else:
                solution = system.solve(fallback=torch.zeros_like(origin))
                networks.write(group, origin + solution.weight)
        return layer_record(group, records, solution)

    def finish(
        self,
        material: Material,
        networks: Networks,
        layers: list[dict[str, Any]],
        hashes: dict[str, Any],
        common: Mapping[str, Any],
        complaints: list[str],
    ) -> nn.Module:
        """The merged model, once its report is written.

        Args:
            material: of the merge.
            networks: all of whose layers are solved.
            layers: their rows in the report.
            hashes: of experts and inputs.
            common: what else the report says.
            complaints: warnings besides those of the layers.
        """
        merged = networks.finish(self._merged_dtype(material))
        warnings = [*duplicates(hashes["experts"]), *warnings_of(layers), *complaints]
        hashes = hashes | {"merged": hash_tensors(tensors_of(merged))}
        extra = {"warnings": warnings, "hashes": hashes, "layers": layers}
        self.report = {**common, **extra, **closing(material)}
        if self._is_rank_zero():
            seconds = self.report["seconds"]
            log.info("%s merged %d experts:\n%s", self.method_name, len(material.tasks), summary(layers))
            log.info("Seconds: %s", ", ".join(f"{stage} {time:.1f}" for stage, time in seconds.items()))
            self._write_report(material)
        return merged

    def written_folders(self) -> dict[str, str]:
        folders = {"checkpoint_dir": self.checkpoint_dir, "save_statistics": self.save_statistics}
        return {setting: folder for setting, folder in folders.items() if folder}

    def _write_report(self, material: Material) -> None:
        """Writes the report and what is published with the model; where that fails, the model is not lost for it."""
        with self.outliving_outputs():
            if (path := self.output_path()) is not None:
                write_json(path, self.report)
        with self.outliving_outputs():
            if material.companions is not None:
                material.companions.write(self.report)

    def _merged_dtype(self, material: Material) -> torch.dtype:
        return getattr(torch, self.dtype) if self.dtype else material.experts.template_dtype or torch.float32

    @property
    def method_name(self) -> str:
        """In messages and reports."""
        return type(self).__name__

    def _check_statistics(self) -> None:
        if self.load_statistics is None:
            return
        if not self.measures_experts_alone:
            raise ValueError(
                f"{self.method_name} cannot take load_statistics: it measures every layer on the prefix merged so far, "
                "which other settings change. RegMean and LOT, which measure experts alone, can."
            )
        both = {"save_statistics": self.save_statistics, "checkpoint_dir": self.checkpoint_dir}
        if given := [name for name, value in (both | {"preflight_only": self.preflight_only}).items() if value]:
            raise ValueError(f"load_statistics measures nothing anew: leave out {', '.join(given)}.")

    def _check_task_weights(self, tasks: list[str]) -> None:
        if unknown := [task for task in self.task_weights if task not in tasks]:
            raise ValueError(f"task_weights names {unknown}, the pool has {tasks}.")
        if tasks and not any(self.task_weights.get(task, 1.0) > 0 for task in tasks):
            raise ValueError("task_weights are zero for every task: there is nothing to merge.")
