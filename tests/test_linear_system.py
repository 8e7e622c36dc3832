"""The sums, their stabilisation and the solution, on matrices alone."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import FAR, FLOAT32, LSTSQ, SAME, relative_error
from torch import Tensor

from fusion_bench_crossmean.cholesky import numerical_rank
from fusion_bench_crossmean.linear_system import (
    DoubtfulSystemError,
    LinearSystem,
    SingularSystemError,
    Solution,
    relative_residual,
)
from fusion_bench_crossmean.paired_statistics import GRAM_BLOCK, accumulate, bilinear_is_cheaper, float32_products

FREE = {"reduce_non_diagonal_ratio": 1.0, "relative_ridge": 0.0}
seeds = st.integers(0, 2**32 - 1)
widths = st.integers(2, 12)
ratios = st.floats(0, 1)
ridges = st.floats(1e-6, 1e-1)
examples = settings(deadline=None, max_examples=30, derandomize=True)
#: After the ridge the condition number is at most 1e8: what two float64 routes can differ by.
RIDGED = 1e-8


def problem(
    seed: int, num_tasks: int = 3, width: int = 8, tokens: int = 60, **kwargs: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Left inputs, right inputs that drift from them by a linear map of the task, expert weights (5, width)."""
    generator = torch.Generator().manual_seed(seed)
    lefts, rights = oracles.drifting_inputs(num_tasks, width, tokens, generator, **kwargs)
    weights = [torch.randn(5, width, generator=generator, dtype=torch.float64) for _ in range(num_tasks)]
    return lefts, rights, weights


def solved(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Sequence[Tensor],
    factors: Sequence[float] | None = None,
    fallback: Tensor | None = None,
    **kwargs: Any,
) -> Solution:
    system = LinearSystem(**kwargs)
    for left, right, weight, factor in zip(lefts, rights, weights, factors or [1.0] * len(lefts), strict=True):
        system.add_task([(left, right)], weight, factor)
    return system.solve(torch.zeros_like(weights[0]) if fallback is None else fallback)


# The solution


@given(seeds, st.integers(1, 4), widths)
@examples
def test_unreduced_solution_is_the_stacked_least_squares_solution(seed: int, num_tasks: int, width: int) -> None:
    lefts, rights, weights = problem(seed, num_tasks, width)
    ours = solved(lefts, rights, weights, **FREE).weight
    assert relative_error(ours, oracles.least_squares(lefts, rights, weights)) < LSTSQ


@given(seeds)
@examples
def test_weighted_solution_is_the_weighted_least_squares_solution(seed: int) -> None:
    lefts, rights, weights = problem(seed)
    factors = [0.1, 1.0, 7.0]
    ours = solved(lefts, rights, weights, factors, **FREE).weight
    assert relative_error(ours, oracles.least_squares(lefts, rights, weights, factors)) < LSTSQ
    assert relative_error(ours, oracles.least_squares(lefts, rights, weights)) > 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_swapped_cross_statistic_misses_the_least_squares_solution(seed: int) -> None:
    """The inputs drift by a linear map: under mere noise C and its transpose are close to each other."""
    lefts, rights, weights = problem(seed, condition=10.0)
    system = LinearSystem(**FREE)
    for left, right, weight in zip(lefts, rights, weights, strict=True):
        statistics = accumulate([(left, right)])
        swap = torch.linalg.lstsq(left.T, statistics.bilinear.T).solution  # left' R with R such that it is C'
        system.add_task([(left, swap)], weight)
    ours = system.solve(torch.zeros_like(weights[0])).weight
    assert relative_error(ours, oracles.least_squares(lefts, rights, weights)) > 0.5


@given(seeds)
@examples
def test_the_gradient_of_the_objective_vanishes_at_the_solution(seed: int) -> None:
    lefts, rights, weights = problem(seed)
    merged = solved(lefts, rights, weights, **FREE).weight.requires_grad_()
    targets = [right @ weight.T for right, weight in zip(rights, weights, strict=True)]
    loss = sum((left @ merged.T - target).square().sum() for left, target in zip(lefts, targets, strict=True))
    loss.backward()
    scale = 2 * float(sum((left.T @ target).norm() for left, target in zip(lefts, targets, strict=True)))
    assert float(merged.grad.norm()) < LSTSQ * scale


