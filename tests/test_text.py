"""Text: rows, the pool's calibration inputs, experts' checkpoints, and the task pool that evaluates encoders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from cli import fusion_bench, log_folder, read_json, run, succeeded
from fake_hub import hashed, model_folder, write_splits
from families import CONFIGS, TASKS, VOCABULARY, halfway, sentences, text_pool, write_tokenizer
from fusion_bench import instantiate
from fusion_bench.utils.hydra_utils import initialize_hydra_config
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.calibration import source_for
from fusion_bench_crossmean.text.encoders import check_token_ids, encoder_of
from fusion_bench_crossmean.text.rows import as_text_rows, encode
from fusion_bench_crossmean.text.taskpool import TextClassificationTaskPool, matthews_correlation
from fusion_bench_crossmean.weights import StoredWeights, checkpoint_of

pytest_plugins = ("cli",)


def test_experts_are_read_from_their_classifiers_checkpoints(tmp_path: Path) -> None:
    """A prefix and the head are all that tells an encoder's checkpoint from its classifier's."""
    pool = text_pool("bert", tmp_path)
    stored = checkpoint_of(encoder_of(pool.load_model("mood")))
    assert isinstance(stored, StoredWeights)
    assert torch.equal(stored["pooler.dense.weight"], pool.load_model("mood").bert.pooler.dense.weight)


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


def test_columns_may_change_names_and_be_one_word() -> None:
    rows = datasets.Dataset.from_dict({"title": ["t"], "text": ["x"], "label": [1]})
    assert as_text_rows(rows, ["title", "text"])[0] == {"text": "t", "text_b": "x", "label": 1}
    assert as_text_rows(rows, "title")[0] == {"text": "t", "text_b": "", "label": 1}
    with pytest.raises(ValueError, match=r"has the columns \['title', 'text', 'label'\], no label 'labels'"):
        as_text_rows(rows, label="labels")
    with pytest.raises(ValueError, match=r"not a DatasetDict with the splits \['train', 'test'\]: name one"):
        as_text_rows(datasets.DatasetDict(train=rows, test=rows))


def test_a_single_text_is_encoded_alike_beside_a_pair(tmp_path: Path) -> None:
    """Else the tokens that count would depend on the batch size."""
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = [{"text": "a cat"}, {"text": "dog", "text_b": "the cat"}, {"text": "dog", "text_b": None}]
    together = encode(tokenizer, rows)
    for index, row in enumerate(rows):
        alone = encode(tokenizer, [row])
        length = alone["input_ids"].shape[1]
        for key, value in alone.items():
            assert together[key][index, :length].tolist() == value[0].tolist(), key
        assert together["attention_mask"][index, length:].sum() == 0


@pytest.mark.parametrize("row", [{"text": None}, {"text": 3}, {"text": "a", "text_b": 1.5}, {}])
def test_a_text_that_is_none_is_an_error(row: dict[str, Any], tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"text(_b)? must be a string, not (None|3|1\.5)"):
        encode(AutoTokenizer.from_pretrained(tmp_path), [{"text": "cat"}, row])


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
        ({"_tokenizer": "a/path"}, r"modelpool\.tokenizer is 'a/path'; it must be a config: 'modelpool\.tokenizer\._t"),
        (
            {"_train_datasets": dict.fromkeys(TASKS, datasets.Dataset.from_dict({"text": [None, "x"] * 15}))},
            r"The calibration inputs of task 'mood': text must be a string, not None",
        ),
    ],
)
def test_pools_that_lack_something_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    pool = text_pool("bert", tmp_path)
    for key, value in change.items():
        setattr(pool, key, value)
    with pytest.raises(ValueError, match=message):
        CrossMeanAlgorithm(num_calibration_samples=24).run(pool)


def test_texts_that_the_model_cannot_read_are_refused(tmp_path: Path) -> None:
    pool = text_pool("roberta", tmp_path)
    room = CONFIGS["roberta"]().max_position_embeddings - CONFIGS["roberta"]().pad_token_id - 1
    for length, fits in ((room, True), (room + 1, False)):
        rows = datasets.Dataset.from_dict({"text": ["cat " * (length - 2)] * 24})
        pool._train_datasets = dict.fromkeys(TASKS, rows)
        pool._tokenizer["model_max_length"] = 1000
        algorithm = CrossMeanAlgorithm(num_calibration_samples=8)
        if fits:
            algorithm.run(pool)
        else:
            with pytest.raises(ValueError, match=f"task 'mood' have {length} tokens in a row, the model reads {room}"):
                algorithm.run(pool)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    pool = text_pool("bert", tmp_path)
    source = source_for(pool, None)
    batch = source.collate([{"text": "cat"}])
    encoder = encoder_of(pool.load_model("mood"))
    check_token_ids(encoder, batch.kwargs, "They")
    ids = batch.kwargs["input_ids"] + encoder.config.vocab_size
    with pytest.raises(ValueError, match=r"They have the token \d+, the model knows \d+ tokens"):
        check_token_ids(encoder, {"input_ids": ids}, "They")


def test_a_text_without_a_token_is_an_error(tmp_path: Path) -> None:
    pool = text_pool("bert", tmp_path)
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
    pool = text_pool(family, tmp_path)
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
    pool, tasks = text_pool("bert", tmp_path), task_pool(tmp_path)
    whole, part = tasks.evaluate(pool.load_model("mood")), tasks.evaluate(encoder_of(pool.load_model("mood")))
    assert whole == part


@pytest.mark.float32
def test_a_head_of_another_encoder_is_refused(tmp_path: Path) -> None:
    text_pool("bert", tmp_path / "one")
    encoder = encoder_of(text_pool("distilbert", tmp_path / "two").load_model("mood"))
    with pytest.raises(ValueError, match=r"The head of task 'mood' belongs to another encoder.*Check heads\.mood"):
        task_pool(tmp_path / "one").evaluate(encoder)


@pytest.mark.float32
@pytest.mark.parametrize("change", ["half", "activation", "no head", "tokenizer", "label", "no rows", "regression"])
def test_heads_that_do_not_fit_are_refused_or_cast(change: str, tmp_path: Path) -> None:
    pool, settings = text_pool("bert", tmp_path), {}
    model, rows = pool.load_model("mood"), sentences(10)
    expected = task_pool(tmp_path).evaluate(encoder_of(pool.load_model("colour")))
    match = None
    if change == "half":
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.half().float() if name.startswith("classifier") else parameter.data
        model.save_pretrained(tmp_path / "mood")
        expected = task_pool(tmp_path).evaluate(encoder_of(pool.load_model("colour")))
        model = model.half()
    elif change == "activation":
        model.config.hidden_act, match = (
            "relu",
            "hidden_act is 'relu' in 'the head of task mood' and 'gelu' in 'the merged",
        )
    elif change == "no head":
        model, match = model.bert, r"heads\.mood is .*, which has no head \('classifier"
    elif change == "tokenizer":
        (tmp_path / "mood").mkdir(exist_ok=True)
        write_tokenizer(tmp_path / "mood", VOCABULARY[:-1])
        match = r"The head of task 'mood' was made with another tokenizer \(\d+ tokens\).*check taskpool\.tokenizer"
    elif change == "label":
        unlabelled = rows.remove_columns("label").add_column("label", [-1] * len(rows))
        settings, match = {"test_datasets": {"mood": unlabelled}}, "have the label -1, its head has 2 classes"
    elif change == "no rows":
        settings = {"test_datasets": {"mood": rows.select([])}}
        match = r"task 'mood' have no rows: check test_datasets\.mood"
    else:
        model = AutoModelForSequenceClassification.from_config(CONFIGS["bert"](num_labels=1))
        match = r"task 'mood' has no classes \(num_labels=1\)"
    model.save_pretrained(tmp_path / "mood")
    encoder = encoder_of(pool.load_model("colour"))
    if match is None:
        assert task_pool(tmp_path).evaluate(encoder) == expected
        return
    with pytest.raises(ValueError, match=match):
        task_pool(tmp_path, **settings).evaluate(encoder)


@pytest.mark.float32
def test_reports_of_several_jobs_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = text_pool("bert", tmp_path)
    tasks = task_pool(tmp_path)
    monkeypatch.setattr(TextClassificationTaskPool, "log_dir", str(tmp_path / "logs"))
    for _ in range(2):
        tasks.evaluate(encoder_of(pool.load_model("mood")))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["report.json", "report_1.json"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": {"modo": "matthews"}}, r"metrics names \['modo'\]; the task pool has \['mood', 'colour'\]"),
        ({"heads": {"mood": "x"}}, r"The task pool has no head for \['colour'\]"),
        ({"metrics": {"mood": "f1"}}, r"metrics must be accuracy or matthews, not \{'mood': 'f1'\}"),
    ],
)
def test_a_task_pool_that_lacks_something_is_refused(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        task_pool(tmp_path, **settings)


@pytest.mark.parametrize(("guesses", "labels"), [([0, 0, 0, 0], [0, 1, 0, 1]), ([0, 1, 0, 1], [1, 1, 1, 1])])
def test_guesses_or_labels_that_are_all_alike_have_no_correlation(guesses: list[int], labels: list[int]) -> None:
    confusion = torch.zeros(2, 2)
    for label, guess in zip(labels, guesses, strict=True):
        confusion[label, guess] += 1
    assert matthews_correlation(confusion) == 0.0


# GLUE, under the names that its parts have on the hub

NAMES = ("text", "text_b")
#: Task -> (the end of its expert's name, its text columns).
GLUE = {
    "cola": ("CoLA", ["sentence"]),
    "mrpc": ("MRPC", ["sentence1", "sentence2"]),
    "rte": ("RTE", ["sentence1", "sentence2"]),
    "sst2": ("SST-2", ["sentence"]),
    "qnli": ("QNLI", ["question", "sentence"]),
    "qqp": ("QQP", ["question1", "question2"]),
}


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for `HF_HOME`: a pico BERT, its experts and nonsense rows."""
    home = tmp_path_factory.mktemp("hub")
    base = AutoModelForSequenceClassification.from_config(CONFIGS["bert"]())
    folder = model_folder(home, "bert-base-uncased")
    halfway(base, 0).bert.save_pretrained(folder)
    write_tokenizer(folder)
    for seed, (task, (end, columns)) in enumerate(GLUE.items()):
        halfway(base, seed).save_pretrained(model_folder(home, f"textattack/bert-base-uncased-{end}"))
        splits = {}
        for split in ("train", "validation", "test"):
            rows = sentences(seed, 40, pairs=len(columns) == 2).cast_column("label", datasets.ClassLabel(2))
            rows = rows.select_columns([*NAMES[: len(columns)], "label"])
            for old, new in zip(NAMES[: len(columns)], columns, strict=True):
                rows = rows.rename_column(old, new)
            splits[split] = rows.add_column("idx", list(range(len(rows))))
        write_splits(home, "nyu-mll/glue", task, splits)
    return home


