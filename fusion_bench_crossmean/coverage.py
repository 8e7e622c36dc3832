"""Which layers merge by a linear system. The only code that reads module names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fusion_bench_crossmean.attention import INPUT_PROJECTION, INPUT_WEIGHT
from fusion_bench_crossmean.messages import shorten

Coverage = Literal["mlp", "full"]

#: A linear layer below a module called `mlp` (CLIP, SigLIP, GPT-2, Llama, ...) or `ffn` (DistilBERT) belongs to a
#: block's MLP, and so do BERT's and RoBERTa's `intermediate.dense` and `output.dense`. A family that calls its MLP
#: otherwise adds an alternative here.
MLP_LAYER = re.compile(r"(^|\.)(mlp|ffn)\.|(^|\.)layer\.\d+\.(intermediate|output)\.dense$")


@dataclass(frozen=True)
class LayerGroup:
    """Linear layers that receive one and the same input tensor, hence share statistics and factorisation.

    Args:
        names: module names in the order of their first call; q, k and v of an attention form one group.
    """

    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The group in one word, e.g. ``layers.0.self_attn.{q_proj,k_proj,v_proj}``."""
        if len(self.names) == 1:
            return self.names[0]
        parents = {name.rpartition(".")[0] for name in self.names}
        if len(parents) > 1:
            return "+".join(self.names)
        leaves = ",".join(name.rpartition(".")[2] for name in self.names)
        return f"{parents.pop()}.{{{leaves}}}".lstrip(".")

    def weight_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The stacked weight, shape (sum of out, in), from a network's tensors by name."""
        weights = [tensors[weight_name(layer)].detach() for layer in self.names]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def split(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `weight_of`: parameter name -> its rows of the stacked weight."""
        names = [weight_name(layer) for layer in self.names]
        return dict(zip(names, weight.split([len(tensors[name]) for name in names]), strict=True))


def weight_name(layer: str) -> str:
    """The parameter that is solved for.

    Example:
        >>> weight_name("mlp.fc1"), weight_name("attn.fused_in_proj")
        ('mlp.fc1.weight', 'attn.in_proj_weight')
    """
    return layer.removesuffix(INPUT_PROJECTION) + INPUT_WEIGHT if is_fused(layer) else f"{layer}.weight"


def is_fused(layer: str) -> bool:
    """Whether it is the stacked projection of an `nn.MultiheadAttention`, see `attention`."""
    return layer.rpartition(".")[2] == INPUT_PROJECTION


def covered_layers(network: nn.Module, coverage: Coverage) -> list[str]:
    """Names of the linear layers that `coverage` asks to be solved.

    `mlp`: those of every block's MLP; `full`: every linear layer, in an `nn.MultiheadAttention` the stacked projection
    of q, k and v (named `fused_in_proj`) and `out_proj`.

    Raises:
        ValueError: an unknown coverage, or one that covers no layer of this network.
    """
    if coverage not in get_args(Coverage):
        raise ValueError(f"coverage must be one of {', '.join(get_args(Coverage))}, not {coverage!r}.")
    linear = linear_layers(network)
    if not linear:
        raise ValueError(f"{type(network).__name__} has no linear layer (nn.Linear) to merge.")
    if coverage == "full":
        check_weights(network, linear)
        return linear
    mlp = [name for name in linear if MLP_LAYER.search(name)]
    if not mlp:
        raise ValueError(
            f"coverage=mlp finds no MLP: no linear layer of {type(network).__name__} lies in a module called 'mlp' "
            f"({shorten(linear)}). Use coverage=full."
        )
    check_weights(network, mlp)
    return mlp


def linear_layers(network: nn.Module) -> list[str]:
    """Names of all linear layers, those inside fused attentions included (of these, self-attentions only)."""
    found: list[str] = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and module.in_features and module.out_features:
            found.append(name)
        elif type(module) is nn.MultiheadAttention and module.in_proj_weight is not None:
            found.append(f"{name}.{INPUT_PROJECTION}".lstrip("."))
    return found


def norm_layers(network: nn.Module) -> list[str]:
    """Names of the normalisation layers (LayerNorm, RMSNorm and their like) with a scale per feature."""
    return [
        name
        for name, module in network.named_modules()
        if (isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm"))
        and isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        and weight.ndim == 1
    ]


def check_weights(network: nn.Module, names: Sequence[str]) -> None:
    """Raises `ValueError` where a layer's weight is not a parameter of its own, hence cannot be solved for."""
    computed, extended = [], []
    for name in names:
        owner, _, weight = weight_name(name).rpartition(".")
        module = network.get_submodule(owner)
        own = {key for key, _ in module.named_parameters()}
        if weight not in own:
            computed.append(name)
        elif isinstance(module, nn.Linear) and own - {"weight", "bias"}:
            extended.append(name)
    if computed or extended:
        raise ValueError(
            f"{shorten(computed + extended)}: not a plain linear layer; its weight is computed from other parameters "
            "(weight or spectral norm, a parametrization, a low-rank update). Bake them into the weight first, e.g. "
            "with torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')."
        )
    tied = [owners for owners in tied_parameters(network) if any(weight_name(name) in owners for name in names)]
    if tied:
        raise ValueError(
            f"Covered weights are tied to others: {shorten([' = '.join(owners) for owners in tied])}. Solving one "
            "would change what was measured with the other: untie them, or use a coverage that leaves them out."
        )


def tied_parameters(network: nn.Module) -> set[tuple[str, ...]]:
    """Groups of names that are one and the same parameter."""
    owners: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return {tuple(names) for names in owners.values() if len(names) > 1}