@given(seeds, ratios, ridges)
@examples
def test_reduced_and_ridged_solution_agrees_with_lu(seed: int, ratio: float, ridge: float) -> None:
    lefts, rights, weights = problem(seed)
    ours = solved(lefts, rights, weights, reduce_non_diagonal_ratio=ratio, relative_ridge=ridge)
    lhs = sum(oracles.reduced(left.T @ left, ratio) for left in lefts)
    rhs = sum(oracles.reduced(x.T @ y, ratio) @ w.T for x, y, w in zip(lefts, rights, weights, strict=True))
    assert relative_error(ours.weight, oracles.solve(lhs, rhs, ridge)) < RIDGED
    assert ours.relative_ridge == ridge
    assert ours.ridge == pytest.approx(ridge * float(lhs.diagonal().mean()), rel=1e-12)
    ridged = lhs + ours.ridge * torch.eye(len(lhs))
    assert float((ridged @ ours.weight.T - rhs).norm() / rhs.norm()) < SAME
    assert ours.relative_residual < SAME


def test_both_statistics_are_reduced() -> None:
    lefts, rights, weights = problem(1)
    ours = solved(lefts, rights, weights, reduce_non_diagonal_ratio=0.5).weight
    lhs = sum(oracles.reduced(left.T @ left, 0.5) for left in lefts)
    rhs = sum(x.T @ y @ w.T for x, y, w in zip(lefts, rights, weights, strict=True))
    assert relative_error(ours, oracles.solve(lhs, rhs, 1e-4)) > FAR


@given(seeds, ratios)
@examples
def test_scaling_all_statistics_leaves_the_weight(seed: int, ratio: float) -> None:
    lefts, rights, weights = problem(seed)
    ours = solved(lefts, rights, weights, reduce_non_diagonal_ratio=ratio).weight
    for scale in (1e-8, 3.0, 1e8):
        scaled = [scale * x for x in lefts], [scale * x for x in rights]
        assert relative_error(solved(*scaled, weights, reduce_non_diagonal_ratio=ratio).weight, ours) < RIDGED


@given(seeds, st.permutations(range(3)))
@examples
def test_the_order_of_the_tasks_leaves_the_weight(seed: int, order: list[int]) -> None:
    lefts, rights, weights = problem(seed)
    ours = solved(lefts, rights, weights).weight
    theirs = solved(*([values[i] for i in order] for values in (lefts, rights, weights))).weight
    assert relative_error(theirs, ours) < RIDGED


@given(seeds, st.lists(st.integers(1, 59), max_size=5, unique=True))
@examples
def test_the_split_into_batches_leaves_the_statistics(seed: int, cuts: list[int]) -> None:
    (left,), (right,), _ = problem(seed, 1)
    whole = accumulate([(left, right)])
    edges = [0, *sorted(cuts), 60]
    parts = accumulate((left[a:b], right[a:b]) for a, b in itertools.pairwise(edges))
    assert relative_error(parts.gram, whole.gram) < SAME
    assert relative_error(parts.bilinear, whole.bilinear) < SAME
    assert parts.right_energy == pytest.approx(whole.right_energy, rel=1e-12)
    assert parts.rows == whole.rows == 60


@given(seeds, st.floats(1e-6, 1e-2))
@examples
def test_rotating_the_input_basis_is_equivariant_at_ratio_one(seed: int, ridge: float) -> None:
    lefts, rights, weights = problem(seed)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))).Q
    turned = [x @ turn for x in lefts], [x @ turn for x in rights], [w @ turn for w in weights]
    ours = solved(*turned, reduce_non_diagonal_ratio=1.0, relative_ridge=ridge).weight
    theirs = solved(lefts, rights, weights, reduce_non_diagonal_ratio=1.0, relative_ridge=ridge).weight @ turn
    assert relative_error(ours, theirs) < RIDGED


