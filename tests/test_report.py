"""The record of a run: its content, and that it is written whole or not at all."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import PicoMLP, experts_of, pico_calibration, pico_clip, pico_experts, vectors
from torch import Tensor

from fusion_bench_crossmean import CrossMeanAlgorithm, RegMeanAlgorithm, __version__
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.criterion import Criterion, LayerAlignment
from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.plots import plot_alignment
from fusion_bench_crossmean.report import as_json, check_writable, mean, peak_memory, table, write_json, written_whole

N = 24


def merged(path: Path, experts: Any = None, inputs: Any = None, **settings: Any) -> dict[str, Any]:
    method = CrossMeanAlgorithm(**{"num_calibration_samples": N, "report_path": str(path)} | settings)
    method.run(pico_experts() if experts is None else experts, pico_calibration() if inputs is None else inputs)
    written = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert written == json.loads(json.dumps(as_json(method.report)))
    return written


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_the_report_states_settings_inputs_and_every_layer(coverage: str, tmp_path: Path) -> None:
    report = merged(tmp_path / "report.json", coverage=coverage, task_weights={"digits": 2.0}, seed=5)
    assert report["method"] == "CrossMeanAlgorithm"
    assert set(report["settings"]) == set(CrossMeanAlgorithm.setting_names())
    assert report["settings"]["path_points"] == [0.0, 0.5, 1.0]
    assert report["settings"]["task_weights"] == {"digits": 2.0}
    assert report["settings"]["seed"] == 5
    assert torch.__version__.startswith(report["versions"]["torch"])
    assert report["versions"]["fusion-bench-crossmean"] == __version__
    assert report["tasks"] == ["digits", "letters", "textures"]
    assert report["num_covered_layers"] == {"mlp": 4, "full": 12}[coverage]
    assert sum(len(layer["layers"]) for layer in report["layers"]) == report["num_covered_layers"]
    assert list(report["calibration_indices"]) == report["tasks"]
    assert all(sorted(drawn) == list(range(N)) for drawn in report["calibration_indices"].values())
    for layer in report["layers"]:
        assert layer["tokens"] == 3 * N * 5
        assert layer["rank"] == layer["features"] == (32 if layer["name"].endswith("fc2") else 16)
        assert 0 < layer["relative_pivot"] <= 1
        assert layer["relative_ridge"] == 1e-4
        assert 0 < layer["ridge"]
        assert 0 <= layer["relative_residual"] < 1e-10
        assert layer["dead_features"] == []
        assert set(layer["alignment"]) == set(layer["prefix_drift"]) == set(report["tasks"])
        assert all(drift > 0 for drift in layer["prefix_drift"].values())
    assert {"forwards", "solve", "statistics", "load experts"} <= set(report["seconds"])
    assert all(seconds >= 0 for seconds in report["seconds"].values())
    assert report["schedule"] == {"kind": "paused", "activation_store": "device"}
    assert report["peak_memory"]["resident_gib"] > 0


@pytest.mark.parametrize("hidden_act", ["gelu", "quick_gelu"])
def test_the_report_states_the_activation(hidden_act: str, tmp_path: Path) -> None:
    report = merged(tmp_path / "report.json", pico_experts(2, hidden_act=hidden_act))
    assert report["activation"].startswith(f"{hidden_act}, ")


def test_the_report_of_few_tokens_states_rank_ridge_and_residual(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """3 tokens, 16 features."""
    experts = experts_of(lambda seed: PicoMLP(width=16, depth=1, seed=seed), 1)
    (layer,) = merged(tmp_path / "report.json", experts, vectors(["digits"], width=16), num_calibration_samples=3)[
        "layers"
    ]
    assert (layer["tokens"], layer["rank"], layer["features"]) == (3, 3, 16)
    assert layer["relative_ridge"] == 1e-4
    assert layer["relative_residual"] < 1e-10
    assert "Layer 'mlp.0': 3 calibration tokens for 16 input features" in caplog.text


def test_the_report_states_dead_features_and_their_columns_are_the_experts_mean(tmp_path: Path) -> None:
    experts, inputs = experts_of(lambda seed: PicoMLP(seed=seed, depth=1)), vectors()
    for tensor in inputs.values():
        tensor[:, 4] = 0
    path = tmp_path / "report.json"
    method = CrossMeanAlgorithm(num_calibration_samples=N, report_path=str(path))
    weight = method.run(experts, inputs).mlp[0].weight
    (layer,) = json.loads(path.read_text())["layers"]
    assert layer["dead_features"] == [4]
    assert (layer["rank"], layer["features"]) == (5, 6)
    expected = torch.stack([expert.mlp[0].weight[:, 4] for expert in experts.values()]).mean(0)
    assert torch.allclose(weight[:, 4], expected, rtol=1e-14, atol=0)


def test_the_report_states_a_ridge_that_had_to_grow(tmp_path: Path) -> None:
    experts, inputs = experts_of(lambda seed: PicoMLP(seed=seed, depth=1)), vectors()
    for tensor in inputs.values():
        tensor[:, 4] = tensor[:, 2]
    settings = {"reduce_non_diagonal_ratio": 1.0, "relative_ridge": 1e-18}
    (layer,) = merged(tmp_path / "report.json", experts, inputs, **settings)["layers"]
    assert layer["relative_ridge"] > 1e-17
    assert layer["rank"] == 5
    assert 0 < layer["relative_pivot"] < 1e-12


def test_a_second_run_has_a_report_of_its_own(tmp_path: Path) -> None:
    method = RegMeanAlgorithm(num_calibration_samples=N)
    experts, inputs = experts_of(lambda seed: PicoMLP(seed=seed)), vectors()
    method.run(experts, inputs)
    first = method.report
    method.run(dict(list(experts.items())[:2]), inputs)
    assert method.report["tasks"] == ["digits", "letters"]
    assert first["tasks"] == ["digits", "letters", "textures"]
    assert len(method.report["layers"]) == 3
    assert method.report["seconds"]["load experts"] < 60


def test_a_merge_that_fails_writes_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LinearSystem, fallback: Tensor) -> Any:
        raise ArithmeticError("on purpose")

    monkeypatch.setattr(LinearSystem, "solve", fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        merged(tmp_path / "report.json")
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_where_writing_fails_and_an_older_file_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with contextlib.suppress(ZeroDivisionError), written_whole(path) as temporary:
        temporary.write_text("half of the n")
        assert temporary.parent == path.parent
        assert path.read_text() == "old"
        _ = 1 / 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "old"
    with path.open() as reader:  # whoever reads the old file meanwhile never meets a half-written one
        with written_whole(path) as temporary:
            temporary.write_text("new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_report_that_cannot_be_turned_into_json_leaves_nothing(tmp_path: Path) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_json(tmp_path / "report.json", {"x": Unprintable()})
    assert not list(tmp_path.iterdir())


def test_a_figure_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    criterion = Criterion([LayerAlignment(LayerGroup(("a",)), {"x": 0.5}, {"x": 0.1})])
    plot_alignment(criterion, tmp_path / "whole.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole.png"]
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(ZeroDivisionError):
        plot_alignment(criterion, tmp_path / "figure.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole.png"]


def test_numbers_that_are_not_finite_become_null() -> None:
    content = {"a": float("nan"), "b": [float("inf"), 1.5], 3: (1, None, True), "path": Path("x")}
    assert as_json(content) == {"a": None, "b": [None, 1.5], "3": [1, None, True], "path": "x"}
    json.dumps(as_json(content), allow_nan=False)


def test_checking_an_output_leaves_nothing_but_its_folder(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "report.json")
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


def test_an_output_below_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"file/report\.json' cannot be written"):
        check_writable(tmp_path / "file" / "report.json")


def test_a_table_has_its_numbers_to_the_right() -> None:
    lines = table(["layer", "rank"], [["encoder.fc1", 7], ["fc2", "1e-04"]]).splitlines()
    assert lines == ["layer         rank", "encoder.fc1      7", "fc2          1e-04"]


def test_the_mean_is_that_of_the_finite_values() -> None:
    assert mean([1.0, float("nan"), 2.0, float("inf")]) == 1.5
    assert str(mean([float("nan")])) == str(mean([])) == "nan"


def test_peak_memory_is_in_gib() -> None:
    assert 0.01 < peak_memory()["resident_gib"] < 1000


def test_the_log_names_every_layer_once_and_the_summary_is_a_table(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        CrossMeanAlgorithm(num_calibration_samples=N).run({"digits": pico_clip()}, pico_calibration(["digits"]))
    assert caplog.text.count("mlp.fc1") == 2
    assert "features  rank  dead" in caplog.text
