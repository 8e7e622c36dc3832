"""The loop that every activation-based merge shares, and the settings that come with it. No formula here."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from fusion_bench import auto_register_config
from fusion_bench.modelpool import BaseModelPool
from torch import Tensor, nn

from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.linear_system import LinearSystem, Solution
from fusion_bench_crossmean.method.calibrated import (
    CalibratedAlgorithm,
    Material,
    as_pool,
    check_choice,
    check_number,
    indices_of,
)
from fusion_bench_crossmean.networks import Networks, common_dtype
from fusion_bench_crossmean.paired_statistics import PairedStatistics
from fusion_bench_crossmean.report import mean, table, write_json
from fusion_bench_crossmean.walker import Inputs, Walker

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
        kwargs: see `CalibratedAlgorithm`.
    """

    # Stored by `auto_register_config`:
    reduce_non_diagonal_ratio: float
    relative_ridge: float
    task_weighting: Literal["sum", "mean"]

    def __init__(
        self,
        *,
        reduce_non_diagonal_ratio: float = 0.9,
        relative_ridge: float = 1e-4,
        task_weighting: Literal["sum", "mean"] = "sum",
        task_weights: Mapping[str, float] | None = None,
        dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_number("reduce_non_diagonal_ratio", reduce_non_diagonal_ratio, 0, 1)
        check_number("relative_ridge", relative_ridge, 0)
        check_choice("task_weighting", task_weighting, ("sum", "mean"))
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
    def input_pair(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Left and right inputs (tokens, in) of one batch: the merged layer's input and the one it is fitted to."""

    def linear_system(self, group: LayerGroup) -> LinearSystem:
        """The empty system of one layer group, with this method's settings."""
        return LinearSystem(
            self.reduce_non_diagonal_ratio, self.relative_ridge, task_weighting=self.task_weighting, name=group.name
        )

    def run(  # pyright: ignore[reportIncompatibleMethodOverride]  (FusionBench's returns nothing)
        self, modelpool: BaseModelPool | Mapping[str, nn.Module], calibration: Mapping[str, Any] | None = None
    ) -> nn.Module:
        """Merges the experts of a pool.

        Args:
            modelpool: FusionBench's pool, or a dict of modules (`_pretrained_` is optional). Experts are not changed.
            calibration: task -> inputs (tensor, dict of tensors, dataset, DataLoader); None takes the pool's own.

        Returns:
            The merged model, a new module.

        Raises:
            ValueError, TypeError, OSError: the pool, the settings or an output do not fit, before any forward.
            SingularSystemError, WalkError: a layer could not be solved or reached; the message names it.
        """
        pool = as_pool(modelpool)
        self._check_task_weights(pool.model_names)
        self.profiler.recorded_durations.clear()
        with self.computing():
            material = self.prepare(pool, calibration)
            merged, layers = self._merge(material)
        self._report(material, layers)
        return merged

    def _merge(self, material: Material) -> tuple[nn.Module, list[dict[str, Any]]]:
        experts, layers = material.experts, []
        with self.profile("average"):
            networks = Networks(experts, self.network_points, material.template, self.device)
        calibration = material.calibration.on(self.device, networks.dtype)
        with networks, Walker(networks, calibration, material.layers) as walker:
            for group, inputs in self.walked(walker):  # depth order; all forwards wait here
                system = self.linear_system(group)
                statistics = {}
                with self.profile("statistics"):
                    for task in experts:
                        pairs = (self.input_pair(batch) for batch in inputs[task])
                        weight = group.weight_of(networks.experts[task])
                        statistics[task] = system.add_task(pairs, weight, self.task_weights.get(task, 1.0), task)
                with self.profile("solve"):
                    solution = system.solve(fallback=group.weight_of(networks.merged))
                    networks.write(group, solution.weight)
                layers.append(layer_record(group, statistics, solution))
        template_dtype = (
            common_dtype([material.template]) if material.has_pretrained else common_dtype(experts.values())
        )
        result = getattr(torch, self.dtype) if self.dtype else template_dtype or torch.float32
        return networks.finish(result), layers

    def _report(self, material: Material, layers: list[dict[str, Any]]) -> None:
        self.report = self.common_report(material) | {"layers": layers} | indices_of(material)
        if self._is_rank_zero():
            seconds = self.report["seconds"]
            log.info("%s merged %d experts:\n%s", type(self).__name__, len(material.experts), summary(layers))
            log.info("Seconds: %s", ", ".join(f"{stage} {time:.1f}" for stage, time in seconds.items()))
            if (path := self.output_path()) is not None:
                write_json(path, self.report)

    def _check_task_weights(self, tasks: list[str]) -> None:
        if unknown := [task for task in self.task_weights if task not in tasks]:
            raise ValueError(f"task_weights names {unknown}, the pool has {tasks}.")
        if tasks and not any(self.task_weights.get(task, 1.0) > 0 for task in tasks):
            raise ValueError("task_weights are zero for every task: there is nothing to merge.")


def layer_record(group: LayerGroup, statistics: Mapping[str, PairedStatistics], solution: Solution) -> dict[str, Any]:
    """One layer group in the report; `alignment` is that of the statistics the system was built from."""
    return {
        "layers": list(group.names),
        "name": group.name,
        "tokens": sum(s.rows for s in statistics.values()),
        "features": solution.features,
        "rank": solution.rank,
        "dead_features": solution.dead_features,
        "ridge": solution.ridge,
        "relative_ridge": solution.relative_ridge,
        "relative_residual": solution.relative_residual,
        "alignment": {task: s.alignment for task, s in statistics.items()},
    }


def summary(layers: list[dict[str, Any]]) -> str:
    """A short table of the solved layers."""
    header = ["layer", "features", "rank", "dead", "ridge", "residual", "alignment"]
    rows = [
        [
            layer["name"],
            layer["features"],
            layer["rank"],
            len(layer["dead_features"]),
            f"{layer['relative_ridge']:.0e}",
            f"{layer['relative_residual']:.0e}",
            f"{mean(list(layer['alignment'].values())):.4f}",
        ]
        for layer in layers
    ]
    return table(header, rows)
