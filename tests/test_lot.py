"""LOT and its combinations: task vectors, the pseudo-inverse, and scales of norms merged by energy."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from families import TASKS, text_pool
from pico import pico_calibration, pico_clip, pico_experts
from tolerances import SAME, relative_error, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import (
    LOTAlgorithm,
    LOTCrossMeanAlgorithm,
    LOTProgressiveRegMeanAlgorithm,
    RegMeanAlgorithm,
)
from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.coverage import norm_layers
from fusion_bench_crossmean.norm_scales import merged_scales, normalised_energies
from fusion_bench_crossmean.pseudo_inverse import PseudoInverseSystem

N = 24
COVERAGES = ("mlp", "full")
#: Method -> (path points of the right side, path point of the left side).
PAIRINGS = {
    LOTAlgorithm: ((1,), 1),
    LOTProgressiveRegMeanAlgorithm: ((0,), 0),
    LOTCrossMeanAlgorithm: ((0, 0.5, 1), 0),
}


def merge(method: type, pretrained: nn.Module, experts: Any, inputs: Any, **settings: Any) -> dict[str, Tensor]:
    algorithm = method(**{"num_calibration_samples": N, "batch_size": 10} | settings)
    return algorithm.run({"_pretrained_": pretrained, **experts}, inputs).state_dict()


@pytest.mark.parametrize("method", PAIRINGS)
@pytest.mark.parametrize("coverage", COVERAGES)
def test_every_combination_equals_its_whole_network_procedure(method: type, coverage: str) -> None:
    pretrained, experts, inputs = pico_clip(seed=9), pico_experts(), pico_calibration()
    ours = merge(method, pretrained, experts, inputs, coverage=coverage)
    points, left = PAIRINGS[method]
    groups = oracles.clip_groups(pretrained, coverage)
    theirs = oracles.whole_network_lot(pretrained, experts, inputs, groups, path_points=points, left_point=left)
    assert state_error(ours, theirs) < 1e-9  # two ways around an inverse, at condition numbers up to 1e5
    plain = oracles.average(experts)
    norms = [f"{name}.weight" for name in norm_layers(pretrained)]
    assert min(relative_error(ours[name], plain[name]) for name in norms) > 1e-4, "scales are not the plain mean"


@pytest.mark.parametrize("coverage", COVERAGES)
def test_lot_is_regmean_where_the_statistics_have_full_rank(coverage: str) -> None:
    """And there is neither reduction nor ridge: the pretrained weight cancels."""
    experts, inputs = pico_experts(), pico_calibration()
    regmean = RegMeanAlgorithm(
        num_calibration_samples=N, coverage=coverage, reduce_non_diagonal_ratio=1.0, relative_ridge=0.0
    )
    theirs = regmean.run(experts, inputs).state_dict()
    ours = merge(LOTAlgorithm, pico_clip(seed=9), experts, inputs, coverage=coverage)
    layers = [f"{name}.weight" for group in oracles.clip_groups(experts["digits"], coverage) for name in group]
    assert max(relative_error(ours[name], theirs[name]) for name in layers) < 1e-8


def test_without_a_pretrained_model_lot_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"LOTAlgorithm needs the pretrained model; the pool has 'digits', .*_pretrai"):
        LOTAlgorithm(num_calibration_samples=N).run(pico_experts(), pico_calibration())


@pytest.mark.parametrize("rcond", [-0.1, 1.5, "x"])
def test_a_cut_outside_its_range_is_refused(rcond: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="rcond"):
        LOTAlgorithm(rcond=rcond)


@pytest.mark.parametrize("method", PAIRINGS)
def test_identical_experts_return_the_expert(method: type) -> None:
    """Where the data say nothing the pretrained weight stays, so they have to say all."""
    expert = pico_clip(seed=3)
    merged = merge(
        method, pico_clip(seed=9), dict.fromkeys(("digits", "letters", "textures"), expert), pico_calibration()
    )
    assert state_error(merged, expert.state_dict()) < 1e-9


@pytest.mark.float32
def test_text_encoders_merge_with_their_norms(tmp_path: Any) -> None:
    pool = text_pool("bert", tmp_path, pretrained=True)
    algorithm = LOTCrossMeanAlgorithm(num_calibration_samples=20, coverage="full")
    merged = algorithm.run(pool).state_dict()
    assert all(tensor.isfinite().all() for tensor in merged.values())
    assert set(algorithm.report["calibration_indices"]) == set(TASKS)


# The system


def system_of(left: Tensor, weight: Tensor, **settings: Any) -> PseudoInverseSystem:
    system = PseudoInverseSystem(1.0, 0.0, **settings)
    system.add_task([(left, left)], weight)
    return system


def test_on_the_null_space_the_solution_is_zero() -> None:
    left, weight = torch.randn(5, 12), torch.randn(7, 12)
    solution = system_of(left, weight).solve(torch.zeros(7, 12))
    assert solution.rank == 5
    inside = torch.linalg.pinv(left) @ left
    assert relative_error(solution.weight, weight @ inside) < 1e-9
    assert solution.relative_residual < 1e-9


def test_sums_in_float32_are_cut_where_they_hold_rounding_only() -> None:
    """Three columns are sums of others; at float64's own limit their noise would be divided by nothing."""
    base = torch.randn(400, 24, dtype=torch.float64)
    left = torch.cat([base, base[:, :3] + base[:, 3:6]], 1)
    weight = torch.randn(5, 27, dtype=torch.float64)
    exact = system_of(left, weight).solve(torch.zeros(5, 27))
    single = system_of(left.float(), weight.float()).solve(torch.zeros(5, 27))
    assert exact.rank == single.rank == 24
    assert relative_error(single.weight, exact.weight) < 1e-4
    careless = system_of(left.float(), weight.float(), rcond=1e-15).solve(torch.zeros(5, 27))
    assert careless.rank > 24


