"""Statistics that are kept on disk, and merges from them without a forward."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cli import fusion_bench, log_folder, read_json, succeeded
from pico import pico_calibration, pico_experts
from safetensors import safe_open
from torch import Tensor, nn

from fusion_bench_crossmean import (
    CrossMeanAlgorithm,
    LOTAlgorithm,
    ProgressiveRegMeanAlgorithm,
    RegMeanAlgorithm,
    sealed,
)
from fusion_bench_crossmean.kept_statistics import MANIFEST
from fusion_bench_crossmean.messages import differences, differing
from fusion_bench_crossmean.walker import Walker

SETTINGS = {"coverage": "full", "num_calibration_samples": 8, "batch_size": 3}


def models(num_tasks: int = 3, seed: int = 0) -> dict[str, nn.Module]:
    experts = pico_experts(num_tasks=num_tasks, seed=seed)
    return {"_pretrained_": pico_experts(num_tasks=1, seed=seed, spread=0.0)["digits"], **experts}


def run(
    method: type = RegMeanAlgorithm, pool: Mapping[str, nn.Module] | None = None, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The merged tensors and the report."""
    algorithm = method(**SETTINGS | settings)
    pool = models() if pool is None else pool
    inputs = {task: images for task, images in pico_calibration().items() if task in pool}
    merged = algorithm.run(pool, None if "load_statistics" in settings else inputs)
    return merged.state_dict(), algorithm.report


def check_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder of RegMean's statistics."""
    run(save_statistics=str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.mark.parametrize("method", [RegMeanAlgorithm, LOTAlgorithm])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"task_weighting": "mean", "task_weights": {"letters": 0.3}},
        {"reduce_non_diagonal_ratio": 0.5, "relative_ridge": 1e-2},
        {"dtype": "float16"},
        {"coverage": "mlp"},
    ],
)
def test_merging_again_is_merging_anew_at_those_settings(
    method: type, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(method, save_statistics=str(tmp_path / "kept"))
    expected, report = run(method, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(Walker, "__enter__", lambda _: pytest.fail("a forward"))
        found, again = run(method, load_statistics=str(tmp_path / "kept"), **settings)
    check_equal(expected, found)
    assert again["layers"] == report["layers"]
    assert again["hashes"] == report["hashes"]
    assert again["calibration_indices"] == report["calibration_indices"]
    assert again["num_inputs_used"] == report["num_inputs_used"]
    assert again["statistics"]["loaded_from"] == str(tmp_path / "kept")


def test_keeping_statistics_changes_no_bit(tmp_path: Path) -> None:
    check_equal(run(save_statistics=str(tmp_path))[0], run()[0])


def test_fewer_tasks_can_be_merged_from_the_statistics_of_more(kept: Path) -> None:
    pool = {name: model for name, model in models().items() if name != "letters"}
    expected, _ = run(pool=pool)
    found, report = run(pool=pool, load_statistics=str(kept))
    check_equal(expected, found)
    assert report["tasks"] == ["digits", "textures"]


def test_statistics_of_lot_serve_regmean(tmp_path: Path) -> None:
    run(LOTAlgorithm, save_statistics=str(tmp_path))
    check_equal(run(load_statistics=str(tmp_path))[0], run()[0])


def test_lot_needs_energies_that_regmean_does_not_keep(kept: Path) -> None:
    with pytest.raises(ValueError, match=r"no energies of normalisation layers for 'digits', .*crossmean/lot"):
        run(LOTAlgorithm, load_statistics=str(kept))


@pytest.mark.parametrize("method", [ProgressiveRegMeanAlgorithm, CrossMeanAlgorithm])
def test_depth_ordered_methods_say_why_they_cannot_merge_again(method: type, kept: Path) -> None:
    with pytest.raises(ValueError, match=rf"{method.__name__} cannot take load_statistics.*prefix.*RegMean and LOT"):
        method(load_statistics=str(kept))


def test_statistics_of_a_merged_prefix_are_refused(tmp_path: Path) -> None:
    run(CrossMeanAlgorithm, save_statistics=str(tmp_path))
    with pytest.raises(ValueError, match=r"are CrossMeanAlgorithm's, measured on its merged prefix"):
        run(load_statistics=str(tmp_path))


def test_crossmean_keeps_gram_and_bilinear_statistic(tmp_path: Path) -> None:
    _, report = run(CrossMeanAlgorithm, save_statistics=str(tmp_path))
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert len(manifest["groups"]) == len(report["layers"])
    with safe_open(tmp_path / "sums-0003-001.safetensors", framework="pt") as file:
        gram, bilinear = file.get_tensor("gram").double(), file.get_tensor("bilinear").double()
    alignment = float((gram * bilinear).sum() / (gram.norm() * bilinear.norm()))
    assert alignment == pytest.approx(report["layers"][3]["alignment"]["letters"], rel=1e-9)


@pytest.mark.parametrize("given", [{"save_statistics": "x"}, {"checkpoint_dir": "x"}, {"preflight_only": True}])
def test_settings_that_do_not_go_with_loading_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"leave out {next(iter(given))}"):
        RegMeanAlgorithm(load_statistics="kept", **given)


def test_other_experts_tasks_and_layers_are_refused(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other weights of 'digits', 'letters', 'textures'"):
        run(pool=models(seed=1), load_statistics=str(kept))
    with pytest.raises(ValueError, match=r"no task 'icons'; they have \['digits', 'letters', 'textures'\]"):
        run(pool=models(num_tasks=4), load_statistics=str(kept))
    run(coverage="mlp", save_statistics=str(tmp_path / "mlp"))
    with pytest.raises(ValueError, match=r"measured at coverage=mlp and have no layer .*q_proj"):
        run(load_statistics=str(tmp_path / "mlp"))


def test_the_same_weights_with_another_activation_are_refused(kept: Path) -> None:
    experts = pico_experts(hidden_act="quick_gelu")
    with pytest.raises(ValueError, match=r"measured with activation gelu.*, these experts run with quick_gelu"):
        run(pool=experts, load_statistics=str(kept))


def test_a_folder_without_statistics_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no statistics\.json. Make it by save_statistics"):
        run(load_statistics=str(tmp_path))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"identity": 3}', '{"identity": {}, "tasks": [], "groups": []}']
)
def test_a_damaged_manifest_is_an_error(content: str, kept: Path) -> None:
    (kept / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=r"statistics\.json is damaged"):
        run(load_statistics=str(kept))