@pytest.mark.parametrize("seed", range(5))
def test_rotating_the_input_basis_is_not_equivariant_at_ratio_nine_tenths(seed: int) -> None:
    lefts, rights, weights = problem(seed, condition=1e3)
    turn = torch.linalg.qr(torch.randn(8, 8)).Q
    turned = [x @ turn for x in lefts], [x @ turn for x in rights], [w @ turn for w in weights]
    ours = solved(*turned, reduce_non_diagonal_ratio=0.9).weight
    theirs = solved(lefts, rights, weights, reduce_non_diagonal_ratio=0.9).weight @ turn
    assert relative_error(ours, theirs) > 0.01


@given(seeds)
@examples
def test_stacked_layers_get_what_each_gets_alone(seed: int) -> None:
    lefts, rights, weights = problem(seed)
    others = [torch.randn(3, 8, generator=torch.Generator().manual_seed(seed + 1)) for _ in weights]
    stacked = solved(lefts, rights, [torch.cat(pair) for pair in zip(weights, others, strict=True)]).weight
    assert relative_error(stacked[:5], solved(lefts, rights, weights).weight) < SAME
    assert relative_error(stacked[5:], solved(lefts, rights, others).weight) < SAME


@given(seeds, ratios, st.integers(1, 4))
@examples
def test_identical_experts_return_the_expert(seed: int, ratio: float, num_tasks: int) -> None:
    lefts, _, weights = problem(seed, num_tasks, condition=100.0)
    ours = solved(lefts, lefts, weights[:1] * num_tasks, reduce_non_diagonal_ratio=ratio, relative_ridge=0.0).weight
    assert relative_error(ours, weights[0]) < LSTSQ


def test_mean_weighting_divides_by_the_tokens_of_the_task() -> None:
    lefts, rights, weights = problem(2)
    short = [lefts[0][:20], *lefts[1:]], [rights[0][:20], *rights[1:]]
    ours = solved(*short, weights, task_weighting="mean").weight
    theirs = solved(*short, weights, [1 / 20, 1 / 60, 1 / 60]).weight
    assert relative_error(ours, theirs) < SAME
    assert relative_error(ours, solved(*short, weights).weight) > 1e-3


@given(seeds, st.floats(0, 1), st.floats(0, 1))
@examples
def test_ablations_change_the_bilinear_statistic_alone(seed: int, beta: float, gamma: float) -> None:
    lefts, rights, weights = problem(seed)
    ours = solved(lefts, rights, weights, symmetric_weight=beta, gram_shrinkage=gamma).weight
    lhs, rhs = 0.0, 0.0
    for left, right, weight in zip(lefts, rights, weights, strict=True):
        gram, cross = left.T @ left, left.T @ right
        cross = (1 - beta) * cross + beta * (cross + cross.T) / 2
        cross = (1 - gamma) * cross + gamma * gram
        lhs, rhs = lhs + oracles.reduced(gram, 0.9), rhs + oracles.reduced(cross, 0.9) @ weight.T
    assert relative_error(ours, oracles.solve(lhs, rhs, 1e-4)) < RIDGED


def test_full_shrinkage_is_the_gram_matrix_alone() -> None:
    lefts, rights, weights = problem(3)
    ours = solved(lefts, rights, weights, gram_shrinkage=1.0).weight
    assert relative_error(ours, solved(lefts, lefts, weights).weight) < SAME
    assert relative_error(ours, solved(lefts, rights, weights).weight) > FAR


# Dtypes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_low_precision_activations_do_not_overflow(dtype: torch.dtype) -> None:
    """300 * 300 * 1,000 tokens is far above float16's 65,504."""
    left = (300 * torch.ones(1000, 8) + 30 * torch.randn(1000, 8)).to(dtype)
    right = (300 * torch.ones(1000, 8) + 30 * torch.randn(1000, 8)).to(dtype)
    weight = torch.randn(5, 8).to(dtype)
    statistics = accumulate([(left, right)])
    assert statistics.gram.dtype == statistics.bilinear.dtype == torch.float32
    assert relative_error(statistics.gram, left.double().T @ left.double()) < FLOAT32
    assert relative_error(statistics.bilinear, left.double().T @ right.double()) < FLOAT32
    assert statistics.right_energy == pytest.approx(float(right.double().square().sum()), rel=1e-5)
    ours = solved([left], [right], [weight])
    assert ours.weight.dtype == torch.float64
    assert ours.weight.isfinite().all()
    exact = solved([left.double()], [right.double()], [weight.double()])
    assert relative_error(ours.weight, exact.weight) < 1e-3  # float32 sums times a condition number of 1e2


