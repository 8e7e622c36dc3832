"""A task pool for merged text encoders: each task's own head on the merged encoder."""

from __future__ import annotations

import itertools
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
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fusion_bench_crossmean.expert_checks import check_architecture
from fusion_bench_crossmean.messages import shorten
from fusion_bench_crossmean.report import unused, write_json
from fusion_bench_crossmean.text.encoders import check_token_ids, encoder_of
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
        if unknown := [task for task in self.metrics if task not in test_datasets and task not in heads]:
            raise ValueError(f"metrics names {unknown}; the task pool has {list(test_datasets)}.")
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
            if not len(rows):
                raise ValueError(f"The test data of task {task!r} have no rows: check test_datasets.{task}.")
            self.test_dataloaders[task] = DataLoader(rows, collate_fn=collate, **self.dataloader_kwargs)
        self.classifiers: dict[str, Any] = {}
        for task in self.test_datasets:
            self.classifiers[task] = classifier = self.load_head(task)
            check_tokenizer(tokenizer, self.heads[task], task)
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
            write_json(unused(Path(log_dir) / "report.json"), report)
        return report

    def load_head(self, task: str) -> Any:
        """The classifier whose head is the task's.

        Raises:
            ValueError: there is none, or none for classes.
        """
        entry = self.heads[task]
        if isinstance(entry, str):
            classifier, found = AutoModelForSequenceClassification.from_pretrained(entry, output_loading_info=True)
            encoder = str(classifier.base_model_prefix)
            if missing := sorted(key for key in found["missing_keys"] if not key.startswith(f"{encoder}.")):
                raise ValueError(
                    f"heads.{task} is {entry!r}, which has no head ({shorten(missing)} missing): give the task's "
                    "fine-tuned model."
                )
        else:
            classifier = instantiate(entry)
        if classifier.config.num_labels < 2:
            raise ValueError(f"The head of task {task!r} has no classes (num_labels={classifier.config.num_labels}).")
        return classifier

    def _evaluate(self, classifier: Any, test_loader: Any, num_classes: int, task_name: str) -> dict[str, float]:
        """`score`, `accuracy`, `loss` and, where that is the score, `matthews`; named as in FusionBench's pools."""
        kind = self.metrics.get(task_name, "accuracy")
        device = self.fabric.device
        classifier.to(device).eval()
        confusion = MulticlassConfusionMatrix(num_classes).to(device)
        total, loss = 0, 0.0
        batches = itertools.islice(test_loader, 1 if self.fast_dev_run else None)
        for inputs, labels in tqdm(batches, desc=task_name, leave=False, disable=not self.fabric.is_global_zero):
            check_token_ids(encoder_of(classifier), inputs, f"The test data of task {task_name!r}")
            if outside := [label for label in labels.tolist() if not 0 <= label < num_classes]:
                raise ValueError(
                    f"The test data of task {task_name!r} have the label {outside[0]}, its head has {num_classes} "
                    "classes. Take a split with labels, and the head of this task."
                )
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


def check_tokenizer(tokenizer: Any, head: Any, task: str) -> None:
    """Raises `ValueError` where a head was fine-tuned with another tokenizer, which lies beside it."""
    folder = Path(head) if isinstance(head, str) else None
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return
    own = AutoTokenizer.from_pretrained(folder).get_vocab()
    if own != tokenizer.get_vocab():
        raise ValueError(
            f"The head of task {task!r} was made with another tokenizer ({len(own)} tokens) than the task pool's "
            f"({len(tokenizer.get_vocab())}): check taskpool.tokenizer."
        )


def share_encoder(classifier: nn.Module, other: nn.Module) -> None:
    """Gives a classifier the other one's encoder where it is built alike: only heads differ between tasks."""
    own, theirs = encoder_of(classifier), encoder_of(other)
    if repr(own) == repr(theirs) and own.dtype == theirs.dtype:
        setattr(classifier, str(classifier.base_model_prefix), encoder_of(other))


def put_encoder(classifier: nn.Module, encoder: nn.Module, task: str) -> None:
    """Gives a classifier the weights of `encoder`, and its dtype.

    Raises:
        ValueError: they are not those of its own encoder's architecture.
    """
    classifier.to(next(encoder.parameters()).dtype)
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
    check_architecture(f"the head of task {task}", own, "the merged model", encoder)
    own.load_state_dict(theirs)
