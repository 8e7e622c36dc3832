"""Scores models with a task pool of FusionBench that is loaded once, on test or on validation rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: Bytes of processed inputs that are kept in memory, together; what does not fit is processed again for every model.
KEPT_BYTES = 2 * 2**30


class Evaluator:
    """Every row of a comparison is scored by the same heads on the same inputs.

    Args:
        taskpool: a task pool of FusionBench with `setup`, `test_dataloaders` and `evaluate`.
        kept_bytes: see `KEPT_BYTES`.
    """

    def __init__(self, taskpool: Any, kept_bytes: int = KEPT_BYTES) -> None:
        self._pool = taskpool
        self._left = kept_bytes
        self._loaders: dict[tuple[Any, str], Iterable[Any]] = {}

    def setup(self) -> None:
        """Loads heads and test rows."""
        self._pool.setup()
        self._keep("test", self._pool.test_dataloaders)
        if isinstance(getattr(self._pool, "clip_model", None), nn.Module):
            # A second setup, for validation rows, goes on with what is loaded.
            self._pool._clip_model, self._pool._processor = self._pool.clip_model, self._pool.processor
            self._pool.clip_model.text_model = RememberedTower(self._pool.clip_model.text_model)

    @property
    def tasks(self) -> list[str]:
        """Those with test rows."""
        return [task for split, task in self._loaders if split == "test"]

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
            self._loaders[split, task] = KeptBatches(loader, self._take)

    def _take(self, size: int) -> bool:
        fits = size <= self._left
        self._left -= size if fits else 0
        return fits


class KeptBatches:
    """The batches of a loader, kept after the first time as far as there is room.

    Args:
        loader: gives the same batches every time.
        take: asks for room, in bytes.
    """

    def __init__(self, loader: Iterable[Any], take: Callable[[int], bool]) -> None:
        self._loader = loader
        self._take = take
        self._kept: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            yield from self._kept
            return
        batches: list[Any] | None = []
        for batch in self._loader:
            if batches is not None and self._take(size_of(batch)):
                batches.append(batch)
            else:
                batches = None
            yield batch
        self._kept = batches


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
            self._known[key] = self.tower(input_ids=input_ids, **inputs)
        return self._known[key]


@contextlib.contextmanager
def predictions_of(taskpool: Any) -> Iterator[dict[str, list[Tensor]]]:
    """Task -> predicted classes, batch by batch, of every task that the pool evaluates inside the block."""
    predictions: dict[str, list[Tensor]] = {}
    evaluate = taskpool._evaluate

    def watched(classifier: nn.Module, test_loader: Any, num_classes: int, task_name: str) -> Any:
        batches = predictions[task_name] = []

        def note(_: nn.Module, __: Any, output: Any) -> None:
            batches.append(logits_of(output).argmax(-1).cpu())

        handle = classifier.register_forward_hook(note)
        try:
            return evaluate(classifier, test_loader, num_classes=num_classes, task_name=task_name)
        finally:
            handle.remove()

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
