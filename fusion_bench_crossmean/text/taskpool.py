"""A task pool for merged text encoders: each task's own head on the merged encoder."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fusion_bench import BaseTaskPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin
from fusion_bench.utils import count_parameters, instantiate
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassConfusionMatrix
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification

from fusion_bench_crossmean.messages import shorten
from fusion_bench_crossmean.text.encoders import encoder_of
from fusion_bench_crossmean.text.rows import encode

log = logging.getLogger(__name__)

#: What a task's score may be.
METRICS = ("accuracy", "matthews")


@auto_register_config
class TextClassificationTaskPool(LightningFabricMixin, BaseTaskPool):
    """Evaluates one encoder on many classification tasks.

    Args:
        test_datasets: task -> data set with `text`, `text_b` and `label`, see `text.rows.load_text`.
        heads: task -> a model for sequence classification (path, hub name or `_target_`), whose head is used.
        tokenizer: `_target_` of a tokenizer.
        metrics: task -> `accuracy` or `matthews` (correlation), its score; tasks left out have accuracy.
        dataloader_kwargs: of torch's DataLoader.
        fast_dev_run: evaluates one batch per task.
    """

    # Stored by `auto_register_config`:
    test_datasets: Mapping[str, Any]
    heads: Mapping[str, Any]
    tokenizer: Any
    fast_dev_run: bool

    _is_setup = False

    def __init__(
        self,
        *,
        test_datasets: Mapping[str, Any],
        heads: Mapping[str, Any],
        tokenizer: Any,
        metrics: Mapping[str, str] | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        fast_dev_run: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.metrics = dict(metrics or {})
        self.dataloader_kwargs = dict(dataloader_kwargs or {})
        if missing := [task for task in test_datasets if task not in heads]:
            raise ValueError(f"The task pool has no head for {missing}: add heads.<task>.")
        if wrong := {task: kind for task, kind in self.metrics.items() if kind not in METRICS}:
            raise ValueError(f"metrics must be {' or '.join(METRICS)}, not {wrong}.")

    def setup(self) -> None:
        """Loads the tokenizer, the test rows and the heads."""
        tokenizer = instantiate(self.tokenizer)

        def collate(rows: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
            return dict(encode(tokenizer, rows)), torch.tensor([row["label"] for row in rows])

        self.test_dataloaders: dict[str, Any] = {}
        for task, entry in self.test_datasets.items():
            rows = instantiate(entry) if isinstance(entry, Mapping) or hasattr(entry, "_target_") else entry
            self.test_dataloaders[task] = DataLoader(rows, collate_fn=collate, **self.dataloader_kwargs)
        self.classifiers: dict[str, Any] = {}
        for task in self.test_datasets:
            self.classifiers[task] = classifier = self.load_head(task)
            share_encoder(classifier, next(iter(self.classifiers.values())))
        self._is_setup = True

    @torch.no_grad()
    def evaluate(self, model: nn.Module, **_: Any) -> dict[str, Any]:
        """Task -> scores, and their mean under `average`.

        Raises:
            ValueError: the model is not the encoder that a task's head was made for.
        """
        if not self._is_setup:
            self.setup()
        encoder = encoder_of(model)
        trainable, total = count_parameters(encoder)
        report: dict[str, Any] = {"model_info": {"trainable_params": trainable, "all_params": total}}
        tasks = list(self.test_dataloaders)
        for task in tqdm(tasks, desc="Evaluating tasks", disable=not self.fabric.is_global_zero):
            classifier = self.classifiers[task]
            put_encoder(classifier, encoder, task)
            count = int(classifier.config.num_labels)
            report[task] = self._evaluate(classifier, self.test_dataloaders[task], num_classes=count, task_name=task)
        report["average"] = {
            key: sum(report[task][key] for task in tasks) / len(tasks) for key in ("score", "accuracy", "loss")
        }
        log.info("Evaluation: %s", report)
        if self.fabric.is_global_zero and (log_dir := getattr(self, "log_dir", None)) is not None:
            (Path(log_dir) / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        return report

    def load_head(self, task: str) -> Any:
        """The classifier whose head is the task's."""
        entry = self.heads[task]
        return (
            AutoModelForSequenceClassification.from_pretrained(entry) if isinstance(entry, str) else instantiate(entry)
        )

    def _evaluate(self, classifier: Any, test_loader: Any, num_classes: int, task_name: str) -> dict[str, float]:
        """`score`, `accuracy`, `loss` and, where that is the score, `matthews`; named as in FusionBench's pools."""
        kind = self.metrics.get(task_name, "accuracy")
        device = self.fabric.device
        classifier.to(device).eval()
        confusion = MulticlassConfusionMatrix(num_classes).to(device)
        total, loss = 0, 0.0
        batches = itertools.islice(test_loader, 1 if self.fast_dev_run else None)
        for inputs, labels in tqdm(batches, desc=task_name, leave=False, disable=not self.fabric.is_global_zero):
            there = labels.to(device)
            logits = classifier(**{key: value.to(device) for key, value in inputs.items()}).logits.float()
            loss += float(nn.functional.cross_entropy(logits, there, reduction="sum"))
            total += len(labels)
            confusion.update(logits, there)
        values = {"accuracy": float(confusion.compute().diagonal().sum()) / total}
        if kind == "matthews":
            values[kind] = matthews_correlation(confusion.compute().double())
        return values | {"score": values[kind], "loss": loss / total}


def matthews_correlation(confusion: Tensor) -> float:
    """Of a confusion matrix (class x guess), for any number of classes; 0 where all guesses or all labels are alike.

    torchmetrics' own is not quite 0 there.
    """
    labels, guesses, total = confusion.sum(1), confusion.sum(0), confusion.sum()
    covariance = confusion.diagonal().sum() * total - labels @ guesses
    variance = (total**2 - labels @ labels) * (total**2 - guesses @ guesses)
    return float(covariance / variance.sqrt()) if variance > 0 else 0.0


def share_encoder(classifier: nn.Module, other: nn.Module) -> None:
    """Gives a classifier the other one's encoder where it is of the same shape: only heads differ between tasks."""
    own, theirs = encoder_of(classifier).state_dict(), encoder_of(other).state_dict()
    if own.keys() == theirs.keys() and all(own[key].shape == theirs[key].shape for key in own):
        setattr(classifier, str(classifier.base_model_prefix), encoder_of(other))


def put_encoder(classifier: nn.Module, encoder: nn.Module, task: str) -> None:
    """Gives a classifier the weights of `encoder`.

    Raises:
        ValueError: they are not those of its own encoder's architecture.
    """
    own = encoder_of(classifier)
    state, theirs = own.state_dict(), encoder.state_dict()
    # RoBERTa's classifiers have no pooler, which its encoder gets, at random, when it is loaded on its own.
    theirs = {key: tensor for key, tensor in theirs.items() if key in state or not key.startswith("pooler.")}
    differing = sorted(state.keys() ^ theirs.keys()) + [
        key for key in state.keys() & theirs.keys() if state[key].shape != theirs[key].shape
    ]
    if differing:
        raise ValueError(
            f"The head of task {task!r} belongs to another encoder: {shorten(differing)} differ. Check heads.{task}."
        )
    own.load_state_dict(theirs)
