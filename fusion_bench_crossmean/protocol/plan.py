"""What a comparison consists of: task sets, and every cell in the order in which they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusion_bench_crossmean.protocol.catalogue import Row
from fusion_bench_crossmean.protocol.cells import Cell

#: A task set of this name stands for all tasks of the pool.
ALL_TASKS = "all"


@dataclass(frozen=True)
class Plan:
    """A comparison.

    Args:
        rows: the methods.
        task_sets: name -> tasks.
        seeds: of the draws, shared by all methods.
        coverages: for the methods that have such a choice.
        sample_counts: calibration inputs per task.
        settings: tasks -> what every cell of these depends on, see `Cell`.
        scales: the values among which a scale is chosen,
        num_validation: on so many rows per task.
    """

    rows: Sequence[Row]
    task_sets: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    coverages: Sequence[str]
    sample_counts: Sequence[int]
    settings: Callable[[Sequence[str]], Mapping[str, Any]]
    scales: Sequence[float]
    num_validation: int

    def cells(self) -> Iterator[tuple[Row, Cell]]:
        """Every cell with its row, each once; task set by task set, so that a table fills from its first column."""
        for name, tasks in self.task_sets.items():
            for row in self.rows:
                for seed in self.seeds if row.uses_seed else [None]:
                    for coverage in self.coverages if row.has_coverage else [row.coverage]:
                        for count in self.sample_counts if row.samples_setting else [None]:
                            yield row, self.cell(row, name, tasks, seed, coverage, count)

    def cell(
        self, row: Row, name: str, tasks: Sequence[str], seed: int | None, coverage: str | None, count: int | None
    ) -> Cell:
        """One of them."""
        own: dict[str, Any] = {"method": row.configured(seed=seed, coverage=coverage, num_samples=count)}
        if row.scale is not None:
            own |= {"scale": row.scale, "scales": list(self.scales), "num_validation": self.num_validation}
        return Cell(row.name, name, tuple(tasks), seed, coverage, count, {**self.settings(tasks), **own})


def task_sets_of(asked: Any, tasks: Sequence[str]) -> dict[str, list[str]]:
    """Name -> tasks, from what a config says: `all`, a list of tasks, name -> tasks, or one of two rules.

    ``{random: {count: 12, size: 8, seed: 0}}`` draws different sets, each without replacement; ``{first: [8, 14, 20]}``
    takes so many tasks of the pool, in its order.

    Raises:
        ValueError: a task that the pools do not have, or a set of fewer than two tasks.
    """
    if asked in (None, ALL_TASKS):
        asked = {ALL_TASKS: list(tasks)}
    elif not isinstance(asked, Mapping):
        asked = {"+".join(asked): list(asked)}
    elif set(asked) == {"random"}:
        asked = random_sets(tasks, **asked["random"])
    elif set(asked) == {"first"}:
        asked = first_sets(tasks, asked["first"])
    sets = {str(name): list(tasks) if chosen == ALL_TASKS else list(chosen) for name, chosen in asked.items()}
    for name, chosen in sets.items():
        if missing := [task for task in chosen if task not in tasks]:
            raise ValueError(f"Task set {name!r} names {missing}; the model pool and the task pool have {list(tasks)}.")
        if len(chosen) < 2 or len(set(chosen)) < len(chosen):
            raise ValueError(f"Task set {name!r} needs at least two different tasks to merge, not {chosen}.")
    return sets


def first_sets(tasks: Sequence[str], sizes: Sequence[int]) -> dict[str, list[str]]:
    """The first tasks of the pool, for every one of `sizes`.

    Raises:
        ValueError: it has not so many.
    """
    if too_large := [size for size in sizes if size > len(tasks)]:
        raise ValueError(f"There are {len(tasks)} tasks, no first {too_large}: set task_sets={{first: [...]}}.")
    return {f"T = {size}": list(tasks[:size]) for size in sizes}


def random_sets(tasks: Sequence[str], count: int, size: int, seed: int = 0) -> dict[str, list[str]]:
    """`count` different sets of `size` tasks, in the pool's order.

    Raises:
        ValueError: there are not so many.
    """
    generator = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    for _ in range(1000 * count):
        if len(found) == count or size > len(tasks):
            break
        found[tuple(sorted(generator.choice(len(tasks), size, replace=False).tolist()))] = None
    if len(found) < count:
        raise ValueError(f"{len(tasks)} tasks do not give {count} different sets of {size}.")
    return {f"random{index}": [tasks[i] for i in chosen] for index, chosen in enumerate(found)}