def test_a_larger_cut_keeps_less() -> None:
    scales = torch.logspace(0, -4, 10)
    left, weight = torch.linalg.qr(torch.randn(50, 10)).Q * scales, torch.randn(3, 10)
    ranks = [system_of(left, weight, rcond=r).solve(torch.zeros(3, 10)).rank for r in (1e-12, 1e-5, 1e-2)]
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == 3


def test_a_dead_feature_keeps_the_pretrained_column() -> None:
    left, weight, fallback = torch.randn(40, 6), torch.randn(4, 6), torch.randn(4, 6)
    left[:, 2] = 0
    solution = system_of(left, weight).solve(fallback)
    assert solution.dead_features == [2]
    assert torch.equal(solution.weight[:, 2], fallback[:, 2])


# Scales of norms


class Normed(nn.Module):
    """A norm that runs, one that does not."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.idle = kind(6), kind(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_energies_are_of_what_a_norm_normalises(kind: type[nn.Module]) -> None:
    network, x = Normed(kind), torch.randn(4, 5, 6) * torch.arange(1, 7)
    with torch.no_grad():
        network.norm.weight.copy_(torch.randn(6))
    mask = torch.rand(4, 5) > 0.4
    batch = Batch((x,), token_mask=mask)
    energies = normalised_energies(network, [batch, batch], norm_layers(network))
    centred = x - x.mean(-1, keepdim=True) if kind is nn.LayerNorm else x
    plain = centred / (centred.square().mean(-1, keepdim=True) + (network.norm.eps or torch.finfo(x.dtype).eps)).sqrt()
    assert relative_error(energies["norm"], 2 * plain[mask].square().sum(0)) < SAME
    assert not energies["idle"].any()
    assert not network.norm._forward_pre_hooks


def test_scales_are_weighted_by_energy_and_averaged_where_there_is_none() -> None:
    energies = {"a": {"norm": torch.tensor([1.0, 0.0])}, "b": {"norm": torch.tensor([3.0, 0.0])}}
    scales = {"a": {"norm": torch.tensor([2.0, 1.0])}, "b": {"norm": torch.tensor([6.0, 4.0])}}
    assert merged_scales(energies, scales)["norm"].tolist() == [5.0, 2.5]
