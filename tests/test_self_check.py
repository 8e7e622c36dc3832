"""After a merge: the merged model is run, and compared with the experts and with averaging."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import oracles
import pytest
import torch
from pico import PicoMLP, draw_weights, experts_of, pico_calibration, pico_experts, vectors
from torch import nn

from fusion_bench_crossmean import CrossMeanAlgorithm, RegMeanAlgorithm, self_check
from fusion_bench_crossmean.linear_system import DoubtfulSystemError, LinearSystem, Solution

SETTINGS: dict[str, Any] = {"coverage": "full", "num_calibration_samples": 16}


def cosine(network: nn.Module, expert: nn.Module, inputs: torch.Tensor) -> float:
    with torch.no_grad():
        one, other = (model.eval()(pixel_values=inputs)[0].flatten() for model in (network, expert))
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def test_the_report_says_how_near_the_merged_model_comes_to_the_experts() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    algorithm = CrossMeanAlgorithm(**SETTINGS)
    merged = algorithm.run(experts, inputs)
    averaged = copy.deepcopy(experts["digits"])
    averaged.load_state_dict(oracles.average(experts))
    for task, expert in experts.items():
        first = inputs[task][algorithm.report["calibration_indices"][task][:4]]
        found = algorithm.report["self_check"]
        assert found["merged"][task] == pytest.approx(cosine(merged, expert, first), abs=1e-6)
        assert found["averaged"][task] == pytest.approx(cosine(averaged, expert, first), abs=1e-6)
    assert algorithm.report["warnings"] == [], "it is nearer than averaging"


class Backwards(LinearSystem):
    """Solves for the opposite of what is asked for."""

    def solve(self, fallback: torch.Tensor) -> Solution:
        solution = super().solve(fallback)
        solution.weight.neg_()
        return solution


class BackwardsMerge(RegMeanAlgorithm):
    system = Backwards


def test_a_merge_that_is_worse_than_averaging_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    algorithm = BackwardsMerge(**SETTINGS)
    with caplog.at_level(logging.WARNING):
        algorithm.run(pico_experts(), pico_calibration())
    (warning,) = algorithm.report["warnings"]
    assert "features are farther from the experts' (cosine" in warning
    assert warning in caplog.text
    with pytest.raises(DoubtfulSystemError, match=r"farther from the experts.*strict=true"):
        BackwardsMerge(**SETTINGS, strict=True).run(pico_experts(), pico_calibration())


def test_a_merged_model_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    features, calls = self_check.features, []

    def overflowing(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        found = features(*arguments)
        return found / 0 if len(calls) > 6 else found  # three experts, three times averaged

    monkeypatch.setattr(self_check, "features", overflowing)
    with pytest.raises(ArithmeticError, match="puts out NaN or infinity on inputs of task 'digits'"):
        CrossMeanAlgorithm(**SETTINGS).run(pico_experts(), pico_calibration())


class Wordless(PicoMLP):
    """Its last word is none."""

    def forward(self, x: torch.Tensor) -> str:
        super().forward(x)
        return "nothing"


class Flat(PicoMLP):
    """Puts out tokens that are not those of the mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).unsqueeze(0)


@pytest.mark.parametrize(("kind", "is_compared"), [(Wordless, False), (Flat, True)])
def test_networks_with_unusual_outputs_merge(kind: type[PicoMLP], is_compared: bool) -> None:
    def make(seed: int) -> nn.Module:
        network = kind()
        network.load_state_dict(draw_weights(network, seed))
        return network

    algorithm = CrossMeanAlgorithm(**SETTINGS)
    algorithm.run(experts_of(make), vectors())
    found = algorithm.report["self_check"]["merged"].values()
    assert all(math.isfinite(value) == is_compared for value in found)
    assert algorithm.report["warnings"] == []
