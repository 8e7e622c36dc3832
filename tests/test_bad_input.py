"""What cannot be merged is refused with the names and values met, before a forward runs; experts stay untouched."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import ForwardCounter
from fusion_bench.modelpool import BaseModelPool
from pico import (
    TASKS,
    PicoMLP,
    PicoText,
    experts_of,
    hooks_of,
    pico_calibration,
    pico_clip,
    pico_experts,
    pico_pool,
    vectors,
)
from torch import Tensor, nn

from fusion_bench_crossmean import (
    AlignmentCriterionAnalyzer,
    CrossMeanAlgorithm,
    CrossStatisticAlgorithm,
    ProgressiveRegMeanAlgorithm,
    RegMeanAlgorithm,
)
from fusion_bench_crossmean.linear_system import LinearSystem, SingularSystemError
from fusion_bench_crossmean.walker import WalkError

METHODS = (CrossMeanAlgorithm, CrossStatisticAlgorithm, ProgressiveRegMeanAlgorithm, RegMeanAlgorithm)
EVERYTHING = (*METHODS, AlignmentCriterionAnalyzer)
N = 24


def mlps(num_tasks: int = 3, **settings: Any) -> dict[str, nn.Module]:
    return experts_of(lambda seed: PicoMLP(seed=seed, **settings), num_tasks)


@pytest.fixture
def refused(forwards: ForwardCounter) -> Iterator[Callable[..., None]]:
    """Asserts that a run raises an error with this message, before any forward."""

    def check(
        experts: Any,
        inputs: Any,
        error: type[Exception],
        match: str,
        method: type = CrossMeanAlgorithm,
        **settings: Any,
    ) -> None:
        algorithm = method(**{"num_calibration_samples": N} | settings)
        with pytest.raises(error, match=match):
            algorithm.run(experts, inputs)
        assert forwards.count == 0

    yield check
    # The counter is able to count: the next forward is seen.
    before = forwards.count
    nn.Identity()(0)
    assert forwards.count == before + 1


# Settings


@pytest.mark.parametrize("method", EVERYTHING)
def test_an_unknown_setting_is_named_with_those_there_are(method: type) -> None:
    with pytest.raises(TypeError, match=r"has no setting 'rigde'; it has .*coverage.*num_calibration_samples"):
        method(rigde=1e-3)


@pytest.mark.parametrize("method", EVERYTHING)
def test_what_fusion_bench_sends_along_is_no_unknown_setting(method: type) -> None:
    method(_usage_="", _version_="0.2.33", _recursive_=False)


@pytest.mark.parametrize("method", EVERYTHING)
@pytest.mark.parametrize("count", [0, -1, 2.5, True, "many", None])
def test_fewer_than_one_calibration_input_is_refused(method: type, count: Any) -> None:
    with pytest.raises(ValueError, match=f"num_calibration_samples must be an integer of at least 1, not {count!r}"):
        method(num_calibration_samples=count)


@pytest.mark.parametrize(
    ("points", "match"),
    [
        ((), "path_points must be a list of at least one number"),
        ("half", "path_points must be a list"),
        (0.5, "path_points must be a list"),
        ((0, 1.5), r"Each of path_points must be a number in \[0, 1\], not 1.5"),
        ((-0.1, 1), r"Each of path_points must be a number in \[0, 1\], not -0.1"),
        ((0, float("nan")), r"Each of path_points must be a number in \[0, 1\], not nan"),
        ((0, 0.5, 0.5), "path_points must differ from each other"),
        ((0, 0.0), "path_points must differ from each other"),
        ((0, None), "Each of path_points must be a number"),
        ((True, 0), "Each of path_points must be a number"),
    ],
)
def test_path_points_that_are_empty_outside_or_repeated_are_refused(points: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CrossMeanAlgorithm(path_points=points)


@pytest.mark.parametrize(
    ("setting", "value", "match"),
    [
        ("coverage", "attention", "coverage must be one of mlp, full, not 'attention'"),
        ("seed", -1, "seed must be an integer of at least 0, not -1"),
        ("batch_size", 0, "batch_size must be an integer of at least 1, not 0"),
        ("num_workers", -2, "num_workers must be an integer of at least 0"),
        ("token_dropout", 1, "token_dropout must be below 1"),
        ("token_dropout", -0.1, r"token_dropout must be a number in \[0, 1\]"),
        ("reduce_non_diagonal_ratio", 1.1, r"reduce_non_diagonal_ratio must be a number in \[0, 1\], not 1.1"),
        ("reduce_non_diagonal_ratio", "all", "reduce_non_diagonal_ratio must be a number"),
        ("relative_ridge", -1e-9, r"relative_ridge must be a number in \[0, 1e\+06\]"),
        ("relative_ridge", float("nan"), "relative_ridge must be a number"),
        ("task_weighting", "median", "task_weighting must be one of sum, mean, not 'median'"),
        ("task_weights", {"digits": -1}, r"task_weights.digits must be a number in \[0, 1e\+06\], not -1"),
        ("dtype", "int64", "dtype must name a floating-point type such as float32, not 'int64'"),
        ("dtype", "double_precision", "dtype must name a floating-point type"),
        ("dtype", "Tensor", "dtype must name a floating-point type"),
        ("symmetric_weight", 2, r"symmetric_weight must be a number in \[0, 1\]"),
        ("gram_shrinkage", -1, r"gram_shrinkage must be a number in \[0, 1\]"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_limits(setting: str, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CrossMeanAlgorithm(**{setting: value})


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_task_in_task_weights_is_named(method: type, refused: Any) -> None:
    weights = {"digits": 1.0, "didgits": 2.0}
    refused(mlps(), vectors(), ValueError, r"task_weights names .*'didgits'.*'textures'", method, task_weights=weights)


def test_task_weights_that_are_all_zero_are_refused(refused: Any) -> None:
    weights = dict.fromkeys(mlps(), 0)
    refused(mlps(), vectors(), ValueError, "task_weights are zero for every task", task_weights=weights)


# Calibration data


@pytest.mark.parametrize("method", EVERYTHING)
def test_more_calibration_inputs_than_there_are_is_an_error_that_says_how_many(method: type, refused: Any) -> None:
    inputs = vectors()
    inputs["letters"] = inputs["letters"][:7]
    match = "task 'letters' has 7 calibration inputs, 24 were asked for.*Lower num_calibration_samples"
    refused(mlps(), inputs, ValueError, match, method)


def test_too_few_images_in_a_pool_is_an_error_that_says_how_many(refused: Any) -> None:
    match = "'digits' has 7, task 'letters' has 7, task 'textures' has 7 calibration inputs, 10 were asked for"
    refused(pico_pool(num_samples=7), None, ValueError, match, num_calibration_samples=10)


@pytest.mark.parametrize("method", EVERYTHING)
def test_a_clip_pool_without_training_data_is_an_error_that_says_what_to_take(method: type, refused: Any) -> None:
    pool = pico_pool(with_training_data=False)
    refused(pool, None, ValueError, r"no training data for task 'digits'.*train_datasets.*_model_only", method)


def test_a_clip_pool_that_lacks_the_data_of_one_task_names_it(refused: Any) -> None:
    pool = pico_pool()
    del pool._train_datasets["letters"]
    refused(pool, None, ValueError, r"no training data for task 'letters' \(it has 'digits', 'textures'\)")


@pytest.mark.parametrize("pool", [dict, BaseModelPool])
def test_a_plain_pool_without_calibration_data_is_an_error_that_says_how_to_give_it(pool: Any, refused: Any) -> None:
    refused(pool(mlps()), None, ValueError, r"brings no calibration inputs.*calibration=\{task")


def test_a_task_without_calibration_data_is_named(refused: Any) -> None:
    refused(mlps(), vectors(["digits", "letters"]), ValueError, "no calibration inputs for task 'textures'.*'letters'")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", EVERYTHING)
def test_nan_or_infinity_in_the_inputs_names_the_task(method: type, value: float, refused: Any) -> None:
    inputs = vectors()
    inputs["letters"][3, 2] = value
    refused(mlps(), inputs, ValueError, r"inputs of task 'letters' have 1 non-finite values .*shape \(24, 6\)", method)


def test_calibration_data_of_an_unknown_kind_is_refused(refused: Any) -> None:
    refused(mlps(), vectors() | {"letters": 7}, TypeError, "inputs of task 'letters' are a int; give a tensor")


# Experts


@pytest.mark.parametrize("method", EVERYTHING)
@pytest.mark.parametrize("pretrained", [False, True])
def test_a_pool_without_experts_is_refused(method: type, pretrained: bool, refused: Any) -> None:
    pool = {"_pretrained_": PicoMLP()} if pretrained else {}
    refused(pool, {}, ValueError, "The pool has no experts: there is nothing to merge", method)


def test_missing_and_unexpected_tensors_are_both_listed(refused: Any) -> None:
    experts = mlps(2)
    experts["letters"].mlp[1] = nn.Linear(6, 6, bias=False)
    experts["letters"].register_parameter("extra", nn.Parameter(torch.ones(2)))
    refused(experts, vectors(), ValueError, r"'letters' lacks 'mlp\.1\.bias' and has in addition 'extra'.*'digits'")


def test_a_missing_layer_is_listed(refused: Any) -> None:
    experts = mlps(2) | {"textures": PicoMLP(depth=2)}
    refused(
        experts, vectors(), ValueError, r"'textures' lacks 'mlp\.2\.bias', 'mlp\.2\.weight' and has in addition nothing"
    )


@pytest.mark.parametrize("method", EVERYTHING)
def test_another_shape_is_named_with_both_shapes_and_the_way_out(method: type, refused: Any) -> None:
    experts = {"digits": PicoText(vocabulary=10), "letters": PicoText(vocabulary=12)}
    ids = {"input_ids": torch.zeros(N, 3, dtype=torch.long), "attention_mask": torch.ones(N, 3)}
    match = r"'embedding\.weight' is \(10, 8\) in 'digits' and \(12, 8\) in 'letters'.*Take the model out"
    refused(experts, dict.fromkeys(experts, ids), ValueError, match, method)


def test_a_pretrained_model_of_another_shape_is_refused(refused: Any) -> None:
    experts = mlps() | {"_pretrained_": PicoMLP(width=8)}
    refused(experts, vectors(), ValueError, r"'mlp\.0\.weight' is \(6, 6\) in 'digits' and \(8, 8\) in '_pretrained_'")


def test_all_experts_that_do_not_fit_are_named_at_once() -> None:
    experts, inputs = pico_experts(4), pico_calibration(TASKS[:4])
    with torch.no_grad():
        next(experts["letters"].parameters())[0] = float("nan")
    experts["icons"] = pico_clip("quick_gelu")
    match = r"2 of 4 experts: Expert 'letters' has NaN or infinity.* hidden_act is 'gelu' in 'digits' and .* in 'icons'"
    with pytest.raises(ValueError, match=match):
        CrossMeanAlgorithm(num_calibration_samples=N).run(experts, inputs)


def test_unfolded_adapters_are_refused() -> None:
    experts, inputs = pico_experts(), pico_calibration()
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    experts["letters"] = peft.get_peft_model(experts["letters"], config)
    with pytest.raises(ValueError, match=r"Expert 'letters' has low-rank adapters in \d+ modules.*merge_and_unload"):
        CrossMeanAlgorithm(num_calibration_samples=N).run(experts, inputs)
    experts["letters"] = experts["letters"].merge_and_unload()
    CrossMeanAlgorithm(num_calibration_samples=N).run(experts, inputs)


@pytest.mark.parametrize("method", EVERYTHING)
def test_experts_that_differ_in_their_activation_are_refused_by_name(method: type, refused: Any) -> None:
    experts = pico_experts(2) | {"textures": pico_clip("quick_gelu", seed=7)}
    match = r"hidden_act is 'gelu' in 'digits' and 'quick_gelu' in 'textures' \(experts with different activations"
    refused(experts, pico_calibration(), ValueError, match, method)


def test_experts_whose_activation_is_only_in_their_config_are_refused_by_name(refused: Any) -> None:
    class Functional(PicoMLP):
        def __init__(self, hidden_act: str) -> None:
            super().__init__()
            self.config = type("Config", (), {"hidden_act": hidden_act})()

    experts = {"digits": Functional("gelu"), "letters": Functional("quick_gelu")}
    refused(experts, vectors(), ValueError, "hidden_act is 'gelu' in 'digits' and 'quick_gelu' in 'letters'")


def test_experts_that_differ_in_their_number_of_heads_are_refused_by_name(refused: Any) -> None:
    experts = pico_experts(2)
    config = copy.deepcopy(experts["digits"].config)
    config.num_attention_heads = 4
    experts["letters"] = type(experts["digits"])(config)
    refused(experts, pico_calibration(), ValueError, "num_attention_heads is 2 in 'digits' and 4 in 'letters'")


def test_integer_buffers_that_disagree_are_refused_by_name(refused: Any) -> None:
    experts = mlps(2)
    for index, expert in enumerate(experts.values()):
        expert.register_buffer("steps", torch.tensor([index]))
    refused(
        experts, vectors(), ValueError, "Integer buffers are copied, and must agree: 'steps' differ between 'digits'"
    )


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("method", EVERYTHING)
def test_nan_or_infinity_in_a_weight_names_expert_and_tensor(method: type, value: float, refused: Any) -> None:
    experts = mlps()
    experts["letters"].mlp[2].bias.data[1] = value
    refused(experts, vectors(), ValueError, r"'letters' has NaN or infinity in 1 tensors: 'mlp\.2\.bias'", method)


class Careless(BaseModelPool):
    """A pool whose `load_model` returns something else for one expert."""

    returned: Any = None

    def load_model(self, model_name_or_config: Any, *_: Any, **__: Any) -> Any:
        return self.returned if model_name_or_config == "letters" else super().load_model(model_name_or_config)


@pytest.mark.parametrize("method", EVERYTHING)
@pytest.mark.parametrize(
    ("returned", "kind"), [(None, "NoneType"), (PicoMLP().state_dict(), "OrderedDict"), ({}, "dict")]
)
def test_a_pool_that_returns_no_module_is_an_error_that_names_the_expert(
    method: type, returned: Any, kind: str, refused: Any
) -> None:
    pool = Careless(mlps())
    pool.returned = returned
    refused(pool, vectors(), TypeError, f"Loading expert 'letters' gave a {kind}, not a torch module", method)


def test_a_pool_that_returns_no_pretrained_module_is_an_error(refused: Any) -> None:
    class Pool(BaseModelPool):
        def load_model(self, model_name_or_config: Any, *_: Any, **__: Any) -> Any:
            return None if model_name_or_config == "_pretrained_" else super().load_model(model_name_or_config)

    refused(Pool(mlps() | {"_pretrained_": PicoMLP()}), vectors(), TypeError, "'_pretrained_' gave a NoneType")


def test_a_model_without_linear_layers_is_refused(refused: Any) -> None:
    experts = {task: nn.Sequential(nn.Conv1d(1, 1, 1)) for task in ("digits", "letters")}
    refused(experts, vectors(), ValueError, "Sequential has no linear layer")


def test_a_model_without_an_mlp_is_an_error_that_names_the_other_coverage(refused: Any) -> None:
    experts = {task: nn.Sequential(nn.Linear(6, 6)) for task in ("digits", "letters")}
    refused(experts, vectors(), ValueError, r"coverage=mlp finds no MLP.*'0'.*Use coverage=full")


# Layers that are not reached: one forward, the probe, has to run to know


class FusedAttention(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x.clone(), x, need_weights=False)[0]  # no longer self-attention
        return x + self.mlp(x)


@pytest.mark.parametrize("method", EVERYTHING)
def test_a_covered_layer_that_no_forward_reaches_is_named_before_anything_is_solved(
    method: type, forwards: ForwardCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinearSystem, "solve", lambda *_, **__: pytest.fail("something was solved"))
    experts = experts_of(FusedAttention)
    inputs = {task: torch.randn(N, 5, 8) for task in experts}
    match = r"2 of 4 covered layers were never reached by a forward: .*'attention\.out_proj'.*coverage=mlp"
    with pytest.raises(WalkError, match=match):
        method(num_calibration_samples=N, coverage="full").run(experts, inputs)
    assert forwards.count == 1
    assert not any(list(hooks_of(expert)) for expert in experts.values())


def test_a_fused_attention_merges_under_the_coverage_that_the_error_names() -> None:
    experts = experts_of(FusedAttention)
    inputs = {task: torch.randn(N, 5, 8) for task in experts}
    algorithm = CrossMeanAlgorithm(num_calibration_samples=N)
    algorithm.run(experts, inputs)
    assert [layer["name"] for layer in algorithm.report["layers"]] == ["mlp.0", "mlp.2"]


# Outputs


@pytest.mark.parametrize("method", EVERYTHING)
def test_an_output_that_cannot_be_written_is_refused(method: type, tmp_path: Path, refused: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "report.json"
    refused(
        mlps(), vectors(), OSError, f"'{path}' cannot be written.*Choose another path", method, report_path=str(path)
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("method", EVERYTHING)
def test_an_output_that_is_a_folder_is_refused(method: type, tmp_path: Path, refused: Any) -> None:
    refused(mlps(), vectors(), OSError, "cannot be written: .* is a folder", method, report_path=str(tmp_path))


def test_the_outputs_are_checked_before_any_expert_is_loaded(tmp_path: Path) -> None:
    class Pool(BaseModelPool):
        def load_model(self, *_: Any, **__: Any) -> Any:
            pytest.fail("an expert was loaded")

    (tmp_path / "file").write_text("in the way")
    algorithm = CrossMeanAlgorithm(num_calibration_samples=N, report_path=str(tmp_path / "file" / "report.json"))
    with pytest.raises(OSError, match="cannot be written"):
        algorithm.run(Pool(mlps()), vectors())


# Things that look bad and are not


def test_an_integer_buffer_that_one_expert_lacks_is_copied_from_those_that_have_it() -> None:
    experts = mlps()
    for task in ("letters", "textures"):
        experts[task].register_buffer("position_ids", torch.arange(3))
    for template in (None, "textures", "digits"):
        pool = experts | ({"_pretrained_": copy.deepcopy(experts[template])} if template else {})
        merged = CrossMeanAlgorithm(num_calibration_samples=N).run(pool, vectors())
        if template == "textures":
            assert torch.equal(merged.position_ids, torch.arange(3))
            assert merged.position_ids.dtype == torch.int64


def test_integer_and_boolean_buffers_are_copied_never_averaged() -> None:
    experts = mlps()
    for expert in experts.values():
        expert.register_buffer("steps", torch.tensor([2**53 + 1]))
        expert.register_buffer("flag", torch.tensor([True, False]))
    merged = CrossMeanAlgorithm(num_calibration_samples=N).run(experts, vectors())
    assert merged.steps.tolist() == [2**53 + 1]
    assert merged.flag.tolist() == [True, False]


def test_experts_that_differ_in_dropout_merge() -> None:
    experts = {}
    for index, task in enumerate(("digits", "letters")):
        network = PicoMLP(seed=index)
        network.dropout = nn.Dropout(0.1 * index)
        experts[task] = network
    CrossMeanAlgorithm(num_calibration_samples=N).run(experts, vectors())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_dtypes_merge_in_float32_and_take_the_pretrained_models_dtype(dtype: torch.dtype) -> None:
    experts = mlps()
    exact = {
        task: copy.deepcopy(expert).to(dtype if task == "letters" else torch.float32)
        for task, expert in experts.items()
    }
    as_float32 = {task: copy.deepcopy(expert).float() for task, expert in exact.items()}
    method = CrossMeanAlgorithm(num_calibration_samples=N)
    expected = method.run(as_float32, vectors()).state_dict()
    seen = []

    class Watched(CrossMeanAlgorithm):
        def input_pair(self, inputs: dict[float, Tensor]) -> tuple[Tensor, Tensor]:
            seen.extend(x.dtype for x in inputs.values())
            return super().input_pair(inputs)

    merged = Watched(num_calibration_samples=N).run(exact, vectors()).state_dict()
    assert set(seen) == {torch.float32}
    assert all(torch.equal(merged[key], expected[key]) for key in expected)
    with_pretrained = exact | {"_pretrained_": PicoMLP().to(dtype)}
    rounded = method.run(with_pretrained, vectors()).state_dict()
    assert all(torch.equal(rounded[key], expected[key].to(dtype)) for key in expected)
    chosen = CrossMeanAlgorithm(num_calibration_samples=N, dtype="float64").run(with_pretrained, vectors()).state_dict()
    assert all(torch.equal(chosen[key], expected[key].double()) for key in expected)
    assert [next(expert.parameters()).dtype for expert in exact.values()] == [torch.float32, dtype, torch.float32]


def test_experts_of_one_low_precision_run_and_stay_in_it() -> None:
    experts = {task: expert.bfloat16() for task, expert in mlps().items()}
    merged = CrossMeanAlgorithm(num_calibration_samples=N).run(experts, vectors())
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}


def test_a_merged_weight_that_overflows_its_dtype_is_an_error_that_names_the_layer() -> None:
    """Two experts whose weights cancel on one task's inputs: the compromise lies far outside of both."""
    experts, inputs = mlps(2), {task: x.half() for task, x in vectors(["digits", "letters"]).items()}
    for expert in experts.values():
        expert.half()

    class Huge(RegMeanAlgorithm):
        def linear_system(self, **options: Any) -> LinearSystem:
            system = super().linear_system(**options)
            solve = system.solve

            def scaled(fallback: Tensor) -> Any:
                solution = solve(fallback)
                solution.weight.mul_(1e6)
                return solution

            system.solve = scaled
            return system

    with pytest.raises(ArithmeticError, match=r"layer 'mlp\.0' overflows torch.float16.*Use dtype=float32"):
        Huge(num_calibration_samples=N).run(experts, inputs)


