"""The text tasks of the mini benchmark: names and data, real and small; `data/NOTICE.md` has sources and terms."""

from __future__ import annotations

import json
from typing import Literal

import datasets
import pyarrow.parquet as pq

from fusion_bench_crossmean.mini.tasks import DATA_DIR, PREFIX

#: The first four are single texts; the last two, which `mini-bert_T6` adds, are pairs.
TEXT_TASKS = ("tweets", "movies", "bible_genre", "wordnet_topic", "bible_paraphrase", "wordnet_entail")
#: Rows of each file, which is shuffled; the first are for training.
TRAINING_ROWS = 1500


def load_text_split(task: str, split: Literal["train", "test"]) -> datasets.Dataset:
    """One split, with the columns `text`, `text_b` (empty unless a pair) and `label`.

    Args:
        task: with or without the prefix `mini-`.
        split: `train` (1,500 rows) or `test` (500 rows).

    Raises:
        ValueError: no such task or split.
    """
    name = task.removeprefix(PREFIX)
    if name not in TEXT_TASKS:
        raise ValueError(f"The mini benchmark has no text task {task!r}; it has {', '.join(TEXT_TASKS)}.")
    if split not in ("train", "test"):
        raise ValueError(f"The mini benchmark has the splits 'train' and 'test', not {split!r}.")
    table = pq.read_table(DATA_DIR / f"{name}.parquet")
    names = json.loads(table.schema.metadata[b"names"])
    columns = {key: table.column(key).to_pylist() for key in ("text", "text_b", "label")}
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "text_b": datasets.Value("string"),
            "label": datasets.ClassLabel(names=names),
        }
    )
    rows = datasets.Dataset.from_dict(columns, features=features)
    return rows.select(range(TRAINING_ROWS) if split == "train" else range(TRAINING_ROWS, len(rows)))
