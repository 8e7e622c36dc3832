"""rho and prefix drift: definition, properties and what the analyzer hands out."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from pico import PicoMLP, experts_of, hooks_of, pico_calibration, pico_clip, pico_experts, vectors
from tolerances import SAME, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import AlignmentCriterionAnalyzer, RegMeanAlgorithm
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.criterion import Criterion, LayerAlignment, advice, measure
from fusion_bench_crossmean.linear_system import LinearSystem

N = 24


def analyzed(experts: Any, inputs: Any, **settings: Any) -> dict[str, Any]:
    analyzer = AlignmentCriterionAnalyzer(**{"num_calibration_samples": N, "batch_size": 7} | settings)
    assert analyzer.run(experts, inputs) is None
    return analyzer.report


@pytest.mark.parametrize("hidden_act", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_alignment_and_drift_equal_a_direct_computation(coverage: str, hidden_act: str) -> None:
    """From whole forwards of the averaged model and the experts; q, k and v count once."""
    experts, inputs = pico_experts(hidden_act=hidden_act), pico_calibration()
    report = analyzed(experts, inputs, coverage=coverage)
    averaged = oracles.average(experts)
    groups = oracles.clip_groups(experts["digits"], coverage)
    assert [set(layer["layers"]) for layer in report["layers"]] == [set(group) for group in groups]
    terms, drifts = {}, {}
    for layer, group in zip(report["layers"], groups, strict=True):
        for task, expert in experts.items():
            left = oracles.layer_inputs(expert, averaged, group[0], inputs[task])
            right = oracles.layer_inputs(expert, expert.state_dict(), group[0], inputs[task])
            terms[layer["name"], task] = oracles.alignment(left, right)
            drifts[layer["name"], task] = float((left - right).norm() / right.norm())
            assert layer["alignment"][task] == pytest.approx(terms[layer["name"], task], abs=1e-12)
            assert layer["prefix_drift"][task] == pytest.approx(drifts[layer["name"], task], abs=1e-9)
    assert len(terms) == len(experts) * {"mlp": 4, "full": 8}[coverage]
    assert report["rho"] == pytest.approx(sum(terms.values()) / len(terms), abs=1e-12)
    assert report["prefix_drift"] == pytest.approx(sum(drifts.values()) / len(drifts), abs=1e-9)
    for task in experts:
        mine = [value for (_, owner), value in terms.items() if owner == task]
        assert report["per_task"][task]["alignment"] == pytest.approx(sum(mine) / len(mine), abs=1e-12)
    assert report["rho"] < 0.99
    assert report["settings"]["coverage"] == coverage


def test_no_alignment_is_above_one() -> None:
    for seed in range(3):
        report = analyzed(pico_experts(seed=seed, spread=0.1 + 0.4 * seed), pico_calibration(seed=seed))
        for layer in report["layers"]:
            assert all(value <= 1 + 1e-12 for value in layer["alignment"].values())


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_identical_experts_have_alignment_one_and_no_drift(coverage: str) -> None:
    expert = pico_clip(seed=3)
    report = analyzed(
        {task: copy.deepcopy(expert) for task in ("digits", "letters")}, pico_calibration(), coverage=coverage
    )
    assert report["rho"] == pytest.approx(1, abs=1e-12)
    assert report["prefix_drift"] < 1e-7


def test_alignment_falls_and_drift_grows_with_the_spread_of_the_experts() -> None:
    reports = [analyzed(pico_experts(spread=spread), pico_calibration()) for spread in (0.05, 0.2, 0.5)]
    assert reports[0]["rho"] > reports[1]["rho"] > reports[2]["rho"]
    assert reports[0]["prefix_drift"] < reports[1]["prefix_drift"] < reports[2]["prefix_drift"]


def test_alignment_does_not_depend_on_the_scale_of_the_inputs() -> None:
    """The first layer of a linear network sees its inputs times any factor on either side."""

    class Scaled(PicoMLP):
        def __init__(self, seed: int, scale: float = 1.0) -> None:
            super().__init__(depth=1, seed=seed)
            self.scale = nn.Parameter(torch.tensor([1.0 + seed]))
            self.factor = scale

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp[0](x * self.scale * self.factor)

    reports = [analyzed(experts_of(lambda seed, f=f: Scaled(seed, f)), vectors()) for f in (1.0, 1e4)]
    assert reports[0]["rho"] == pytest.approx(1, abs=1e-12)
    assert reports[0]["rho"] == pytest.approx(reports[1]["rho"], abs=1e-12)
    assert reports[0]["prefix_drift"] > 0.1
    # One expert has the mean's scale and no drift: a difference of squares, whose root leaves 1e-8 of their rounding.
    assert reports[0]["prefix_drift"] == pytest.approx(reports[1]["prefix_drift"], abs=1e-7)


def test_the_batch_size_and_the_order_of_the_tasks_do_not_matter() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    first = analyzed(experts, inputs)
    second = analyzed(dict(reversed(experts.items())), inputs, batch_size=24)
    assert first["rho"] == pytest.approx(second["rho"], abs=1e-12)
    assert first["prefix_drift"] == pytest.approx(second["prefix_drift"], abs=1e-9)


def test_the_alignment_of_regmeans_report_is_that_of_its_own_statistics() -> None:
    method = RegMeanAlgorithm(num_calibration_samples=N)
    method.run(pico_experts(), pico_calibration())
    assert {value for layer in method.report["layers"] for value in layer["alignment"].values()} == {1.0}


def test_nothing_is_solved_and_each_model_passes_over_the_inputs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Counted(PicoMLP):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    monkeypatch.setattr(LinearSystem, "solve", lambda *_, **__: pytest.fail("something was solved"))
    experts, inputs = experts_of(lambda seed: Counted(seed=seed, depth=5)), vectors()
    analyzed(experts, inputs, batch_size=8)
    assert sum(calls) == 2 * 3 * N + 8  # averaged model and experts, and the probe's one batch
    assert not any(list(hooks_of(expert)) for expert in experts.values())


def test_the_averaged_model_is_returned_where_asked_for() -> None:
    experts = pico_experts()
    analyzer = AlignmentCriterionAnalyzer(num_calibration_samples=N, return_averaged_model=True)
    averaged = analyzer.run(experts, pico_calibration())
    assert state_error(averaged.state_dict(), oracles.average(experts)) < SAME
    with pytest.raises(ValueError, match="return_averaged_model must be true or false, not 'yes'"):
        AlignmentCriterionAnalyzer(return_averaged_model="yes")


def test_the_analyzer_writes_json_and_figure(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rho.json"
    report = analyzed(pico_experts(), pico_calibration(), report_path=str(path))
    written = json.loads(path.read_text())
    assert written["rho"] == report["rho"]
    assert written["method"] == "AlignmentCriterionAnalyzer"
    assert written["advice"].startswith(f"rho = {report['rho']:.3f}")
    assert len(written["layers"]) == 4
    figures = [entry for entry in path.parent.iterdir() if entry.suffix == ".png"]
    assert len(figures) == 1
    assert figures[0].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(list(path.parent.iterdir())) == 2


def test_without_an_output_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    analyzed(pico_experts(), pico_calibration())
    assert not list(tmp_path.iterdir())


def layer(name: str, alignment: dict[str, float], drift: dict[str, float]) -> LayerAlignment:
    return LayerAlignment(LayerGroup((name,)), alignment, drift)


def test_rho_is_the_mean_over_layer_groups_and_experts() -> None:
    criterion = Criterion(
        [
            layer("a", {"x": 1.0, "y": 0.5}, {"x": 0.0, "y": 1.0}),
            layer("b", {"x": 0.7, "y": 0.2}, {"x": 0.4, "y": 0.6}),
        ]
    )
    assert criterion.rho == pytest.approx(0.6)
    assert criterion.prefix_drift == pytest.approx(0.5)
    assert criterion.per_task()["y"] == pytest.approx({"alignment": 0.35, "prefix_drift": 0.8})


def test_a_layer_whose_inputs_are_all_zero_does_not_count() -> None:
    zero, one = torch.zeros(4, 3), torch.randn(4, 3)
    walk = [
        (LayerGroup(("a",)), {"x": [{0.0: zero, 1.0: zero.clone()}]}),
        (LayerGroup(("b",)), {"x": [{0.0: one, 1.0: 2 * one}]}),
    ]
    criterion = measure(walk)
    assert math.isnan(criterion.layers[0].alignment["x"])
    assert criterion.rho == pytest.approx(1, abs=1e-12)
    assert criterion.prefix_drift == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("rho", "method"),
    [(0.5, "speaks for CrossMean"), (0.93, "CrossMean with a look at Progressive"), (0.99, "RegMean is enough")],
)
def test_advice_names_the_value_and_a_method(rho: float, method: str) -> None:
    assert f"rho = {rho:.3f}" in advice(rho)
    assert method in advice(rho)


def test_inputs_that_are_not_finite_are_an_error_that_names_layer_and_task() -> None:
    """Else they would be left out of the mean, and the advice given on what is left (the averaged model overflows)."""
    experts, inputs = pico_experts(), pico_calibration()
    with torch.no_grad():
        experts["letters"].get_submodule(
            next(name for name, _ in experts["letters"].named_modules() if name.endswith("layers.0.mlp.fc1"))
        ).weight.fill_(1e300)
    with pytest.raises(
        ArithmeticError, match=r"Layer '.*layers.0.mlp.fc2': the inputs of task 'digits' hold NaN or inf"
    ):
        analyzed(experts, inputs)


def test_there_is_no_advice_on_nothing() -> None:
    assert "could not be measured" in advice(float("nan"))
    assert "RegMean" not in advice(float("nan"))
