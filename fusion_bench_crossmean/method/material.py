"""What a run works on, once it is loaded and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from torch import nn

from fusion_bench_crossmean.calibration import Calibration
from fusion_bench_crossmean.expert_loading import Experts


@dataclass(frozen=True)
class Material:
    """What a run works on.

    Args:
        experts: the experts' tensors, and the template of the merged model.
        layers: names of the covered layers.
        calibration: the drawn inputs.
    """

    experts: Experts
    layers: list[str]
    calibration: Calibration

    @property
    def tasks(self) -> list[str]:
        """The experts' names."""
        return list(self.experts.weights)


def as_pool(modelpool: BaseModelPool | Mapping[str, nn.Module]) -> BaseModelPool:
    """A pool from a pool or a dict of modules.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(modelpool, BaseModelPool):
        return modelpool
    if not isinstance(modelpool, Mapping):
        kind = type(modelpool).__name__
        raise TypeError(f"modelpool must be a FusionBench pool or a dict of task -> module, not a {kind}.")
    return BaseModelPool(dict(modelpool))


def indices_of(material: Material) -> dict[str, Any]:
    """The longest part of a report, hence its last one."""
    return {"calibration_indices": material.calibration.indices}
