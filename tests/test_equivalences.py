"""Properties across modules: whole merges against the oracles and against each other."""

from __future__ import annotations

import copy
from typing import Any

import oracles
import pytest
import torch
from pico import PicoMLP, experts_of, pico_calibration, pico_clip, pico_experts, vectors
from tolerances import FAR, FLOAT32, SAME, UNRIDGED, relative_error, state_error
from torch import Tensor, nn

import fusion_bench_crossmean.linear_system as linear_system
from fusion_bench_crossmean import (
    CrossMeanAlgorithm,
    CrossStatisticAlgorithm,
    ProgressiveRegMeanAlgorithm,
    RegMeanAlgorithm,
)

N = 24
SETTINGS = {"num_calibration_samples": N, "batch_size": 10}
COVERAGES = ("mlp", "full")
METHODS = (CrossMeanAlgorithm, CrossStatisticAlgorithm, ProgressiveRegMeanAlgorithm, RegMeanAlgorithm)
#: Method -> (path points of the right side, path point of the left side).
PAIRINGS = {
    CrossMeanAlgorithm: ((0, 0.5, 1), 0),
    CrossStatisticAlgorithm: ((1,), 0),
    ProgressiveRegMeanAlgorithm: ((0,), 0),
    RegMeanAlgorithm: ((1,), 1),
}


def merge(method: type, experts: Any, inputs: Any, **settings: Any) -> dict[str, Tensor]:
    return method(**SETTINGS | settings).run(experts, inputs).state_dict()


def solved_layers(experts: dict[str, nn.Module], coverage: str) -> list[str]:
    groups = oracles.clip_groups(next(iter(experts.values())), coverage)
    return [f"{name}.weight" for group in groups for name in group]


