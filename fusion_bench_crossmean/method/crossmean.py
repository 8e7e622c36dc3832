"""CrossMean: merged inputs paired with the mean of the inputs on the path to the expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion_bench import auto_register_config

from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.method.base import LayerwiseMerge
from fusion_bench_crossmean.method.settings import check_number
from fusion_bench_crossmean.paired_statistics import InputPair
from fusion_bench_crossmean.walker import Inputs


@auto_register_config
class CrossMeanAlgorithm(LayerwiseMerge):
    """``W = (sum_t W_t Cbar_t') (sum_t X~_t' X~_t)^-1`` with ``Cbar_t = mean over s of X~_t' X_t^(s)``.

    Args:
        path_points: s in the mean, in [0, 1]: 0 is the merged prefix, 1 the expert. (0,) is Progressive RegMean.
        symmetric_weight: beta, moves the bilinear statistic towards its symmetric part; an ablation, 0 is off.
        gram_shrinkage: gamma, moves it towards the Gram matrix; an ablation, 0 is off.
        kwargs: see `LayerwiseMerge`.

    References: CrossMean, arXiv 2610.14762, Eq. 4.
    """

    # Stored by `auto_register_config`:
    symmetric_weight: float
    gram_shrinkage: float

    def __init__(
        self,
        *,
        path_points: Sequence[float] = (0.0, 0.5, 1.0),
        symmetric_weight: float = 0.0,
        gram_shrinkage: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path_points = check_path_points(path_points)
        check_number("symmetric_weight", symmetric_weight, 0, 1)
        check_number("gram_shrinkage", gram_shrinkage, 0, 1)

    @property
    def network_points(self) -> tuple[float, ...]:
        return tuple(sorted({0.0, *self.path_points}))

    def input_pair(self, inputs: Inputs) -> InputPair:
        if self.path_points == [0.0]:
            return inputs[0], inputs[0]
        return inputs[0], [inputs[point] for point in self.path_points]

    def linear_system(self, **options: Any) -> LinearSystem:
        own = {"symmetric_weight": self.symmetric_weight, "gram_shrinkage": self.gram_shrinkage}
        return super().linear_system(**own, **options)


def check_path_points(points: Any) -> list[float]:
    """The points as floats.

    Raises:
        ValueError: none, twice the same, or one outside [0, 1].
    """
    if not isinstance(points, Sequence) or isinstance(points, (str, bytes)) or len(points) == 0:
        raise ValueError(f"path_points must be a list of at least one number in [0, 1], not {points!r}.")
    for point in points:
        check_number("Each of path_points", point, 0, 1)
    if len(set(points)) != len(points):
        raise ValueError(f"path_points must differ from each other, not {list(points)}.")
    return [float(point) for point in points]