def test_float32_sums_are_solved_in_float64() -> None:
    lefts, rights, weights = problem(4, condition=10.0)
    single = [[x.float() for x in values] for values in (lefts, rights, weights)]
    ours = solved(*single, **FREE)
    assert ours.weight.dtype == torch.float64
    assert ours.relative_residual < SAME
    assert relative_error(ours.weight, oracles.least_squares(lefts, rights, weights)) < 1e-4


@pytest.mark.parametrize("asked", [None, "highest", "high", "medium"])
@pytest.mark.parametrize("outside", ["highest", "medium"])
def test_float32_products_have_the_precision_asked_for_inside_and_as_before_outside(outside: str, asked: Any) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(outside)
    try:
        with contextlib.suppress(ZeroDivisionError), float32_products(asked) if asked else float32_products():
            assert torch.get_float32_matmul_precision() == (asked or "highest")
            _ = 1 / 0
        assert torch.get_float32_matmul_precision() == outside
    finally:
        torch.set_float32_matmul_precision(before)


def test_inputs_and_weights_are_not_changed() -> None:
    lefts, rights, weights = problem(5)
    copies = [[x.clone() for x in values] for values in (lefts, rights, weights)]
    fallback = torch.ones(5, 8)
    solved(lefts, rights, weights, symmetric_weight=0.5, fallback=fallback)
    for values, before in zip((lefts, rights, weights), copies, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(values, before, strict=True))
    assert torch.equal(fallback, torch.ones(5, 8))


# Systems that the data do not determine


def test_few_tokens_give_a_finite_weight_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """3 tokens, 16 features."""
    left, weight = torch.randn(3, 16), torch.randn(5, 16)
    system = LinearSystem(name="block.fc1")
    system.add_task([(left, left)], weight)
    with caplog.at_level(logging.WARNING):
        ours = system.solve(torch.zeros(5, 16))
    assert ours.weight.isfinite().all()
    assert ours.rank == 3
    assert ours.features == 16
    assert ours.ridge == pytest.approx(1e-4 * float(left.square().sum()) / 16)
    assert ours.relative_residual < SAME
    assert "'block.fc1': 3 calibration tokens for 16 input features (rank 3)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "inputs", "message"),
    [
        ({}, torch.randn(3, 16), "3 calibration tokens for 16 input features"),
        (
            {"reduce_non_diagonal_ratio": 1.0, "relative_ridge": 1e-18},
            torch.randn(60, 1).expand(60, 16),
            "is not positive definite at relative_ridge=1e-18, trying 1e-17",
        ),
    ],
)
def test_strict_makes_errors_of_warnings(settings: dict[str, float], inputs: Tensor, message: str) -> None:
    weight = torch.randn(5, 16)
    lenient, strict = (LinearSystem(**settings, strict=strict, name="block.fc1") for strict in (False, True))
    for system in (lenient, strict):
        system.add_task([(inputs.contiguous(), inputs.contiguous())], weight)
    assert message in lenient.solve(weight).warnings[0]
    assert len(lenient.solve(weight).warnings) == len(lenient.warnings), "of the last solution only"
    with pytest.raises(DoubtfulSystemError, match=f"'block.fc1': .*{message}.*strict=true"):
        strict.solve(weight)


def test_enough_tokens_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    lefts, rights, weights = problem(6)
    with caplog.at_level(logging.WARNING):
        assert solved(lefts, rights, weights).rank == 8
    assert not caplog.text


def duplicated(tokens: int = 60) -> tuple[Tensor, Tensor]:
    left = torch.randn(tokens, 8)
    left[:, 5] = left[:, 2]
    return left, torch.randn(5, 8)


@pytest.mark.parametrize("seed", range(8))
def test_two_identical_features_without_stabilisation_are_an_error(seed: int) -> None:
    """Cholesky often 'succeeds' on them, with a residual that looks fine: the pivots tell."""
    torch.manual_seed(seed)
    left, weight = duplicated()
    system = LinearSystem(**FREE, name="block.fc2")
    system.add_task([(left, left)], weight)
    match = r"'block\.fc2': the system \(8 x 8, 60 calibration tokens\) is not positive definite at relative_ridge=0\."
    with pytest.raises(SingularSystemError, match=match):
        system.solve(weight)


