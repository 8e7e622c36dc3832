"""What each method pairs and what its settings do."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from fusion_bench import RuntimeConstants
from pico import PicoMLP, experts_of, pico_calibration, pico_clip, pico_experts, pico_pool, vectors
from tolerances import FAR, SAME, relative_error, state_error
from torch import Tensor

import fusion_bench_crossmean
from fusion_bench_crossmean import (
    AlignmentCriterionAnalyzer,
    CrossMeanAlgorithm,
    CrossStatisticAlgorithm,
    ProgressiveRegMeanAlgorithm,
    RegMeanAlgorithm,
)

N = 24
METHODS = (CrossMeanAlgorithm, CrossStatisticAlgorithm, ProgressiveRegMeanAlgorithm, RegMeanAlgorithm)
INPUT_SETTINGS = {"coverage", "num_calibration_samples", "calibration_data", "seed", "batch_size", "num_workers"}
INPUT_SETTINGS |= {"token_dropout"}
SHARED = INPUT_SETTINGS | {
    "precision",
    "schedule",
    "activation_store",
    "max_memory_gib",
    "preflight_only",
    "report_path",
}
MERGING = SHARED | {"reduce_non_diagonal_ratio", "relative_ridge", "task_weighting", "task_weights", "dtype"}
MERGING |= {"checkpoint_dir", "strict", "save_statistics", "load_statistics"}


def merge(method: type, experts: Any, inputs: Any, **settings: Any) -> dict[str, Tensor]:
    return method(**{"num_calibration_samples": N, "batch_size": 12} | settings).run(experts, inputs).state_dict()


INPUTS = {0.0: torch.tensor([[0.0]]), 0.5: torch.tensor([[3.0]]), 1.0: torch.tensor([[6.0]])}


@pytest.mark.parametrize(
    ("method", "points", "left", "right"),
    [
        (RegMeanAlgorithm(), (1.0,), 6.0, 6.0),
        (ProgressiveRegMeanAlgorithm(), (0.0,), 0.0, 0.0),
        (CrossStatisticAlgorithm(), (0.0, 1.0), 0.0, 6.0),
        (CrossMeanAlgorithm(), (0.0, 0.5, 1.0), 0.0, 3.0),
        (CrossMeanAlgorithm(path_points=(0.5, 1)), (0.0, 0.5, 1.0), 0.0, 4.5),
        (CrossMeanAlgorithm(path_points=(1,)), (0.0, 1.0), 0.0, 6.0),
        (CrossMeanAlgorithm(path_points=(0,)), (0.0,), 0.0, 0.0),
        (CrossMeanAlgorithm(path_points=(0.5,)), (0.0, 0.5), 0.0, 3.0),
    ],
)
def test_a_method_is_the_networks_it_runs_and_the_inputs_it_pairs(
    method: Any, points: tuple[float, ...], left: float, right: float
) -> None:
    assert method.network_points == points
    one, other = method.input_pair({point: INPUTS[point] for point in points})
    others = [other] if isinstance(other, Tensor) else other
    assert float(one) == left
    assert sum(map(float, others)) / len(others) == right


@pytest.mark.parametrize("method", METHODS)
def test_the_methods_have_these_settings_and_no_others(method: type) -> None:
    own = {"path_points", "symmetric_weight", "gram_shrinkage"} if method is CrossMeanAlgorithm else set()
    assert set(method.setting_names()) == MERGING | own
    assert set(method().settings()) == MERGING | own


def test_the_analyzer_has_the_shared_settings_and_one_of_its_own() -> None:
    assert set(AlignmentCriterionAnalyzer.setting_names()) == SHARED | {"return_averaged_model"}


def test_the_defaults_are_the_papers() -> None:
    expected = {
        "coverage": "mlp",
        "num_calibration_samples": 256,
        "reduce_non_diagonal_ratio": 0.9,
        "relative_ridge": 1e-4,
        "task_weighting": "sum",
        "path_points": [0.0, 0.5, 1.0],
        "symmetric_weight": 0.0,
        "gram_shrinkage": 0.0,
        "token_dropout": 0.0,
        "precision": "full",
    }
    settings = CrossMeanAlgorithm().settings()
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize("method", METHODS)
def test_settings_are_keyword_only(method: type) -> None:
    with pytest.raises(TypeError):
        method("full")


def test_every_public_name_exists() -> None:
    assert all(hasattr(fusion_bench_crossmean, name) for name in fusion_bench_crossmean.__all__)


# Ablations


@pytest.mark.parametrize(("beta", "gamma"), [(0.25, 0.0), (1.0, 0.0), (0.0, 0.3), (0.5, 0.5)])
def test_symmetric_weight_and_gram_shrinkage_equal_their_formulas(beta: float, gamma: float) -> None:
    experts, inputs = pico_experts(2), pico_calibration()
    ours = merge(CrossMeanAlgorithm, experts, inputs, symmetric_weight=beta, gram_shrinkage=gamma)
    groups = oracles.clip_groups(experts["digits"], "mlp")
    path = {"path_points": (0, 0.5, 1)}
    theirs = oracles.whole_network(experts, inputs, groups, **path, symmetric=beta, shrinkage=gamma)
    assert state_error(ours, theirs) < SAME
    assert state_error(ours, oracles.whole_network(experts, inputs, groups, **path)) > 0.01


def test_full_gram_shrinkage_is_progressive_regmean() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(CrossMeanAlgorithm, experts, inputs, gram_shrinkage=1.0)
    assert state_error(ours, merge(ProgressiveRegMeanAlgorithm, experts, inputs)) < SAME


@pytest.mark.parametrize("method", METHODS)
def test_token_dropout_leaves_tokens_out_of_the_statistics_alone(method: type) -> None:
    """Of every layer the same; the forwards see all of them."""
    experts, inputs = pico_experts(), pico_calibration()
    algorithm = method(num_calibration_samples=N, token_dropout=0.5, coverage="full")
    ours = algorithm.run(experts, inputs).state_dict()
    (tokens,) = {layer["tokens"] for layer in algorithm.report["layers"]}
    assert 0.4 < tokens / (3 * N * 5) < 0.6
    assert state_error(ours, merge(method, experts, inputs, coverage="full")) > 0.01
    assert state_error(ours, merge(method, experts, inputs, coverage="full", token_dropout=0.5, batch_size=24)) < SAME


def test_token_dropout_pairs_the_same_tokens_on_both_sides() -> None:
    """Identical experts: left and right are equal token by token, or the expert would not come out."""
    expert = pico_clip(seed=4)
    experts, inputs = {"digits": expert, "letters": expert}, pico_calibration()
    ours = merge(CrossStatisticAlgorithm, experts, inputs, token_dropout=0.3, relative_ridge=0.0)
    assert state_error(ours, expert.state_dict()) < 1e-9


def test_token_dropout_depends_on_the_seed() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    first = merge(RegMeanAlgorithm, experts, inputs, token_dropout=0.3)
    assert state_error(first, merge(RegMeanAlgorithm, experts, inputs, token_dropout=0.3, seed=1)) > 1e-3


# Stabilisation


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", [{"reduce_non_diagonal_ratio": 0.5}, {"relative_ridge": 1e-1}], ids=str)
def test_ratio_and_ridge_reach_the_system(method: type, setting: dict[str, float]) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    assert state_error(merge(method, experts, inputs, **setting), merge(method, experts, inputs)) > 0.01


@pytest.mark.parametrize("method", METHODS)
def test_mean_weighting_counts_tasks_and_not_tokens(method: type) -> None:
    """Texts of different lengths would do; here a task's tokens are dropped by a mask of its own."""
    experts = experts_of(lambda seed: PicoMLP(seed=seed), 2)
    inputs = vectors(["digits", "letters"])
    doubled = inputs | {"letters": inputs["letters"].repeat(2, 1)}

    class Uneven(method):  # type: ignore[misc, valid-type]
        def linear_system(self, **options: Any) -> Any:
            system = super().linear_system(**options)
            add = system.add_task

            def twice(pairs: Any, weight: Tensor, factor: float, task: str, num_batches: int) -> Any:
                times = 2 if task == "letters" else 1
                return add(list(pairs) * times, weight, factor, task, num_batches=num_batches * times)

            system.add_task = twice
            return system

    mean = merge(Uneven, experts, inputs, task_weighting="mean")
    assert state_error(mean, merge(method, experts, inputs, task_weighting="mean")) < SAME
    total = merge(Uneven, experts, inputs, task_weighting="sum")
    assert state_error(total, merge(method, experts, inputs, task_weights={"letters": 2.0})) < SAME
    assert relative_error(total["mlp.2.weight"], mean["mlp.2.weight"]) > 1e-3
    assert len(doubled["letters"]) == 2 * N


