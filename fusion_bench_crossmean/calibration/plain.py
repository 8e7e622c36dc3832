"""Calibration inputs that the user hands over: tensors, dicts of tensors, datasets or DataLoaders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fusion_bench_crossmean.calibration.batch import Batch
from fusion_bench_crossmean.calibration.reading import told

LABEL_KEYS = ("label", "labels")
GIVE = "give a tensor, a dict of tensors, a dataset or a DataLoader."


class PlainSource:
    """Task -> data, as given to ``run(modelpool, calibration=...)``.

    One input may be a tensor (the network's only argument), a tuple whose first entry is that (labels behind it are
    not used) or a dict of keyword arguments; an `attention_mask` in it also tells padding from text. Data may be

    - a tensor, a numpy array or a dict of tensors whose first axis counts the inputs,
    - a map-style dataset of inputs,
    - any iterable of batches of inputs, such as a DataLoader: its inputs are drawn from in the order it gives them.
    """

    def __init__(self, calibration: Mapping[str, Any]) -> None:
        if not isinstance(calibration, Mapping):
            kind = type(calibration).__name__
            raise TypeError(f"calibration must be a dict of task -> inputs, not a {kind}.")
        self.calibration = calibration

    def dataset(self, task: str) -> Any:
        if task not in self.calibration:
            have = ", ".join(map(repr, self.calibration)) or "none"
            raise ValueError(f"There are no calibration inputs for task {task!r}; there are for {have}.")
        data, where = self.calibration[task], f"The calibration inputs of task {task!r}"
        if isinstance(data, np.ndarray):
            if data.dtype.kind not in "fiub":
                raise TypeError(f"{where} are an array of {data.dtype}; {GIVE}")
            return torch.from_numpy(np.ascontiguousarray(data.astype(data.dtype.newbyteorder("="), copy=False)))
        if isinstance(data, Tensor):
            return data
        if isinstance(data, Mapping):
            (rows,) = told(map(DictOfTensors, [data]), task)
            return rows
        if isinstance(data, (str, bytes, type)):
            raise TypeError(f"{where} are {repr(data)[:80]}; {GIVE}")
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            return data
        if isinstance(data, Iterable):
            return [item for items in told(map(split_batch, data), task) for item in items]
        raise TypeError(f"{where} are a {type(data).__name__}; {GIVE}")

    def collate(self, items: Sequence[Any]) -> Batch:
        if isinstance(items[0], Mapping):
            if odd := [key for key in items[0] if not isinstance(key, str)]:
                raise ValueError(f"the names of an input's tensors must be text, not {', '.join(map(repr, odd))}.")
            inputs = default_collate([{k: v for k, v in item.items() if k not in LABEL_KEYS} for item in items])
            mask = inputs.get("attention_mask")
            if mask is not None and not ((mask == 0) | (mask == 1)).all():
                raise ValueError("An attention_mask must hold 1 for a token that counts and 0 for padding only.")
            return Batch(kwargs=inputs, token_mask=None if mask is None else mask.bool())
        return Batch(args=(torch.stack([first(item) for item in items]),))


class DictOfTensors:
    """A dict of tensors as a dataset: item i is the dict of their i-th rows.

    Example:
        >>> DictOfTensors({"x": torch.arange(3)})[1]
        {'x': tensor(1)}
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        if bad := [key for key, value in tensors.items() if not has_rows(value)]:
            raise ValueError(f"the values of {', '.join(map(repr, bad))} are no tensors with an axis for the inputs.")
        lengths = {key: len(tensor) for key, tensor in tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"The tensors of one task must have one length, not {lengths}.")
        self.tensors = tensors
        self.length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: tensor[index] for key, tensor in self.tensors.items()}


def has_rows(value: Any) -> bool:
    """Whether it has a first axis."""
    return bool(value.ndim) if isinstance(value, (Tensor, np.ndarray)) else isinstance(value, (list, tuple))


def first(item: Any) -> Tensor:
    """The input among (input, label, ...), or the input itself."""
    return item[0] if isinstance(item, Sequence) else item


def split_batch(batch: Any) -> list[Any]:
    """The inputs of one batch as a DataLoader gives it."""
    if isinstance(batch, Mapping):
        whole = DictOfTensors({key: value for key, value in batch.items() if key not in LABEL_KEYS})
        return [whole[index] for index in range(len(whole))]
    return list(first(batch))
