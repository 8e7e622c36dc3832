"""Bad calibration inputs: of one task, or all that is given."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bad_input_kinds.networks import (
    NUM_INPUTS,
    WIDTH,
    Attempt,
    Kind,
    OnPurpose,
    TextNet,
    attempt_of,
    networks,
    one_of,
    texts,
    vectors,
)

X = (NUM_INPUTS, WIDTH)


class Rows:
    """A dataset whose length and items are whatever the functions say."""

    def __init__(self, length: Callable[[], Any], item: Callable[[int], Any]) -> None:
        self.length = length
        self.item = item

    def __len__(self) -> int:
        return self.length()

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Stream(IterableDataset):
    """A few rows, one after the other."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(X))


def raised(error: BaseException) -> Any:
    raise error


def rows_that(item: Callable[[int], Any]) -> Rows:
    return Rows(lambda: NUM_INPUTS, item)


def last_is(odd: Any) -> Rows:
    """The input with the highest number is odd, the others are good."""
    return rows_that(lambda index: odd if index == NUM_INPUTS - 1 else torch.randn(WIDTH))


def loader(collate: Callable[[list[Any]], Any] | None, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(X)), batch_size=3, collate_fn=collate, **options)


def raising_after(count: int) -> Iterator[Tensor]:
    yield from torch.randn(count, 1, WIDTH)
    raise OnPurpose("in an iterator")


def poked(value: float) -> Tensor:
    rows = torch.randn(X)
    rows[3, 2] = value
    return rows


