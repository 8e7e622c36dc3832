"""A comparison from FusionBench's pools to tables: checks first, then cell by cell, then what is read off them."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tqdm.auto import tqdm

from fusion_bench_crossmean.calibration.pool_data import check_training_data
from fusion_bench_crossmean.method.settings import check_choice, check_integer
from fusion_bench_crossmean.protocol.catalogue import Row
from fusion_bench_crossmean.protocol.cells import CellStore
from fusion_bench_crossmean.protocol.computing import Computer
from fusion_bench_crossmean.protocol.evaluation import Evaluator
from fusion_bench_crossmean.protocol.outputs import Outcome, check_outputs, write_outputs
from fusion_bench_crossmean.protocol.plan import Plan, task_sets_of
from fusion_bench_crossmean.protocol.pool_configs import limited, stamps, strings_in, without_other_rows
from fusion_bench_crossmean.protocol.splits import draw_split
from fusion_bench_crossmean.report import check_writable, environment
from fusion_bench_crossmean.text.encoders import without_heads

log = logging.getLogger(__name__)

#: What a method or a pool may raise. Not what ends the program: an interrupt, an exit.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    SafetensorError,
)


@dataclass(frozen=True)
class Comparison:
    """What to compare, how, and where to keep it.

    Args:
        modelpool, taskpool: FusionBench's configs, as plain containers.
        rows: the methods.
        title: of the tables.
        baseline: name of the row that margins are over.
        outputs: see `outputs.OUTPUTS`.
        pool: name of the pools, in titles and for the folder.
        folder: of tables and figures, one below it per pool.
        cells: folder of finished cells; other comparisons may share it.
        build: config of a pool or an algorithm -> the object, with its Fabric.
        machine: what the results depend on besides: device and precision.
        task_sets: see `task_sets_of`.
        seeds, coverages, sample_counts: see `Plan`.
        num_validation: labelled training rows per task.
        scales: among which one is chosen.
        notes: below every table.
        is_trial: whether the numbers mean nothing.
        is_main: whether this process shows progress.
    """

    modelpool: Mapping[str, Any]
    taskpool: Mapping[str, Any]
    rows: Sequence[Row]
    title: str
    baseline: str
    outputs: Sequence[str]
    pool: str
    folder: Path
    cells: Path
    build: Callable[[Mapping[str, Any]], Any]
    machine: Mapping[str, str]
    task_sets: Any = "all"
    seeds: Sequence[int] = (0, 1, 2)
    coverages: Sequence[str] = ("mlp",)
    sample_counts: Sequence[int] = (256,)
    num_validation: int = 256
    scales: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4, 2.0)
    notes: Sequence[str] = ()
    is_trial: bool = False
    is_main: bool = True

    def run(self) -> Outcome:
        """Computes what is missing and writes tables and figures.

        Raises:
            ValueError, OSError: what can be known before long work.
            RuntimeError: some cells could not be computed; the others are kept, and in the tables.
        """
        self._check()
        store = CellStore(self.cells)
        cells = list(self.plan.cells())
        results = {cell.digest: store.read(cell) for _, cell in cells}
        failures: dict[str, str] = {}
        messages = self.folder / self.pool / "messages.log"
        if None in results.values():
            self._check_rows()
            with quiet(messages):
                computer = self.computer()
            with tqdm(cells, dynamic_ncols=True, disable=not self.is_main) as bar:
                for row, cell in bar:
                    if results[cell.digest] is not None:
                        continue
                    bar.set_description(cell.name)
                    try:
                        with quiet(messages):
                            results[cell.digest] = found = computer.compute(row, cell)
                    except FAILURES as error:  # one method's failure is not the comparison's
                        failures[cell.name] = f"{type(error).__name__}: {error}"
                        bar.write(f"{cell.name} failed: {failures[cell.name]}", file=sys.stderr)
                        continue
                    store.write(cell, found)
        finished = [(row, cell, found) for row, cell in cells if (found := results[cell.digest]) is not None]
        if not finished:
            raise RuntimeError(f"No cell could be computed: {in_short(failures)}")
        outcome = write_outputs(
            finished,
            title=self.title,
            pool=self.pool,
            baseline=self.baseline,
            asked=self.outputs,
            folder=self.folder,
            notes=[*self.notes, *self._remarks(failures)],
        )
        if failures:
            raise RuntimeError(
                f"{len(failures)} of {len(cells)} cells failed: {in_short(failures)} The others are in "
                f"{outcome.folder}; details are in {messages}."
            )
        return outcome

    @functools.cached_property
    def tasks(self) -> list[str]:
        """What both pools have."""
        experts = [task for task in self.modelpool["models"] if not task.startswith("_")]
        tested = self.taskpool.get("test_datasets") or {}
        common = [task for task in experts if task in tested]
        if not common:
            raise ValueError(f"The model pool has the tasks {experts}, the task pool {list(tested)}: none is in both.")
        if len(common) < len(experts):
            log.warning("The task pool has no test rows for %s.", [task for task in experts if task not in common])
        return common

    @functools.cached_property
    def plan(self) -> Plan:
        """Every cell, not yet looked for."""
        sets = task_sets_of(self.task_sets, self.tasks)
        settings = functools.cache(lambda tasks: self._settings_of(tasks))
        return Plan(
            self.rows,
            sets,
            self.seeds,
            self.coverages,
            self.sample_counts,
            lambda tasks: settings(tuple(tasks)),
            list(self.scales),
            self.num_validation,
        )

    @functools.cached_property
    def used_tasks(self) -> list[str]:
        """Those of any task set, in the pool's order."""
        used = {task for tasks in self.plan.task_sets.values() for task in tasks}
        return [task for task in self.tasks if task in used]

    @functools.cached_property
    def training_rows(self) -> Callable[[str], Any]:
        """Task -> its whole training set, loaded once."""
        pool = self.pool_for(self.used_tasks)

        @functools.cache
        def load(task: str) -> Any:
            check_training_data(pool, task, f"Add '+modelpool.train_datasets.{task}=...', or leave the task out.")
            return pool.load_train_dataset(task)

        return load

    @property
    def needed_validation(self) -> int:  # per task
        return self.num_validation if any(row.scale for row in self.rows) else 0

    def pool_for(self, tasks: Sequence[str]) -> Any:
        """A model pool with these experts and the pretrained model."""
        return without_heads(self.build(self._pool_config(tasks)))

    def computer(self) -> Computer:
        """With everything loaded that all cells share."""
        pool_for = functools.lru_cache(maxsize=1)(self.pool_for)
        pool_for(tuple(self.used_tasks))  # FusionBench's OpenCLIP task pool asks its program for it
        evaluator = Evaluator(self.build(limited(self.taskpool, self.used_tasks)))
        evaluator.setup()
        return Computer(
            pool_for,
            self.build,
            evaluator,
            self.used_tasks,
            self.training_rows,
            self.needed_validation,
            list(self.scales),
        )

    def _check(self) -> None:
        """What needs no data."""
        check_outputs(self.outputs)
        names = [row.name for row in self.rows]
        if self.baseline not in names:
            raise ValueError(f"recipe.baseline is {self.baseline!r}, which is not among the methods {names}: add it.")
        for name, values in (("seeds", self.seeds), ("num_calibration_samples", self.sample_counts)):
            least = 0 if name == "seeds" else 1
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different numbers, at least one, not {list(values)}.")
            for value in values:
                check_integer(f"Each of {name}", value, at_least=least)
        for coverage in self.coverages:
            check_choice("Each of coverages", coverage, ("mlp", "full"))
        if scaled := [row.name for row in self.rows if row.scale]:
            check_integer("num_validation_samples", self.num_validation, at_least=1)
            if not self.scales:
                raise ValueError(f"scales is empty; {', '.join(scaled)} need values to choose from.")
        if "correlations" in self.outputs and len(self.plan.task_sets) < 3:
            raise ValueError(f"Rank correlations need at least three task sets, not {list(self.plan.task_sets)}.")
        if "_pretrained_" not in self.modelpool["models"] and (
            needing := [row.name for row in self.rows if row.needs_pretrained]
        ):
            raise ValueError(
                f"{', '.join(needing)} need the pretrained model, which the pool does not have. Add '_pretrained_' to "
                "modelpool.models, or leave these methods out."
            )
        _ = self.plan.task_sets
        check_writable(self.cells / "cell.json")
        check_writable(self.folder / self.pool / "results.csv")

    def _check_rows(self) -> None:
        """Whether every task has the training rows that are going to be drawn."""
        if any(row.samples_setting or row.scale for row in self.rows):
            for task in self.used_tasks:
                size = len(self.training_rows(task))
                draw_split(task, size, max(self.sample_counts), self.needed_validation, seed=0)

    def _remarks(self, failures: Mapping[str, str]) -> list[str]:
        """What a reader of the tables has to know."""
        trial = ["A trial run: the numbers mean nothing."] if self.is_trial else []
        return trial + ([f"Cells that failed and are missing: {', '.join(failures)}."] if failures else [])

    def _settings_of(self, tasks: Sequence[str]) -> dict[str, Any]:
        """What all cells of some tasks depend on, besides their method."""
        pools = {"modelpool": self._pool_config(tasks), "taskpool": limited(self.taskpool, tasks)}
        return {
            **pools,
            "weights": {path: stamps(path) for path in sorted(set(strings_in(pools)))},
            "is_trial": self.is_trial,
            "machine": dict(self.machine),
            "versions": environment(),
        }

    def _pool_config(self, tasks: Sequence[str]) -> dict[str, Any]:
        return without_other_rows(limited(self.modelpool, tasks))


def in_short(failures: Mapping[str, str]) -> str:
    """The first of them, in words."""
    lines = [f"{name}: {error}" for name, error in list(failures.items())[:3]]
    return " | ".join(lines) + ("" if len(failures) <= 3 else " | ...")


@contextlib.contextmanager
def quiet(path: Path) -> Iterator[None]:
    """What methods and pools print and log goes to a file inside the block, so that one progress bar is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    with path.open("a", encoding="utf-8") as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        levels = [(other, other.level) for other in root.handlers]
        for other, _ in levels:
            other.setLevel(logging.CRITICAL)
        root.addHandler(handler)
        try:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(io.StringIO()):
                yield
        except FAILURES:
            log.exception("The cell failed.")
            raise
        finally:
            root.removeHandler(handler)
            for other, level in levels:
                other.setLevel(level)
