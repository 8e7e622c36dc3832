"""The linear system of one layer: the tasks' statistics added up, their stabilisation and the solution.

Every activation-based method solves ``W = (sum_t W_t B_t) (sum_t A_t)^-1`` (CrossMean, arXiv 2610.14762, Eq. 1) and
differs only in which inputs it pairs. This module knows tensors only: no network, no hook, no FusionBench.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.linalg.lapack import dpstrf  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from fusion_bench_crossmean.paired_statistics import PairedStatistics, accumulate

log = logging.getLogger(__name__)

#: The ridge grows by tens up to this multiple of the mean diagonal before a system is given up.
LARGEST_RELATIVE_RIDGE = 1e-1
#: Relative residual above which a solution is reported as doubtful; a sound float64 solve stays far below.
DOUBTFUL_RESIDUAL = 1e-6


class SingularSystemError(ArithmeticError):
    """A layer's system has non-finite values, or is not positive definite at the largest ridge allowed."""


@dataclass(frozen=True)
class Solution:
    """What came of one layer's system.

    Args:
        weight: the merged weight, float64, shape (out, in).
        ridge: what was added to the diagonal of the left-hand side (absolute).
        relative_ridge: the same in multiples of its mean diagonal; above the setting where the ladder was climbed.
        relative_residual: ``||(A + r I) X - B||_F / ||B||_F``.
        rank: numerical rank of ``sum_t A_t`` before reduction and ridge; below `features`, the data alone do not
            determine the weight and the stabilisation does.
        features: the layer's input width.
        dead_features: input features that were zero on every row; their columns are the fallback's.
    """

    weight: Tensor
    ridge: float
    relative_ridge: float
    relative_residual: float
    rank: int
    features: int
    dead_features: list[int]


