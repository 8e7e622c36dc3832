"""Text encoders: BERT, RoBERTa and DistilBERT through FusionBench's pool, their calibration and their evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import oracles
import pytest
import torch
from fusion_bench.modelpool import SequenceClassificationModelPool
from pico import draw_weights
from test_schedules import STORES, exit_code
from tolerances import SAME, state_error
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    RobertaConfig,
)

from fusion_bench_crossmean import AlignmentCriterionAnalyzer, CrossMeanAlgorithm
from fusion_bench_crossmean.calibration import source_for
from fusion_bench_crossmean.text.encoders import encoder_of
from fusion_bench_crossmean.text.rows import as_text_rows, encode
from fusion_bench_crossmean.text.taskpool import TextClassificationTaskPool

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "mat", "red", "blue", "very", "not", "good", "bad")
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
TASKS = {"mood": 2, "colour": 3}
N = 24
SIZES = {"vocab_size": len(VOCABULARY), "pad_token_id": 0, "max_position_embeddings": 40}
WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CONFIGS: dict[str, Callable[..., Any]] = {
    "bert": lambda **options: BertConfig(**SIZES, **WIDE, **options),
    "roberta": lambda **options: RobertaConfig(**SIZES, **WIDE, type_vocab_size=2, **options),
    "distilbert": lambda **options: DistilBertConfig(**SIZES, dim=16, hidden_dim=24, n_layers=2, n_heads=2, **options),
}
#: Family -> the layers of a block in depth order, those on one input together; then those behind the blocks.
LAYERS = {
    "bert": (
        "encoder.layer.{}.",
        [
            ["attention.self.query", "attention.self.key", "attention.self.value"],
            ["attention.output.dense"],
            ["intermediate.dense"],
            ["output.dense"],
        ],
        [["pooler.dense"]],
    ),
    "distilbert": (
        "transformer.layer.{}.",
        [["attention.q_lin", "attention.k_lin", "attention.v_lin"], ["attention.out_lin"], ["ffn.lin1"], ["ffn.lin2"]],
        [],
    ),
}
LAYERS["roberta"] = (*LAYERS["bert"][:2], [])


def groups(family: str, coverage: str) -> list[list[str]]:
    prefix, block, behind = LAYERS[family]
    names = block if coverage == "full" else block[2:]
    inside = [[prefix.format(i) + name for name in group] for i in range(2) for group in names]
    return inside + (behind if coverage == "full" else [])


def write_tokenizer(folder: Path, **options: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | options))
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


def classifier(family: str, seed: int, num_labels: int) -> nn.Module:
    network = AutoModelForSequenceClassification.from_config(CONFIGS[family](num_labels=num_labels))
    network.to(torch.get_default_dtype())
    start, own = draw_weights(network, 99), draw_weights(network, seed)
    network.load_state_dict(
        {k: torch.lerp(start[k], own[k], 0.5) if own[k].is_floating_point() else own[k] for k in own}
    )
    return network


def sentences(seed: int, count: int = 40, *, pairs: bool = False) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(seed)

    def sentence() -> str:
        length = int(torch.randint(1, 9, (), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))

    labels = torch.randint(2, (count,), generator=generator).tolist()
    second = [sentence() if pairs else "" for _ in range(count)]
    return datasets.Dataset.from_dict({"text": [sentence() for _ in range(count)], "text_b": second, "label": labels})


def pool_of(family: str, folder: Path, *, pretrained: bool = False) -> SequenceClassificationModelPool:
    """Experts saved as people save them, named as FusionBench's configs name them."""
    models = {}
    for seed, (task, labels) in enumerate((("_pretrained_", 2), *TASKS.items())):
        if task == "_pretrained_" and not pretrained:
            continue
        classifier(family, seed, labels).save_pretrained(folder / task)
        entry = {"pretrained_model_name_or_path": str(folder / task), "dtype": torch.get_default_dtype()}
        models[task] = {"_target_": "transformers.AutoModelForSequenceClassification.from_pretrained"} | entry
    write_tokenizer(folder / "tokenizer")
    return InMemoryPool(
        models,
        tokenizer={
            "_target_": "transformers.AutoTokenizer.from_pretrained",
            "pretrained_model_name_or_path": str(folder / "tokenizer"),
        },
        train_datasets={task: sentences(seed, pairs=seed == 1) for seed, task in enumerate(TASKS)},
    )