@pytest.mark.float32
def test_glue_experts_are_merged_and_evaluated(glue: Path, tmp_path: Path) -> None:
    pools = ["modelpool=bert-base-uncased_glue6", "taskpool=bert-base-uncased_glue6"]
    settings = ["method.coverage=full", "method.num_calibration_samples=16", "taskpool.dataloader_kwargs.num_workers=0"]
    saved = "merged_model_save_path='{log_dir}/merged'"
    succeeded(fusion_bench("method=crossmean", *pools, *settings, saved, cwd=tmp_path, HF_HOME=str(glue)))
    logs = log_folder(tmp_path / "outputs")
    report = read_json(logs / "report.json")
    assert set(report) == {"model_info", "average", *GLUE}
    assert "matthews" in report["cola"]
    assert report["cola"]["score"] == report["cola"]["matthews"]
    assert len(read_json(logs / "crossmean_report.json")["calibration_indices"]["qqp"]) == 16
    assert AutoModel.from_pretrained(logs / "merged").config.model_type == "bert"


@pytest.mark.float32
def test_glue_experts_are_made_by_one_command(glue: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fusion_bench_crossmean.text.finetune", "--task", "cola", "qqp", "--epochs", "1"]
    output = succeeded(run([*command, "--output", "experts"], tmp_path, HF_HOME=str(glue)))
    assert "validation accuracy" in output
    assert sorted(path.name for path in (tmp_path / "experts").iterdir()) == ["cola", "qqp"]
    start = AutoModel.from_pretrained(glue / "hub/models--bert-base-uncased/snapshots" / hashed("bert-base-uncased"))
    for task in ("cola", "qqp"):
        expert = AutoModelForSequenceClassification.from_pretrained(tmp_path / "experts" / task)
        assert expert.config.num_labels == 2
        assert not torch.equal(expert.bert.pooler.dense.weight, start.pooler.dense.weight)
        assert len(AutoTokenizer.from_pretrained(tmp_path / "experts" / task)) == len(VOCABULARY)


@pytest.mark.parametrize(("name", "count"), [("glue4", 4), ("glue6", 6)])
def test_glue_pools_compose_with_one_head_per_expert(name: str, count: int, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    short = f"bert-base-uncased_{name}"
    experts = {"modelpool": "modelpool.experts.cola=mine", "taskpool": "taskpool.heads.cola=mine"}
    config = initialize_hydra_config(
        "fabric_model_fusion",
        overrides=[*(f"{group}={short}" for group in experts), *experts.values()],
        return_hydra_config=False,
    )
    pool, tasks = (
        instantiate(OmegaConf.create(OmegaConf.to_container(config[group], resolve=True)), _recursive_=False)
        for group in experts
    )
    assert isinstance(tasks, TextClassificationTaskPool)
    assert pool.model_names == list(tasks.test_datasets) == pool.train_dataset_names
    assert len(pool.model_names) == count
    assert tasks.metrics == {"cola": "matthews"}
    loaded = {task: pool._models[task]["pretrained_model_name_or_path"] for task in pool.model_names}
    assert loaded == dict(tasks.heads)
    assert loaded["cola"] == "mine"
