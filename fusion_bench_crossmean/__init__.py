"""CrossMean for FusionBench: activation-based model merging with one paused forward pass per network."""

from fusion_bench_crossmean.compat import apply_cures

__version__ = "0.1.0"

apply_cures()

from fusion_bench_crossmean.method import (  # noqa: E402  (the cures come before whatever imports FusionBench's pools)
    AlignmentCriterionAnalyzer,
    CrossMeanAlgorithm,
    CrossStatisticAlgorithm,
    LOTAlgorithm,
    LOTCrossMeanAlgorithm,
    LOTProgressiveRegMeanAlgorithm,
    ProgressiveRegMeanAlgorithm,
    RegMeanAlgorithm,
)

__all__ = [
    "AlignmentCriterionAnalyzer",
    "CrossMeanAlgorithm",
    "CrossStatisticAlgorithm",
    "LOTAlgorithm",
    "LOTCrossMeanAlgorithm",
    "LOTProgressiveRegMeanAlgorithm",
    "ProgressiveRegMeanAlgorithm",
    "RegMeanAlgorithm",
    "__version__",
]