class InMemoryPool(SequenceClassificationModelPool):
    """With its training data in memory."""

    def load_train_dataset(self, dataset_name: str, *_: Any, **__: Any) -> Any:
        return self._train_datasets[dataset_name]


def merged_by(pool: Any, inputs: Any = None, **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    algorithm = CrossMeanAlgorithm(**{"num_calibration_samples": N, "batch_size": 7} | settings)
    return algorithm.run(pool, inputs), algorithm.report


def drawn(pool: SequenceClassificationModelPool, report: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Task -> one batch of the calibration texts that a merge used."""
    tokenizer = pool.load_tokenizer()
    return {
        task: dict(encode(tokenizer, [pool.load_train_dataset(task)[i] for i in indices]))
        for task, indices in report["calibration_indices"].items()
    }


@pytest.mark.parametrize("coverage", ["mlp", "full"])
@pytest.mark.parametrize("family", CONFIGS)
def test_encoders_merge_like_the_whole_network_procedure_under_every_schedule(
    family: str, coverage: str, tmp_path: Path
) -> None:
    pool = pool_of(family, tmp_path)
    paused, report = merged_by(pool, coverage=coverage)
    assert [layer["layers"] for layer in report["layers"]] == groups(family, coverage)
    experts = {task: encoder_of(pool.load_model(task)) for task in TASKS}
    assert paused.state_dict().keys() == experts["mood"].state_dict().keys(), "the encoder alone, without a head"
    expected = oracles.whole_network(experts, drawn(pool, report), groups(family, coverage), path_points=(0, 0.5, 1))
    assert state_error(paused.state_dict(), expected) < SAME

    def replays(store: str) -> None:
        replayed, _ = merged_by(pool, coverage=coverage, schedule="replay", activation_store=store)
        assert state_error(replayed.state_dict(), paused.state_dict()) == 0

    for store in STORES:
        assert exit_code(lambda store=store: replays(store)) == 0


@pytest.mark.parametrize("family", CONFIGS)
def test_every_token_that_is_no_padding_counts_and_the_pooler_sees_the_first_only(family: str, tmp_path: Path) -> None:
    pool = pool_of(family, tmp_path)
    _, report = merged_by(pool, coverage="full")
    tokens = sum(int(batch["attention_mask"].sum()) for batch in drawn(pool, report).values())
    for layer in report["layers"]:
        assert layer["tokens"] == (N * len(TASKS) if "pooler" in layer["name"] else tokens)


@pytest.mark.parametrize("family", CONFIGS)
def test_padding_does_not_matter(family: str, tmp_path: Path) -> None:
    pool = pool_of(family, tmp_path)
    once, _ = merged_by(pool, coverage="full", batch_size=1)
    together, _ = merged_by(pool, coverage="full", batch_size=N)
    assert state_error(together.state_dict(), once.state_dict()) < 1e-9


@pytest.mark.parametrize("family", CONFIGS)
def test_a_merge_is_saved_and_loads_again(family: str, tmp_path: Path) -> None:
    pool = pool_of(family, tmp_path, pretrained=True)
    merged, _ = merged_by(pool, coverage="full")
    pool.save_model(merged, str(tmp_path / "merged"))
    pooler = {"add_pooling_layer": False} if family == "roberta" else {}  # whose classifier has none
    loaded = type(merged).from_pretrained(tmp_path / "merged", dtype=torch.get_default_dtype(), **pooler)
    assert state_error(loaded.state_dict(), merged.state_dict()) == 0
    inputs = dict(encode(pool.load_tokenizer(), list(sentences(5, 3))))
    assert torch.equal(loaded.eval()(**inputs)[0], merged.eval()(**inputs)[0])


@pytest.mark.parametrize("coverage", ["mlp", "full"])
@pytest.mark.parametrize("family", CONFIGS)
def test_identical_experts_return_the_expert(family: str, coverage: str, tmp_path: Path) -> None:
    pool = pool_of(family, tmp_path)
    pool._models = dict.fromkeys(TASKS, pool._models["mood"])
    merged, _ = merged_by(pool, coverage=coverage, relative_ridge=1e-12)
    expert = encoder_of(pool.load_model("mood"))
    assert state_error(merged.state_dict(), expert.state_dict()) < 1e-6


def test_experts_are_read_from_their_classifiers_checkpoints(tmp_path: Path) -> None:
    """A prefix and the head are all that tells an encoder's checkpoint from its classifier's."""
    from fusion_bench_crossmean.weights import StoredWeights, checkpoint_of

    pool = pool_of("bert", tmp_path)
    stored = checkpoint_of(encoder_of(pool.load_model("mood")))
    assert isinstance(stored, StoredWeights)
    assert torch.equal(stored["pooler.dense.weight"], pool.load_model("mood").bert.pooler.dense.weight)


def test_the_criterion_measures_encoders(tmp_path: Path) -> None:
    analyzer = AlignmentCriterionAnalyzer(num_calibration_samples=N, coverage="full")
    analyzer.run(pool_of("bert", tmp_path))
    assert 0 < analyzer.report["rho"] < 1


# Rows


GLUE_ROWS = {
    "one": ({"sentence": ["a"], "label": [1], "idx": [0]}, ("a", "")),
    "pair": ({"sentence1": ["a"], "sentence2": ["b"], "label": [1]}, ("a", "b")),
    "questions": ({"question1": ["a"], "question2": ["b"]}, ("a", "b")),
    "question and sentence": ({"question": ["a"], "sentence": ["b"]}, ("a", "b")),
    "ours": ({"text": ["a"], "text_b": ["b"]}, ("a", "b")),
}


@pytest.mark.parametrize("kind", GLUE_ROWS)
def test_text_columns_are_found_by_name(kind: str) -> None:
    columns, (text, text_b) = GLUE_ROWS[kind]
    rows = as_text_rows(datasets.Dataset.from_dict(columns))
    assert (rows[0]["text"], rows[0]["text_b"]) == (text, text_b)
    assert set(rows.column_names) == {"text", "text_b"} | ({"label"} & columns.keys())


def test_text_columns_may_be_named() -> None:
    rows = as_text_rows(datasets.Dataset.from_dict({"b": ["x"], "a": ["y"], "class": [3]}), ["a", "b"], "class")
    assert rows[0] == {"text": "y", "text_b": "x", "label": 3}


@pytest.mark.parametrize("columns", [None, ["body"], ["a", "b", "c"]])
def test_columns_that_are_not_there_are_an_error_that_names_those_that_are(columns: Any) -> None:
    rows = datasets.Dataset.from_dict({"a": ["x"], "b": ["x"], "c": ["x"]})
    with pytest.raises(ValueError, match=r"has the columns \['a', 'b', 'c'\], no.* Name one or two: columns="):
        as_text_rows(rows, columns)


def test_texts_are_cut_at_the_tokenizers_limit(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, model_max_length=6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert encode(tokenizer, [{"text": "cat " * 20}, {"text": "dog"}])["input_ids"].shape == (2, 6)
    assert encode(tokenizer, [{"text": "dog", "text_b": "the cat"}])["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1]]


# Bad pools


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_tokenizer": None}, r"The pool has no tokenizer\. Add one: '\+modelpool\.tokenizer\._target_"),
        ({"_train_datasets": None}, r"no training data for task 'mood'.*\+modelpool\.train_datasets\.mood\._target_="),
        (
            {"_train_datasets": dict.fromkeys(TASKS, datasets.Dataset.from_dict({"body": ["x"] * 30}))},
            r"The calibration data of task 'mood' has the columns \['body'\]",
        ),
    ],
)
def test_pools_that_lack_something_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    pool = pool_of("bert", tmp_path)
    for key, value in change.items():
        setattr(pool, key, value)
    with pytest.raises(ValueError, match=message):
        merged_by(pool)


def test_a_text_without_a_token_is_an_error(tmp_path: Path) -> None:
    pool = pool_of("bert", tmp_path)
    source = source_for(pool, None)
    source.tokenizer.add_special_tokens({})
    with pytest.raises(ValueError, match="has no token at all"):
        source.__class__.collate(NoSpecialTokens(source), [{"text": ""}, {"text": "cat"}])


class NoSpecialTokens:
    """A source whose tokenizer adds none."""

    def __init__(self, source: Any) -> None:
        self.inner = source.tokenizer
        self.tokenizer = self

    model_max_length = 10

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs, add_special_tokens=False)


# Evaluation


def task_pool(folder: Path, **settings: Any) -> TextClassificationTaskPool:
    tokenizer = {
        "_target_": "transformers.AutoTokenizer.from_pretrained",
        "pretrained_model_name_or_path": str(folder / "tokenizer"),
    }
    defaults: dict[str, Any] = {
        "test_datasets": {task: sentences(10 + seed) for seed, task in enumerate(TASKS)},
        "heads": {task: str(folder / task) for task in TASKS},
        "tokenizer": tokenizer,
        "dataloader_kwargs": {"batch_size": 7},
    }
    return TextClassificationTaskPool(**defaults | settings)


@pytest.mark.float32
@pytest.mark.parametrize("family", CONFIGS)
def test_each_tasks_own_head_is_evaluated_on_the_encoder(family: str, tmp_path: Path) -> None:
    pool = pool_of(family, tmp_path)
    encoder = encoder_of(pool.load_model("colour"))
    report = task_pool(tmp_path, metrics={"mood": "matthews"}).evaluate(encoder)
    tokenizer = pool.load_tokenizer()
    for seed, task in enumerate(TASKS):
        model = pool.load_model(task)
        encoder_of(model).load_state_dict(encoder.state_dict())
        rows = sentences(10 + seed)
        with torch.no_grad():
            guesses = model.eval()(**encode(tokenizer, list(rows))).logits.argmax(-1)
        labels = torch.tensor(rows["label"][:])
        assert report[task]["accuracy"] == pytest.approx(float((guesses == labels).float().mean()))
        if task == "mood":
            correlation = float(torch.corrcoef(torch.stack([guesses, labels]).double())[0, 1])
            assert report[task]["score"] == pytest.approx(correlation if correlation == correlation else 0.0, abs=1e-6)
        else:
            assert report[task]["score"] == report[task]["accuracy"]
    assert report["average"]["score"] == pytest.approx(sum(report[task]["score"] for task in TASKS) / 2)


@pytest.mark.float32
def test_a_classifier_is_evaluated_by_its_encoder(tmp_path: Path) -> None:
    pool, tasks = pool_of("bert", tmp_path), task_pool(tmp_path)
    whole, part = tasks.evaluate(pool.load_model("mood")), tasks.evaluate(encoder_of(pool.load_model("mood")))
    assert whole == part


@pytest.mark.float32
def test_a_head_of_another_encoder_is_refused(tmp_path: Path) -> None:
    pool_of("bert", tmp_path / "one")
    encoder = encoder_of(pool_of("distilbert", tmp_path / "two").load_model("mood"))
    with pytest.raises(ValueError, match=r"The head of task 'mood' belongs to another encoder.*Check heads\.mood"):
        task_pool(tmp_path / "one").evaluate(encoder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": {"mood": "x"}}, r"The task pool has no head for \['colour'\]"),
        ({"metrics": {"mood": "f1"}}, r"metrics must be accuracy or matthews, not \{'mood': 'f1'\}"),
    ],
)
def test_a_task_pool_that_lacks_something_is_refused(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        task_pool(tmp_path, **settings)
