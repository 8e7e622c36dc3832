"""Averaged, merged and path networks; modes and configs while they run; one checkpoint under every layout."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import oracles
import pytest
import torch
from pico import PicoMLP, experts_of, hooks_of, pico_calibration, pico_clip, pico_experts
from tolerances import SAME, relative_error, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.experts import activation_of, check_experts
from fusion_bench_crossmean.networks import Networks, average_into, common_dtype, interpolate, ready_to_run

GROUP = LayerGroup(("mlp.0",))


def mlps(**settings: Any) -> dict[str, nn.Module]:
    return experts_of(lambda seed: PicoMLP(seed=seed, **settings))


@pytest.mark.parametrize("hidden_act", ["gelu", "quick_gelu"])
def test_the_merged_network_starts_as_the_mean_of_the_experts(hidden_act: str) -> None:
    experts = pico_experts(hidden_act=hidden_act)
    template = pico_clip(hidden_act, seed=9)
    networks = Networks(experts, (0.0,), template)
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
    average_into(target, list(experts.values()))
    assert torch.equal(target.mlp[0].weight, torch.full((6, 6), 59989.0).half())


def test_equal_parameters_are_copied_bit_for_bit() -> None:
    """The sum of three times 0.1, divided by three, is not 0.1."""
    experts = mlps()
    for expert in experts.values():
        expert.mlp[0].weight.data.fill_(0.1)
    target = PicoMLP()
    average_into(target, list(experts.values()))
    assert (0.1 + 0.1 + 0.1) / 3 != 0.1
    assert torch.equal(target.mlp[0].weight, experts["digits"].mlp[0].weight)


@pytest.mark.parametrize("point", [0.25, 0.5])
def test_a_path_network_interpolates_every_parameter(point: float) -> None:
    merged, expert = pico_clip(seed=1), pico_clip(seed=2)
    path = interpolate(merged, expert, point)
    assert state_error(path.state_dict(), oracles.mixed(merged.state_dict(), expert.state_dict(), point)) < SAME
    assert state_error(merged.state_dict(), pico_clip(seed=1).state_dict()) == 0


def test_a_network_is_found_by_task_and_path_point() -> None:
    experts = mlps()
    networks = Networks(experts, (0.0, 0.25, 1.0), experts["digits"])
    assert networks.network("letters", 0.0) is networks.network("digits", 0.0) is networks.merged
    assert networks.network("letters", 1.0) is experts["letters"]
    assert networks.network("letters", 0.25) is networks.paths["letters", 0.25]
    assert len(networks.paths) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_written_weight_reaches_merged_and_path_networks_and_no_expert(dtype: torch.dtype) -> None:
    experts = {task: expert.to(dtype) for task, expert in mlps().items()}
    before = {task: copy.deepcopy(expert.state_dict()) for task, expert in experts.items()}
    networks = Networks(experts, (0.0, 0.25, 1.0), experts["digits"])
    others = {key: tensor.clone() for key, tensor in networks.merged.state_dict().items() if key != "mlp.0.weight"}
    weight = torch.randn(6, 6, dtype=torch.float64)
    networks.write(GROUP, weight)
    stored = networks.merged.mlp[0].weight
    assert torch.equal(stored, weight.to(dtype))
    for task, expert in experts.items():
        path = networks.paths[task, 0.25].mlp[0].weight
        # from the stored weight, not from the float64 solution
        assert torch.equal(path, torch.lerp(stored, expert.mlp[0].weight, 0.25))
        assert all(torch.equal(tensor, before[task][key]) for key, tensor in expert.state_dict().items())
    assert all(torch.equal(networks.merged.state_dict()[key], tensor) for key, tensor in others.items())


def test_a_stacked_weight_is_written_to_every_layer_of_its_group() -> None:
    experts = pico_experts()
    networks = Networks(experts, (0.0, 0.5, 1.0), experts["digits"])
    names = tuple(oracles.clip_groups(networks.merged, "full")[0])
    group, weight = LayerGroup(names), torch.randn(48, 16)
    networks.write(group, weight)
    assert torch.equal(group.weight_of(networks.merged), weight)
    assert torch.equal(networks.merged.get_submodule(names[1]).weight, weight[16:32])


def test_a_written_weight_that_overflows_is_an_error_that_names_layer_and_size() -> None:
    experts = {task: expert.half() for task, expert in mlps().items()}
    networks = Networks(experts, (0.0,), experts["digits"])
    with pytest.raises(ArithmeticError, match=r"layer 'mlp\.0' overflows torch\.float16 \(largest entry 1e\+05\)"):
        networks.write(GROUP, torch.full((6, 6), 1e5))


def test_a_result_that_overflows_its_dtype_is_an_error_that_names_the_tensors() -> None:
    experts = mlps()
    networks = Networks(experts, (0.0,), experts["digits"])
    networks.write(GROUP, torch.full((6, 6), 1e5))
    with pytest.raises(ArithmeticError, match=r"overflows torch\.float16 in 'mlp\.0\.weight'\. Use dtype=float32"):
        networks.finish(torch.float16)


def test_networks_of_another_dtype_are_copies() -> None:
    experts = mlps()
    experts["letters"].float()
    networks = Networks(experts, (0.0, 1.0), experts["digits"])
    assert networks.dtype == torch.float32
    assert networks.experts["letters"] is experts["letters"]
    assert networks.experts["digits"] is not experts["digits"]
    assert common_dtype([experts["digits"]]) == torch.float64
    assert common_dtype(networks.experts.values()) == torch.float32
    assert common_dtype(experts.values()) is None


def test_networks_run_in_eval_mode_and_return_to_the_modes_they_had() -> None:
    experts = mlps()
    experts["digits"].mlp[1].eval()
    networks = Networks(experts, (0.0, 0.5, 1.0), experts["digits"])
    modes = {task: [module.training for module in expert.modules()] for task, expert in experts.items()}
    everything = [networks.merged, *experts.values(), *networks.paths.values()]
    with contextlib.suppress(ZeroDivisionError), networks:
        assert not any(module.training for network in everything for module in network.modules())
        _ = 1 / 0
    assert modes == {task: [module.training for module in expert.modules()] for task, expert in experts.items()}
    assert modes["digits"] != modes["letters"]


def test_recording_is_off_inside_and_as_before_outside() -> None:
    network = pico_clip()
    network.config.output_hidden_states = True
    with contextlib.suppress(ZeroDivisionError), ready_to_run(network):
        assert network.config.output_hidden_states is False
        assert network(pico_calibration()["digits"][:1]).hidden_states is None
        _ = 1 / 0
    assert network.config.output_hidden_states is True


def test_merged_parameters_need_no_gradient_while_networks_run_and_are_as_trainable_as_the_template_afterwards() -> (
    None
):
    experts = mlps()
    template = PicoMLP(seed=9)
    template.mlp[0].weight.requires_grad_(False)
    networks = Networks(experts, (0.0, 0.5, 1.0), template)
    assert not any(p.requires_grad for p in networks.merged.parameters())
    merged = networks.finish(torch.float64)
    assert [n for n, p in merged.named_parameters() if not p.requires_grad] == ["mlp.0.weight"]


@pytest.mark.parametrize(("hidden_act", "named"), [("gelu", "GELU"), ("quick_gelu", "QuickGELU")])
def test_the_activation_is_stated_as_config_and_class(hidden_act: str, named: str) -> None:
    assert activation_of(pico_clip(hidden_act)).startswith(f"{hidden_act}, {named}")
    assert activation_of(PicoMLP()) == "unknown"


def test_experts_that_fit_are_accepted() -> None:
    check_experts(pico_experts(3) | {"_pretrained_": pico_clip(seed=9)})
    check_experts(mlps())


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
