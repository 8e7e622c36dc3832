"""One cell: the merge, with its scale chosen on validation rows, and the scores of what came out."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning
import torch
from torch import nn

from fusion_bench_crossmean.protocol.catalogue import EXPERTS, Row
from fusion_bench_crossmean.protocol.cells import Cell
from fusion_bench_crossmean.protocol.evaluation import Evaluator
from fusion_bench_crossmean.protocol.splits import Split, chosen, draw_split, serving, unlabelled

log = logging.getLogger(__name__)


class Computer:
    """Computes cells.

    Args:
        pool_for: tasks -> a model pool with just these experts.
        build: an algorithm's config -> the algorithm.
        evaluator: set up.
        tasks: all that any cell has.
        training_rows: task -> the whole training set.
        num_validation: validation rows per task, 0 where no row has a scale.
        scales: among which a scale is chosen.
    """

    def __init__(
        self,
        pool_for: Callable[[tuple[str, ...]], Any],
        build: Callable[[Mapping[str, Any]], Any],
        evaluator: Evaluator,
        tasks: Sequence[str],
        training_rows: Callable[[str], Any],
        num_validation: int,
        scales: list[float],
    ) -> None:
        self.pool_for = pool_for
        self.build = build
        self.evaluator = evaluator
        self.tasks = tasks
        self.training_rows = training_rows
        self.num_validation = num_validation
        self.scales = scales

    def compute(self, row: Row, cell: Cell) -> dict[str, Any]:
        """What a cell holds: scores and predictions by task, `mean`, `scale`, `seconds`; rho where it is measured."""
        pool = self.pool_for(cell.tasks)
        if row.name == EXPERTS:
            return self._experts(pool, cell)
        splits = self._splits(cell)
        rows = {task: unlabelled(self.training_rows(task), split.calibration) for task, split in splits.items()}
        found: dict[str, Any] = {"calibration_rows": {task: split.calibration for task, split in splits.items()}}
        with serving(pool, rows):
            scale, tried = self._choose_scale(row, cell, pool) if row.scale else (None, {})
            algorithm, model, found["seconds"] = self._merge(row, cell, pool, scale)
        if scale is not None:
            found |= {"scale": scale, "validation": tried}
        report = getattr(algorithm, "report", {})
        if "activation" in report:
            found["activation"] = report["activation"]
        if "rho" in report:
            found["criterion"] = {key: report[key] for key in ("rho", "prefix_drift", "per_task", "layers")}
        if model is None:
            return found
        return found | scored(self.evaluator.scores(model, cell.tasks))

    def _merge(self, row: Row, cell: Cell, pool: Any, scale: float | None) -> tuple[Any, nn.Module | None, float]:
        config = row.configured(seed=cell.seed, coverage=cell.coverage, num_samples=cell.num_samples, scale=scale)
        algorithm = self.build(config)
        # FusionBench's methods draw from the global generators.
        lightning.seed_everything(cell.seed or 0, verbose=False)
        start = time.perf_counter()
        algorithm.on_run_start()
        model = algorithm.run(pool)
        algorithm.on_run_end()
        seconds = time.perf_counter() - start
        if model is not None and (bad := [k for k, t in model.state_dict().items() if not is_sound(t)]):
            raise ArithmeticError(f"{row.title} left NaN or infinity in {bad[:3]} ({cell.name}).")
        return algorithm, model, seconds

    def _choose_scale(self, row: Row, cell: Cell, pool: Any) -> tuple[float, dict[str, float]]:
        """The scale with the best mean score on the validation rows of the cell's seed; of equal ones the smallest."""
        assert cell.seed is not None
        if not self.evaluator.has_validation(cell.seed):
            labelled = {}
            for task in self.tasks:
                everything = self.training_rows(task)
                split = draw_split(task, len(everything), 0, self.num_validation, cell.seed)
                labelled[task] = chosen(everything, split.validation)
            self.evaluator.add_validation(cell.seed, labelled)
        tried = {}
        for scale in self.scales:
            _, model, _ = self._merge(row, cell, pool, scale)
            assert model is not None
            tried[scale] = mean_score(self.evaluator.scores(model, cell.tasks, cell.seed))
        best = max(tried, key=lambda scale: (tried[scale], -scale))
        return best, {str(scale): value for scale, value in tried.items()}

    def _splits(self, cell: Cell) -> dict[str, Split]:
        if cell.num_samples is None or cell.seed is None:
            return {}
        return {
            task: draw_split(task, len(self.training_rows(task)), cell.num_samples, self.num_validation, cell.seed)
            for task in cell.tasks
        }

    def _experts(self, pool: Any, cell: Cell) -> dict[str, Any]:
        found = {}
        for task in cell.tasks:
            found |= self.evaluator.scores(pool.load_model(task), [task])
        return {"seconds": 0.0} | scored(found)


def is_sound(tensor: torch.Tensor) -> bool:
    """Whether it has no NaN and no infinity."""
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def mean_score(scores: Mapping[str, Mapping[str, Any]]) -> float:
    """The plain mean over the tasks."""
    return statistics.mean(found["score"] for found in scores.values())


def scored(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The scores as a cell holds them."""
    return {"scores": dict(scores), "mean": mean_score(scores)}
