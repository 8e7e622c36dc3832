"""Cholesky factorisations: one that works in the memory it is given, and one that tells the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import scipy.linalg
import torch
from scipy.linalg.lapack import dpstrf  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from fusion_bench_crossmean.workspace import Workspace


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
    """Factorises a symmetric float32 or float64 matrix, shape (n, n), contiguous, which it may overwrite.

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


def numerical_rank(gram: Tensor, bound: int, workspace: Workspace | None = None) -> int:
    """Numerical rank of a Gram matrix, shape (n, n), that was summed in its own dtype; below n / 2 a bound of it.

    What counts is how much of a feature the others leave unexplained: scaled to a unit diagonal, pivots of a pivoted
    factorisation (LAPACK dpstrf) below ``4 n eps`` are null. In the usual case, that of full rank, there is no need
    for one, at three times the price: if the matrix less twice that on its diagonal is positive definite, then no
    pivot can be that small, in whatever order.

    Args:
        gram: left as it is.
        bound: what the rank cannot exceed (rows summed, live features); returned at once where it is below n / 2.
        workspace: where the scaled copy lies.

    Example:
        >>> numerical_rank(torch.tensor([[4.0, 2.0], [2.0, 1.0]]), bound=2)
        1
    """
    width = len(gram)
    if bound < width // 2:
        return bound
    null = 4 * width * torch.finfo(gram.dtype).eps
    scale = gram.diagonal().clamp_min(0).rsqrt().nan_to_num(posinf=0.0)  # a dead feature's row stays zero
    scaled = (workspace or Workspace()).empty("scaled", tuple(gram.shape), gram.dtype, gram.device)
    if bound == width:
        torch.mul(gram, scale, out=scaled).mul_(scale.unsqueeze(1)).diagonal().sub_(2 * null)
        if factorise(scaled) is not None:
            return width
    torch.mul(gram, scale, out=scaled).mul_(scale.unsqueeze(1))
    _, _, rank, _ = dpstrf(scaled.double().cpu().numpy(), tol=null, lower=1, overwrite_a=1)
    return min(int(rank), bound)
