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
from torch import Tensor

from fusion_bench_crossmean.cholesky import CholeskyFactor, factorise, numerical_rank
from fusion_bench_crossmean.paired_statistics import (
    NUM_PROBES,
    InputPair,
    PairedStatistics,
    accumulate,
    probes,
)
from fusion_bench_crossmean.workspace import Workspace

log = logging.getLogger(__name__)

#: The ridge grows by tens up to this multiple of the mean diagonal before a system is given up.
LARGEST_RELATIVE_RIDGE = 1e-1
#: Relative residual above which a solution is reported as doubtful; a sound float64 solve stays far below.
DOUBTFUL_RESIDUAL = 1e-6

#: Rows of a matrix that are converted to float64 at a time.
PIECE = 256


class SingularSystemError(ArithmeticError):
    """A layer's system has non-finite values, or is not positive definite at the largest ridge allowed."""


class DoubtfulSystemError(ArithmeticError):
    """A layer's solution came with a warning, and warnings are errors."""


@dataclass(frozen=True)
class Solution:
    """What came of one layer's system.

    Args:
        weight: the merged weight, float64, shape (out, in).
        ridge: what was added to the diagonal of the left-hand side (absolute).
        relative_ridge: the same in multiples of its mean diagonal; above the setting where the ladder was climbed.
        relative_residual: ``||(A + r I) X - B||_F / ||B||_F``, see the function of that name.
        rank: numerical rank of ``sum_t A_t`` before reduction and ridge; below `features`, the data alone do not
            determine the weight and the stabilisation does.
        relative_pivot: smallest squared pivot of the factorisation over the largest: at least one over the condition.
        features: the layer's input width.
        dead_features: input features that were zero on every row; their columns are the fallback's.
        warnings: what was doubtful about it.
    """

    weight: Tensor
    ridge: float
    relative_ridge: float
    relative_residual: float
    rank: int
    relative_pivot: float
    features: int
    dead_features: list[int]
    warnings: list[str]