# Dtype of the result


@pytest.mark.parametrize("asked", [None, "float32", "float16", "torch.bfloat16", torch.float32])
def test_the_result_has_the_dtype_asked_for_else_the_experts(asked: Any) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(RegMeanAlgorithm, experts, inputs, dtype=asked)
    expected = torch.float64 if asked is None else getattr(torch, str(asked).removeprefix("torch."))
    exact = merge(RegMeanAlgorithm, experts, inputs)
    for key, tensor in ours.items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, exact[key].to(expected))


def test_the_pretrained_model_decides_the_dtype_of_the_result_not_that_of_the_forwards() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    ours = merge(RegMeanAlgorithm, {"_pretrained_": pico_clip(seed=9).float(), **experts}, inputs)
    exact = merge(RegMeanAlgorithm, experts, inputs)
    assert all(torch.equal(ours[key], exact[key].to(ours[key].dtype)) for key in exact)
    assert {tensor.dtype for tensor in ours.values() if tensor.is_floating_point()} == {torch.float32}


# Runs


@pytest.mark.parametrize("method", METHODS)
def test_a_method_object_can_be_run_again(method: type) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    algorithm = method(num_calibration_samples=N)
    first, second = (algorithm.run(experts, inputs).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_global_random_state_neither_matters_nor_changes() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    settings = {"token_dropout": 0.2, "num_calibration_samples": 20}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = merge(CrossMeanAlgorithm, experts, inputs, **settings)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = merge(CrossMeanAlgorithm, experts, inputs, **settings)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_fast_development_run_takes_few_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RuntimeConstants, "debug", True)
    algorithm = RegMeanAlgorithm(num_calibration_samples=256)
    algorithm.run(pico_pool())
    assert {len(drawn) for drawn in algorithm.report["calibration_indices"].values()} == {8}


def test_workers_that_load_the_data_change_nothing() -> None:
    experts = pico_experts(2)
    pool = pico_pool(experts)
    ours = merge(RegMeanAlgorithm, pool, None, num_workers=1)
    assert all(torch.equal(tensor, ours[key]) for key, tensor in merge(RegMeanAlgorithm, pool, None).items())


def test_the_methods_tell_experts_apart() -> None:
    """A task's statistics belong to that task's weights: exchanged inputs give another merge."""
    experts, inputs = pico_experts(2), pico_calibration(["digits", "letters"])
    exchanged = {"digits": inputs["letters"], "letters": inputs["digits"]}
    for method in METHODS:
        ours, theirs = (merge(method, experts, x) for x in (inputs, exchanged))
        name = next(name for name in reversed(ours) if name.endswith("fc2.weight"))
        assert relative_error(ours[name], theirs[name]) > FAR
