"""Loads a pool's experts one after the other and checks them.

After that an expert is only read: from its own checkpoint where that holds the same values, else from memory, or from a
copy on disk where memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from fusion_bench.modelpool import BaseModelPool
from torch import nn

from fusion_bench_crossmean.expert_checks import check_expert
from fusion_bench_crossmean.origins import Origin, origin_of
from fusion_bench_crossmean.text.encoders import encoder_of
from fusion_bench_crossmean.weights import (
    StoredWeights,
    Weights,
    checkpoint_of,
    hollow,
    parameter_dtypes,
    size_of,
    tensors_of,
)


@dataclass(frozen=True)
class Experts:
    """What is known of a pool's models once they are loaded.

    Args:
        weights: task -> the expert's tensors.
        template: a model without values: the pool's pretrained one, without that its first expert. The merged model
            is built like it.
        dtype: the one floating-point dtype of all experts' parameters, None where they differ.
        template_dtype: the same of the pretrained model; without one it is `dtype`.
        origins: where each model of the pool comes from.
        pretrained: the pretrained model's tensors, where they were asked for.
    """

    weights: dict[str, Weights]
    template: nn.Module
    dtype: torch.dtype | None
    template_dtype: torch.dtype | None
    origins: dict[str, Origin]
    pretrained: Weights | None = None


def load_experts(
    modelpool: BaseModelPool,
    fits: Callable[[int], bool],
    new_file: Callable[[], Path],
    *,
    keep_pretrained: bool = False,
    progress: Callable[[Iterable[str], str], Iterable[str]] = lambda items, _: items,
) -> Experts:
    """Every expert of the pool and its pretrained model, one whole model at a time.

    Args:
        modelpool: FusionBench's pool.
        fits: whether all experts' tensors, so many bytes, may stay in memory.
        new_file: where to store an expert that neither may nor has a checkpoint to be read from.
        keep_pretrained: keeps the pretrained model's tensors too.
        progress: wraps the tasks; called with them and a description.

    Raises:
        TypeError, ValueError: experts that are none, or do not fit the others (see `check_expert`), all of them.
    """
    tasks = modelpool.model_names
    weights: dict[str, Weights] = {}
    origins: dict[str, Origin] = {}
    reference: tuple[str, nn.Module] | None = None
    dtypes: set[torch.dtype] = set()
    in_memory = True

    def kept(model: nn.Module) -> Weights:
        """The model's tensors, from where they take no memory if there is such a place or need of one."""
        tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
        # What the pool holds itself would not leave memory by being read from elsewhere.
        stored = None if modelpool.has_instance_models else checkpoint_of(model)
        if stored is None and not in_memory:
            stored = StoredWeights.write(new_file(), tensors)
        return tensors if stored is None else stored

    def load(name: str) -> nn.Module:
        model = modelpool.load_model(name)
        origins[name] = origin_of(modelpool, name, model)
        return encoder_of(model)

    offenders: list[Exception] = []
    for task in progress(tasks, "loading experts"):
        expert = load(task)
        try:
            check_expert(task, expert, reference)
        except (TypeError, ValueError) as error:  # the others may have something wrong with them too
            offenders.append(error)
            del expert
            continue
        if reference is None:
            reference = task, without_values(expert)
            size = (len(tasks) + keep_pretrained) * size_of(tensors_of(expert))
            in_memory = modelpool.has_instance_models or fits(size)
        dtypes |= parameter_dtypes(expert)
        weights[task] = kept(expert)
        del expert
    if len(offenders) == 1:
        raise offenders[0]
    if offenders:
        raise ValueError(f"{len(offenders)} of {len(tasks)} experts: " + " ".join(map(str, offenders)))
    assert reference is not None
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if not modelpool.has_pretrained:
        return Experts(weights, reference[1], dtype=dtype, template_dtype=dtype, origins=origins)
    pretrained = load("_pretrained_")
    check_expert("_pretrained_", pretrained, reference)
    dtypes = parameter_dtypes(pretrained)
    template_dtype = dtypes.pop() if len(dtypes) == 1 else None
    values = kept(pretrained) if keep_pretrained else None
    return Experts(weights, without_values(pretrained), dtype, template_dtype, origins, values)


def without_values(network: nn.Module) -> nn.Module:
    """Its structure, on torch's meta device."""
    return hollow(network, lambda tensor: torch.empty_like(tensor, device="meta"))