@pytest.mark.parametrize("path_points", [(0,), (0, 0.5, 1), (1,)], ids=str)
@pytest.mark.parametrize("hidden_act", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("coverage", COVERAGES)
def test_paused_equals_whole_network(coverage: str, hidden_act: str, path_points: tuple[float, ...]) -> None:
    experts, inputs = pico_experts(hidden_act=hidden_act), pico_calibration()
    ours = merge(CrossMeanAlgorithm, experts, inputs, coverage=coverage, path_points=path_points)
    groups = oracles.clip_groups(experts["digits"], coverage)
    assert state_error(ours, oracles.whole_network(experts, inputs, groups, path_points=path_points)) < SAME


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("coverage", COVERAGES)
def test_every_method_equals_its_row_of_the_table(method: type, coverage: str) -> None:
    """Two experts of three blocks, another stabilisation than the default."""
    experts, inputs = pico_experts(2, seed=1, num_layers=3), pico_calibration(["digits", "letters"], seed=1)
    ours = merge(method, experts, inputs, coverage=coverage, reduce_non_diagonal_ratio=0.7, relative_ridge=1e-3)
    points, left = PAIRINGS[method]
    groups = oracles.clip_groups(experts["digits"], coverage)
    theirs = oracles.whole_network(experts, inputs, groups, path_points=points, left_point=left, ratio=0.7, ridge=1e-3)
    assert state_error(ours, theirs) < SAME


@pytest.mark.parametrize("coverage", COVERAGES)
def test_the_methods_differ_from_each_other(coverage: str) -> None:
    """Otherwise the tests above could not tell them apart."""
    experts, inputs = pico_experts(), pico_calibration()
    merged = [merge(method, experts, inputs, coverage=coverage) for method in METHODS]
    last = solved_layers(experts, coverage)[-1]
    for index, ours in enumerate(merged):
        for theirs in merged[:index]:
            assert relative_error(ours[last], theirs[last]) > FAR


@pytest.mark.parametrize("path_points", [(0, 0.5, 1), (1,)], ids=str)
@pytest.mark.parametrize("coverage", COVERAGES)
def test_swapped_cross_statistic_is_caught(
    coverage: str, path_points: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    groups = oracles.clip_groups(experts["digits"], coverage)
    right = oracles.whole_network(experts, inputs, groups, path_points=path_points)
    accumulate = linear_system.accumulate

    def swapped(pairs: Any, weight: Tensor, *_: Any, **__: Any) -> linear_system.PairedStatistics:
        statistics = accumulate(pairs, weight)  # without a number of batches C is formed
        assert statistics.bilinear is not None
        statistics.bilinear = statistics.bilinear.T
        statistics.product = statistics.bilinear @ weight.T
        return statistics

    monkeypatch.setattr(linear_system, "accumulate", swapped)
    wrong = merge(CrossMeanAlgorithm, experts, inputs, coverage=coverage, path_points=path_points)
    errors = [relative_error(wrong[name], right[name]) for name in solved_layers(experts, coverage)]
    assert min(errors) > 0.5
    theirs = oracles.whole_network(experts, inputs, groups, path_points=path_points, swapped=True)
    assert state_error(wrong, theirs) < SAME


@pytest.mark.parametrize("coverage", COVERAGES)
def test_path_point_zero_alone_is_progressive_regmean(coverage: str) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(CrossMeanAlgorithm, experts, inputs, coverage=coverage, path_points=(0,))
    theirs = merge(ProgressiveRegMeanAlgorithm, experts, inputs, coverage=coverage)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("coverage", COVERAGES)
def test_path_point_one_alone_is_the_cross_statistic(coverage: str) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(CrossMeanAlgorithm, experts, inputs, coverage=coverage, path_points=(1,))
    theirs = merge(CrossStatisticAlgorithm, experts, inputs, coverage=coverage)
    assert state_error(ours, theirs) < SAME


@pytest.mark.parametrize("coverage", COVERAGES)
def test_expert_inputs_for_merged_inputs_is_regmean(coverage: str) -> None:
    class ExpertInputs(CrossMeanAlgorithm):
        def input_pair(self, inputs: dict[float, Tensor]) -> tuple[Tensor, Tensor]:
            return super().input_pair(dict.fromkeys(inputs, inputs[1]))

    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(ExpertInputs, experts, inputs, coverage=coverage)
    assert state_error(ours, merge(RegMeanAlgorithm, experts, inputs, coverage=coverage)) < SAME


def test_the_order_of_the_path_points_does_not_matter() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(CrossMeanAlgorithm, experts, inputs, path_points=(1, 0.25, 0))
    assert state_error(ours, merge(CrossMeanAlgorithm, experts, inputs, path_points=(0, 0.25, 1))) < SAME


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("coverage", COVERAGES)
@pytest.mark.parametrize("num_tasks", [1, 3])
def test_identical_experts_return_the_expert(method: type, coverage: str, num_tasks: int) -> None:
    expert = pico_clip(seed=5)
    experts = {task: copy.deepcopy(expert) for task in ("digits", "letters", "textures")[:num_tasks]}
    ours = merge(method, experts, pico_calibration(experts), coverage=coverage, relative_ridge=0.0)
    assert state_error(ours, expert.state_dict()) < UNRIDGED


@pytest.mark.parametrize("method", METHODS)
def test_the_ridge_pulls_the_weight_of_identical_experts_to_zero(method: type) -> None:
    expert = pico_clip(seed=5)
    ours = merge(method, {"digits": expert}, pico_calibration(["digits"]), relative_ridge=1e-1)
    for name in solved_layers({"digits": expert}, "mlp"):
        assert 0.3 < float(ours[name].norm() / expert.state_dict()[name].norm()) < 0.97


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_the_tasks_does_not_matter(method: type) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(method, experts, inputs)
    theirs = merge(method, dict(reversed(experts.items())), dict(reversed(inputs.items())))
    assert state_error(theirs, ours) < SAME


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch_size", [5, 24, 100])
def test_the_split_into_batches_does_not_matter(method: type, batch_size: int) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(method, experts, inputs, batch_size=batch_size)
    assert state_error(ours, merge(method, experts, inputs, batch_size=8)) < SAME


def test_the_batch_size_does_not_change_which_tokens_are_dropped() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(CrossMeanAlgorithm, experts, inputs, token_dropout=0.4, batch_size=5)
    assert state_error(ours, merge(CrossMeanAlgorithm, experts, inputs, token_dropout=0.4, batch_size=24)) < SAME


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_twice_is_bitwise_equal(method: type) -> None:
    experts, inputs = pico_experts(), pico_calibration(num_samples=40)
    first, second = (merge(method, experts, inputs, token_dropout=0.2, seed=3) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = merge(method, experts, inputs, token_dropout=0.2, seed=4)
    name = solved_layers(experts, "mlp")[0]
    assert relative_error(first[name], other[name]) > 1e-4


@pytest.mark.parametrize("coverage", COVERAGES)
def test_the_gradient_of_the_unreduced_objective_vanishes_at_the_merged_weight(coverage: str) -> None:
    """``sum_t ||X~_t W' - X_t W_t'||^2`` of the cross statistic, by autograd, layer by layer in the final network."""
    experts, inputs = pico_experts(), pico_calibration()
    free = {"reduce_non_diagonal_ratio": 1.0, "relative_ridge": 0.0}
    ours = merge(CrossStatisticAlgorithm, experts, inputs, coverage=coverage, **free)
    network = experts["digits"]
    for group in oracles.clip_groups(network, coverage):
        for name in group:
            weight = ours[f"{name}.weight"].clone().requires_grad_()
            loss, scale = torch.zeros(()), 0.0
            for task, expert in experts.items():
                left = oracles.layer_inputs(network, ours, name, inputs[task])
                state = expert.state_dict()
                target = oracles.layer_inputs(network, state, name, inputs[task]) @ state[f"{name}.weight"].T
                loss = loss + (left @ weight.T - target).square().sum()
                scale += 2 * float((left.T @ target).norm())
            loss.backward()
            assert loss.item() > 1e-3  # the experts cannot all be met: the minimum is a compromise
            assert float(weight.grad.norm()) < UNRIDGED * scale


@pytest.mark.parametrize("coverage", COVERAGES)
def test_unreduced_cross_statistic_solves_the_stacked_least_squares_problem(coverage: str) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    free = {"reduce_non_diagonal_ratio": 1.0, "relative_ridge": 0.0}
    ours = merge(CrossStatisticAlgorithm, experts, inputs, coverage=coverage, **free)
    network = experts["digits"]
    for group in oracles.clip_groups(network, coverage):
        for name in group:
            states = {task: expert.state_dict() for task, expert in experts.items()}
            theirs = oracles.least_squares(
                [oracles.layer_inputs(network, ours, name, inputs[task]) for task in experts],
                [oracles.layer_inputs(network, states[task], name, inputs[task]) for task in experts],
                [states[task][f"{name}.weight"] for task in experts],
            )
            assert relative_error(ours[f"{name}.weight"], theirs) < UNRIDGED


def test_what_no_layer_solves_is_the_mean_of_the_experts() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours, mean = merge(CrossMeanAlgorithm, experts, inputs, coverage="full"), oracles.average(experts)
    solved = set(solved_layers(experts, "full"))
    assert len(solved) == 12
    for name, tensor in ours.items():
        if name in solved:
            assert relative_error(tensor, mean[name]) > 0.01
        elif tensor.is_floating_point():
            assert relative_error(tensor, mean[name]) < SAME


def test_parameters_that_all_experts_share_stay_bit_for_bit() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    reference = copy.deepcopy(experts["digits"].state_dict())
    shared = [name for name in reference if "embed" in name or "layernorm" in name]
    assert len(shared) >= 4
    for expert in experts.values():
        for name in shared:
            expert.state_dict()[name].copy_(reference[name] * 0.1)
    expected = {name: experts["digits"].state_dict()[name].clone() for name in shared}
    ours = merge(CrossMeanAlgorithm, experts, inputs)
    assert all(torch.equal(ours[name], expected[name]) for name in shared)


@pytest.mark.parametrize("method", METHODS)
def test_task_weights_scale_the_statistics_of_a_task(method: type) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    weights = {"digits": 3.0, "letters": 0.25}
    ours = merge(method, experts, inputs, task_weights=weights)
    points, left = PAIRINGS[method]
    groups = oracles.clip_groups(experts["digits"], "mlp")
    theirs = oracles.whole_network(experts, inputs, groups, path_points=points, left_point=left, weights=weights)
    assert state_error(ours, theirs) < SAME
    assert state_error(ours, merge(method, experts, inputs)) > 0.01


@pytest.mark.parametrize("method", METHODS)
def test_scaling_all_task_weights_changes_nothing(method: type) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(method, experts, inputs, task_weights=dict.fromkeys(experts, 7.5))
    assert state_error(ours, merge(method, experts, inputs)) < SAME


def test_a_task_weight_of_zero_takes_the_task_out_of_every_system() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(RegMeanAlgorithm, experts, inputs, task_weights={"textures": 0.0})
    two = {task: experts[task] for task in ("digits", "letters")}
    theirs = merge(RegMeanAlgorithm, two, inputs)
    for name in solved_layers(experts, "mlp"):
        assert relative_error(ours[name], theirs[name]) < SAME


@pytest.mark.parametrize("method", METHODS)
def test_sum_and_mean_agree_at_equal_token_counts(method: type) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(method, experts, inputs, task_weighting="mean")
    assert state_error(ours, merge(method, experts, inputs, task_weighting="sum")) < SAME


@pytest.mark.float32
@pytest.mark.parametrize("method", METHODS)
def test_float32_experts_agree_with_float64_ones(method: type) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(method, experts, inputs)
    assert {tensor.dtype for tensor in ours.values() if tensor.is_floating_point()} == {torch.float32}
    experts = {task: copy.deepcopy(expert).double() for task, expert in experts.items()}
    theirs = merge(method, experts, {task: x.double() for task, x in inputs.items()})
    assert state_error(ours, theirs) < FLOAT32


@pytest.mark.parametrize("depth", [1, 6])
def test_any_depth_works_on_plain_modules_and_vectors(depth: int) -> None:
    experts, inputs = experts_of(lambda seed: PicoMLP(depth=depth, seed=seed)), vectors()
    ours = merge(CrossMeanAlgorithm, experts, inputs)
    theirs = oracles.whole_network(experts, inputs, [[f"mlp.{i}"] for i in range(depth)], path_points=(0, 0.5, 1))
    assert state_error(ours, theirs) < SAME
