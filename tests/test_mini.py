"""The mini benchmark as shipped: data, weights, configs, and stock and own methods on it through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import ROOT, failed, fusion_bench, log_folder, read_json, succeeded
from safetensors import safe_open
from transformers import CLIPModel, CLIPVisionModel

from fusion_bench_crossmean.mini.assets import VARIANTS, asset_folder
from fusion_bench_crossmean.mini.tasks import PREFIX, PROMPTS, TASK_SETS, load_split, read_split

pytest_plugins = ("cli",)
pytestmark = pytest.mark.float32

MINI = ROOT / "fusion_bench_crossmean" / "mini"
POOLS = ("modelpool=mini-clip_TA8", "taskpool=mini-clip_TA8")
TASKS = [PREFIX + task for task in TASK_SETS["TA8"]]
SIZES = {"icons": (888, 296)}
CHECKPOINTS = ["pretrained", *TASKS]


def accuracies(report: Path) -> dict[str, float]:
    """Task -> accuracy, of FusionBench's evaluation report."""
    return {task: scores["accuracy"] for task, scores in read_json(report).items() if task != "model_info"}


# --- data ---


@pytest.mark.parametrize("task", PROMPTS)
def test_splits_have_their_rows_and_all_classes(task):
    train, test = load_split(task, "train"), load_split(PREFIX + task, "test")
    names = train.features["label"].names
    assert (len(train), len(test)) == SIZES.get(task, (1500, 500))
    assert test.features["label"].names == names
    assert len(set(names)) == len(names)
    assert set(train["label"]) == set(test["label"]) == set(range(len(names)))
    image = train[0]["image"]
    assert (image.size, image.mode) == ((28, 28), "RGB")


@pytest.mark.parametrize("task", PROMPTS)
def test_no_image_is_in_both_splits(task):
    train, test = ({image.tobytes() for image in read_split(task, split).images} for split in ("train", "test"))
    assert (len(train), len(test)) == SIZES.get(task, (1500, 500))
    assert not train & test


def test_unknown_task_or_split_is_refused():
    with pytest.raises(ValueError, match="no task 'cars'; it has mnist"):
        load_split("cars", "train")
    with pytest.raises(ValueError, match="'train' and 'test', not 'val'"):
        load_split("mnist", "val")


# --- weights ---


def test_everything_shipped_is_small():
    files = [path for folder in ("data", "weights") for path in (MINI / folder).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in [*files, ROOT / "LICENSE"]) <= 30e6
    tower = CLIPVisionModel.from_pretrained(asset_folder("mini-clip") / TASKS[0])
    assert sum(parameter.numel() for parameter in tower.parameters()) <= 1.0e6


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_stored_in_float16_and_load_as_float32(name):
    folder = asset_folder("mini-clip") / name
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {file.get_tensor(key).dtype for key in file.keys()}
    assert stored == {torch.float16}
    config = json.loads((folder / "config.json").read_text())
    parts = [config, config["vision_config"], config["text_config"]] if name == "pretrained" else [config]
    for part in parts:
        assert part["dtype"] == part["torch_dtype"] == "float32"
    network = (CLIPModel if name == "pretrained" else CLIPVisionModel).from_pretrained(folder)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


def test_experts_differ_from_the_pretrained_tower_and_each_other():
    weights = {}
    for name in CHECKPOINTS:
        tower = CLIPVisionModel.from_pretrained(asset_folder("mini-clip") / name)
        weights[name] = torch.cat([parameter.detach().flatten() for parameter in tower.parameters()]).numpy()
    for i, first in enumerate(CHECKPOINTS):
        for second in CHECKPOINTS[:i]:
            assert np.linalg.norm(weights[first] - weights[second]) > 1e-2 * np.linalg.norm(weights[second])


# --- the command line ---


def test_merges_print_an_accuracy_for_every_task(tmp_path):
    # The stock method is the first of its process: only the configs' resolver can have registered the tasks.
    output = succeeded(fusion_bench("-m", "method=simple_average,crossmean", *POOLS, cwd=tmp_path))
    logs = log_folder(tmp_path / "outputs")
    average, merged = accuracies(logs / "report.json"), accuracies(logs / "report_1.json")
    assert list(average) == list(merged) == [*TASKS, "average"]
    assert f"accuracy: {merged['mini-letters']}" in output
    assert merged != average
    assert min(merged["average"], average["average"]) > 0.6  # chance is below 0.1
    report = read_json(logs / "crossmean_report.json")
    assert {len(drawn) for drawn in report["calibration_indices"].values()} == {256}
    assert "quick_gelu" in report["activation"]


def test_stock_regmean_runs_on_the_mini_pools(tmp_path):
    few = "method.num_regmean_examples=16"
    succeeded(fusion_bench("method=regmean/clip_regmean", few, *POOLS, cwd=tmp_path))
    assert set(accuracies(log_folder(tmp_path / "outputs") / "report.json")) == {*TASKS, "average"}


@pytest.mark.parametrize("name", ["mini-clip-gelu_TA8", "mini-clip-gelu-deep_TALL14"])
def test_a_variant_that_is_not_built_names_the_command(name, tmp_path):
    cache = {"FUSION_BENCH_CROSSMEAN_CACHE": str(tmp_path / "cache")}
    message = failed(fusion_bench("method=crossmean", f"modelpool={name}", f"taskpool={name}", cwd=tmp_path, **cache))
    tasks = name.rpartition("_")[2]
    command = f"python -m fusion_bench_crossmean.mini.build_clip --activation gelu --tasks {tasks} --layers "
    assert command + ("12" if "deep" in name else "6") in message
    assert str(tmp_path / "cache") in message


def test_every_variant_finds_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSION_BENCH_CROSSMEAN_CACHE", str(tmp_path))
    built = [variant for name, variant in VARIANTS.items() if name != "mini-clip"]
    for index, variant in enumerate(built):
        folder = tmp_path / f"{variant.folder}-{index:08x}" / "pretrained"
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    found = {asset_folder(name).name: variant.folder for name, variant in VARIANTS.items() if name != "mini-clip"}
    assert found == {f"{variant.folder}-{index:08x}": variant.folder for index, variant in enumerate(built)}