def test_the_pivots_are_needed_since_some_singular_systems_factorise() -> None:
    """What the test above relies on to be able to fail."""
    succeeded = 0
    for seed in range(8):
        torch.manual_seed(seed)
        left, _ = duplicated()
        succeeded += int(torch.linalg.cholesky_ex(left.T @ left).info) == 0
    assert succeeded > 0


@pytest.mark.parametrize("settings_", [{"reduce_non_diagonal_ratio": 0.9}, {"relative_ridge": 1e-4}], ids=str)
def test_two_identical_features_with_stabilisation_share_their_weight(settings_: dict[str, float]) -> None:
    left, weight = duplicated()
    system = LinearSystem(**FREE | settings_)
    system.add_task([(left, left)], weight)
    ours = system.solve(weight)
    assert ours.rank == 7
    assert relative_error(left @ ours.weight.T, left @ weight.T) < 0.1
    # The pivot of the second of two equal features is what the stabilisation gives it.
    low, high = (0.05, 1) if "reduce_non_diagonal_ratio" in settings_ else (1e-5, 1e-3)
    assert low < ours.relative_pivot < high


def test_the_ridge_grows_by_tens_with_a_warning_that_names_the_layer(caplog: pytest.LogCaptureFixture) -> None:
    left, weight = duplicated()
    system = LinearSystem(1.0, 1e-18, name="block.fc2")
    system.add_task([(left, left)], weight)
    with caplog.at_level(logging.WARNING):
        ours = system.solve(weight)
    steps = round(math.log10(ours.relative_ridge / 1e-18))
    assert 2 <= steps <= 4  # up to about n * 2.2e-16
    assert ours.relative_ridge == pytest.approx(1e-18 * 10**steps)
    assert ours.ridge == pytest.approx(ours.relative_ridge * float(left.square().sum()) / 8)
    assert caplog.text.count("Layer 'block.fc2': its system is not positive definite at relative_ridge=") == steps
    assert ours.weight.isfinite().all()
    assert ours.relative_residual < SAME


@pytest.mark.parametrize("start", [1e-15, 1e-4, 1e-3, 2e-3, 0.1])
def test_the_ridge_stops_at_a_tenth_of_the_mean_diagonal(start: float, caplog: pytest.LogCaptureFixture) -> None:
    system = LinearSystem(1.0, start, name="block.fc1")
    system.add_task([(torch.eye(2), torch.eye(2))], torch.eye(2))
    system.lhs = torch.diag(torch.tensor([3.0, -1.0]))  # no Gram matrix: no ridge up to 1 helps
    last = {1e-15: "0.1", 1e-4: "0.1", 1e-3: "0.1", 2e-3: "0.02", 0.1: "0.1"}[start]
    with caplog.at_level(logging.WARNING), pytest.raises(SingularSystemError, match=f"at relative_ridge={last}\\."):
        system.solve(torch.eye(2))
    assert caplog.text.count("trying") == {1e-15: 14, 1e-4: 3, 1e-3: 2, 2e-3: 1, 0.1: 0}[start]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_system_can_be_solved_again_with_the_same_result(dtype: torch.dtype) -> None:
    """Solving leaves the sums as they are."""
    lefts, rights, weights = problem(7, condition=10.0)
    fallback, system = torch.randn(5, 8), LinearSystem()
    for left, right, weight in zip(lefts, rights, weights, strict=True):
        left[:, 3] = right[:, 3] = 0
        system.add_task([(left.to(dtype), right.to(dtype))], weight)
    first, second = system.solve(fallback), system.solve(fallback)
    assert torch.equal(first.weight, second.weight)
    assert first.dead_features == second.dead_features == [3]


def test_a_ridge_above_the_ladder_is_used_as_asked() -> None:
    left, weight = torch.randn(60, 8), torch.randn(5, 8)
    assert solved([left], [left], [weight], relative_ridge=2.0).relative_ridge == 2.0


