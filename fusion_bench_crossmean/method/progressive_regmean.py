"""Progressive RegMean: the Gram matrix re-measured on the merged prefix."""

from __future__ import annotations

from fusion_bench_crossmean.method.base import LayerwiseMerge
from fusion_bench_crossmean.paired_statistics import InputPair
from fusion_bench_crossmean.walker import Inputs


class ProgressiveRegMeanAlgorithm(LayerwiseMerge):
    """``W = (sum_t W_t A_t) (sum_t A_t)^-1`` with ``A_t = X~_t' X~_t``, in depth order.

    References: Chain of Merges (Buzzega et al., 2025); CrossMean, arXiv 2610.14762, Table 1.
    """

    @property
    def network_points(self) -> tuple[float, ...]:
        return (0.0,)

    def input_pair(self, inputs: Inputs) -> InputPair:
        return inputs[0], inputs[0]
