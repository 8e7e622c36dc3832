"""Averaged, merged and path networks; modes and configs while they run; one checkpoint under every layout."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import oracles
import pytest
import torch
from pico import PicoMLP, experts_of, hooks_of, pico_calibration, pico_clip, pico_experts
from tolerances import SAME, relative_error, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.expert_checks import activation_of, check_expert
from fusion_bench_crossmean.networks import Networks, average_into, ready_to_run
from fusion_bench_crossmean.weights import tensors_of

GROUP = LayerGroup(("mlp.0",))


def mlps(**settings: Any) -> dict[str, nn.Module]:
    return experts_of(lambda seed: PicoMLP(seed=seed, **settings))


def networks_of(
    experts: Mapping[str, nn.Module],
    path_points: Sequence[float],
    template: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
    forward_dtype: torch.dtype | None = None,
) -> Networks:
    tensors = {task: tensors_of(expert) for task, expert in experts.items()}
    template = template or next(iter(experts.values()))
    return Networks(tensors, path_points, template, dtype=dtype, forward_dtype=forward_dtype)


def loaded(networks: Networks, task: str, point: float, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """A copy of what the network of one task at one path point runs with."""
    networks.load(task, point, names)
    return {name: tensor.clone() for name, tensor in networks.network(task, point).state_dict().items()}


@pytest.mark.parametrize("hidden_act", ["gelu", "quick_gelu"])
def test_the_merged_network_starts_as_the_mean_of_the_experts(hidden_act: str) -> None:
    experts = pico_experts(hidden_act=hidden_act)
    template = pico_clip(hidden_act, seed=9)
    networks = networks_of(experts, (0.0,), template)
    assert state_error(networks.merged.state_dict(), oracles.average(experts)) < SAME
    assert networks.merged is not template
    assert state_error(template.state_dict(), pico_clip(hidden_act, seed=9).state_dict()) == 0


def test_the_mean_of_low_precision_experts_is_taken_in_float32() -> None:
    experts = {task: expert.half() for task, expert in mlps().items()}
    with torch.no_grad():
        for expert in experts.values():
            expert.mlp[0].weight.fill_(60000.0)  # their sum overflows float16
        experts["digits"].mlp[0].weight.fill_(59968.0)
    target = copy.deepcopy(experts["digits"])
    average_into(tensors_of(target), [tensors_of(expert) for expert in experts.values()])
    assert torch.equal(target.mlp[0].weight, torch.full((6, 6), 59989.0).half())


def test_equal_parameters_are_copied_bit_for_bit() -> None:
    """The sum of three times 0.1, divided by three, is not 0.1."""
    experts = mlps()
    for expert in experts.values():
        expert.mlp[0].weight.data.fill_(0.1)
    target = PicoMLP()
    average_into(tensors_of(target), [tensors_of(expert) for expert in experts.values()])
    assert (0.1 + 0.1 + 0.1) / 3 != 0.1
    assert torch.equal(target.mlp[0].weight, experts["digits"].mlp[0].weight)


@pytest.mark.parametrize("point", [0.25, 0.5])
def test_a_path_network_interpolates_every_parameter(point: float) -> None:
    experts = pico_experts()
    networks = networks_of(experts, (0.0, point))
    merged = copy.deepcopy(networks.merged.state_dict())
    path = loaded(networks, "letters", point)
    assert state_error(path, oracles.mixed(merged, experts["letters"].state_dict(), point)) < SAME
    assert state_error(networks.merged.state_dict(), merged) == 0
    assert state_error(experts["letters"].state_dict(), pico_experts()["letters"].state_dict()) == 0


def test_one_module_runs_for_every_task_and_path_point_with_the_tensors_loaded_for_it() -> None:
    experts = pico_experts()
    networks = networks_of(experts, (0.0, 0.25, 1.0))
    merged = networks.merged.state_dict()
    for task in [*experts, *reversed(experts)]:  # each after itself, and after every other
        for point in (1.0, 0.25, 0.0, 0.25, 1.0):
            assert networks.network(task, point) is networks.runner
            state = experts[task].state_dict()
            expected = {0.0: merged, 0.25: oracles.mixed(merged, state, 0.25), 1.0: state}[point]
            error = state_error(loaded(networks, task, point), expected)
            assert error < SAME if point == 0.25 else error == 0


def test_expert_and_merged_parameters_run_as_they_are_stored_without_a_copy() -> None:
    experts = mlps()
    networks = networks_of(experts, (0.0, 1.0))
    for task, expert in experts.items():
        for point, owner in ((1.0, expert), (0.0, networks.merged)):
            networks.load(task, point)
            for name, parameter in networks.runner.named_parameters():
                assert parameter.data_ptr() == owner.get_parameter(name).data_ptr()


def test_what_is_not_loaded_holds_nan() -> None:
    networks = networks_of(mlps(), (0.0, 0.5, 1.0))

    def missing() -> set[str]:
        return {name for name, tensor in networks.runner.state_dict().items() if bool(tensor.isnan().any())}

    everything = {name for name, _ in networks.runner.named_parameters()}
    assert missing() == everything
    for point in networks.path_points:
        for names in (["mlp.0.weight", "mlp.0.bias"], ["mlp.1.weight"], None):
            networks.load("letters", point, names)
            assert missing() == (set() if names is None else everything - set(names))
    networks.unload()
    assert missing() == everything


def test_a_forward_that_writes_into_a_buffer_reaches_neither_merged_network_nor_expert() -> None:
    experts = mlps()
    for value, expert in enumerate(experts.values()):
        expert.register_buffer("average", torch.full((2,), float(value)))
    networks = networks_of(experts, (0.0, 0.5, 1.0))
    for point in networks.path_points:
        networks.load("textures", point)
        networks.runner.average.add_(1)
    assert torch.equal(networks.merged.average, torch.ones(2))
    assert [expert.average.tolist() for expert in experts.values()] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_written_weight_reaches_merged_and_path_networks_and_no_expert(dtype: torch.dtype) -> None:
    experts = {task: expert.to(dtype) for task, expert in mlps().items()}
    before = {task: copy.deepcopy(expert.state_dict()) for task, expert in experts.items()}
    networks = networks_of(experts, (0.0, 0.25, 1.0), dtype=dtype)
    others = {key: tensor.clone() for key, tensor in networks.merged.state_dict().items() if key != "mlp.0.weight"}
    for point in networks.path_points:  # what was made before the weight was written must not be used again
        networks.load("digits", point)
    weight = torch.randn(6, 6, dtype=torch.float64)
    networks.write(GROUP, weight)
    stored = networks.merged.mlp[0].weight
    assert torch.equal(stored, weight.to(dtype))
    for task, expert in experts.items():
        # from the stored weight, not from the float64 solution
        path = torch.lerp(stored, expert.mlp[0].weight, 0.25)
        expected = {0.0: stored, 0.25: path, 1.0: before[task]["mlp.0.weight"]}
        for point, tensor in expected.items():
            assert torch.equal(loaded(networks, task, point)["mlp.0.weight"], tensor)
        assert all(torch.equal(tensor, before[task][key]) for key, tensor in expert.state_dict().items())
    assert all(torch.equal(networks.merged.state_dict()[key], tensor) for key, tensor in others.items())


def test_a_stacked_weight_is_written_to_every_layer_of_its_group() -> None:
    experts = pico_experts()
    networks = networks_of(experts, (0.0, 0.5, 1.0))
    names = tuple(oracles.clip_groups(networks.merged, "full")[0])
    group, weight = LayerGroup(names), torch.randn(48, 16)
    networks.write(group, weight)
    assert torch.equal(networks.merged_weight(group), weight)
    assert torch.equal(networks.merged.get_submodule(names[1]).weight, weight[16:32])
    expert = [experts["letters"].get_submodule(name).weight for name in names]
    assert torch.equal(networks.expert_weight("letters", group), torch.cat(expert))


def test_a_written_weight_that_overflows_is_an_error_that_names_layer_and_size() -> None:
    experts = {task: expert.half() for task, expert in mlps().items()}
    networks = networks_of(experts, (0.0,), dtype=torch.float16)
    with pytest.raises(ArithmeticError, match=r"layer 'mlp\.0' overflows torch\.float16 \(largest entry 1e\+05\)"):
        networks.write(GROUP, torch.full((6, 6), 1e5))


def test_a_result_that_overflows_its_dtype_is_an_error_that_names_the_tensors() -> None:
    networks = networks_of(mlps(), (0.0,))
    networks.write(GROUP, torch.full((6, 6), 1e5))
    with pytest.raises(ArithmeticError, match=r"overflows torch\.float16 in 'mlp\.0\.weight'\. Use dtype=float32"):
        networks.finish(torch.float16)


@pytest.mark.parametrize("forward_dtype", [None, torch.bfloat16])
def test_experts_of_another_dtype_run_as_rounded_copies(forward_dtype: torch.dtype | None) -> None:
    experts = mlps()
    experts["letters"].float()
    before = copy.deepcopy(experts)
    networks = networks_of(experts, (0.0, 0.5, 1.0), dtype=torch.float32, forward_dtype=forward_dtype)
    assert {p.dtype for p in networks.merged.parameters()} == {torch.float32}
    runs_in = forward_dtype or torch.float32
    for task, expert in experts.items():
        assert networks.expert_weight(task, GROUP).dtype == torch.float32
        state, merged = expert.state_dict(), networks.merged.state_dict()
        path = {name: torch.lerp(merged[name], tensor.float(), 0.5) for name, tensor in state.items()}
        for point, expected in ((0.0, merged), (0.5, path), (1.0, state)):
            ours = loaded(networks, task, point)
            assert all(torch.equal(ours[name], tensor.to(runs_in)) for name, tensor in expected.items())
            assert {tensor.dtype for tensor in ours.values()} == {runs_in}
    for task, expert in experts.items():
        assert {p.dtype for p in expert.parameters()} == {torch.float32 if task == "letters" else torch.float64}
        assert state_error(expert.state_dict(), before[task].state_dict()) == 0


def test_networks_run_in_eval_mode_while_experts_keep_the_modes_they_had() -> None:
    experts = mlps()
    experts["digits"].mlp[1].eval()
    networks = networks_of(experts, (0.0, 0.5, 1.0))
    modes = {task: [module.training for module in expert.modules()] for task, expert in experts.items()}

    def unchanged() -> bool:
        return modes == {task: [module.training for module in expert.modules()] for task, expert in experts.items()}

    with contextlib.suppress(ZeroDivisionError), networks:
        for network in (networks.merged, networks.runner):
            assert not any(module.training for module in network.modules())
        assert unchanged()
        _ = 1 / 0
    assert unchanged()
    assert modes["digits"] != modes["letters"]


def test_eval_mode_ends_with_the_block_and_every_module_returns_to_its_own() -> None:
    network = PicoMLP()
    network.mlp[1].eval()
    modes = [module.training for module in network.modules()]
    with contextlib.suppress(ZeroDivisionError), ready_to_run(network):
        assert not any(module.training for module in network.modules())
        _ = 1 / 0
    assert modes == [module.training for module in network.modules()]
    assert True in modes
    assert False in modes


def test_recording_is_off_inside_and_as_before_outside() -> None:
    network = pico_clip()
    network.config.output_hidden_states = True
    with contextlib.suppress(ZeroDivisionError), ready_to_run(network):
        assert network.config.output_hidden_states is False
        assert network(pico_calibration()["digits"][:1]).hidden_states is None
        _ = 1 / 0
    assert network.config.output_hidden_states is True


def test_parameters_need_no_gradient_while_networks_run_and_are_as_trainable_as_the_template_afterwards() -> None:
    template = PicoMLP(seed=9)
    template.mlp[0].weight.requires_grad_(False)
    networks = networks_of(mlps(), (0.0, 0.5, 1.0), template)
    networks.load("digits", 0.5)
    for network in (networks.merged, networks.runner):
        assert not any(p.requires_grad for p in network.parameters())
    merged = networks.finish(torch.float64)
    assert [n for n, p in merged.named_parameters() if not p.requires_grad] == ["mlp.0.weight"]


@pytest.mark.parametrize(("hidden_act", "named"), [("gelu", "GELU"), ("quick_gelu", "QuickGELU")])
def test_the_activation_is_stated_as_config_and_class(hidden_act: str, named: str) -> None:
    assert activation_of(pico_clip(hidden_act)).startswith(f"{hidden_act}, {named}")
    assert activation_of(PicoMLP()) == "unknown"


def test_experts_that_fit_are_accepted() -> None:
    for experts in (pico_experts(3) | {"_pretrained_": pico_clip(seed=9)}, mlps()):
        reference = next(iter(experts.items()))
        for name, expert in experts.items():
            check_expert(name, expert, reference)


# One checkpoint, several layouts

#: Frobenius norm and a fixed projection of every solved weight; transformers 4.57 and 5.24 agree on them.
FINGERPRINTS = {
    "encoder.layers.0.self_attn.q_proj.weight": (2.5535470718174875, 0.8949479134619429),
    "encoder.layers.0.self_attn.k_proj.weight": (2.3082964875887257, -1.090546771937211),
    "encoder.layers.0.self_attn.v_proj.weight": (2.519506663648606, -1.366744477693194),
    "encoder.layers.0.self_attn.out_proj.weight": (4.021414181901416, 0.06284178947031172),
    "encoder.layers.0.mlp.fc1.weight": (3.5689837844937053, 2.8312618660170776),
    "encoder.layers.0.mlp.fc2.weight": (2.9061222798264286, -0.36850322788722745),
    "encoder.layers.1.self_attn.q_proj.weight": (2.720446422928713, 0.42698482217657907),
    "encoder.layers.1.self_attn.k_proj.weight": (2.676027757062038, -1.684499233050007),
    "encoder.layers.1.self_attn.v_proj.weight": (2.6804139492979973, 3.069735646743332),
    "encoder.layers.1.self_attn.out_proj.weight": (2.7222642568443556, 1.5141697828212846),
    "encoder.layers.1.mlp.fc1.weight": (3.695826575216897, 4.996919214593973),
    "encoder.layers.1.mlp.fc2.weight": (3.3585793391476892, -2.925925107276095),
}


class Nested(nn.Module):
    """The layout of older checkpoints: everything below `vision_model`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.vision_model = network

    def forward(self, pixel_values: Tensor) -> Any:
        return self.vision_model(pixel_values)


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_nesting_does_not_change_the_merged_weights(coverage: str) -> None:
    method = CrossMeanAlgorithm(num_calibration_samples=24, coverage=coverage)
    flat = method.run(pico_experts(), pico_calibration()).state_dict()
    nested = method.run({task: Nested(e) for task, e in pico_experts().items()}, pico_calibration()).state_dict()
    assert nested.keys() == {f"vision_model.{key}" for key in flat}
    assert all(torch.equal(nested[f"vision_model.{key}"], tensor) for key, tensor in flat.items())


