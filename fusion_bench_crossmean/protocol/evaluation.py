"""Scores models with a task pool of FusionBench that is loaded once, on test or on validation rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_crossmean.memory import memory_of

#: Part of the free memory in which processed inputs are kept; what does not fit is processed again for every model.
KEPT_PART = 0.25


class Evaluator:
    """Every row of a comparison is scored by the same heads on the same inputs.

    Args:
        taskpool: a task pool of FusionBench with `setup`, `test_dataloaders` and `evaluate`.
        room: bytes for processed inputs; None: see `KEPT_PART`.
    """

    def __init__(self, taskpool: Any, room: int | None = None) -> None:
        self._pool = taskpool
        self._room = Room(int(KEPT_PART * memory_of(torch.device("cpu"), None).free) if room is None else room)
        self._loaders: dict[tuple[Any, str], Iterable[Any]] = {}

    def setup(self) -> None:
        """Loads heads and test rows."""
        self._pool.setup()
        self._keep("test", self._pool.test_dataloaders)
        if isinstance(getattr(self._pool, "clip_model", None), nn.Module):
            # A second setup, for validation rows, goes on with what is loaded.
            self._pool._clip_model, self._pool._processor = self._pool.clip_model, self._pool.processor
            self._pool.clip_model.text_model = RememberedTower(self._pool.clip_model.text_model)

    def add_validation(self, seed: int, rows: Mapping[str, Any]) -> None:
        """Labelled rows of a seed, by task."""
        attribute = "_test_datasets" if hasattr(self._pool, "_test_datasets") else "test_datasets"
        before = getattr(self._pool, attribute)
        setattr(self._pool, attribute, dict(rows))
        try:
            self._pool.setup()
        finally:
            setattr(self._pool, attribute, before)
        self._keep(seed, self._pool.test_dataloaders)

    def has_validation(self, seed: int) -> bool:
        """Whether `add_validation` was called for it."""
        return any(split == seed for split, _ in self._loaders)

    def scores(self, model: nn.Module, tasks: Sequence[str], seed: int | None = None) -> dict[str, dict[str, Any]]:
        """Task -> `score` (in [0, 1], Matthews correlation in [-1, 1]) and `predictions`, a class per row.

        Args:
            model: as a method returns it.
            tasks: which to score.
            seed: of the validation rows; None: the test rows.
        """
        split = "test" if seed is None else seed
        self._pool.test_dataloaders = {task: self._loaders[split, task] for task in tasks}
        with predictions_of(self._pool) as predictions:
            report = self._pool.evaluate(model)
        return {
            task: {
                "score": float(report[task].get("score", report[task]["accuracy"])),
                "predictions": torch.cat(predictions[task]).tolist(),
            }
            for task in tasks
        }

    def _keep(self, split: Any, loaders: Mapping[str, Iterable[Any]]) -> None:
        for task, loader in loaders.items():
            self._loaders[split, task] = KeptBatches(loader, self._room)


@dataclass
class Room:
    """How many bytes may still be kept."""

    left: int


class KeptBatches:
    """The batches of a loader, kept after the first time if there is room for all of them.

    Args:
        loader: gives the same batches every time.
        room: shared with others.
    """

    def __init__(self, loader: Iterable[Any], room: Room) -> None:
        self._loader = loader
        self._room = room
        self._kept: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            yield from self._kept
            return
        batches: list[Any] = []
        fits = True
        for index, batch in enumerate(self._loader):
            if index == 0:
                fits = size_of(batch) * len(self) <= self._room.left
            if fits:
                batches.append(batch)
            yield batch
        if fits:  # all of them were asked for
            self._kept = batches
            self._room.left -= sum(map(size_of, batches))


def size_of(batch: Any) -> int:
    """Bytes of a batch's tensors, nested or not."""
    if isinstance(batch, Tensor):
        return batch.nbytes
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return sum(size_of(item) for item in items)


class RememberedTower(nn.Module):
    """A text tower that computes each prompt once: heads are the same for every model that is evaluated."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self._known: dict[bytes, Any] = {}

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        key = repr(input_ids.shape).encode() + input_ids.cpu().numpy().tobytes()
        if key not in self._known:
            self._known[key] = (None, self.tower(input_ids=input_ids, **inputs)[1])  # all that a head is made of
        return self._known[key]


@contextlib.contextmanager
def predictions_of(taskpool: Any) -> Iterator[dict[str, list[Tensor]]]:
    """Task -> predicted classes, batch by batch, of every task that the pool evaluates inside the block."""
    predictions: dict[str, list[Tensor]] = {}
    evaluate = taskpool._evaluate

    def watched(classifier: nn.Module, test_loader: Any, num_classes: int, task_name: str) -> Any:
        batches = predictions[task_name] = []

        forward = classifier.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            batches.append(logits_of(output).argmax(-1).cpu())
            return output

        # Not a hook: FusionBench's OpenCLIP classifier is called past its hooks.
        classifier.forward = noted
        try:
            return evaluate(classifier, test_loader, num_classes=num_classes, task_name=task_name)
        finally:
            del classifier.forward

    taskpool._evaluate = watched
    try:
        yield predictions
    finally:
        del taskpool._evaluate


def logits_of(output: Any) -> Tensor:
    """What a classifier returns, without its wrapping."""
    if isinstance(output, Tensor):
        return output
    return output["logits"] if isinstance(output, Mapping) else output.logits