@pytest.mark.parametrize("settings_", [{}, FREE], ids=["stabilised", "free"])
def test_the_column_of_a_dead_feature_is_the_fallback(settings_: dict[str, float]) -> None:
    lefts, rights, weights = problem(7, condition=10.0)
    for left, right in zip(lefts, rights, strict=True):
        left[:, 3] = right[:, 3] = 0
    fallback = torch.randn(5, 8)
    ours = solved(lefts, rights, weights, fallback=fallback, **settings_)
    assert ours.dead_features == [3]
    assert torch.equal(ours.weight[:, 3], fallback[:, 3])
    assert (ours.rank, ours.features) == (7, 8)
    assert ours.relative_pivot > 1e-3  # a dead feature is no small pivot
    live = [0, 1, 2, 4, 5, 6, 7]
    if settings_:
        narrow = [[x[:, live] for x in values] for values in (lefts, rights, weights)]
        assert relative_error(ours.weight[:, live], oracles.least_squares(*narrow)) < LSTSQ


def test_a_feature_that_one_task_uses_is_alive() -> None:
    lefts, rights, weights = problem(7)
    lefts[0][:, 3] = rights[0][:, 3] = 0
    assert solved(lefts, rights, weights).dead_features == []


def test_all_features_dead_gives_the_fallback() -> None:
    weight = torch.randn(5, 4)
    ours = solved([torch.zeros(9, 4)], [torch.zeros(9, 4)], [weight], fallback=weight)
    assert torch.equal(ours.weight, weight)
    assert ours.rank == 0
    assert ours.relative_pivot == 1
    assert ours.dead_features == [0, 1, 2, 3]
    assert ours.relative_residual == 0


@given(seeds, st.integers(1, 12), st.integers(1, 12))
@examples
def test_the_rank_is_that_of_the_inputs(seed: int, rank: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rank = min(rank, width)
    left = torch.randn(40, rank, generator=generator, dtype=torch.float64)
    left = (
        torch.linalg.qr(left).Q
        @ torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q[:rank]
    )
    gram = left.T @ left
    assert numerical_rank(gram, bound=width) == rank
    assert numerical_rank(gram.float(), bound=width) == rank
    assert solved([left], [left], [torch.ones(1, width)]).rank == rank


@given(seeds, widths, ratios, ridges)
@examples
def test_the_relative_pivot_is_at_least_one_over_the_condition(
    seed: int, width: int, ratio: float, ridge: float
) -> None:
    lefts, rights, weights = problem(seed, width=width)
    ours = solved(lefts, rights, weights, reduce_non_diagonal_ratio=ratio, relative_ridge=ridge)
    system = sum(oracles.reduced(left.T @ left, ratio) for left in lefts) + ours.ridge * torch.eye(width)
    assert 1 / float(torch.linalg.cond(system)) <= ours.relative_pivot * (1 + RIDGED)
    pivots = torch.linalg.cholesky(system).diagonal().square()
    assert ours.relative_pivot == pytest.approx(float(pivots.min() / pivots.max()), rel=RIDGED)


@pytest.mark.parametrize("outputs", [5, 16, 17, 400])
def test_the_residual_is_exact_for_few_columns_and_near_it_for_many(outputs: int) -> None:
    """More rows than are converted at a time; a solution that is off by a per cent."""
    features = 300
    left = torch.randn(2 * features, features)
    gram, ratio = left.T @ left, 0.7
    diagonal = gram.diagonal() + 3.0
    matrix = oracles.reduced(gram, ratio) + 3.0 * torch.eye(features)
    exact = torch.randn(features, outputs)
    rhs, weight = matrix @ exact, (exact + 0.01 * torch.randn(features, outputs)).T
    direct = float((matrix @ weight.T - rhs).norm() / rhs.norm())
    assert direct > 1e-3
    ours = relative_residual(gram.clone(), ratio, diagonal, weight, rhs)
    # A mean of 16 squares for each norm.
    assert ours == pytest.approx(direct, rel=1e-9 if outputs <= 16 else 0.3)
    assert relative_residual(gram, ratio, diagonal, exact.T, rhs) < SAME


@given(
    seeds,
    st.integers(0, 59),
    st.integers(0, 7),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.booleans(),
    st.sampled_from([2, 5]),
)
@examples
def test_a_non_finite_input_is_an_error_that_names_layer_and_task(
    seed: int, row: int, column: int, value: float, in_left: bool, outputs: int
) -> None:
    """In both orders of ``C W'``: with two outputs C is not formed, with five it is."""
    (left,), (right,), (weight,) = problem(seed, 1)
    assert bilinear_is_cheaper(60, 8, outputs) is (outputs == 5)
    (left if in_left else right)[row, column] = value
    system = LinearSystem(name="block.fc1")
    with pytest.raises(
        SingularSystemError, match=r"Layer 'block\.fc1'.*\(8 x 8\) have .* non-finite values, from task 'digits'"
    ):
        system.add_task([(left, right)], weight[:outputs], task="digits", num_batches=1)


def test_no_batches_are_an_error() -> None:
    with pytest.raises(ValueError, match="no inputs to sum"):
        accumulate([])


def test_no_tasks_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"'block\.fc1': no task was added"):
        LinearSystem(name="block.fc1").solve(torch.ones(1, 1))