#: Errors of users' own datasets.
ERRORS = (
    *(ValueError, TypeError, KeyError, IndexError, OSError, RuntimeError, AttributeError, ZeroDivisionError, EOFError),
    *(
        NotImplementedError,
        AssertionError,
        struct.error,
        UnicodeError,
        StopIteration,
        RecursionError,
        LookupError,
        OnPurpose,
    ),
)
#: In words -> what a task's inputs are.
ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "abcdefgh",
    "int": lambda: 7,
    "bytes": lambda: b"abcdefgh",
    "a class": lambda: Tensor,
    "a function": lambda: lambda: torch.randn(X),
    "an empty list": list,
    "an empty dict": dict,
    "a list of None": lambda: [None] * NUM_INPUTS,
    "a list of floats": lambda: [0.5] * NUM_INPUTS,
    "a list of text": lambda: ["text"] * NUM_INPUTS,
    "a list of lists": lambda: [[0.5] * WIDTH] * NUM_INPUTS,
    "a list of empty lists": lambda: [[] for _ in range(NUM_INPUTS)],
    "a list of tensors": lambda: list(torch.randn(X)),
    "a list of arrays": lambda: [np.ones(WIDTH, dtype=np.float32)] * NUM_INPUTS,
    "a list of tuples": lambda: [(row, 1) for row in torch.randn(X)],
    "a list of dicts": lambda: [{"x": row, "label": 1} for row in torch.randn(X)],
    "a list of odd dicts": lambda: [{"x": row, str(i): 1} for i, row in enumerate(torch.randn(X))],
    "a list of label dicts": lambda: [{"label": 1}] * NUM_INPUTS,
    "different shapes": lambda: [torch.randn(i + 1) for i in range(NUM_INPUTS)],
    "different dtypes": lambda: [torch.randn(WIDTH).to([torch.half, torch.float][i % 2]) for i in range(NUM_INPUTS)],
    "different kinds": lambda: [torch.randn(WIDTH) if i % 2 else {"x": torch.randn(WIDTH)} for i in range(NUM_INPUTS)],
    "a set": lambda: set(torch.randn(X)),
    "a scalar": lambda: torch.tensor(1.0),
    "no rows": lambda: torch.randn(0, WIDTH),
    "one row": lambda: torch.randn(1, WIDTH),
    "too few rows": lambda: torch.randn(NUM_INPUTS - 1, WIDTH),
    "one axis": lambda: torch.randn(NUM_INPUTS),
    "tokens": lambda: torch.randn(NUM_INPUTS, 3, WIDTH),
    "no tokens": lambda: torch.randn(NUM_INPUTS, 0, WIDTH),
    "five axes": lambda: torch.randn(NUM_INPUTS, 1, 2, 1, WIDTH),
    "wide": lambda: torch.randn(NUM_INPUTS, WIDTH + 1),
    "no width": lambda: torch.randn(NUM_INPUTS, 0),
    "double": lambda: torch.randn(X).double(),
    "half": lambda: torch.randn(X).half(),
    "bfloat16": lambda: torch.randn(X).bfloat16(),
    "float8": lambda: torch.randn(X).to(torch.float8_e4m3fn),
    "int tensor": lambda: torch.randint(9, X),
    "bool tensor": lambda: torch.randn(X) > 0,
    "uint8": lambda: torch.ones(X, dtype=torch.uint8),
    "complex": lambda: torch.randn(X, dtype=torch.complex64),
    "sparse": lambda: torch.randn(X).to_sparse(),
    "meta": lambda: torch.empty(X, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, WIDTH), *[torch.randn(3, WIDTH)] * (NUM_INPUTS - 1)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(X), 0.1, 0, torch.qint8),
    "gradients": lambda: torch.randn(X, requires_grad=True),
    "not a leaf": lambda: torch.randn(X, requires_grad=True) * 2,
    "inference": lambda: torch.inference_mode()(lambda: torch.randn(X))(),
    "a parameter": lambda: nn.Parameter(torch.randn(X)),
    "expanded": lambda: torch.randn(1, WIDTH).expand(X),
    "transposed": lambda: torch.randn(WIDTH, NUM_INPUTS).T,
    "nan": lambda: poked(float("nan")),
    "inf": lambda: poked(float("-inf")),
    "one huge": lambda: poked(3e38),
    "zeros": lambda: torch.zeros(X),
    "ones": lambda: torch.ones(X),
    "1e30": lambda: torch.randn(X) * 1e30,
    "1e-30": lambda: torch.randn(X) * 1e-30,
    "1e200": lambda: torch.randn(X).double() * 1e200,
    "array": lambda: np.ones(X),
    "array of objects": lambda: np.full(X, None, dtype=object),
    "array of text": lambda: np.full(X, "a"),
    "array of half": lambda: np.ones(X, dtype=np.float16),
    "array of uint16": lambda: np.ones(X, dtype=np.uint16),
    "array of complex": lambda: np.ones(X, dtype=np.complex128),
    "big-endian array": lambda: np.ones(X, dtype=">f4"),
    "reversed array": lambda: np.ones(X, dtype=np.float32)[::-1],
    "read-only array": lambda: np.broadcast_to(np.float32(1), X),
    "array without axes": lambda: np.float32(3) * np.ones(()),
    "masked array": lambda: np.ma.masked_array(np.ones(X, dtype=np.float32), mask=True),
    "dict of x": lambda: {"x": torch.randn(X)},
    "dict of y": lambda: {"y": torch.randn(X)},
    "dict of two": lambda: {"x": torch.randn(X), "y": torch.randn(X)},
    "dict of labels": lambda: {"label": torch.ones(NUM_INPUTS)},
    "dict with labels": lambda: {"x": torch.randn(X), "labels": torch.ones(NUM_INPUTS)},
    "dict of lengths": lambda: {"x": torch.randn(X), "labels": torch.ones(3)},
    "dict of lists": lambda: {"x": torch.randn(X).tolist()},
    "dict of arrays": lambda: {"x": np.ones(X, dtype=np.float32)},
    "dict of None": lambda: {"x": None},
    "dict of scalars": lambda: {"x": torch.tensor(1.0)},
    "dict of numbers": lambda: {1: torch.randn(X)},
    "dict of dicts": lambda: {"x": {"x": torch.randn(X)}},
    "generator": lambda: (row for row in torch.randn(4, 2, WIDTH)),
    "generator of nothing": lambda: iter(()),
    "generator of None": lambda: iter([None] * NUM_INPUTS),
    "generator of numbers": lambda: iter(range(NUM_INPUTS)),
    "generator of text": lambda: iter(["ab", "cd", "ef", "gh"]),
    "generator of empty lists": lambda: iter([[]] * 4),
    "generator of scalars": lambda: iter(torch.randn(NUM_INPUTS)),
    "generator that raises": lambda: raising_after(int(torch.randint(NUM_INPUTS, ()))),
    "loader": lambda: loader(None),
    "shuffled loader": lambda: loader(None, shuffle=True),
    "loader of lists": lambda: loader(lambda items: items),
    "loader of None": lambda: loader(lambda _: None),
    "loader of text": lambda: loader(lambda _: "text"),
    "loader of dicts": lambda: loader(lambda items: {"x": torch.stack([item[0] for item in items]), "label": 1}),
    "loader of labels first": lambda: loader(lambda items: (torch.ones(len(items)), torch.randn(len(items), WIDTH))),
    "loader of tuples of tuples": lambda: loader(lambda items: ((torch.randn(len(items), WIDTH), 1), 2)),
    "loader that raises": lambda: loader(lambda _: raised(OnPurpose("in a collate"))),
    "loader of a stream": lambda: DataLoader(Stream(), batch_size=3),
    "stream": Stream,
    "dataset of tuples": lambda: TensorDataset(torch.randn(X), torch.ones(NUM_INPUTS)),
    "dataset of labels first": lambda: TensorDataset(torch.ones(NUM_INPUTS), torch.randn(X)),
    "dataset of None": lambda: rows_that(lambda _: None),
    "dataset without length": lambda: Rows(lambda: raised(TypeError("no length")), lambda _: torch.randn(WIDTH)),
    "dataset of length -1": lambda: Rows(lambda: -1, lambda _: torch.randn(WIDTH)),
    "dataset of length 8.5": lambda: Rows(lambda: 8.5, lambda _: torch.randn(WIDTH)),
    "dataset of length 10**15": lambda: Rows(lambda: 10**15, lambda _: torch.randn(WIDTH)),
    "dataset that is shorter": lambda: Rows(lambda: 99, lambda index: torch.randn(X)[index]),
    "last is None": lambda: last_is(None),
    "last is text": lambda: last_is("text"),
    "last is wide": lambda: last_is(torch.randn(WIDTH + 1)),
    "last is nan": lambda: last_is(torch.full((WIDTH,), float("nan"))),
    "last is a tuple": lambda: last_is((torch.randn(WIDTH), 1)),
    "last is a dict": lambda: last_is({"x": torch.randn(WIDTH)}),
    "last is double": lambda: last_is(torch.randn(WIDTH).double()),
    "empty tuples": lambda: rows_that(lambda _: ()),
    "tuples of text": lambda: rows_that(lambda _: ("text", 1)),
    **{
        f"always {error.__name__}": lambda error=error: rows_that(lambda _: raised(error("on purpose")))
        for error in ERRORS
    },
    **{
        f"at last {error.__name__}": lambda error=error: rows_that(
            lambda index: raised(error("on purpose")) if index == NUM_INPUTS - 1 else torch.randn(WIDTH)
        )
        for error in ERRORS
    },
}


