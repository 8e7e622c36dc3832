"""A layer's system solved on the range of its left-hand side, for methods that merge task vectors. Tensors only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion_bench_crossmean.linear_system import LinearSystem, SingularSystemError, Solution, relative_residual


class PseudoInverseSystem(LinearSystem):
    """``W' = A^+ B``: nothing is added where the data say nothing, so there the solution is zero.

    Args:
        rcond: eigenvalues of A below this multiple of the largest are null. None: ``n eps`` of the dtype in which the
            statistics were summed, below which they hold rounding only.
        settings: see `LinearSystem`; a ridge is added to the eigenvalues that are not null.
    """

    def __init__(self, *args: Any, rcond: float | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.rcond = rcond

    def solve(self, fallback: Tensor) -> Solution:
        """The solution of least norm, through a float64 eigendecomposition.

        Args:
            fallback: weight of shape (out, in) whose columns are used for dead features.

        Returns:
            `rank` is the number of eigenvalues that are not null, `relative_pivot` the smallest of these over the
            largest.
        """
        if self.lhs is None or self.rhs is None:
            raise ValueError(f"Layer {self.name!r}: no task was added, there is nothing to solve.")
        dead = self.lhs.diagonal() == 0
        matrix = self.lhs.double()
        diagonal = matrix.diagonal().clone()
        matrix.mul_(self.ratio).diagonal().copy_(diagonal)
        ridge = self.relative_ridge * float(diagonal.mean())
        values, vectors = torch.linalg.eigh(matrix)
        epsilon = torch.finfo(self.lhs.dtype).eps
        largest = float(values[-1])
        live = values > largest * (len(matrix) * epsilon if self.rcond is None else self.rcond)
        values, vectors = values[live], vectors[:, live]
        rhs = self.rhs.double()
        weight = ((vectors / (values + ridge)) @ (vectors.T @ rhs)).T.contiguous()
        residual = relative_residual(self.lhs, self.ratio, diagonal + ridge, weight, self.rhs)
        if not torch.isfinite(weight).all():
            raise SingularSystemError(f"Layer {self.name!r}: its pseudo-inverse is not finite. Raise rcond.")
        weight[:, dead] = fallback.to(weight)[:, dead]
        return Solution(
            weight,
            ridge,
            self.relative_ridge,
            residual,
            rank=int(live.sum()),
            relative_pivot=float(values[0]) / largest if len(values) else 0.0,
            features=len(dead),
            dead_features=dead.nonzero().flatten().tolist(),
            warnings=self.warnings,
        )
