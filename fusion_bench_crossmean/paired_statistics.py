"""Sums over paired inputs: Gram matrix, bilinear statistic, and what is read off them. Tensors only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Full float32 products on every device inside the block (no TF32, no bfloat16), as before afterwards."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@dataclass
class PairedStatistics:
    """Sums over the rows of paired inputs ``L`` (left) and ``R`` (right) of one task.

    Args:
        gram: ``L' L``, shape (in, in).
        bilinear: ``L' R``, shape (in, in): rows belong to left, columns to right. It is `gram` itself where both
            sides are the same tensor.
        right_energy: ``||R||_F^2``.
        rows: how many rows (tokens) were summed.
    """

    gram: Tensor
    bilinear: Tensor
    right_energy: float
    rows: int

    @property
    def alignment(self) -> float:
        """``<L'L, L'R>_F / (||L'L||_F ||L'R||_F)``: at most 1, and 1 iff L'R is a positive multiple of L'L."""
        if self.bilinear is self.gram:
            return 1.0
        gram, bilinear = self.gram.double(), self.bilinear.double()
        norms = gram.norm() * bilinear.norm()
        return float((gram * bilinear).sum() / norms) if norms > 0 else float("nan")

    @property
    def drift(self) -> float:
        """``||L - R||_F / ||R||_F``, from traces alone."""
        if self.bilinear is self.gram:
            return 0.0
        left, cross = self.gram.diagonal().double().sum(), self.bilinear.diagonal().double().sum()
        squared = float(left - 2 * cross) + self.right_energy
        return (max(squared, 0.0) / self.right_energy) ** 0.5 if self.right_energy > 0 else float("nan")


def accumulate(pairs: Iterable[tuple[Tensor, Tensor]]) -> PairedStatistics:
    """Sums ``L' L`` and ``L' R`` over batches, in float32, or float64 where the inputs are float64.

    Args:
        pairs: (left, right) per batch, each of shape (tokens, in) and in any floating dtype; they are upcast before
            the product. Where both are one tensor, one product is computed.

    Raises:
        ValueError: no batch at all.
    """
    gram = bilinear = None
    right_energy, rows = 0.0, 0
    for left, right in pairs:
        same = right is left
        dtype = torch.promote_types(left.dtype, torch.float32)
        left = left.to(dtype)
        right = left if same else right.to(dtype)
        if gram is None or bilinear is None:
            gram = left.new_zeros(left.shape[1], left.shape[1])
            bilinear = gram if same else torch.zeros_like(gram)
        gram.addmm_(left.T, left)
        if bilinear is not gram:
            bilinear.addmm_(left.T, right)
        right_energy += float(right.double().square().sum()) if dtype == torch.float64 else float(right.norm()) ** 2
        rows += left.shape[0]
    if gram is None or bilinear is None:
        raise ValueError("There are no inputs to sum: the calibration set of a task is empty.")
    return PairedStatistics(gram, bilinear, right_energy, rows)
