"""Calibration inputs of FusionBench's pools of image encoders: their training images through their own processor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from fusion_bench.dataset import CLIPDataset

from fusion_bench_crossmean.calibration.batch import Batch
from fusion_bench_crossmean.calibration.pool_data import check_training_data


class CLIPPoolSource:
    """Reads `train_datasets` of the pool; labels are not used.

    Args:
        modelpool: a `CLIPVisionModelPool` with `train_datasets` and a processor.
    """

    def __init__(self, modelpool: Any) -> None:
        self.modelpool = modelpool

    @functools.cached_property
    def processor(self) -> Any:
        """From an image to a tensor."""
        return self.modelpool.load_processor()

    @property
    def preprocessor(self) -> Any:
        """What is saved beside a model; None: the pool has none."""
        return None if getattr(self.modelpool, "_processor", None) is None else self.processor

    def dataset(self, task: str) -> CLIPDataset:
        check_training_data(
            self.modelpool,
            task,
            "Take a pool with train_datasets (not a '_model_only' one), or add "
            f"'+modelpool.train_datasets.{task}=...'.",
        )
        return self.wrap(self.modelpool.load_train_dataset(task), task)

    def wrap(self, rows: Any, task: str) -> CLIPDataset:
        names = getattr(rows, "column_names", None)
        if names is not None and "text" in names and "image" not in names:
            raise ValueError(f"The calibration data of task {task!r} are texts, but this pool's models read images.")
        return CLIPDataset(rows, self.processor)

    def collate(self, items: Sequence[Any]) -> Batch:
        return Batch(kwargs={"pixel_values": torch.stack([image for image, *_ in items])})


class OpenCLIPPoolSource(CLIPPoolSource):
    """The same for an `OpenCLIPVisionModelPool`: without the random crops that it trains with."""

    @functools.cached_property
    def processor(self) -> Any:
        return self.modelpool.test_processor

    @property
    def preprocessor(self) -> None:
        """Its images are prepared by what open_clip has for the architecture."""
        return

    def collate(self, items: Sequence[Any]) -> Batch:
        return Batch(args=(torch.stack([image for image, *_ in items]),))
