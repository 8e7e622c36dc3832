"""Our RegMean against FusionBench's own, on the same pool, images and tensors."""

from __future__ import annotations

import pytest
import torch
from fusion_bench.method import RegMeanAlgorithmForCLIP
from pico import PicoPool, pico_clip, pico_experts, pico_pool
from tolerances import FAR, PARITY, SAME, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import RegMeanAlgorithm

N = 40


class StockRegMean(RegMeanAlgorithmForCLIP):
    """FusionBench's hooks, sums and merging code; only its zero-shot head, which RegMean does not need, is left out."""

    def on_regmean_start(self) -> None:
        pass

    def compute_logits(self, module: nn.Module, batch: tuple[Tensor, Tensor], task: str) -> Tensor:
        images, _ = batch
        return module(images)[1]


def stock(pool: PicoPool, ratio: float, batch_size: int) -> dict[str, Tensor]:
    method = StockRegMean(
        num_regmean_examples=N,
        exclude_param_names_regex=[],
        reduce_non_diagonal_ratio=ratio,
        weight_transpose=True,
        dataloader_kwargs={"batch_size": batch_size, "num_workers": 0},
    )
    method._fabric_instance = RegMeanAlgorithm().fabric
    with torch.random.fork_rng():  # its loader shuffles
        return method.run(pool).state_dict()


@pytest.mark.parametrize("hidden_act", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("ratio", [0.95, 0.9])
def test_regmean_equals_fusion_bench(hidden_act: str, ratio: float) -> None:
    """The pool has as many images as are drawn, hence the draw is the same whatever the order."""
    experts = pico_experts(3, seed=3, hidden_act=hidden_act)
    for expert in experts.values():
        expert.eval()
    pool = pico_pool(experts, num_samples=N, pretrained=pico_clip(hidden_act, seed=9))
    settings = {"coverage": "full", "relative_ridge": 0.0, "task_weighting": "mean", "num_calibration_samples": N}
    ours = RegMeanAlgorithm(reduce_non_diagonal_ratio=ratio, **settings).run(pool).state_dict()
    # The stock method writes into the pool's own pretrained model: it comes last.
    theirs = stock(pool, ratio, batch_size=8)
    assert state_error(ours, theirs) < PARITY


def test_parity_needs_the_same_ratio() -> None:
    pool = pico_pool(pico_experts(2, seed=3), num_samples=N, pretrained=pico_clip(seed=9))
    settings = {"coverage": "full", "relative_ridge": 0.0, "task_weighting": "mean", "num_calibration_samples": N}
    ours = RegMeanAlgorithm(reduce_non_diagonal_ratio=0.5, **settings).run(pool).state_dict()
    theirs = stock(pool, 0.95, batch_size=8)
    assert state_error(ours, theirs) > FAR


def test_the_pretrained_model_gives_the_merge_no_weight() -> None:
    experts = pico_experts(2, seed=3)
    first, second = (
        RegMeanAlgorithm(num_calibration_samples=N)
        .run(pico_pool(experts, num_samples=N, pretrained=pretrained))
        .state_dict()
        for pretrained in (pico_clip(seed=8), None)
    )
    assert state_error(first, second) < SAME
