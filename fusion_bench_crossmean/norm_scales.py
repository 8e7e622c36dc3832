"""Scales of normalisation layers, merged by how much of each feature passes through them (LOT, arXiv 2505.23859).

    gamma = sum_t n_t gamma_t / sum_t n_t,    n_t = squared norm, per feature, of what expert t's layer normalised

Knows modules and calibration inputs; which weights are written, `networks` decides.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.forwards import input_of

#: Name of a normalisation layer -> per feature the energy of what it normalised, float64, shape (features,).
Energies = Mapping[str, Tensor]


@torch.no_grad()
def normalised_energies(network: nn.Module, batches: Iterable[Batch], norms: Sequence[str]) -> dict[str, Tensor]:
    """What the layers called `norms` normalise when `network` runs over `batches`, summed over the tokens that count.

    A layer that is never reached has zero energy.
    """
    energies: dict[str, Tensor] = {}
    current: list[Batch] = []
    with contextlib.ExitStack() as stack:
        for name in norms:
            layer = network.get_submodule(name)
            scale = layer.get_parameter("weight")
            energies[name] = torch.zeros(len(scale), dtype=torch.float64, device=scale.device)
            hook = energy_hook(without_scale(layer), energies[name], current)
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for batch in batches:
            current[:] = [batch]
            batch.run(network)
    return energies


def energy_hook(plain: nn.Module, energy: Tensor, current: Sequence[Batch]) -> Any:
    """A pre-hook that adds to `energy` what `plain` makes of a layer's inputs; the current batch knows their rows."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        rows = plain(current[0].rows(input_of(args, kwargs)))
        energy.add_(rows.double().square().sum(0))

    return before


def without_scale(layer: nn.Module) -> nn.Module:
    """A copy that only normalises: its shift is 0 and its scale 1 (2 where the layer adds one to it, which cancels)."""
    plain = copy.deepcopy(layer)
    for name, parameter in plain.named_parameters():
        parameter.fill_(0.0 if name == "bias" else 1.0)
    return plain


def merged_scales(energies: Mapping[str, Energies], scales: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Normalisation layer -> gamma in float64; where no energy was met, the plain mean.

    Args:
        energies: task -> layer -> n_t.
        scales: task -> layer -> gamma_t.
    """
    merged = {}
    for name in next(iter(energies.values())):
        n = torch.stack([energies[task][name] for task in energies])
        gamma = torch.stack([scales[task][name].to(n) for task in energies])
        total = n.sum(0)
        merged[name] = torch.where(total > 0, (n * gamma).sum(0) / total, gamma.mean(0))
    return merged
