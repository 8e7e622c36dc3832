"""Models that are not CLIP: what they do in a forward is measured rightly, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import whole_network
from tolerances import SAME, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.forwards import WalkError

WIDTH = 8


class Residual(nn.Module):
    """Three linear layers of one width, called as `step` says."""

    def __init__(self, seed: int, step: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mlp = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.mlp:
            x = self.step(x, layer)
        return x


def in_place(x: Tensor, layer: nn.Module) -> Tensor:
    x += layer(x).tanh()
    return x


def out_of_place(x: Tensor, layer: nn.Module) -> Tensor:
    return x + layer(x).tanh()


def merged(experts: dict[str, nn.Module], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return CrossMeanAlgorithm(num_calibration_samples=24).run(experts, inputs).state_dict()


def wide(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(24, WIDTH, generator=generator, dtype=torch.float64)


INPUTS = {"a": wide(1), "b": wide(2)}


def residuals(step: Callable[[Tensor, nn.Module], Tensor]) -> dict[str, nn.Module]:
    return {"a": Residual(1, step), "b": Residual(2, step)}


def test_a_tensor_changed_in_place_is_another_input() -> None:
    groups = [[f"mlp.{i}"] for i in range(3)]
    plain = residuals(out_of_place)
    expected = whole_network(plain, INPUTS, groups, path_points=(0, 0.5, 1))
    assert state_error(merged(residuals(in_place), INPUTS), expected) < SAME


def test_a_forward_that_writes_into_its_own_input_is_refused() -> None:
    class Scaling(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x *= 2
            return super().forward(x)

    experts = {"a": Scaling(1, out_of_place), "b": Scaling(2, out_of_place)}
    with pytest.raises(RuntimeError, match="writes into its own input"):
        merged(experts, INPUTS)


def test_experts_that_share_a_layer_object_merge() -> None:
    experts, twins = residuals(out_of_place), residuals(out_of_place)
    experts["b"].mlp[0] = experts["a"].mlp[0]
    twins["b"].mlp[0].load_state_dict(twins["a"].mlp[0].state_dict())
    assert state_error(merged(experts, INPUTS), merged(twins, INPUTS)) < SAME


@pytest.mark.parametrize("normed", ["weight_norm", "spectral_norm"])
def test_a_weight_computed_from_others_is_refused(normed: str) -> None:
    experts = residuals(out_of_place)
    for expert in experts.values():
        getattr(torch.nn.utils.parametrizations, normed)(expert.mlp[1])
    with pytest.raises(ValueError, match=r"'mlp\.1': not a plain linear layer"):
        merged(experts, INPUTS)


def test_a_linear_layer_with_parameters_of_its_own_is_refused() -> None:
    class LowRank(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.update = nn.Parameter(torch.ones(WIDTH, 1))

    experts = residuals(out_of_place)
    for expert in experts.values():
        expert.mlp[2] = LowRank()
    with pytest.raises(ValueError, match=r"'mlp\.2': not a plain linear layer"):
        merged(experts, INPUTS)


def test_a_covered_weight_that_is_tied_is_refused() -> None:
    experts = residuals(out_of_place)
    for expert in experts.values():
        expert.mlp[2].weight = expert.mlp[0].weight
    with pytest.raises(ValueError, match=r"tied to others: 'mlp\.0\.weight = mlp\.2\.weight'"):
        merged(experts, INPUTS)


def test_weights_tied_in_one_expert_only_are_refused() -> None:
    experts = residuals(out_of_place)
    experts["b"].mlp[2].weight = experts["b"].mlp[0].weight
    with pytest.raises(ValueError, match=r"tied in only one of 'a' and 'b'"):
        merged(experts, INPUTS)


def test_buffers_outside_the_state_dict_must_agree() -> None:
    experts = residuals(out_of_place)
    for value, expert in enumerate(experts.values()):
        expert.register_buffer("frequencies", torch.full((2,), float(value)), persistent=False)
    with pytest.raises(ValueError, match=r"outside the state dict differ between 'a' and 'b'.*'frequencies'"):
        merged(experts, INPUTS)


def test_padding_does_not_count_where_a_model_flattens_its_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = Batch(args=(), token_mask=mask)
    tokens = torch.arange(12.0).reshape(2, 3, 2)
    assert torch.equal(batch.rows(tokens.reshape(-1, 2)), batch.rows(tokens))
    assert len(batch.rows(tokens[:, 0])) == 2
    with pytest.raises(ValueError, match=r"have 5 rows, the attention mask has \(2, 3\)"):
        batch.rows(torch.ones(5, 2))


def test_an_additive_attention_mask_is_refused() -> None:
    data = {task: {"x": rows, "attention_mask": torch.full((24, 1), -1e4)} for task, rows in INPUTS.items()}
    with pytest.raises(ValueError, match="must hold 1 for a token that counts"):
        merged(residuals(out_of_place), data)


def test_numpy_arrays_are_calibration_inputs() -> None:
    arrays = {task: rows.numpy() for task, rows in INPUTS.items()}
    assert state_error(merged(residuals(in_place), arrays), merged(residuals(in_place), INPUTS)) == 0


def test_a_pool_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match="dict of task -> module, not a list"):
        CrossMeanAlgorithm().run(list(residuals(in_place).values()), INPUTS)


# What a forward leaves in the network


class Keeping(nn.Module):
    """Two layers between which the network keeps something, as `keep` says."""

    def __init__(self, seed: int, keep: Callable[[Keeping, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.mlp = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.kept: dict[str, Tensor] = {}
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.mlp:
            x = layer(self.keep(self, x)).tanh()
        return x


def cache_of_a_weight(network: Keeping, x: Tensor) -> Tensor:
    if "bias" not in network.kept:
        network.kept["bias"] = network.scale * 2
    return x + network.kept["bias"]


def value_of_the_first_layer(network: Keeping, x: Tensor) -> Tensor:
    if x.shape[1] == WIDTH and not hasattr(network, "step"):
        network.step = 0
    if network.step % 3 == 0:
        network.kept["mean"] = x.mean(0)
    network.step += 1
    return x + network.kept["mean"]


@pytest.mark.parametrize("keep", [cache_of_a_weight, value_of_the_first_layer])
def test_what_another_forward_would_find_in_the_network_is_refused(keep: Callable[..., Tensor]) -> None:
    with pytest.raises(WalkError, match="leaves values in 'kept' that depend on weights or inputs"):
        merged({"a": Keeping(1, keep), "b": Keeping(2, keep)}, INPUTS)


def weight_computed_anew(network: Keeping, x: Tensor) -> Tensor:
    network.kept["bias"] = network.scale * 2
    return x + network.kept["bias"]


def constant(network: Keeping, x: Tensor) -> Tensor:
    network.kept.setdefault("bias", torch.arange(float(WIDTH)))
    return x + network.kept["bias"]


def noted_only(network: Keeping, x: Tensor) -> Tensor:
    network.kept["mean"] = x.mean(0)
    return x + network.scale


@pytest.mark.parametrize("keep", [weight_computed_anew, constant, noted_only])
def test_what_no_other_forward_uses_may_stay_in_the_network(keep: Callable[..., Tensor]) -> None:
    experts = {"a": Keeping(1, keep), "b": Keeping(2, keep)}
    expected = whole_network(experts, INPUTS, [[f"mlp.{i}"] for i in range(3)], path_points=(0, 0.5, 1))
    assert state_error(merged(experts, INPUTS), expected) < SAME
