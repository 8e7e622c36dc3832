"""Draws every task's calibration inputs from a source and batches them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from fusion_bench.modelpool import BaseModelPool
from torch.utils.data import DataLoader, Subset

from fusion_bench_crossmean.calibration.batch import Batch
from fusion_bench_crossmean.calibration.clip import CLIPPoolSource, OpenCLIPPoolSource
from fusion_bench_crossmean.calibration.draw import draw_indices
from fusion_bench_crossmean.calibration.files import FilesSource, WrappingSource
from fusion_bench_crossmean.calibration.plain import PlainSource
from fusion_bench_crossmean.calibration.reading import length_of, told
from fusion_bench_crossmean.calibration.text import TextPoolSource
from fusion_bench_crossmean.weights import unusual

#: Inputs per task that are looked at before and after everything else.
NUM_PROBES = 4


class CalibrationSource(Protocol):
    """Where calibration inputs come from: one class per pool family."""

    def dataset(self, task: str) -> Any:
        """The task's inputs, with ``len`` and integer indexing; one item is one image or text.

        Raises:
            ValueError: there are none; the message says what to change.
        """
        ...

    def collate(self, items: Sequence[Any]) -> Batch:
        """A batch from items of the dataset."""
        ...


#: Name of a pool's class, or of one that it inherits from -> its source: importing some classes takes seconds. A new
#: pool family is a class in this folder and a line here.
SOURCES: dict[str, Callable[[Any], WrappingSource]] = {
    "CLIPVisionModelPool": CLIPPoolSource,
    "OpenCLIPVisionModelPool": OpenCLIPPoolSource,
    "SequenceClassificationModelPool": TextPoolSource,
}


@dataclass(frozen=True)
class Calibration:
    """The inputs of a merge.

    Args:
        batches: task -> batches.
        indices: task -> which inputs of its dataset were drawn, in the order of use.
    """

    batches: dict[str, list[Batch]]
    indices: dict[str, list[int]]

    def on(self, device: torch.device, dtype: torch.dtype) -> dict[str, list[Batch]]:
        """The batches on `device`, floating-point inputs in `dtype`."""
        return {task: [batch.to(device, dtype) for batch in batches] for task, batches in self.batches.items()}


def source_for(
    modelpool: BaseModelPool, calibration: Mapping[str, Any] | None, files: Mapping[str, str] | None = None
) -> CalibrationSource:
    """The source of a pool's calibration inputs; `calibration` (task -> data), where given, comes before the pool.

    `files` (task -> path, see `FilesSource`) stand in for some tasks' data of the pool.

    Raises:
        ValueError: there is none; files of a task that the pool does not have.
    """
    if files and (unknown := [task for task in files if task not in modelpool.model_names]):
        raise ValueError(f"calibration_data names {unknown}, the pool has {list(modelpool.model_names)}.")
    if files and calibration is not None:
        raise ValueError("Calibration inputs are given twice: as calibration_data and to run(). Leave one out.")
    if calibration is not None:
        return PlainSource(calibration)
    for family in type(modelpool).__mro__:
        if source := SOURCES.get(family.__name__):
            return FilesSource(files, source(modelpool)) if files else source(modelpool)
    raise ValueError(
        "This pool brings no calibration inputs. "
        "Give them to run(modelpool, calibration={task: tensor, dict of tensors, dataset or DataLoader})"
        f"{'; how to read the files of calibration_data is not known for it either' if files else ''}."
    )


def preprocessor_of(modelpool: BaseModelPool) -> Any:
    """What makes inputs for a pool's models, a processor or tokenizer with `save_pretrained`; None: there is none."""
    for family in type(modelpool).__mro__:
        if source := SOURCES.get(family.__name__):
            return source(modelpool).preprocessor
    return None