def test_the_same_weights_give_the_same_merge_under_every_version_of_transformers() -> None:
    """The numbers were computed once; experts and images come from numpy by name."""
    merged = CrossMeanAlgorithm(num_calibration_samples=24, coverage="full").run(pico_experts(), pico_calibration())
    for name, (norm, projection) in FINGERPRINTS.items():
        key = name if name in merged.state_dict() else f"vision_model.{name}"
        weight = merged.state_dict()[key]
        direction = torch.cos(torch.arange(weight.numel(), dtype=torch.float64)).view_as(weight)
        assert relative_error(weight.norm(), torch.tensor(norm)) < 1e-9
        assert relative_error((weight * direction).sum(), torch.tensor(projection)) < 1e-9
    assert len(FINGERPRINTS) == 12


def test_a_merge_leaves_no_hook_on_its_result() -> None:
    merged = CrossMeanAlgorithm(num_calibration_samples=24).run(pico_experts(), pico_calibration())
    assert not list(hooks_of(merged))
    assert not any(module.training for module in merged.modules())


class Rotating(nn.Module):
    """A layer, and frequencies that are not part of the state dict."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("frequencies", frequencies, persistent=False)


@pytest.mark.parametrize("final", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("forward_dtype", [None, torch.bfloat16])
def test_buffers_of_a_precision_of_their_own_keep_it(forward_dtype: torch.dtype | None, final: torch.dtype) -> None:
    frequencies = torch.tensor([1 / 3, 0.1], dtype=torch.float32)
    experts = {task: Rotating(frequencies) for task in "ab"}
    for expert in experts.values():
        expert.layer.to(torch.bfloat16)
    networks = networks_of(experts, (0,), dtype=torch.bfloat16, forward_dtype=forward_dtype)
    for network in (networks.merged, networks.runner, networks.finish(final)):
        assert network.frequencies.dtype == torch.float32
        assert torch.equal(network.frequencies, frequencies)
    assert networks.merged.layer.weight.dtype == final


def test_buffers_of_the_parameters_precision_follow_it() -> None:
    experts = {task: Rotating(torch.tensor([1 / 3, 0.1])) for task in "ab"}
    networks = networks_of(experts, (0,), dtype=torch.float64, forward_dtype=torch.bfloat16)
    assert networks.runner.frequencies.dtype == torch.bfloat16
    assert networks.finish(torch.float32).frequencies.dtype == torch.float32


def test_averaging_reads_one_tensor_at_a_time() -> None:
    """Experts lie on disk because memory is short."""
    alive: list[int] = []

    class Watched(dict):
        def __getitem__(self, name: str) -> Tensor:
            tensor = torch.ones(3)
            alive.append(1)
            weakref.finalize(tensor, alive.pop)
            assert len(alive) <= 3
            return tensor

    target = {"a": torch.zeros(3)}
    average_into(target, [Watched(a=None) for _ in range(8)])
    assert torch.equal(target["a"], torch.ones(3))