class LinearSystem:
    """Collects one layer's statistics over the tasks and solves for its merged weight.

    Args:
        reduce_non_diagonal_ratio: off-diagonal entries of every statistic are multiplied by this; 1.0 leaves them.
        relative_ridge: ridge in multiples of the mean diagonal of ``sum_t A_t``. At 0 there is no ladder: a system
            that is not positive definite is an error.
        task_weighting: ``sum`` adds the tasks' sums over tokens, ``mean`` their means.
        symmetric_weight: beta, ``C -> (1 - beta) C + beta (C + C') / 2`` on the bilinear statistic. An ablation.
        gram_shrinkage: gamma, ``C -> (1 - gamma) C + gamma A``, after the former. An ablation.
        strict: makes errors of warnings.
        name: the layer, for messages.
        workspace: where the matrices lie; it serves one system at a time.
    """

    def __init__(
        self,
        reduce_non_diagonal_ratio: float = 0.9,
        relative_ridge: float = 1e-4,
        *,
        task_weighting: Literal["sum", "mean"] = "sum",
        symmetric_weight: float = 0.0,
        gram_shrinkage: float = 0.0,
        strict: bool = False,
        name: str = "",
        workspace: Workspace | None = None,
    ) -> None:
        self.ratio = reduce_non_diagonal_ratio
        self.relative_ridge = relative_ridge
        self.task_weighting = task_weighting
        self.symmetric_weight = symmetric_weight
        self.gram_shrinkage = gram_shrinkage
        self.strict = strict
        self.warnings: list[str] = []
        self.name = name
        self.workspace = workspace or Workspace()
        self.rows = 0
        self.lhs: Tensor | None = None  # sum_t A_t, not yet reduced: (in, in)
        self.rhs: Tensor | None = None  # sum_t C_t W_t', reduced: (in, out)

    def add_task(
        self,
        pairs: Iterable[InputPair],
        expert_weight: Tensor,
        task_weight: float = 1.0,
        task: str = "",
        num_batches: int | None = None,
    ) -> PairedStatistics:
        """Adds one task: ``A_t = L' L`` and ``B_t = (L' R)'`` of its paired inputs, with the expert's weight.

        Args:
            pairs: see `accumulate`. Minimising ``sum_t ||L W' - R W_t'||^2`` gives ``W' = (sum A)^-1 sum (L'R) W_t'``,
                hence left is what the merged layer receives and right what the expert's layer receives.
            expert_weight: ``W_t``, shape (out, in).
            task_weight: scales ``A_t`` and ``B_t`` alike.
            task: its name, for messages.
            num_batches: how many pairs there are; lets the cheaper order of ``C W'`` be chosen. None: C is formed.

        Returns:
            The task's sums, unreduced; valid until the next task is added.

        Raises:
            SingularSystemError: the inputs hold NaN or infinity, or no row.
        """
        weight = None if self._is_ablation else expert_weight
        statistics = accumulate(pairs, weight, num_batches, self.workspace)
        self.add_statistics(statistics, expert_weight, task_weight, task)
        return statistics

    def add_statistics(
        self, statistics: PairedStatistics, expert_weight: Tensor, task_weight: float = 1.0, task: str = ""
    ) -> None:
        """Adds one task's sums, which are there already; for arguments and errors see `add_task`."""
        if not statistics.rows:
            raise SingularSystemError(
                f"Layer {self.name!r}: no token of task {task!r} counts. Check its attention masks, or lower "
                "token_dropout."
            )
        gram, diagonal, product = statistics.gram, statistics.diagonal, statistics.product
        transposed = statistics.transposed
        if self._is_ablation:
            transposed = expert_weight.T.to(gram.dtype)
            assert statistics.bilinear is not None
            bilinear = statistics.bilinear
            if self.symmetric_weight:
                bilinear = torch.lerp(bilinear, (bilinear + bilinear.T) / 2, self.symmetric_weight)
            if self.gram_shrinkage:
                bilinear = torch.lerp(bilinear, gram, self.gram_shrinkage)
            diagonal, product = bilinear.diagonal(), bilinear @ transposed
        assert transposed is not None
        assert product is not None
        # One NaN or infinity in a row of inputs reaches the diagonal of L'L, and every row of L'R W'.
        if not (gram.diagonal().sum().isfinite() and product.sum().isfinite()):
            bad = int((~gram.isfinite()).sum() + (~product.isfinite()).sum())
            raise SingularSystemError(
                f"Layer {self.name!r}: the statistics ({len(gram)} x {len(gram)}) have {bad} non-finite values, "
                f"from task {task!r}. Check that expert's weights and calibration inputs, or load it in float32."
            )
        if self.lhs is None or self.rhs is None:
            self.lhs = self.workspace.zeros("lhs", tuple(gram.shape), gram.dtype, gram.device)
            self.rhs = self.workspace.zeros("rhs", tuple(transposed.shape), gram.dtype, gram.device)
        scale = task_weight / statistics.rows if self.task_weighting == "mean" else task_weight
        self.lhs.add_(gram, alpha=scale)
        self.rhs.add_(product, alpha=scale * self.ratio)
        self.rhs.addcmul_(diagonal.unsqueeze(1), transposed, value=scale * (1 - self.ratio))
        self.rows += statistics.rows

    @property
    def _is_ablation(self) -> bool:
        return self.symmetric_weight > 0 or self.gram_shrinkage > 0

    def sums(self) -> dict[str, Tensor]:
        """What was added up so far: `lhs`, shape (in, in), and `rhs`, shape (in, out)."""
        return {name: sum_ for name, sum_ in (("lhs", self.lhs), ("rhs", self.rhs)) if sum_ is not None}

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
        self.warnings = []
        diagonal = self.lhs.diagonal().to(torch.float64, copy=True)
        dead = diagonal == 0
        # A dead feature's row and column are zero: any positive pivot decouples it, and its result is replaced.
        mean_diagonal = float(diagonal.mean()) or 1.0
        diagonal[dead] = mean_diagonal
        live = len(dead) - int(dead.sum())
        rank = numerical_rank(self.lhs, min(self.rows, live), self.workspace)
        factor, relative_ridge = self._factorise(self.lhs, diagonal, mean_diagonal)
        ridge = relative_ridge * mean_diagonal
        transposed = torch.empty_like(self.rhs.T, dtype=torch.float64, memory_format=torch.contiguous_format)
        weight = factor.solve(transposed.copy_(self.rhs.T))
        residual = relative_residual(self.lhs, self.ratio, diagonal + ridge, weight, self.rhs)
        if residual > DOUBTFUL_RESIDUAL:
            self._doubt(f"the relative residual of its system is {residual:.1e}.")
        if self.rows < live:
            self._doubt(
                f"{self.rows} calibration tokens for {live} input features (rank {rank}); the reduction and the ridge "
                "decide the rest. More calibration inputs would help."
            )
        weight[:, dead] = fallback.to(weight)[:, dead]
        return Solution(
            weight,
            ridge,
            relative_ridge,
            residual,
            rank,
            float(factor.pivots.min() / factor.pivots.max()),
            features=len(dead),
            dead_features=dead.nonzero().flatten().tolist(),
            warnings=self.warnings,
        )

    def _doubt(self, message: str) -> None:
        """Warns of something, or raises `DoubtfulSystemError`."""
        if self.strict:
            raise DoubtfulSystemError(f"Layer {self.name!r}: {message} (An error because of strict=true.)")
        self.warnings.append(message)
        log.warning("Layer %r: %s", self.name, message)

    def _factorise(self, lhs: Tensor, diagonal: Tensor, mean_diagonal: float) -> tuple[CholeskyFactor, float]:
        """Factorises the reduced `lhs` with ``diagonal + r`` on its diagonal; also returns r / mean_diagonal."""
        relative_ridge = self.relative_ridge
        while True:
            matrix = self.workspace.empty("float64", tuple(lhs.shape), torch.float64, lhs.device)
            matrix.copy_(lhs).mul_(self.ratio).diagonal().copy_(diagonal + relative_ridge * mean_diagonal)
            factor = factorise(matrix)
            lowest = len(lhs) * torch.finfo(torch.float64).eps
            if factor is not None and factor.pivots.min() >= lowest * factor.pivots.max():
                return factor, relative_ridge
            following = relative_ridge * 10
            # The tolerance keeps 1e-4 * 10 * 10 * 10 on the ladder in spite of rounding.
            if relative_ridge == 0 or following > LARGEST_RELATIVE_RIDGE * (1 + 1e-9):
                raise SingularSystemError(
                    f"Layer {self.name!r}: the system ({len(lhs)} x {len(lhs)}, {self.rows} calibration tokens) is "
                    f"not positive definite at relative_ridge={relative_ridge:g}. Use more calibration inputs, a "
                    "reduce_non_diagonal_ratio below 1, or a positive (larger) relative_ridge."
                )
            self._doubt(
                f"its system is not positive definite at relative_ridge={relative_ridge:g}, trying {following:g}."
            )
            relative_ridge = following


