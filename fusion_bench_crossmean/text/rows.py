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
    columns: Sequence[str] | None = None,
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
        ValueError: no such columns.
    """
    rows = datasets.load_dataset(path, name, split=split, **options)
    source = " ".join(filter(None, (path, name, split)))
    return as_text_rows(rows, columns, label, source)


def as_text_rows(
    rows: datasets.Dataset, columns: Sequence[str] | None = None, label: str = "label", source: str = "The data set"
) -> datasets.Dataset:
    """A data set with its text columns renamed, see `load_text`."""
    have = rows.column_names
    columns = list(columns) if columns else next((list(c) for c in TEXT_COLUMNS if set(c) <= set(have)), None)
    if columns is None or not set(columns) <= set(have) or len(columns) not in (1, 2):
        wanted = f"not {columns}" if columns else "none that is known to hold text"
        raise ValueError(
            f"{source} has the columns {have}, {wanted}. Name one or two: columns=[...] of "
            "fusion_bench_crossmean.text.rows.load_text."
        )
    kept = rows.select_columns([*columns, *([label] if label in have and label not in columns else [])])
    for old, new in zip(columns, ("text", "text_b")[: len(columns)], strict=True):
        if old != new:
            kept = kept.rename_column(old, new)
    if len(columns) == 1:
        kept = kept.add_column("text_b", [""] * len(kept))
    return kept.rename_column(label, "label") if label in have and label != "label" else kept


def encode(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]]) -> BatchEncoding:
    """Token ids and masks of some rows, padded to the longest of them and cut at the tokenizer's `model_max_length`."""
    has_pairs = any(row.get("text_b") for row in rows)
    return tokenizer(
        [row["text"] for row in rows],
        [row.get("text_b", "") for row in rows] if has_pairs else None,
        padding=True,
        truncation=tokenizer.model_max_length < NO_LIMIT,
        return_tensors="pt",
    )