@pytest.mark.parametrize("damage", ["cut", "emptied", "flipped", "exchanged", "gone"])
def test_damaged_statistics_are_an_error_that_names_the_file(damage: str, kept: Path) -> None:
    path = kept / "sums-0003-001.safetensors"
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-40])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "flipped":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif damage == "exchanged":
        shutil.copy(kept / "sums-0002-001.safetensors", path)  # of another width
    else:
        path.unlink()
    with pytest.raises(ValueError, match=r"sums-0003-001\.safetensors"):
        run(load_statistics=str(kept))


def test_statistics_of_another_merge_are_not_overwritten(kept: Path) -> None:
    with pytest.raises(ValueError, match=r"holds those of another merge: .*seed is 0 there and 1 here"):
        run(seed=1, save_statistics=str(kept))
    (kept / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"has norms-|has sums-.* but no statistics\.json"):
        run(save_statistics=str(kept))


def test_a_full_disk_costs_the_statistics_and_not_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealed, "save_file", failing)
    found, report = run(save_statistics=str(tmp_path))
    monkeypatch.undo()
    check_equal(run()[0], found)
    assert any("not complete" in warning and "No space left" in warning for warning in report["warnings"])
    with pytest.raises(ValueError, match="are not complete: 'sums-0000-000"):
        run(load_statistics=str(tmp_path))


def test_a_resumed_merge_measures_again_what_has_no_statistics(tmp_path: Path) -> None:
    settings = {"checkpoint_dir": str(tmp_path / "checkpoint"), "save_statistics": str(tmp_path / "kept")}
    expected, _ = run(**settings)
    (tmp_path / "kept" / "sums-0002-001.safetensors").unlink()
    found, _ = run(**settings)
    check_equal(expected, found)
    check_equal(expected, run(load_statistics=str(tmp_path / "kept"))[0])


def test_a_preflight_counts_the_statistics_and_writes_none(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    algorithm = CrossMeanAlgorithm(**SETTINGS, save_statistics=str(folder), preflight_only=True)
    algorithm.run(models(), pico_calibration())
    assert not folder.exists()
    (size,) = algorithm.report["preflight"]["disk_gib"].values()
    run(CrossMeanAlgorithm, save_statistics=str(folder))
    tensors = 0
    for path in folder.glob("sums-*"):
        with safe_open(path, framework="pt") as file:
            tensors += sum(file.get_tensor(name).numel() * 4 for name in file.keys())
    assert round(size * 2**30) == tensors


@pytest.mark.float32
def test_the_documented_commands_keep_statistics_and_merge_from_them(tmp_path: Path) -> None:
    pools = ["method=crossmean/lot", "modelpool=mini-clip_TA8", "fast_dev_run=true"]
    succeeded(fusion_bench(*pools, "method.save_statistics=statistics", cwd=tmp_path))
    assert len(list((tmp_path / "statistics").glob("sums-*.safetensors"))) == 12 * 8
    again = ["method.load_statistics=statistics", "method.task_weights={mini-mnist: 2.0}"]
    again += ["taskpool=mini-clip_TA8", "path.output_dir=again"]
    succeeded(fusion_bench(*pools, *again, cwd=tmp_path))
    report = read_json(log_folder(tmp_path / "again") / "crossmean_report.json")
    assert report["statistics"]["loaded_from"] == "statistics"
    assert report["settings"]["task_weights"] == {"mini-mnist": 2.0}
    assert set(report["num_inputs_used"].values()) == {8}


def test_differences_are_named_with_both_values() -> None:
    assert list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}, "d": 3})) == [
        "a.c is 2 there and None here",
        "d is None there and 3 here",
    ]
    assert differing({"a": 1}, {"a": 1}) == ""
    assert differing(dict.fromkeys("abcdef", 1), dict.fromkeys("abcdef", 2)).endswith(" here and more")