def open_datasets(source: CalibrationSource, tasks: Sequence[str], num_samples: int) -> dict[str, Any]:
    """Every task's inputs, not yet read.

    Raises:
        ValueError: a task without inputs or with fewer than `num_samples`; all offenders are named.
    """
    datasets = {task: source.dataset(task) for task in tasks}
    lengths = {task: length_of(data, task) for task, data in datasets.items()}
    if short := {task: length for task, length in lengths.items() if length < num_samples}:
        have = ", ".join(f"task {task!r} has {size}" for task, size in short.items())
        raise ValueError(f"{have} calibration inputs, {num_samples} were asked for. Lower num_calibration_samples.")
    return datasets


def load_calibration(
    source: CalibrationSource,
    datasets: Mapping[str, Any],
    *,
    num_samples: int,
    seed: int,
    batch_size: int,
    num_workers: int = 0,
    token_dropout: float = 0.0,
    offset: int = 0,
    progress: Callable[[Iterable[str], str], Iterable[str]] = lambda items, _: items,
) -> Calibration:
    """Exactly `num_samples` inputs per task, drawn without replacement.

    Args:
        source: makes the batches.
        datasets: from `open_datasets`.
        num_samples: images or texts per task.
        seed: of the draw and of `token_dropout`.
        batch_size: inputs per forward; the result of a merge does not depend on it.
        num_workers: processes that load data.
        token_dropout: see `Batch`.
        offset: see `draw_indices`.
        progress: wraps the tasks; called with them and a description.

    Raises:
        ValueError: too few inputs, or non-finite ones.
    """
    indices = {task: draw_indices(task, len(data), num_samples, seed, offset) for task, data in datasets.items()}
    batches: dict[str, list[Batch]] = {}
    for task in progress(datasets, "loading calibration inputs"):
        drawn: Any = Subset(datasets[task], indices[task])
        loader = DataLoader(
            drawn,
            batch_size=batch_size,
            num_workers=num_workers,
            collate_fn=source.collate,
            generator=torch.Generator().manual_seed(seed),  # else it draws its workers' seeds from the global state
        )
        seeds = [zlib.crc32(f"{seed} {task} {index}".encode()) for index in indices[task]]
        batches[task] = []
        for index, batch in enumerate(told(loader, task)):
            check_finite(batch, task)
            dropout_seeds = tuple(seeds[index * batch_size : (index + 1) * batch_size])
            batches[task].append(replace(batch, token_dropout=token_dropout, dropout_seeds=dropout_seeds, task=task))
        if len(batches[task]) != len(loader):  # StopIteration out of a dataset looks like its end
            raise ValueError(f"The calibration inputs of task {task!r} end before they should: {len(loader)} batches.")
    return Calibration(batches, indices)


def load_probes(
    source: CalibrationSource, datasets: Mapping[str, Any], *, num_samples: int, seed: int
) -> dict[str, Batch]:
    """Task -> the first of its calibration inputs, a few, as one batch: shows early whether they can be read at all.

    Raises:
        ValueError: they cannot.
    """
    probes = {}
    for task, data in datasets.items():
        indices = draw_indices(task, len(data), num_samples, seed)[:NUM_PROBES]
        (batch,) = told((source.collate([data[index] for index in chosen]) for chosen in [indices]), task)
        probes[task] = replace(batch, task=task)
        check_finite(probes[task], task)
    return probes


def check_finite(batch: Batch, task: str) -> None:
    """Raises `ValueError` where an input of `task` is no plain tensor, or holds NaN or infinity."""
    for tensor in batch.tensors():
        where = f"The calibration inputs of task {task!r} have"
        if what := unusual(tensor):
            raise ValueError(f"{where} {what} of shape {tuple(tensor.shape)}. Give plain tensors.")
        if tensor.is_floating_point() and (bad := int((~tensor.isfinite()).sum())):
            raise ValueError(
                f"{where} {bad} non-finite values in a tensor of shape {tuple(tensor.shape)}. Clean the data, or take "
                "another seed."
            )