# What a run leaves of the experts


def snapshot(experts: dict[str, nn.Module]) -> dict[str, Any]:
    return {
        task: {
            "weights": {key: tensor.clone() for key, tensor in expert.state_dict().items()},
            "training": {name: module.training for name, module in expert.named_modules()},
            "requires_grad": {name: p.requires_grad for name, p in expert.named_parameters()},
            "grads": {name: p.grad for name, p in expert.named_parameters()},
            "hooks": [id(hook) for hook in hooks_of(expert)],
            "storage": {name: p.data_ptr() for name, p in expert.named_parameters()},
        }
        for task, expert in experts.items()
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    for task, old in before.items():
        new = after[task]
        assert old["weights"].keys() == new["weights"].keys()
        assert all(torch.equal(tensor, new["weights"][key]) for key, tensor in old["weights"].items())
        assert {k: v for k, v in old.items() if k != "weights"} == {k: v for k, v in new.items() if k != "weights"}


@pytest.fixture
def lived_in() -> dict[str, nn.Module]:
    """Experts with hooks, frozen parameters and training modes of their own."""
    experts = pico_experts()
    experts["letters"].eval()
    first = next(module for module in experts["textures"].modules() if isinstance(module, nn.Linear))
    first.eval()  # below a parent in training mode
    first.register_forward_pre_hook(lambda *_: None)
    experts["textures"].register_forward_hook(lambda *_: None)
    for name, parameter in experts["digits"].named_parameters():
        parameter.requires_grad_("bias" in name)
    return experts


@pytest.mark.parametrize("method", EVERYTHING)
@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_experts_are_as_before_a_run(method: type, coverage: str, lived_in: dict[str, nn.Module]) -> None:
    before = snapshot(lived_in)
    method(num_calibration_samples=N, coverage=coverage).run(lived_in, pico_calibration())
    assert_unchanged(before, snapshot(lived_in))


@pytest.mark.parametrize("error", [SingularSystemError, KeyboardInterrupt])
@pytest.mark.parametrize("method", METHODS)
def test_experts_are_as_before_during_a_run_and_after_it_fails_in_the_middle(
    method: type, error: type[BaseException], lived_in: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, solve, count = snapshot(lived_in), LinearSystem.solve, []

    def fail_at_the_third(self: LinearSystem, fallback: Tensor) -> Any:
        count.append(1)
        if len(count) == 3:
            raise error("on purpose")
        assert_unchanged(before, snapshot(lived_in))
        return solve(self, fallback)

    monkeypatch.setattr(LinearSystem, "solve", fail_at_the_third)
    with pytest.raises(error, match="on purpose"):
        method(num_calibration_samples=N).run(lived_in, pico_calibration())
    assert_unchanged(before, snapshot(lived_in))


def test_a_pretrained_model_is_as_before_and_its_frozen_parameters_are_frozen_in_the_result() -> None:
    pretrained = pico_clip(seed=9)
    frozen = [name for name, _ in pretrained.named_parameters() if "layernorm" in name]
    for name in frozen:
        pretrained.get_parameter(name).requires_grad_(False)
    before = snapshot({"_pretrained_": pretrained})
    experts = pico_experts()
    merged = CrossMeanAlgorithm(num_calibration_samples=N).run(
        {"_pretrained_": pretrained, **experts}, pico_calibration()
    )
    assert_unchanged(before, snapshot({"_pretrained_": pretrained}))
    assert merged is not pretrained
    assert all(p.requires_grad is (name not in frozen) for name, p in merged.named_parameters())
    owned = {p.data_ptr() for model in (pretrained, *experts.values()) for p in model.parameters()}
    assert not owned & {p.data_ptr() for p in merged.parameters()}


def test_tied_weights_stay_tied_and_survive_saving(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.embedding = nn.Linear(6, 8, bias=False)
            self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU())
            self.decoder = nn.Linear(6, 8, bias=False)
            self.decoder.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.embedding(x)) @ self.decoder.weight

    experts, inputs = experts_of(Tied), vectors()
    merged = CrossMeanAlgorithm(num_calibration_samples=N).run(experts, inputs)
    assert merged.decoder.weight is merged.embedding.weight
    torch.save(merged.state_dict(), tmp_path / "merged.pt")
    loaded = Tied(99).eval()
    loaded.load_state_dict(torch.load(tmp_path / "merged.pt"))
    assert torch.equal(loaded(inputs["digits"]), merged(inputs["digits"]))


def test_a_merged_clip_survives_saving(tmp_path: Path) -> None:
    merged = CrossMeanAlgorithm(num_calibration_samples=N).run(pico_experts(), pico_calibration())
    merged.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_act"] == "gelu"
    loaded = type(merged).from_pretrained(tmp_path, dtype=torch.float64).eval()
    images = pico_calibration()["digits"]
    assert torch.equal(loaded(images)[1], merged(images)[1])


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("num_tasks", [2, 8])
def test_a_pool_that_loads_lazily_has_three_models_alive_whatever_depth_and_tasks(num_tasks: int, depth: int) -> None:
    """The template, which has no values, the merged one and the one that runs; before them one expert at a time."""
    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    class Counted(PicoMLP):
        def __new__(cls, *_: Any, **__: Any) -> Counted:  # deep copies come this way too
            made = super().__new__(cls)
            alive.add(made)
            return made

    while_loading, while_solving = [], []

    class Lazy(BaseModelPool):
        def load_model(self, model_name_or_config: Any, *_: Any, **__: Any) -> nn.Module:
            while_loading.append(len(alive))
            return Counted(depth=depth, seed=self.all_model_names.index(model_name_or_config))

    class Watched(CrossMeanAlgorithm):
        def linear_system(self, **options: Any) -> LinearSystem:
            while_solving.append(len(alive))
            return super().linear_system(**options)

    tasks = TASKS[:num_tasks]
    pool = Lazy(dict.fromkeys(["_pretrained_", *tasks], "lazy"))
    merged = Watched(num_calibration_samples=N).run(pool, vectors(tasks))
    assert while_loading == [0] + [1] * num_tasks
    assert while_solving == [3] * depth
    assert set(alive) == {merged}