def inputs(generator: np.random.Generator, folder: Path) -> Attempt:
    """The inputs of one task or all are odd, or all that is given as `calibration`."""
    given: Any = vectors()
    about = "all inputs"
    if generator.random() < 0.08:
        whole: list[Any] = [{}, None, [], 7, "a", torch.randn(X), list(given), {"a": given["a"]}, {0: 1}, given.items()]
        given = one_of(generator, [*whole, {**given, "zzz": None}, iter(given), Rows(lambda: 2, given.get)])
        return attempt_of(generator, f"as calibration {given!r:.60}", networks(), given)
    for task in one_of(generator, [["a"], ["b"], ["a", "b"]]):
        word = one_of(generator, list(ODD))
        given[task], about = ODD[word](), f"{about}, {task}: {word}"
    settings = {"num_workers": 1} if generator.random() < 0.01 else {}
    return attempt_of(generator, about, networks(), given, **settings)


def text_inputs(generator: np.random.Generator, folder: Path) -> Attempt:
    """Token numbers or attention masks are odd."""
    given = texts()
    shape = (NUM_INPUTS, 3)
    ids: dict[str, Callable[[], Any]] = {
        "good": lambda: torch.randint(10, shape),
        "out of range": lambda: torch.full(shape, 10),
        "one out of range": lambda: torch.tensor([[1, 2, 3]] * (NUM_INPUTS - 1) + [[1, 2, 99]]),
        "negative": lambda: torch.full(shape, -1),
        "huge": lambda: torch.full(shape, 2**62),
        "float": lambda: torch.ones(shape),
        "bool": lambda: torch.ones(shape, dtype=torch.bool),
        "int32": lambda: torch.ones(shape, dtype=torch.int32),
        "uint8": lambda: torch.ones(shape, dtype=torch.uint8),
        "one axis": lambda: torch.ones(NUM_INPUTS, dtype=torch.long),
        "no tokens": lambda: torch.ones(NUM_INPUTS, 0, dtype=torch.long),
        "lists": lambda: torch.ones(shape, dtype=torch.long).tolist(),
        "text": lambda: ["some text"] * NUM_INPUTS,
        "None": lambda: None,
    }
    masks: dict[str, Callable[[], Any]] = {
        "ones": lambda: torch.ones(shape),
        "zeros": lambda: torch.zeros(shape),
        "zeros in one row": lambda: torch.tensor([[0, 0, 0]] + [[1, 1, 0]] * (NUM_INPUTS - 1)),
        "halves": lambda: torch.full(shape, 0.5),
        "twos": lambda: torch.full(shape, 2),
        "negative": lambda: torch.full(shape, -1e4),
        "nan": lambda: torch.full(shape, float("nan")),
        "bool": lambda: torch.ones(shape, dtype=torch.bool),
        "left": lambda: torch.tensor([[0, 1, 1]] * NUM_INPUTS),
        "too long": lambda: torch.ones(NUM_INPUTS, 4),
        "too short": lambda: torch.ones(NUM_INPUTS, 2),
        "too few": lambda: torch.ones(NUM_INPUTS - 1, 3),
        "one axis": lambda: torch.ones(NUM_INPUTS),
        "square": lambda: torch.ones(NUM_INPUTS, 3, 3),
        "four axes": lambda: torch.ones(NUM_INPUTS, 1, 1, 3),
        "complex": lambda: torch.ones(shape, dtype=torch.complex64),
        "lists": lambda: torch.ones(shape).tolist(),
        "text": lambda: ["110"] * NUM_INPUTS,
        "None": lambda: None,
    }
    about = []
    for task in one_of(generator, [["a"], ["b"], ["a", "b"]]):
        of_ids, of_mask = one_of(generator, list(ids)), one_of(generator, list(masks))
        of_ids = "good" if generator.random() < 0.5 else of_ids
        given[task] = {"input_ids": ids[of_ids](), "attention_mask": masks[of_mask]()}
        if generator.random() < 0.1:
            del given[task][one_of(generator, list(given[task]))]
        if generator.random() < 0.1:
            rows = given[task]
            given[task] = [{key: value[i] for key, value in rows.items() if value is not None} for i in range(7)]
        about.append(f"{task}: ids {of_ids}, mask {of_mask}")
    return attempt_of(generator, "; ".join(about), networks(TextNet), given)


CALIBRATION_KINDS: dict[str, Kind] = {"inputs": inputs, "text inputs": text_inputs}
