"""Calibration inputs of FusionBench's SequenceClassificationModelPool: its training texts through its own tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import datasets

from fusion_bench_crossmean.calibration.batch import Batch
from fusion_bench_crossmean.calibration.pool_data import check_training_data
from fusion_bench_crossmean.text.rows import as_text_rows, encode


class TextPoolSource:
    """Reads `train_datasets` of the pool; labels are not used. Padding is told from text by the attention mask.

    Args:
        modelpool: with `train_datasets` and a tokenizer.
    """

    def __init__(self, modelpool: Any) -> None:
        self.modelpool = modelpool

    @functools.cached_property
    def tokenizer(self) -> Any:
        """From texts to token ids.

        Raises:
            ValueError: the pool has none.
        """
        entry = getattr(self.modelpool, "_tokenizer", None)
        if isinstance(entry, str):
            raise ValueError(
                f"modelpool.tokenizer is {entry!r}; it must be a config: 'modelpool.tokenizer._target_=transformers."
                f"AutoTokenizer.from_pretrained' 'modelpool.tokenizer.pretrained_model_name_or_path={entry}'."
            )
        if entry is None:
            raise ValueError(
                "The pool has no tokenizer. Add one: '+modelpool.tokenizer._target_=transformers.AutoTokenizer."
                "from_pretrained' '+modelpool.tokenizer.pretrained_model_name_or_path=...'."
            )
        return self.modelpool.load_tokenizer()

    @property
    def preprocessor(self) -> Any:
        """What is saved beside a model; None: the pool has none."""
        entry = getattr(self.modelpool, "_tokenizer", None)
        return None if entry is None or isinstance(entry, str) else self.tokenizer

    def dataset(self, task: str) -> Any:
        check_training_data(
            self.modelpool,
            task,
            f"Add '+modelpool.train_datasets.{task}._target_=fusion_bench_crossmean.text.rows.load_text' "
            f"'+modelpool.train_datasets.{task}.path=...'.",
        )
        assert self.tokenizer is not None  # a pool without one is refused before its data are read
        return self.wrap(self.modelpool.load_train_dataset(task), task)

    def wrap(self, rows: Any, task: str) -> Any:
        if not isinstance(rows, (datasets.Dataset, datasets.DatasetDict)):
            if not (len(rows) and isinstance(rows[0], Mapping) and "text" in rows[0]):
                raise ValueError(f"The calibration data of task {task!r} are no texts; this pool's models read texts.")
            return rows
        return as_text_rows(rows, source=f"The calibration data of task {task!r}")

    def collate(self, items: Sequence[Any]) -> Batch:
        inputs = encode(self.tokenizer, items)
        mask = inputs["attention_mask"].bool()
        if not mask.any(1).all():
            raise ValueError("A calibration text has no token at all. Leave empty texts out of the data.")
        return Batch(kwargs=dict(inputs), token_mask=mask)