class LinearSystem:
    """Collects one layer's statistics over the tasks and solves for its merged weight.

    Args:
        reduce_non_diagonal_ratio: off-diagonal entries of every statistic are multiplied by this; 1.0 leaves them.
        relative_ridge: ridge in multiples of the mean diagonal of ``sum_t A_t``. At 0 there is no ladder: a system
            that is not positive definite is an error.
        task_weighting: ``sum`` adds the tasks' sums over tokens, ``mean`` their means.
        symmetric_weight: beta, ``C -> (1 - beta) C + beta (C + C') / 2`` on the bilinear statistic. An ablation.
        gram_shrinkage: gamma, ``C -> (1 - gamma) C + gamma A``, after the former. An ablation.
        name: the layer, for messages.
    """

    def __init__(
        self,
        reduce_non_diagonal_ratio: float = 0.9,
        relative_ridge: float = 1e-4,
        *,
        task_weighting: Literal["sum", "mean"] = "sum",
        symmetric_weight: float = 0.0,
        gram_shrinkage: float = 0.0,
        name: str = "",
    ) -> None:
        self.ratio = reduce_non_diagonal_ratio
        self.relative_ridge = relative_ridge
        self.task_weighting = task_weighting
        self.symmetric_weight = symmetric_weight
        self.gram_shrinkage = gram_shrinkage
        self.name = name
        self.rows = 0
        self.lhs: Tensor | None = None  # sum_t A_t, not yet reduced: (in, in)
        self.rhs: Tensor | None = None  # sum_t C_t W_t', reduced: (in, out)

    def add_task(
        self,
        pairs: Iterable[tuple[Tensor, Tensor]],
        expert_weight: Tensor,
        task_weight: float = 1.0,
        task: str = "",
    ) -> PairedStatistics:
        """Adds one task: ``A_t = L' L`` and ``B_t = (L' R)'`` of its paired inputs, with the expert's weight.

        Args:
            pairs: see `accumulate`. Minimising ``sum_t ||L W' - R W_t'||^2`` gives ``W' = (sum A)^-1 sum (L'R) W_t'``,
                hence left is what the merged layer receives and right what the expert's layer receives.
            expert_weight: ``W_t``, shape (out, in).
            task_weight: scales ``A_t`` and ``B_t`` alike.
            task: its name, for messages.

        Returns:
            The task's sums, unreduced.

        Raises:
            SingularSystemError: the inputs hold NaN or infinity.
        """
        statistics = accumulate(pairs)
        gram, bilinear = statistics.gram, statistics.bilinear
        # One NaN or infinity in a row of inputs reaches the diagonal of L'L, and every column sum of L'R.
        if not (gram.diagonal().sum().isfinite() and bilinear.sum().isfinite()):
            bad = int((~gram.isfinite()).sum() + (~bilinear.isfinite()).sum())
            raise SingularSystemError(
                f"Layer {self.name!r}: the statistics ({len(gram)} x {len(gram)}) have {bad} non-finite values, "
                f"from task {task!r}. Check that expert's weights and calibration inputs, or load it in float32."
            )
        if self.symmetric_weight:
            bilinear = torch.lerp(bilinear, (bilinear + bilinear.T) / 2, self.symmetric_weight)
        if self.gram_shrinkage:
            bilinear = torch.lerp(bilinear, gram, self.gram_shrinkage)
        scale = task_weight / statistics.rows if self.task_weighting == "mean" else task_weight
        transposed = expert_weight.T.to(gram.dtype)
        if self.lhs is None or self.rhs is None:
            self.lhs, self.rhs = torch.zeros_like(gram), transposed.new_zeros(transposed.shape)
        self.lhs.add_(gram, alpha=scale)
        self.rhs.addmm_(bilinear, transposed, alpha=scale * self.ratio)
        self.rhs.addcmul_(bilinear.diagonal().unsqueeze(1), transposed, value=scale * (1 - self.ratio))
        self.rows += statistics.rows
        return statistics

    def solve(self, fallback: Tensor) -> Solution:
        """Solves ``(A + r I) X = B`` for the merged weight ``X'``; A is the reduced sum of the tasks' Gram matrices.

        Cholesky in float64. A factorisation counts as failed when it breaks down or when its smallest squared pivot
        is below ``n * 2.2e-16`` times the largest; then r grows by tens up to 0.1 mean(diag A), with a warning.

        Args:
            fallback: weight of shape (out, in) whose columns are used for dead features.

        Raises:
            SingularSystemError: the system is not positive definite at the largest ridge allowed.
        """
        if self.lhs is None or self.rhs is None:
            raise ValueError(f"Layer {self.name!r}: no task was added, there is nothing to solve.")
        lhs, rhs = self.lhs.double(), self.rhs.double()
        diagonal = lhs.diagonal().clone()
        dead = diagonal == 0
        rank = numerical_rank(lhs, min(self.rows, len(lhs) - int(dead.sum())), torch.finfo(self.lhs.dtype).eps)
        lhs = lhs * self.ratio
        # A dead feature's row and column are zero: any positive pivot decouples it, and its result is replaced.
        mean_diagonal = float(diagonal.mean()) or 1.0
        diagonal[dead] = mean_diagonal
        factor, relative_ridge = self._factorise(lhs, diagonal, mean_diagonal)
        solution = torch.cholesky_solve(rhs, factor)
        residual = float(torch.addmm(rhs, lhs, solution, beta=-1).norm()) / (float(rhs.norm()) or 1.0)
        if residual > DOUBTFUL_RESIDUAL:
            log.warning("Layer %r: the relative residual of its system is %.1e.", self.name, residual)
        live = len(lhs) - int(dead.sum())
        if self.rows < live:
            log.warning(
                "Layer %r: %d calibration tokens for %d input features (rank %d); the reduction and the ridge decide "
                "the rest. More calibration inputs would help.",
                self.name,
                self.rows,
                live,
                rank,
            )
        weight = solution.T.contiguous()
        weight[:, dead] = fallback.to(weight)[:, dead]
        dead_features = dead.nonzero().flatten().tolist()
        return Solution(weight, relative_ridge * mean_diagonal, relative_ridge, residual, rank, len(lhs), dead_features)

    def _factorise(self, lhs: Tensor, diagonal: Tensor, mean_diagonal: float) -> tuple[Tensor, float]:
        """Lower Cholesky factor of `lhs` with ``diagonal + r`` written on its diagonal, and r / mean_diagonal."""
        relative_ridge = self.relative_ridge
        while True:
            lhs.diagonal().copy_(diagonal + relative_ridge * mean_diagonal)
            factor, failed_at = torch.linalg.cholesky_ex(lhs)
            pivots = factor.diagonal().square()
            floor = len(lhs) * torch.finfo(torch.float64).eps * pivots.max()
            if failed_at == 0 and pivots.min() >= floor:
                return factor, relative_ridge
            following = relative_ridge * 10
            # The tolerance keeps 1e-4 * 10 * 10 * 10 on the ladder in spite of rounding.
            if relative_ridge == 0 or following > LARGEST_RELATIVE_RIDGE * (1 + 1e-9):
                raise SingularSystemError(
                    f"Layer {self.name!r}: the system ({len(lhs)} x {len(lhs)}, {self.rows} calibration tokens) is "
                    f"not positive definite at relative_ridge={relative_ridge:g}. Use more calibration inputs, a "
                    "reduce_non_diagonal_ratio below 1, or a positive (larger) relative_ridge."
                )
            log.warning(
                "Layer %r: its system is not positive definite at relative_ridge=%g, trying %g.",
                self.name,
                relative_ridge,
                following,
            )
            relative_ridge = following


def numerical_rank(gram: Tensor, bound: int, eps: float) -> int:
    """Rank of a symmetric positive semidefinite float64 matrix whose entries carry a relative error `eps`.

    Pivoted Cholesky (LAPACK dpstrf). The rank cannot exceed `bound` (rows summed, live features), which is returned
    without a factorisation where it already says that the matrix is rank-deficient by far.

    Example:
        >>> numerical_rank(torch.diag(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)), bound=3, eps=1e-7)
        2
    """
    if bound < len(gram) // 2:
        return bound
    tolerance = len(gram) * eps * float(gram.diagonal().max())
    _, _, rank, _ = dpstrf(gram.cpu().numpy(), tol=tolerance, lower=1)
    return min(int(rank), bound)