# The two orders of C W'


def sums_of(left: Tensor, right: Tensor, weight: Tensor, num_batches: int | None) -> Any:
    pairs = zip(left.chunk(num_batches or 1), right.chunk(num_batches or 1), strict=True)
    return accumulate(pairs, weight, num_batches)


@given(seeds, st.integers(1, 3), st.sampled_from([1, 2, 3, 6]))
@examples
def test_the_order_of_the_products_leaves_every_statistic_and_the_solution(
    seed: int, outputs: int, num_batches: int
) -> None:
    """With few outputs C itself is not needed, and not formed."""
    (left,), (right,), (weight,) = problem(seed, 1)
    weight = weight[:outputs]
    formed, ours = (sums_of(left, right, weight, count) for count in (None, num_batches))
    assert formed.bilinear is not None
    assert ours.bilinear is None
    assert relative_error(formed.product, left.T @ right @ weight.T) < SAME
    assert relative_error(ours.product, formed.product) < SAME
    assert relative_error(ours.diagonal, formed.diagonal) < SAME
    assert relative_error(ours.gram, formed.gram) < SAME
    assert ours.right_energy == pytest.approx(formed.right_energy, rel=1e-12)
    assert ours.rows == formed.rows == 60
    assert ours.drift() == pytest.approx(formed.drift(), rel=1e-9)
    solutions = []
    for count in (None, num_batches):
        system = LinearSystem()
        system.add_task(zip(left.chunk(num_batches), right.chunk(num_batches), strict=True), weight, num_batches=count)
        solutions.append(system.solve(weight).weight)
    assert relative_error(*solutions) < RIDGED


def test_the_order_of_the_products_is_the_one_with_fewer_multiplications() -> None:
    """Counted by hand: ``(L' R) W'`` and ``L' (R W')``."""
    shapes = [(10, 5, 1), (10, 5, 100), (10_000, 64, 256), (10_000, 256, 64), (60, 8, 4), (60, 8, 5)]
    for rows, width, outputs in shapes:
        formed = rows * width * width + width * width * outputs
        chained = rows * width * outputs + rows * outputs * width
        assert bilinear_is_cheaper(rows, width, outputs) is (formed <= chained)


@pytest.mark.parametrize("symmetric_weight", [0.0, 0.5])
def test_the_ablations_form_the_bilinear_statistic_whatever_it_costs(symmetric_weight: float) -> None:
    (left,), (right,), (weight,) = problem(8, 1)
    system = LinearSystem(symmetric_weight=symmetric_weight)
    statistics = system.add_task([(left, right)], weight[:1], num_batches=1)
    assert (statistics.bilinear is None) is (symmetric_weight == 0)
    assert relative_error(statistics.gram, left.T @ left) < SAME


