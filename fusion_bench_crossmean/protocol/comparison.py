"""A comparison from FusionBench's pools to tables: checks first, then cell by cell, then what is read off them."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from fusion_bench_crossmean.protocol.catalogue import Row
from fusion_bench_crossmean.protocol.cells import Cell, CellStore
from fusion_bench_crossmean.protocol.computing import Computer
from fusion_bench_crossmean.protocol.evaluation import Evaluator
from fusion_bench_crossmean.protocol.outputs import Outcome, check_outputs, write_outputs
from fusion_bench_crossmean.protocol.plan import Plan, task_sets_of
from fusion_bench_crossmean.protocol.splits import draw_split
from fusion_bench_crossmean.report import check_writable, environment

log = logging.getLogger(__name__)

#: Parts of a model pool's config from which rows could reach a merge besides the calibration rows.
OTHER_ROWS = ("test_datasets", "val_datasets")
#: What files hold weights.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True)
class Comparison:
    """What to compare, how, and where to keep it.

    Args:
        modelpool, taskpool: FusionBench's configs, as plain containers.
        rows: the methods.
        title: of the tables.
        baseline: name of the row that margins are over.
        outputs: see `outputs.OUTPUTS`.
        folder: of tables and figures.
        cells: folder of finished cells; other comparisons may share it.
        build: config of a pool or an algorithm -> the object, with its Fabric.
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
    folder: Path
    cells: Path
    build: Callable[[Mapping[str, Any]], Any]
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
        plan = self.plan()
        self._check(plan)
        store = CellStore(self.cells)
        cells = list(plan.cells())
        finished: list[tuple[Row, Cell, Mapping[str, Any]]] = []
        failures: dict[str, BaseException] = {}
        computer: Computer | None = None
        with tqdm(cells, dynamic_ncols=True, disable=not self.is_main) as bar:
            for row, cell in bar:
                bar.set_description(cell.name)
                found = store.read(cell)
                if found is None:
                    with quiet(self.folder / "messages.log"):
                        computer = computer or self.computer()
                        try:
                            found = computer.compute(row, cell)
                        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
                            # One method's failure is not the comparison's.
                            failures[cell.name] = e
                            log.exception("%s failed", cell.name)
                            continue
                    store.write(cell, found)
                finished.append((row, cell, found))
        if not finished:
            raise RuntimeError(f"No cell could be computed: {in_short(failures)}")
        outcome = write_outputs(
            finished,
            title=self.title,
            baseline=self.baseline,
            asked=self.outputs,
            folder=self.folder,
            notes=[*self.notes, *(["A trial run: the numbers mean nothing."] if self.is_trial else [])],
        )
        if failures:
            raise RuntimeError(
                f"{len(failures)} of {len(cells)} cells failed: {in_short(failures)} The others are in {self.folder}; "
                f"details are in {self.folder / 'messages.log'}."
            )
        return outcome

    @functools.cached_property
    def tasks(self) -> list[str]:
        """What both pools have."""
        tested = self.taskpool.get("test_datasets") or {}
        return [task for task in self.modelpool["models"] if not task.startswith("_") and task in tested]

    def plan(self) -> Plan:
        """Every cell, not yet looked for."""
        sets = task_sets_of(self.task_sets, self.tasks)
        return Plan(
            self.rows, sets, self.seeds, self.coverages, self.sample_counts, self._settings_of, list(self.scales)
        )

    def pool_for(self, tasks: Sequence[str]) -> Any:
        """A model pool with these experts and the pretrained model."""
        return self.build(self._pool_config(tasks))

    def computer(self) -> Computer:
        """With everything loaded that all cells share."""
        whole = self.pool_for(self.tasks)
        evaluator = Evaluator(self.build(self.taskpool))
        evaluator.setup()
        return Computer(
            functools.lru_cache(maxsize=1)(self.pool_for),
            self.build,
            evaluator,
            functools.cache(whole.load_train_dataset),
            self.num_validation,
            list(self.scales),
        )

    def _check(self, plan: Plan) -> None:
        check_outputs(self.outputs)
        names = [row.name for row in self.rows]
        if self.baseline not in names:
            raise ValueError(f"Margins are over {self.baseline!r}, which is not among the methods {names}.")
        if not any(name.startswith("_pretrained_") for name in self.modelpool["models"]):
            if needing := [row.name for row in self.rows if row.needs_pretrained]:
                raise ValueError(
                    f"{', '.join(needing)} need the pretrained model, which the pool does not have. Add '_pretrained_' "
                    "to modelpool.models, or leave these methods out."
                )
        check_writable(self.cells / "cell.json")
        check_writable(self.folder / "results.csv")
        drawing = [row for row in self.rows if row.samples_setting or row.scale]
        if not drawing:
            return
        pool = self.pool_for(self.tasks)
        for task in dict.fromkeys(task for tasks in plan.task_sets.values() for task in tasks):
            size = len(pool.load_train_dataset(task))
            draw_split(task, size, max(self.sample_counts), self.num_validation, seed=0)

    def _settings_of(self, tasks: Sequence[str]) -> dict[str, Any]:
        """What all cells of some tasks depend on, besides their method."""
        pools = {"modelpool": self._pool_config(tasks), "taskpool": limited(self.taskpool, tasks)}
        return {
            **pools,
            "weights": {path: stamps(path) for path in sorted(set(strings_in(pools)))},
            "num_validation": self.num_validation,
            "is_trial": self.is_trial,
            "versions": environment(),
        }

    def _pool_config(self, tasks: Sequence[str]) -> dict[str, Any]:
        return limited({key: value for key, value in self.modelpool.items() if key not in OTHER_ROWS}, tasks)


def limited(config: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """A pool's config with the models and data sets of some tasks, and its special models."""
    config = copy.deepcopy(dict(config))
    for part in ("models", "train_datasets", "test_datasets"):
        if isinstance(entries := config.get(part), Mapping):
            config[part] = {k: v for k, v in entries.items() if k in tasks or k.startswith("_")}
    return config


def strings_in(value: Any) -> Iterator[str]:
    """Every string that nested containers hold as a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def stamps(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of the weights at a path; nothing where it is no path: then its name says it."""
    place = Path(path)
    try:
        files = [place] if place.is_file() else [file for kind in WEIGHT_FILES for file in sorted(place.glob(kind))]
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except (OSError, ValueError):
        return []


def in_short(failures: Mapping[str, BaseException]) -> str:
    """The first of them, in words."""
    lines = [f"{name}: {type(error).__name__}: {error}" for name, error in list(failures.items())[:3]]
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
        finally:
            root.removeHandler(handler)
            for other, level in levels:
                other.setLevel(level)
