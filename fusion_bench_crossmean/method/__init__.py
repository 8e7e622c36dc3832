"""One file per method, the loop in `base`."""

from fusion_bench_crossmean.method.alignment_criterion import AlignmentCriterionAnalyzer
from fusion_bench_crossmean.method.cross_statistic import CrossStatisticAlgorithm
from fusion_bench_crossmean.method.crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.method.lot import (
    LOTAlgorithm,
    LOTCrossMeanAlgorithm,
    LOTProgressiveRegMeanAlgorithm,
)
from fusion_bench_crossmean.method.progressive_regmean import ProgressiveRegMeanAlgorithm
from fusion_bench_crossmean.method.regmean import RegMeanAlgorithm

__all__ = [
    "AlignmentCriterionAnalyzer",
    "CrossMeanAlgorithm",
    "CrossStatisticAlgorithm",
    "LOTAlgorithm",
    "LOTCrossMeanAlgorithm",
    "LOTProgressiveRegMeanAlgorithm",
    "ProgressiveRegMeanAlgorithm",
    "RegMeanAlgorithm",
]
