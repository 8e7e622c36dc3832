"""Calibration inputs of FusionBench's CLIPVisionModelPool: its training images through its own processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fusion_bench.dataset import CLIPDataset
from fusion_bench.modelpool import CLIPVisionModelPool

from fusion_bench_crossmean.calibration.batch import Batch


class CLIPPoolSource:
    """Reads `train_datasets` of the pool; labels are not used.

    Args:
        modelpool: with `train_datasets` and a processor.
    """

    def __init__(self, modelpool: CLIPVisionModelPool) -> None:
        self.modelpool = modelpool
        self._processor: Any = None

    def dataset(self, task: str) -> CLIPDataset:
        if task not in self.modelpool.train_dataset_names:
            have = ", ".join(map(repr, self.modelpool.train_dataset_names)) or "none"
            raise ValueError(
                f"The pool has no training data for task {task!r} (it has {have}), and calibration inputs come from "
                "there. Take a pool with train_datasets (not a '_model_only' one), or add "
                f"'+modelpool.train_datasets.{task}=...'."
            )
        if self._processor is None:
            self._processor = self.modelpool.load_processor()
        rows: Any = self.modelpool.load_train_dataset(task)
        return CLIPDataset(rows, self._processor)

    def collate(self, items: Sequence[Any]) -> Batch:
        return Batch(kwargs={"pixel_values": torch.stack([image for image, *_ in items])})