def bytes_needed(features: int, outputs: int) -> int:
    """Memory that a layer's statistics and solution take at once, in bytes, with float32 sums.

    Three (in, in) sums and a scaled copy, and the left-hand side once more in float64, with the two copies that torch
    makes to factorise it on a GPU (on a CPU they are a margin); four (in, out) matrices in float32, and two in float64.
    """
    return features * features * (4 * 4 + 3 * 8) + features * outputs * (4 * 4 + 2 * 8)


def relative_residual(lhs: Tensor, ratio: float, diagonal: Tensor, weight: Tensor, rhs: Tensor) -> float:
    """``||A X - B||_F / ||B||_F`` for ``X = weight'`` and A = `ratio` times `lhs` with `diagonal` on its diagonal.

    In float64. With many columns both norms are those of products with random signs, whose squares are unbiased
    estimates: the whole product would cost as much as the solution.
    """
    directions = torch.eye(len(weight)).to(weight) if len(weight) <= NUM_PROBES else probes(len(weight), weight)
    x = weight.T @ directions
    error = norm = 0.0
    for start in range(0, len(lhs), PIECE):  # in pieces: a float64 copy of `lhs` would be the largest matrix around
        piece = slice(start, start + PIECE)
        own = lhs[piece].to(torch.float64, copy=True).mul_(ratio)
        own.diagonal(start).copy_(diagonal[piece])
        target = rhs[piece].double() @ directions
        error += float((own @ x - target).square().sum())
        norm += float(target.square().sum())
    return (error / norm) ** 0.5 if norm > 0 else error**0.5
