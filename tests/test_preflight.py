"""What a preflight says, that it merges nothing, and that its estimates follow what they depend on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cli import fusion_bench, log_folder, read_json, succeeded
from pico import PicoMLP, pico_calibration, pico_clip, pico_experts, vectors

from fusion_bench_crossmean import AlignmentCriterionAnalyzer, CrossMeanAlgorithm, RegMeanAlgorithm, preflight
from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.method.verdict import in_words
from fusion_bench_crossmean.preflight import Work, duplicates, expected_seconds, measure, short_of_disk
from fusion_bench_crossmean.weights import tensors_of

pytest_plugins = ("cli",)

SETTINGS: dict[str, Any] = {"coverage": "full", "num_calibration_samples": 24, "batch_size": 4, "preflight_only": True}


@pytest.fixture(autouse=True)
def _no_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearSystem, "solve", lambda *_: pytest.fail("a preflight solves nothing"))


@pytest.mark.parametrize("method", [CrossMeanAlgorithm, RegMeanAlgorithm, AlignmentCriterionAnalyzer])
def test_a_preflight_says_what_a_run_would_take_and_merges_nothing(
    method: type, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "report.json"
    algorithm = method(**SETTINGS, report_path=str(path))
    with caplog.at_level(logging.INFO):
        assert algorithm.run(pico_experts(), pico_calibration()) is None
    found = json.loads(path.read_text())["preflight"]
    assert found == json.loads(json.dumps(algorithm.report["preflight"]))
    assert found["warnings"] == []
    assert found["seconds"] > 0
    assert 0 < found["peak_memory_gib"] < 100
    assert "all checks passed" in caplog.text
    for line in found["in_words"]:
        assert line in caplog.text
    assert "in 8 groups are solved, from 24 inputs per task" in caplog.text
    assert algorithm.report["num_inputs_used"] == dict.fromkeys(pico_experts(), 4), "one batch per task"


def test_the_checks_of_a_run_are_those_of_its_preflight() -> None:
    experts = pico_experts()
    experts["letters"] = pico_clip("quick_gelu")
    with pytest.raises(ValueError, match="'quick_gelu' in 'letters'"):
        CrossMeanAlgorithm(**SETTINGS).run(experts, pico_calibration())
    with pytest.raises(ValueError, match="24 were asked for"):
        CrossMeanAlgorithm(**SETTINGS).run(pico_experts(), pico_calibration(num_samples=23))


def test_identical_experts_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    experts = pico_experts()
    experts["letters"] = experts["digits"]
    algorithm = CrossMeanAlgorithm(**SETTINGS)
    algorithm.run(experts, pico_calibration())
    assert algorithm.report["preflight"]["warnings"] == ["The models 'digits', 'letters' are the same, bit for bit."]
    assert "are the same, bit for bit" in caplog.text
    assert duplicates({"a": "x", "b": "y"}) == []


def test_what_is_written_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = CrossMeanAlgorithm(**SETTINGS, checkpoint_dir=str(tmp_path / "checkpoint"))
    algorithm.run(pico_experts(), pico_calibration())
    found = algorithm.report["preflight"]
    weights = [t for name, t in tensors_of(pico_clip()).items() if ".layers." in name and t.ndim == 2]
    assert found["disk_gib"] == {str(tmp_path / "checkpoint"): sum(t.nbytes for t in weights) / 2**30}
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
    algorithm.run(pico_experts(), pico_calibration())
    assert not (tmp_path / "checkpoint").exists(), "a preflight begins no checkpoint, which the merge would refuse"
    (warning,) = algorithm.report["preflight"]["warnings"]
    assert "checkpoint needs 0.00 GiB, its disk has 0.00 GiB left" in warning
    assert short_of_disk({tmp_path / "not" / "there": 100}) == []
    assert len(short_of_disk({tmp_path / "not" / "there": 101})) == 1


def test_rows_are_counted_and_a_forward_is_timed() -> None:
    network, inputs = PicoMLP(), vectors()["digits"]
    groups = [LayerGroup((name,)) for name, m in network.named_modules() if isinstance(m, torch.nn.Linear)]
    work = measure(network, Batch(args=(inputs,)), groups)
    assert work.rows == [len(inputs)] * len(groups)
    assert work.seconds > 0
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_the_expected_time_follows_what_it_depends_on() -> None:
    tensors = {"a.weight": torch.empty(30, 10)}
    group, work = LayerGroup(("a",)), Work(2.0, [100])

    def seconds(**changes: Any) -> float:
        settings = {"num_batches": 3.0, "num_points": 2, "rate": 1e30, "replays": False} | changes
        return expected_seconds(work, [group], tensors, **settings)

    assert seconds() == pytest.approx(12)
    assert seconds(replays=True) == pytest.approx(24)
    assert seconds(num_batches=6.0) == pytest.approx(24)
    statistics, solution = 100 * (10**2 + 2 * 10**2), 2 * (2 * 10**3 / 3 + 2 * 10**2 * 30)
    overhead = preflight.STATISTICS_OVERHEAD
    assert seconds(rate=1.0) == pytest.approx(12 + 3 * overhead * statistics + solution)


def test_times_are_told_in_words() -> None:
    assert in_words(42.3) == "42 seconds"
    assert in_words(4000.0) == "67 minutes"


@pytest.mark.float32
def test_a_preflight_on_the_command_line_saves_no_model(tmp_path: Path) -> None:
    settings = ["method.preflight_only=true", "merged_model_save_path='{log_dir}/merged'", "taskpool=mini-clip_TA8"]
    output = succeeded(fusion_bench("method=crossmean", "modelpool=mini-clip_TA8", *settings, cwd=tmp_path))
    assert "Preflight of CrossMeanAlgorithm: all checks passed" in output
    logs = log_folder(tmp_path / "outputs")
    found = read_json(logs / "crossmean_report.json")["preflight"]
    assert 0 < found["disk_gib"][str(logs)] < 0.1
    assert not (logs / "merged").exists()
