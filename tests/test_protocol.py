"""The comparison program: draws, cells, evaluation, tables, and whole comparisons on pico text encoders."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from families import CONFIGS, halfway, sentences, write_tokenizer
from fusion_bench import BaseAlgorithm, instantiate
from lightning import Fabric
from omegaconf import OmegaConf
from scipy import stats
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.protocol import comparison as comparison_module
from fusion_bench_crossmean.protocol import figures
from fusion_bench_crossmean.protocol.catalogue import Row, rows_of
from fusion_bench_crossmean.protocol.cells import Cell, CellStore
from fusion_bench_crossmean.protocol.comparison import Comparison
from fusion_bench_crossmean.protocol.computing import Computer
from fusion_bench_crossmean.protocol.evaluation import KeptBatches, RememberedTower, Room
from fusion_bench_crossmean.protocol.outputs import write_outputs
from fusion_bench_crossmean.protocol.plan import task_sets_of
from fusion_bench_crossmean.protocol.results import rank_correlation, tidy, with_margins
from fusion_bench_crossmean.protocol.splits import Unlabelled, draw_split, serving, unlabelled
from fusion_bench_crossmean.protocol.tables import (
    Table,
    Value,
    correlation_table,
    score_table,
    seconds_table,
    task_table,
)

TASKS = ("mood", "colour", "taste")
TRAIN, TEST = 60, 20


# Draws


def test_calibration_and_validation_are_disjoint_whatever_their_sizes() -> None:
    for calibration, validation, seed in itertools.product((1, 10, 30), (0, 5, 30), (0, 1)):
        split = draw_split("mood", TRAIN, calibration, validation, seed)
        assert (len(split.calibration), len(split.validation)) == (calibration, validation)
        assert len(set(split.calibration + split.validation)) == calibration + validation


def test_smaller_draws_begin_larger_ones_and_validation_stays() -> None:
    small, large = draw_split("mood", TRAIN, 8, 10, 0), draw_split("mood", TRAIN, 50, 10, 0)
    assert large.calibration[:8] == small.calibration
    assert large.validation == small.validation
    assert draw_split("mood", TRAIN, 8, 10, 1) != small
    assert draw_split("colour", TRAIN, 8, 10, 0) != small


def test_a_training_set_that_is_too_small_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match=r"'mood' has 60 training rows; 50 for calibration and 11 others"):
        draw_split("mood", TRAIN, 50, 11, 0)


@pytest.mark.parametrize(
    "rows",
    [
        datasets.Dataset.from_dict({"text": list("abcd"), "label": [1, 2, 3, 4]}),
        [{"text": letter, "label": index + 1} for index, letter in enumerate("abcd")],
        [(letter, index + 1) for index, letter in enumerate("abcd")],
    ],
    ids=["datasets", "mappings", "pairs"],
)
def test_what_a_merge_is_given_has_no_labels(rows: Any) -> None:
    some = unlabelled(rows, [2, 0])
    items = [some[i] for i in range(len(some))]
    if isinstance(items[0], Mapping):
        items = [(item["text"], item.get("label", 0)) for item in items]
    assert items == [("c", 0), ("a", 0)]


def test_a_pool_serves_the_chosen_rows_and_nothing_else() -> None:
    class Pool:
        def load_train_dataset(self, dataset_name: str) -> str:
            return f"all of {dataset_name}"

    pool: Any = Pool()
    with serving(pool, {"mood": "some"}):
        assert pool.load_train_dataset("mood") == "some"
        with pytest.raises(ValueError, match="does not say how many"):
            pool.load_train_dataset("colour")
    assert pool.load_train_dataset("mood") == "all of mood"


# Cells

FOUND = {"seconds": 1.0, "scores": {}, "mean": 0.5}


def cell(**changes: Any) -> Cell:
    own = {"row": "crossmean", "task_set": "all", "tasks": ("a", "b"), "seed": 0, "coverage": "mlp", "num_samples": 8}
    return Cell(**{**own, "settings": {"method": {"path_points": [0, 1]}}, **changes})


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": ("a", "c")},
        {"seed": 1},
        {"coverage": "full"},
        {"num_samples": 9},
        {"settings": {"method": {"path_points": [0, 0.5, 1]}}},
        {"settings": {"method": {"path_points": [0, 1]}, "versions": {"torch": "3"}}},
    ],
    ids=str,
)
def test_whatever_a_result_depends_on_tells_cells_apart(change: dict[str, Any], tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.write(cell(), FOUND)
    assert store.read(cell()) == FOUND
    assert store.read(cell(**change)) is None


def test_names_do_not_tell_cells_apart() -> None:
    assert cell(row="ours", task_set="set 1").digest == cell().digest


@pytest.mark.parametrize(
    "content", ["", "{", '{"found": {}}', '{"cell": {}, "found": {}}', "[]", '{"cell": 1, "found": 2}']
)
def test_a_damaged_cell_is_made_again(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CellStore(tmp_path)
    store.path_of(cell()).write_text(content)
    assert store.read(cell()) is None
    assert "is damaged" in caplog.text


def test_a_file_of_another_cell_is_not_taken(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.write(cell(seed=1), FOUND)
    store.path_of(cell(seed=1)).rename(store.path_of(cell()))
    assert store.read(cell()) is None


def test_a_cell_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CellStore(tmp_path)
    store.write(cell(), FOUND)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            store.write(cell(), FOUND | {"mean": 0.7})
    assert store.read(cell()) == FOUND
    assert len(list(tmp_path.iterdir())) == 1


# Catalogue and plan


def test_a_row_knows_what_it_needs_from_its_config() -> None:
    catalogue = {
        "ours": {"title": "Ours", "method": {"coverage": "mlp", "num_calibration_samples": 256, "seed": 0}},
        "stock": {"title": "Stock", "method": {"num_regmean_examples": 256}},
        "scaled": {"title": "Scaled", "method": {"scaling_factor": 0.3}, "scale": "scaling_factor"},
        "plain": {"title": "Plain", "method": {"_target_": "x"}},
        "seeded": {"title": "Seeded", "method": {"seed": 0}},
        "fixed": {"title": "Fixed", "method": {"_target_": "x"}, "coverage": "full"},
        "experts": {"title": "Experts"},
    }
    ours, stock, scaled, plain, seeded, fixed, _ = rows_of(catalogue, list(catalogue))
    assert ours.configured(seed=2, coverage="full", num_samples=9) == {
        "coverage": "full",
        "num_calibration_samples": 9,
        "seed": 2,
    }
    assert stock.configured(seed=2, coverage="full", num_samples=9) == {"num_regmean_examples": 9}
    assert scaled.configured(seed=2, coverage=None, num_samples=None, scale=0.7) == {"scaling_factor": 0.7}
    assert [row.uses_seed for row in (ours, stock, scaled, plain, seeded)] == [True, True, True, False, True]
    assert not fixed.has_coverage
    with pytest.raises(ValueError, match="Of empty the catalogue does not say what it is"):
        rows_of({"empty": {"title": "Empty"}}, ["empty"])
    assert catalogue["ours"]["method"]["seed"] == 0, "the catalogue stays as it is"
    with pytest.raises(ValueError, match=r"has no method typo; it has ours, stock"):
        rows_of(catalogue, ["typo"])
    with pytest.raises(ValueError, match="names one twice"):
        rows_of(catalogue, ["ours", "ours"])


def test_task_sets_may_be_given_in_five_ways() -> None:
    assert task_sets_of("all", TASKS) == {"all": list(TASKS)}
    assert task_sets_of(["mood", "taste"], TASKS) == {"mood+taste": ["mood", "taste"]}
    assert task_sets_of({"x": ["mood", "taste"], "y": "all"}, TASKS)["y"] == list(TASKS)
    assert task_sets_of({"first": [2, 3]}, TASKS) == {"T = 2": list(TASKS[:2]), "T = 3": list(TASKS)}
    drawn = task_sets_of({"random": {"count": 3, "size": 2, "seed": 1}}, TASKS)
    assert len({tuple(chosen) for chosen in drawn.values()}) == 3
    assert drawn == task_sets_of({"random": {"count": 3, "size": 2, "seed": 1}}, TASKS)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["mood"], "at least two different tasks"),
        (["mood", "mood"], "at least two different tasks"),
        ({"x": ["mood", "smell"]}, r"'x' names \['smell'\]; the model pool and the task pool have \['mood'"),
        ({"random": {"count": 4, "size": 2}}, "do not give 4 different sets of 2"),
        ({"first": [2, 4, 5]}, r"There are 3 tasks, no first \[4, 5\]"),
        ({"random": {"count": 1, "size": 4}}, "do not give 1 different sets of 4"),
    ],
    ids=str,
)
def test_wrong_task_sets_are_errors(asked: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_sets_of(asked, TASKS)


# Statistics


def test_a_rank_correlation_is_spearmans_with_its_permutation_test() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.3, 0.1, 0.5, 0.2, 0.9, 0.8]
    found = rank_correlation(x, y)
    assert found.estimate == pytest.approx(stats.spearmanr(x, y).statistic)
    count = [
        abs(stats.spearmanr(x, order).statistic) >= abs(found.estimate) - 1e-12 for order in itertools.permutations(y)
    ]
    assert found.p_value == pytest.approx(np.mean(count)), "720 permutations are all of them"
    assert found.low < found.estimate < found.high
    assert found == rank_correlation(x, y)


def test_of_constant_values_there_is_no_rank_correlation() -> None:
    assert np.isnan(rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).estimate)
    with pytest.raises(ValueError, match="at least three settings"):
        rank_correlation([1.0, 2.0], [1.0, 2.0])


def frame_of(scores: dict[str, list[float]], seeds: list[Any]) -> pd.DataFrame:
    """A tidy frame: method -> mean score per seed (of methods with one score only, without a seed)."""
    finished = []
    for name, values in scores.items():
        for seed, value in zip(seeds if len(values) > 1 else [None], values, strict=True):
            own = cell(row=name, seed=seed, num_samples=8 if seed is not None else None, coverage=None)
            found = {"seconds": 1.0, "mean": value, "scores": {"a": {"score": value}, "b": {"score": value}}}
            finished.append((Row(name, name.title()), own, found))
    return tidy(finished)


def test_margins_are_differences_within_one_seed() -> None:
    frame = frame_of({"base": [0.5, 0.7], "better": [0.6, 0.9], "seedless": [0.4]}, [0, 1])
    margins = with_margins(frame, "base")
    means = margins[margins["task"] == "mean"].set_index(["method", "seed"])["margin"]
    assert means["better", 0] == pytest.approx(10)
    assert means["better", 1] == pytest.approx(20)
    assert [means["seedless", seed] for seed in (0, 1)] == pytest.approx([-10, -30])


def test_the_table_marks_the_best_three_and_pairs_margins() -> None:
    frame = frame_of({"base": [0.5, 0.7], "better": [0.6, 0.9], "seedless": [0.4], "worst": [0.1, 0.2]}, [0, 1])
    table = score_table(frame, "base", "A title", ["A note."])
    rows = {name: [value.text for value in values] for name, values in table.rows}
    assert rows["Better"] == ["75.00 ± 21.21", "+15.00 ± 7.07"]
    assert rows["Seedless"][0] == "40.00"
    assert rows["Base"][1] == ""
    assert [name for name, _ in table.rows] == ["Base", "Better", "Seedless", "Worst"]
    markdown = table.as_markdown()
    for marked in ("**75.00 ± 21.21**", "*60.00 ± 14.14*", "40.00 ³", "A title", "A note."):
        assert marked in markdown
    assert r"\textbf{75.00 $\pm$ 21.21}" in table.as_latex()


def test_latex_is_escaped() -> None:
    text = Table("t", ["a_b", "50 %"], [("x & y", [Value("1 ± 2")])]).as_latex()
    assert r"a\_b & 50 \%" in text
    assert r"x \& y & 1 $\pm$ 2" in text


def settings_results() -> list[tuple[Row, Cell, dict[str, Any]]]:
    """Four task sets at two coverages: a method whose margin falls as rho rises, one without coverage, a criterion."""
    finished = []
    for index, coverage in itertools.product(range(4), ("mlp", "full")):
        rho, bonus = 0.8 + 0.04 * index, 0.1 if coverage == "full" else 0.0
        scores = {"base": 0.5 + 0.01 * index, "ours": 0.5 + 0.01 * index + 0.2 - rho / 10 + bonus}
        common = {"task_set": f"set{index}", "tasks": ("a", f"b{index}"), "coverage": coverage}
        for name, value in scores.items():
            found = {"seconds": 2.0, "mean": value, "scores": {"a": {"score": value}}}
            finished.append((Row(name, name.title()), cell(row=name, **common), found))
        criterion = {"rho": rho, "prefix_drift": 1.0, "layers": [{"alignment": {"a": rho, "b": rho}}]}
        found = {"seconds": 1.0, "criterion": criterion}
        finished.append((Row("criterion", "Criterion"), cell(row="criterion", **common), found))
    for index in range(4):
        own = cell(row="stock", task_set=f"set{index}", tasks=("a", f"b{index}"), coverage="full")
        found = {"seconds": 4.0, "mean": 0.4, "scores": {"a": {"score": 0.4}}}
        finished.append((Row("stock", "Stock", coverage="full"), own, found))
    return finished


def settings_frame() -> pd.DataFrame:
    """The same as a tidy frame."""
    return tidy(settings_results(), "pico")


def test_a_method_of_one_coverage_stays_in_its_column() -> None:
    table = score_table(settings_frame(), "base", "t", [])
    assert table.header[1::2] == [f"set{index}, {coverage}" for index in range(4) for coverage in ("mlp", "full")]
    texts = dict(zip(table.header[1:], dict(table.rows)["Stock"], strict=True))
    assert texts["set0, full"].text == "40.00"
    assert texts["set0, mlp"].text == ""
    assert dict(zip(table.header[1:], dict(table.rows)["rho"], strict=True))["set3, mlp"].text == "0.920"


def test_correlations_are_over_task_sets_at_one_coverage() -> None:
    table = correlation_table(settings_frame(), "base", "t", [])
    rows = dict(table.rows)
    assert set(rows) == {"Ours (mlp)", "Ours (full)", "Stock (full)"}
    assert rows["Ours (mlp)"][0].text == "4"
    assert rows["Ours (mlp)"][1].text.startswith("-1.00")
    assert rows["Ours (mlp)"][3].text.startswith("+nan"), "the drift is the same everywhere"


def test_other_tables_and_figures_hold_every_setting(tmp_path: Path) -> None:
    frame = settings_frame()
    assert len(task_table(frame, "t", [])) == 8
    seconds = seconds_table(frame, "base", "t", ["A note."])
    assert "A note." in seconds.notes
    values = dict(zip(seconds.header[1:], dict(seconds.rows)["Stock"], strict=True))
    assert values["seconds (set0, full)"].text == "4.0"
    assert values["seconds (set0, mlp)"].text == ""
    figures.save(figures.margin_by_alignment(frame, "base"), tmp_path / "margins")
    figures.save(figures.score_by_samples(frame), tmp_path / "samples")
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".pdf"}
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


def test_several_pools_make_one_table_more(tmp_path: Path) -> None:
    results = settings_results()
    asked = ["scores", "by_task", "correlations", "margin_by_alignment", "score_by_samples", "alignment_by_depth"]
    for pool in ("pico", "nano"):
        assert not list(tmp_path.glob("*.md"))
        write_outputs(results, title="t", pool=pool, baseline="base", asked=asked, folder=tmp_path, notes=["A note."])
    assert "pico, set0, mlp" in (tmp_path / "scores.md").read_text()
    lines = (tmp_path / "correlations.md").read_text().splitlines()
    assert any(line.startswith("| Ours (mlp) | 8 | -1.00") for line in lines), "four task sets of two pools"
    made = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert made == {
        f"{name}.{suffix}"
        for names, suffixes in (
            (("scores", "correlations"), ("md", "tex")),
            (("margin_by_alignment", "score_by_samples"), ("png", "pdf")),
        )
        for name in names
        for suffix in suffixes
    }


# Evaluation


def test_batches_are_kept_as_far_as_there_is_room() -> None:
    calls = []

    class Loader:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            calls.append(1)
            yield from ({"x": torch.zeros(4)}, torch.ones(4))

    room = Room(8 * torch.zeros(0).element_size())
    kept = KeptBatches(Loader(), room)
    assert len([*itertools.islice(kept, 1)]) == 1, "one batch of a trial run"
    assert room.left, "which is not kept"
    first = list(kept)
    assert [id(batch) for batch in kept] == [id(batch) for batch in first]
    assert len(calls) == 2
    assert not room.left
    other = KeptBatches(Loader(), room)
    assert len(list(other)) == len(list(other)) == len(other) == 2
    assert len(calls) == 4


def test_a_text_tower_computes_each_prompt_once() -> None:
    calls = []

    class Tower(nn.Module):
        def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
            calls.append(input_ids)
            return input_ids, input_ids + 1

    tower, ids = RememberedTower(Tower()), torch.tensor([[1, 2]])
    assert torch.equal(tower(input_ids=ids)[1], tower(input_ids=ids.clone())[1])
    assert len(calls) == 1
    tower(input_ids=ids.T)
    assert len(calls) == 2


# Whole comparisons


def rows_for(task: str, split: str) -> datasets.Dataset:
    """Named as `_target_` in the pools."""
    seed = 10 * TASKS.index(task) + (split == "test")
    return sentences(seed, TEST if split == "test" else TRAIN)


class Spy(BaseAlgorithm):
    """Notes which rows a merge can get hold of; returns the first expert."""

    seen: list[tuple[str, list[int], list[str]]] = []  # noqa: RUF012

    def __init__(self, num_calibration_samples: int, seed: int) -> None:
        super().__init__()

    def run(self, modelpool: Any) -> nn.Module:
        for task in modelpool.model_names:
            rows = modelpool.load_train_dataset(task)
            Spy.seen.append((task, list(rows.column_names), list(rows["text"])))
        assert not modelpool.test_dataset_names
        return modelpool.load_model(modelpool.model_names[0])


class Failing(BaseAlgorithm):
    def run(self, modelpool: Any) -> nn.Module:
        raise RuntimeError("this method does not work")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    with torch.random.fork_rng(devices=[]):
        for seed, task in enumerate(("_pretrained_", *TASKS)):
            network = AutoModelForSequenceClassification.from_config(CONFIGS["bert"](num_labels=2 + seed % 2))
            halfway(network, seed).save_pretrained(folder / task)
    write_tokenizer(folder / "tokenizer")
    return folder


OURS = "fusion_bench_crossmean."
SAMPLES = {"coverage": "mlp", "num_calibration_samples": 256, "seed": 0}
CATALOGUE: dict[str, dict[str, Any]] = {
    "experts": {"title": "experts"},
    "averaging": {"title": "averaging", "method": {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}},
    "task_arithmetic": {
        "title": "Task Arithmetic",
        "method": {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3},
        "scale": "scaling_factor",
        "needs_pretrained": True,
    },
    "regmean": {"title": "RegMean", "method": {"_target_": OURS + "RegMeanAlgorithm", **SAMPLES}},
    "crossmean": {"title": "CrossMean", "method": {"_target_": OURS + "CrossMeanAlgorithm", **SAMPLES}},
    "criterion": {"title": "criterion", "method": {"_target_": OURS + "AlignmentCriterionAnalyzer", **SAMPLES}},
    "spy": {
        "title": "spy",
        "method": {"_target_": "test_protocol.Spy", "num_calibration_samples": 1, "seed": 0},
    },
    "failing": {"title": "failing", "method": {"_target_": "test_protocol.Failing"}},
}


def build(config: Mapping[str, Any]) -> Any:
    made = instantiate(OmegaConf.create(dict(config)), _recursive_=False)
    if hasattr(made, "_fabric_instance"):
        made._fabric_instance = Fabric(accelerator="cpu", devices=1)
    return made


def comparison(experts: Path, folder: Path, methods: list[str], **changes: Any) -> Comparison:
    tokenizer = {
        "_target_": "transformers.AutoTokenizer.from_pretrained",
        "pretrained_model_name_or_path": str(experts / "tokenizer"),
    }
    data = {
        split: {task: {"_target_": "test_protocol.rows_for", "task": task, "split": split} for task in TASKS}
        for split in ("train", "test")
    }
    load = "transformers.AutoModel.from_pretrained"
    modelpool = {
        "_target_": "fusion_bench.modelpool.SequenceClassificationModelPool",
        "tokenizer": tokenizer,
        "models": {
            task: {"_target_": load, "pretrained_model_name_or_path": str(experts / task)}
            for task in ("_pretrained_", *TASKS)
        },
        "train_datasets": data["train"],
        "test_datasets": data["test"],
    }
    taskpool = {
        "_target_": "fusion_bench_crossmean.text.taskpool.TextClassificationTaskPool",
        "tokenizer": tokenizer,
        "test_datasets": data["test"],
        "heads": {task: str(experts / task) for task in TASKS},
        "dataloader_kwargs": {"batch_size": 8},
    }
    settings: dict[str, Any] = {
        "modelpool": modelpool,
        "taskpool": taskpool,
        "rows": rows_of(CATALOGUE, methods),
        "title": "A comparison",
        "pool": "pico",
        "machine": {"device": "cpu"},
        "baseline": "regmean",
        "outputs": ["scores", "by_task"],
        "folder": folder / "tables",
        "cells": folder / "cells",
        "build": build,
        "seeds": (0, 1),
        "sample_counts": (12,),
        "num_validation": 10,
        "scales": (0.1, 0.5, 1.0),
    }
    return Comparison(**settings | changes)


METHODS = ["experts", "averaging", "task_arithmetic", "regmean", "crossmean", "criterion"]


@pytest.mark.float32
def test_a_comparison_from_pools_to_tables(experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = comparison(experts, tmp_path, METHODS).run()
    assert len(list((tmp_path / "cells").iterdir())) == 1 + 1 + 2 + 2 + 2 + 2
    first = (tmp_path / "tables" / "pico" / "scores.md").read_text()
    for word in ("Task Arithmetic", "CrossMean", "over RegMean", "rho", "A comparison"):
        assert word in first
    frame = pd.read_parquet(tmp_path / "tables" / "pico" / "results.parquet")
    assert set(frame["method"]) == set(METHODS)
    assert len(pd.read_csv(tmp_path / "tables" / "pico" / "results.csv")) == len(frame)

    # One entry by hand: the merge as a user makes it, a head, the test rows.
    found = next(f for row, c, f in outcome.finished if row.name == "crossmean" and c.seed == 1)
    pool = comparison(experts, tmp_path, METHODS).pool_for(TASKS)
    merged = CrossMeanAlgorithm(num_calibration_samples=12, seed=1, coverage="mlp").run(pool).state_dict()
    rows, head = rows_for("colour", "test"), AutoModelForSequenceClassification.from_pretrained(experts / "colour")
    head.bert.load_state_dict(merged)
    tokens = pool.load_tokenizer()(list(rows["text"]), padding=True, return_tensors="pt")
    with torch.no_grad():
        guesses = head.eval()(**tokens).logits.argmax(-1)
    assert found["scores"]["colour"]["predictions"] == guesses.tolist()
    right = float((guesses == torch.tensor(rows["label"][:])).float().mean())
    assert found["scores"]["colour"]["score"] == pytest.approx(right)
    line = frame[(frame["method"] == "crossmean") & (frame["seed"] == 1) & (frame["task"] == "colour")]
    assert float(line["score"].iloc[0]) == pytest.approx(100 * right)

    # A second run computes nothing, not even loads a model, and says the same.
    monkeypatch.setattr(Comparison, "computer", lambda _: pytest.fail("nothing is missing"))
    comparison(experts, tmp_path, METHODS).run()
    assert (tmp_path / "tables" / "pico" / "scores.md").read_text() == first


@pytest.mark.float32
def test_a_killed_comparison_loses_one_cell_at_most(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = comparison(experts, tmp_path / "whole", METHODS)
    whole.run()
    compute, count = Computer.compute, itertools.count()

    def killed(self: Computer, row: Row, own: Cell) -> Any:
        if next(count) == 4:
            raise KeyboardInterrupt
        return compute(self, row, own)

    with monkeypatch.context() as patch:
        patch.setattr(Computer, "compute", killed)
        with pytest.raises(KeyboardInterrupt):
            comparison(experts, tmp_path / "killed", METHODS).run()
    assert len(list((tmp_path / "killed" / "cells").iterdir())) == 4
    comparison(experts, tmp_path / "killed", METHODS).run()
    tables = [(tmp_path / kind / "tables" / "pico" / "scores.md").read_text() for kind in ("whole", "killed")]
    assert tables[0] == tables[1]


@pytest.mark.float32
def test_a_scale_is_chosen_on_validation_rows(experts: Path, tmp_path: Path) -> None:
    outcome = comparison(experts, tmp_path, ["task_arithmetic", "regmean"]).run()
    for row, _, found in outcome.finished:
        if row.name == "task_arithmetic":
            tried = {float(scale): value for scale, value in found["validation"].items()}
            assert set(tried) == {0.1, 0.5, 1.0}
            assert found["scale"] == min(s for s, v in tried.items() if v == max(tried.values()))

    # One of the values by hand, on the rows that are held back.
    own = comparison(experts, tmp_path, ["task_arithmetic", "regmean"])
    _, one, found = next(item for item in outcome.finished if item[0].name == "task_arithmetic" and item[1].seed == 1)
    merged = build(own.rows[0].configured(seed=1, coverage=None, num_samples=None, scale=0.5)).run(own.pool_for(TASKS))
    scores = []
    for task in TASKS:
        everything = rows_for(task, "train")
        rows = everything.select(draw_split(task, TRAIN, 0, 10, 1).validation)
        head = AutoModelForSequenceClassification.from_pretrained(experts / task).eval()
        head.bert.load_state_dict(merged.state_dict())
        tokens = own.pool_for(TASKS).load_tokenizer()(list(rows["text"]), padding=True, return_tensors="pt")
        with torch.no_grad():
            guesses = head(**tokens).logits.argmax(-1)
        scores.append(float((guesses == torch.tensor(rows["label"][:])).float().mean()))
    assert found["validation"]["0.5"] == pytest.approx(np.mean(scores))
    assert one.seed == 1


@pytest.mark.float32
def test_no_label_and_no_other_row_reaches_a_merge(experts: Path, tmp_path: Path) -> None:
    Spy.seen.clear()
    comparison(experts, tmp_path, ["spy", "regmean", "task_arithmetic"]).run()
    assert len(Spy.seen) == 2 * len(TASKS)
    for index, (task, columns, texts) in enumerate(Spy.seen):
        seed = index // len(TASKS)
        split = draw_split(task, TRAIN, 12, 10, seed)
        everything = rows_for(task, "train")["text"]
        assert "label" not in columns
        assert texts == [everything[i] for i in split.calibration]


@pytest.mark.float32
def test_rows_that_no_config_speaks_of_are_not_to_be_had(experts: Path, tmp_path: Path) -> None:
    pool = comparison(experts, tmp_path, METHODS).pool_for(TASKS)
    with serving(pool, {}), pytest.raises(ValueError, match=r"training rows of task 'mood'.*num_calibration_samples"):
        pool.load_train_dataset("mood")


def test_a_method_that_fails_does_not_take_the_others_along(experts: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"1 of 5 cells failed: failing-all: RuntimeError: this method does not"):
        comparison(experts, tmp_path, ["failing", "regmean", "crossmean"]).run()
    table = (tmp_path / "tables" / "pico" / "scores.md").read_text()
    assert "CrossMean" in table
    assert "Cells that failed and are missing: failing-all" in table
    assert "this method does not work" in (tmp_path / "tables" / "pico" / "messages.log").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_counts": (61,)}, r"'mood' has 60 training rows; 61 for calibration and 0 others"),
        ({"baseline": "lot"}, r"recipe\.baseline is 'lot', which is not among the methods \['regmean'"),
        ({"outputs": ["scores", "pie_chart"]}, r"outputs names pie_chart; there are scores, by_task"),
        ({"task_sets": ["mood", "smell"]}, r"names \['smell'\]"),
        ({"coverages": ["mlp", "attention"]}, r"Each of coverages must be .*mlp.*full.*'attention'"),
        ({"seeds": [0, 0]}, r"seeds must be different numbers, at least one, not \[0, 0\]"),
        ({"sample_counts": []}, "num_calibration_samples must be different numbers"),
        ({"sample_counts": [0]}, "Each of num_calibration_samples must be"),
        ({"outputs": ["correlations"]}, "Rank correlations need at least three task sets"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_anything_is_merged(
    changes: dict[str, Any], message: str, experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "computer", lambda _: pytest.fail("too late"))
    with pytest.raises(ValueError, match=message):
        comparison(experts, tmp_path, ["regmean", "crossmean"], **changes).run()


def test_task_vector_methods_need_a_pretrained_model(experts: Path, tmp_path: Path) -> None:
    own = comparison(experts, tmp_path, ["task_arithmetic", "regmean"])
    del own.modelpool["models"]["_pretrained_"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="task_arithmetic need the pretrained model, which the pool does not have"):
        own.run()


def test_changed_weights_are_another_cell(experts: Path, tmp_path: Path) -> None:
    def digests() -> list[str]:
        return [c.digest for _, c in comparison(experts, tmp_path, ["crossmean", "regmean"]).plan.cells()]

    before = digests()
    assert before == digests()
    (path,) = (experts / "mood").glob("*.safetensors")
    path.write_bytes(path.read_bytes())
    assert not set(before) & set(digests())


def test_a_long_list_of_failures_is_cut() -> None:
    failures = {str(i): "ValueError: x" for i in range(5)}
    assert comparison_module.in_short(failures).count("ValueError") == 3


def test_unlabelled_rows_are_as_many() -> None:
    assert len(Unlabelled([{"label": 1}, {"label": 2}])) == 2
    assert json.dumps(Unlabelled([{"label": 1}])[0]) == '{"label": 0}'
