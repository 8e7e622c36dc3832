"""Our RegMean against FusionBench's own, on the same pool, images and tensors; its RegMean++ against its definition."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any

import oracles
import pytest
import torch
from fusion_bench.method import RegMeanAlgorithmForCLIP, RegMeanAlgorithmForCLIPPlusPlus
from pico import PicoPool, pico_clip, pico_experts, pico_pool
from tolerances import FAR, PARITY, SAME, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import RegMeanAlgorithm
from fusion_bench_crossmean.calibration import source_for

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


# RegMean++


class StockRegMeanPlusPlus(RegMeanAlgorithmForCLIPPlusPlus):
    """FusionBench's, with the cures of `compat`; without its zero-shot head."""

    def on_regmean_start(self) -> None:
        pass


def tower_of(model: nn.Module) -> Any:
    """Its own attribute in transformers 4, the model itself in transformers 5."""
    return getattr(model, "vision_model", model)


def regmean_plusplus(
    experts: Mapping[str, nn.Module], pretrained: nn.Module, images: Mapping[str, Tensor], ratio: float
) -> dict[str, Tensor]:
    """Statistics of an expert's block on what the merged blocks before it make; what is behind the blocks stays."""
    merged, average = copy.deepcopy(pretrained).eval(), oracles.average(experts)
    tower = tower_of(merged)
    for name, parameter in merged.named_parameters():
        if "embeddings" in name or "pre_layrnorm" in name:
            parameter.data.copy_(average[name])
    hidden = {task: tower.pre_layrnorm(tower.embeddings(images[task])) for task in experts}
    for index, layer in enumerate(tower.encoder.layers):
        blocks = {task: copy.deepcopy(tower_of(e).encoder.layers[index]).eval() for task, e in experts.items()}
        seen = {
            (task, name): oracles.reduced(rows.T @ rows / len(rows), ratio)
            for task, block in blocks.items()
            for name, rows in rows_in(block, hidden[task]).items()
        }
        own = oracles.average(blocks)
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                lhs = sum(seen[task, name] for task in blocks)
                rhs = sum(seen[task, name] @ block.get_submodule(name).weight.T for task, block in blocks.items())
                own[f"{name}.weight"] = torch.linalg.solve(lhs, rhs).T
        layer.load_state_dict(own)
        hidden = {task: run_block(layer, rows) for task, rows in hidden.items()}
    return merged.state_dict()


def rows_in(block: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """Linear layer -> the rows that it receives."""
    rows: dict[str, Tensor] = {}
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            note = partial(lambda name, _, args: rows.__setitem__(name, args[0].flatten(0, -2)), name)
            module.register_forward_pre_hook(note)
    run_block(block, hidden)
    return rows


def run_block(block: nn.Module, hidden: Tensor) -> Tensor:
    causal = {"causal_attention_mask": None} if "causal_attention_mask" in signature(block.forward).parameters else {}
    output = block(hidden, attention_mask=None, **causal)
    return output if isinstance(output, Tensor) else output[0]


def test_fusion_benchs_regmean_plusplus_is_what_it_says() -> None:
    experts, pretrained = pico_experts(3, seed=3), pico_clip(seed=9)
    for expert in experts.values():
        expert.eval()
    pool = pico_pool(experts, num_samples=N, pretrained=copy.deepcopy(pretrained).eval())
    source = source_for(pool, None)
    images = {
        task: source.collate([source.dataset(task)[i] for i in range(N)]).kwargs["pixel_values"] for task in experts
    }
    method = StockRegMeanPlusPlus(
        num_regmean_examples=N,
        exclude_param_names_regex=[],
        reduce_non_diagonal_ratio=0.9,
        weight_transpose=True,
        dataloader_kwargs={"batch_size": 8, "num_workers": 0},
    )
    method._fabric_instance = RegMeanAlgorithm().fabric
    with torch.random.fork_rng(), torch.no_grad():
        theirs = method.run(pool).state_dict()
        ours = regmean_plusplus(experts, pretrained, images, 0.9)
    assert state_error(ours, theirs) < PARITY
