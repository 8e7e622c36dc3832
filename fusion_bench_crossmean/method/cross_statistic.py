"""The cross statistic alone: merged inputs paired with expert inputs."""

from __future__ import annotations

from fusion_bench_crossmean.method.base import LayerwiseMerge
from fusion_bench_crossmean.paired_statistics import InputPair
from fusion_bench_crossmean.walker import Inputs


class CrossStatisticAlgorithm(LayerwiseMerge):
    """``W = (sum_t W_t C_t') (sum_t X~_t' X~_t)^-1`` with ``C_t = X~_t' X_t``; CrossMean with the path point 1 alone.

    References: CrossMean, arXiv 2610.14762, Eq. 3.
    """

    @property
    def network_points(self) -> tuple[float, ...]:
        return (0.0, 1.0)

    def input_pair(self, inputs: Inputs) -> InputPair:
        return inputs[0], inputs[1]
