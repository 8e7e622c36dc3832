"""Which rows of a task's training set serve what: calibration (unlabelled) and validation (labelled), disjoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
from fusion_bench.modelpool import BaseModelPool
from torch.utils.data import Dataset, Subset

from fusion_bench_crossmean.calibration import draw_indices

#: What stands in the place of a label that nobody may read.
HIDDEN_LABEL = 0


@dataclass(frozen=True)
class Split:
    """Row numbers of one task's training set.

    Args:
        calibration: what a merge is given, without labels. They are the rows that ``method=crossmean`` draws on its own
            for the same seed, and a smaller set is the beginning of a larger one.
        validation: what a scale is chosen on.
    """

    calibration: list[int]
    validation: list[int]


def draw_split(task: str, size: int, num_calibration: int, num_validation: int, seed: int) -> Split:
    """Both draws of one task; validation rows are the same for every number of calibration rows.

    Raises:
        ValueError: the training set is too small for two disjoint draws.

    Example:
        >>> split = draw_split("a", 10, 6, 4, seed=0)
        >>> sorted(split.calibration + split.validation) == list(range(10))
        True
    """
    if num_calibration + num_validation > size:
        raise ValueError(
            f"Task {task!r} has {size} training rows; {num_calibration} for calibration and {num_validation} others "
            "for validation were asked for. Lower num_calibration_samples or num_validation_samples."
        )
    validation = draw_indices(task, size, num_validation, seed, offset=size - num_validation)
    return Split(draw_indices(task, size, num_calibration, seed), validation)


class Unlabelled(Dataset):
    """Rows whose label is hidden: what a merge may see of them."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return {**row, "label": HIDDEN_LABEL} if isinstance(row, Mapping) else (row[0], HIDDEN_LABEL, *row[2:])


def chosen(rows: Any, indices: Sequence[int]) -> Any:
    """Some rows of a data set, labels included."""
    return rows.select(indices) if isinstance(rows, datasets.Dataset) else Subset(rows, indices)


def unlabelled(rows: Any, indices: Sequence[int]) -> Any:
    """Some rows of a data set, their labels hidden."""
    some = chosen(rows, indices)
    if not isinstance(some, datasets.Dataset) or "image" in some.column_names:
        return Unlabelled(some)
    return some.remove_columns([name for name in ("label",) if name in some.column_names])


@contextlib.contextmanager
def serving(modelpool: BaseModelPool, rows: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block the pool's training sets are these rows and nothing else, whoever asks for them."""

    def load_train_dataset(dataset_name: str, *_: Any, **__: Any) -> Any:
        if dataset_name not in rows:
            raise ValueError(
                f"The method asks for training rows of task {dataset_name!r}, but its config does not say "
                "how many: give it num_calibration_samples."
            )
        return rows[dataset_name]

    modelpool.load_train_dataset = load_train_dataset  # type: ignore[method-assign]
    try:
        yield
    finally:
        del modelpool.load_train_dataset