@pytest.mark.parametrize("seed", range(5))
def test_alignment_without_the_bilinear_statistic_is_near_the_exact_one(seed: int) -> None:
    """Sixteen random directions; the inputs of a layer drift little enough for its first digits to hold."""
    (left,), (right,), (weight,) = problem(seed, 1, width=64, tokens=300, condition=10.0, drift=0.3)
    ours = sums_of(left, right, weight[:1], 3)
    assert ours.bilinear is None
    exact = oracles.alignment(left, right)
    assert exact < 0.99
    assert ours.alignment() == pytest.approx(exact, abs=0.02)
    same = sums_of(left, left.clone(), weight[:1], 3)
    assert same.bilinear is None
    assert same.alignment() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("width", [GRAM_BLOCK - 1, GRAM_BLOCK, GRAM_BLOCK + 1, 2 * GRAM_BLOCK + 5])
def test_a_gram_matrix_of_several_blocks_is_whole_and_symmetric(width: int) -> None:
    left, right = torch.randn(70, width), torch.randn(70, width)
    statistics = accumulate([(left[:30], right[:30]), (left[30:], right[30:])])
    assert relative_error(statistics.gram, left.T @ left) < SAME
    assert torch.equal(statistics.gram, statistics.gram.T)
    assert statistics.alignment() == pytest.approx(oracles.alignment(left, right), abs=1e-12)


# Alignment and drift


@given(seeds, widths, st.floats(0, 3))
@examples
def test_alignment_is_at_most_one_and_equals_the_direct_sum(seed: int, width: int, drift: float) -> None:
    (left,), (right,), _ = problem(seed, 1, width, drift=drift)
    statistics = accumulate([(left, right)])
    assert statistics.alignment() <= 1 + 1e-12
    assert statistics.alignment() == pytest.approx(oracles.alignment(left, right), abs=1e-12)


@given(seeds, st.floats(1e-4, 1e4), st.floats(1e-4, 1e4))
@examples
def test_alignment_does_not_depend_on_the_scale_of_either_side(
    seed: int, left_scale: float, right_scale: float
) -> None:
    (left,), (right,), _ = problem(seed, 1)
    ours = accumulate([(left_scale * left, right_scale * right)]).alignment()
    assert ours == pytest.approx(accumulate([(left, right)]).alignment(), abs=1e-12)


@given(seeds, st.floats(1e-3, 1e3))
@examples
def test_alignment_is_one_for_positive_multiples_alone(seed: int, scale: float) -> None:
    (left,), (right,), _ = problem(seed, 1, condition=10.0)
    assert accumulate([(left, scale * left)]).alignment() == pytest.approx(1, abs=1e-12)
    assert accumulate([(left, -scale * left)]).alignment() == pytest.approx(-1, abs=1e-12)
    assert accumulate([(left, right)]).alignment() < 1 - 1e-4


@given(seeds, st.floats(0.01, 3))
@examples
def test_drift_from_traces_equals_the_direct_norm(seed: int, drift: float) -> None:
    (left,), (right,), _ = problem(seed, 1, drift=drift)
    direct = float((left - right).norm() / right.norm())
    # Cancellation: the squares differ by rounding of 1e-16 relative to the whole, not to the difference.
    assert accumulate([(left, right)]).drift() == pytest.approx(direct, abs=1e-7)
    assert accumulate([(left.float(), right.float())]).drift() == pytest.approx(direct, abs=2e-3)


def test_one_tensor_on_both_sides_is_summed_once() -> None:
    left = torch.randn(20, 4)
    statistics = accumulate([(left, left), (left, left)])
    assert statistics.bilinear is statistics.gram
    assert statistics.alignment() == 1.0
    assert statistics.drift() == 0.0
    equal = accumulate([(left, left.clone()), (left, left.clone())])
    assert relative_error(statistics.gram, equal.gram) < SAME
    assert relative_error(statistics.gram, equal.bilinear) < SAME
    assert equal.drift() < 1e-7


@pytest.mark.parametrize("weighting", ["sum", "mean"])
def test_a_task_none_of_whose_tokens_counts_is_an_error_that_names_it(weighting: Any) -> None:
    system = LinearSystem(name="mlp.0", task_weighting=weighting)
    with pytest.raises(SingularSystemError, match=r"Layer 'mlp\.0': no token of task 'digits' counts"):
        system.add_task([(torch.zeros(0, 3), torch.zeros(0, 3))], torch.ones(2, 3), task="digits")
