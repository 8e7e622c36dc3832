"""A Cholesky factorisation that works in the memory it is given where LAPACK can be called directly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import scipy.linalg
import torch
from torch import Tensor


@dataclass(frozen=True)
class CholeskyFactor:
    """A factorised matrix A.

    Args:
        pivots: the squared diagonal of the factor, shape (n,).
        solve: B' of shape (m, n), contiguous -> X' with A X = B; may overwrite B'.
    """

    pivots: Tensor
    solve: Callable[[Tensor], Tensor]


def factorise(matrix: Tensor) -> CholeskyFactor | None:
    """Factorises a symmetric float64 matrix, shape (n, n), contiguous, which it may overwrite.

    On a CPU by scipy in place: torch copies the matrix and clears half of the result, which takes longer than the
    factorisation itself. Elsewhere by torch.

    Returns:
        None if the matrix is not positive definite.
    """
    if matrix.device.type == "cpu":
        try:
            # Rows of a C-ordered array are columns of its transpose, which is the order LAPACK works in.
            factor = scipy.linalg.cho_factor(matrix.numpy().T, overwrite_a=True, check_finite=False)
        except scipy.linalg.LinAlgError:
            return None

        def solve(transposed: Tensor) -> Tensor:
            target = transposed.numpy().T
            solution = scipy.linalg.cho_solve(factor, target, overwrite_b=True, check_finite=False)
            return torch.from_numpy(solution.T)

        return CholeskyFactor(torch.from_numpy(factor[0].diagonal() ** 2), solve)
    lower, failed_at = torch.linalg.cholesky_ex(matrix)
    if failed_at:
        return None
    return CholeskyFactor(lower.diagonal().square(), lambda transposed: torch.cholesky_solve(transposed.T, lower).T)
