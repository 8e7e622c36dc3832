"""The alignment criterion: how far the averaged model's inputs and the experts' agree. Writes no weight.

    rho = mean over layer groups and experts of <A, C>_F / (||A||_F ||C||_F),   A = X~' X~,   C = X~' X

with X~ the inputs in the weight-averaged model and X those in the expert. Lower rho: CrossMean and Progressive
RegMean gain more over RegMean (CrossMean, arXiv 2610.14762, Section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.paired_statistics import accumulate
from fusion_bench_crossmean.report import mean
from fusion_bench_crossmean.walker import Inputs
from fusion_bench_crossmean.workspace import Workspace


@dataclass(frozen=True)
class LayerAlignment:
    """One layer group.

    Args:
        group: the layers; those that share an input count once.
        alignment: task -> its term of rho, at most 1.
        prefix_drift: task -> ``||X~ - X||_F / ||X||_F``.
    """

    group: LayerGroup
    alignment: dict[str, float]
    prefix_drift: dict[str, float]


@dataclass(frozen=True)
class Criterion:
    """All layer groups in depth order."""

    layers: Sequence[LayerAlignment]

    @property
    def rho(self) -> float:
        """The mean over layer groups and experts."""
        return mean([value for layer in self.layers for value in layer.alignment.values()])

    @property
    def prefix_drift(self) -> float:
        """The mean drift over layer groups and experts."""
        return mean([value for layer in self.layers for value in layer.prefix_drift.values()])

    def per_task(self) -> dict[str, dict[str, float]]:
        """Task -> its mean over the layer groups."""
        return {
            task: {
                "alignment": mean([layer.alignment[task] for layer in self.layers]),
                "prefix_drift": mean([layer.prefix_drift[task] for layer in self.layers]),
            }
            for task in self.layers[0].alignment
        }


def measure(walk: Iterable[tuple[LayerGroup, Mapping[str, Iterable[Inputs]]]]) -> Criterion:
    """The criterion from a walk over the averaged model (path point 0) and the experts (path point 1).

    Raises:
        ArithmeticError: the inputs of a layer hold NaN or infinity.
    """
    layers, workspace = [], Workspace()
    for group, inputs in walk:
        alignment, drift = {}, {}
        for task, batches in inputs.items():
            sums = accumulate(((batch[0], batch[1]) for batch in batches), workspace=workspace)
            if not (sums.gram.diagonal().sum().isfinite() and sums.diagonal.sum().isfinite()):
                raise ArithmeticError(
                    f"Layer {group.name!r}: the inputs of task {task!r} hold NaN or infinity. Check that expert's "
                    "weights and calibration inputs, or load it in float32."
                )
            alignment[task], drift[task] = sums.alignment(), sums.drift()
        layers.append(LayerAlignment(group, alignment, drift))
    return Criterion(layers)


def advice(rho: float) -> str:
    """One sentence: which method this value speaks for, with the paper's figures and ours behind it.

    The paper's are margins over RegMean in points of accuracy on CLIP backbones; ours are the mini benchmark's
    (README): far smaller networks, at rho 0.87 to 0.88. rho depends on backbone, coverage and tasks: a hint, not a
    promise.
    """
    if math.isnan(rho):
        return "rho could not be measured: the covered layers receive nothing but zeros."
    small = (
        "Small models may gain less: on our mini benchmark CrossMean gained 1.2 points at rho 0.87 (full coverage) and "
        "nothing at 0.88 (mlp)."
    )
    if rho < 0.915:
        return (
            f"rho = {rho:.3f} speaks for CrossMean: in the paper's sets with rho between 0.86 and 0.91 it gained 3.8 "
            f"to 12.5 points over RegMean and Progressive RegMean 1.9 to 5.8. {small}"
        )
    if rho < 0.96:
        return (
            f"rho = {rho:.3f} speaks for CrossMean with a look at Progressive RegMean: in the paper's sets with rho "
            "between 0.92 and 0.95 CrossMean gained 0.5 to 10.5 points over RegMean and Progressive RegMean 0.5 to "
            f"5.8, and on the larger backbones either can be the better one. {small}"
        )
    return (
        f"rho = {rho:.3f} says that little is to be gained: in the paper's sets with rho above 0.96 CrossMean ended "
        "between -0.2 and +0.6 points of RegMean and Progressive RegMean at +0.3 to +0.4, so RegMean is enough and "
        f"Progressive RegMean the safe choice. {small}"
    )
