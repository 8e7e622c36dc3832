"""Labelled or unlabelled text as rows of `text`, `text_b` (of a pair, else empty) and `label`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from transformers import BatchEncoding, PreTrainedTokenizerBase

#: Where GLUE and its like keep a text or a pair; the first of these that a data set has is taken.
TEXT_COLUMNS = (
    ("text", "text_b"),
    ("text",),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
    ("sentence",),
)
#: A tokenizer that knows no limit of its model says this or more.
NO_LIMIT = 10**6


def load_text(
    path: str,
    name: str | None = None,
    split: str = "train",
    columns: str | Sequence[str] | None = None,
    label: str = "label",
    **options: Any,
) -> datasets.Dataset:
    """A split of any source of `datasets.load_dataset`, with the columns `text`, `text_b` and, if it has one, `label`.

    Args:
        path, name, split: see `datasets.load_dataset`.
        columns: the one or two columns with text; None finds them by name, see `TEXT_COLUMNS`.
        label: the column with the class.
        options: further arguments of `datasets.load_dataset`.

    Raises:
        ValueError: no such columns, or no such split.
    """
    rows = datasets.load_dataset(path, name, split=split, **options)
    source = " ".join(filter(None, (path, name, split)))
    return as_text_rows(rows, columns, label, source)


def as_text_rows(
    rows: Any, columns: str | Sequence[str] | None = None, label: str = "label", source: str = "The data set"
) -> datasets.Dataset:
    """A data set with its text columns renamed, see `load_text`."""
    if not isinstance(rows, datasets.Dataset):
        splits = f" with the splits {list(rows)}: name one, split=..." if isinstance(rows, Mapping) else ""
        raise ValueError(f"{source} must be a data set, not a {type(rows).__name__}{splits}.")
    have = rows.column_names
    if label not in have and label != "label":
        raise ValueError(f"{source} has the columns {have}, no label {label!r}.")
    columns = [columns] if isinstance(columns, str) else columns
    columns = list(columns) if columns else next((list(c) for c in TEXT_COLUMNS if set(c) <= set(have)), None)
    if columns is None or not set(columns) <= set(have) or len(columns) not in (1, 2):
        wanted = f"not {columns}" if columns else "none that is known to hold text"
        raise ValueError(
            f"{source} has the columns {have}, {wanted}. Name one or two: columns=[...] of "
            "fusion_bench_crossmean.text.rows.load_text. In a file, call the column text (the second of a pair text_b)."
        )
    names: dict[str, str] = dict(zip(columns, ("text", "text_b")[: len(columns)], strict=True))
    if label in have and label not in columns:
        names[label] = "label"
    kept = rows.select_columns(list(names)).rename_columns({old: new for old, new in names.items() if old != new})
    return kept if len(columns) == 2 else kept.add_column("text_b", [""] * len(kept))


def encode(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]]) -> BatchEncoding:
    """Token ids and masks of some rows, padded to the longest of them and cut at the tokenizer's `model_max_length`.

    A row without a second text is a single text, whatever the rows beside it are.

    Raises:
        ValueError: a text that is no string.
    """
    for key, value in ((key, row.get(key)) for row in rows for key in ("text", "text_b")):
        if not isinstance(value, str) and (key == "text" or value is not None):
            raise ValueError(f"{key} must be a string, not {value!r}: clean the data, or name other columns.")
    options: dict[str, Any] = {
        "truncation": tokenizer.model_max_length < NO_LIMIT,
        "return_attention_mask": True,
    }
    pairs = [bool(row.get("text_b")) for row in rows]
    if any(pairs) and not all(pairs):  # a tokenizer takes texts or pairs at a time
        encoded: Any = [tokenizer(row["text"], row.get("text_b") or None, **options) for row in rows]
        return tokenizer.pad(encoded, padding=True, return_attention_mask=True, return_tensors="pt")
    seconds = [row["text_b"] for row in rows] if all(pairs) else None
    return tokenizer([row["text"] for row in rows], seconds, padding=True, return_tensors="pt", **options)
