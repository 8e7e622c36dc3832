"""RegMean in the same loop, for comparisons with the same stabilisation and calibration draw."""

from __future__ import annotations

from fusion_bench_crossmean.method.base import LayerwiseMerge
from fusion_bench_crossmean.paired_statistics import InputPair
from fusion_bench_crossmean.walker import Inputs


class RegMeanAlgorithm(LayerwiseMerge):
    """``W = (sum_t W_t G_t) (sum_t G_t)^-1`` with ``G_t = X_t' X_t`` measured on the experts.

    References: Dataless knowledge fusion by merging weights of language models (Jin et al., 2023).
    """

    measures_experts_alone = True

    @property
    def network_points(self) -> tuple[float, ...]:
        return (1.0,)

    def input_pair(self, inputs: Inputs) -> InputPair:
        return inputs[1], inputs[1]
