"""Sums over paired inputs: Gram matrix, bilinear statistic, and what is read off them. Tensors only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_bench_crossmean.workspace import Workspace

#: Left and right inputs of one batch, of shape (tokens, in); of several right ones the mean is meant.
InputPair = tuple[Tensor, Tensor | Sequence[Tensor]]
#: Columns of a Gram matrix that are computed at a time: large enough for a product, small enough to save half of it.
GRAM_BLOCK = 384
#: Rows whose products are summed at a time, in the cache.
CACHED_ROWS = 64
#: Random directions, besides the mean inputs, in which the alignment is measured where C is never formed.
NUM_PROBES = 16


@contextlib.contextmanager
def float32_products(precision: Literal["highest", "high", "medium"] = "highest") -> Iterator[None]:
    """Float32 products of this precision on every device inside the block, as before afterwards.

    `highest` is full float32 (no TF32, no bfloat16), also in convolutions; `medium` lets operands be rounded to
    bfloat16, while sums are float32.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set torch's newer switches, one per backend, which this one does not go with
        with newer_switches(is_full=precision == "highest"):
            yield
        return
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextlib.contextmanager
def newer_switches(*, is_full: bool) -> Iterator[None]:
    """The same through `fp32_precision` of every backend (torch 2.9 and later)."""
    backends: Any = torch.backends
    reduced = {
        backends.cuda.matmul: "tf32",
        backends.mkldnn.matmul: "bf16",
        backends.cudnn.conv: "tf32",
        backends.mkldnn.conv: "bf16",
    }
    before = {backend: backend.fp32_precision for backend in reduced}
    try:
        for backend, precision in reduced.items():
            backend.fp32_precision = "ieee" if is_full else precision
        yield
    finally:
        for backend, precision in before.items():
            backend.fp32_precision = precision


@dataclass
class PairedStatistics:
    """Sums over the rows of paired inputs ``L`` (left) and ``R`` (right) of one task.

    The matrices lie in a workspace: they are valid until the next sums are made with it.

    Args:
        gram: ``A = L' L``, shape (in, in).
        bilinear: ``C = L' R``, shape (in, in): rows belong to left, columns to right. It is `gram` itself where both
            sides are the same tensor, and None where only `product` was asked for.
        transposed: ``W'`` of the weight that was given, shape (in, out), in the dtype of the sums; None without one.
        product: ``C W'``, shape (in, out).
        diagonal: of C, shape (in,).
        directions: V of shape (in, directions), see `directions_for`; None where C was formed.
        sketch: ``C V``; None where C was formed.
        right_energy: ``||R||_F^2``.
        rows: how many rows (tokens) were summed.
    """

    gram: Tensor
    bilinear: Tensor | None
    transposed: Tensor | None
    product: Tensor | None
    diagonal: Tensor
    directions: Tensor | None
    sketch: Tensor | None
    right_energy: float
    rows: int

    def alignment(self) -> float:
        """``<A, C>_F / (||A||_F ||C||_F)``: at most 1, and 1 iff C is a positive multiple of A.

        Where C was not formed, that of ``A V`` and ``C V``, whose products are unbiased estimates of those of A and C.
        """
        if self.bilinear is self.gram:
            return 1.0
        gram, other = self.gram, self.bilinear
        if other is None:
            assert self.directions is not None
            assert self.sketch is not None
            gram, other = gram @ self.directions, self.sketch
        rows = max(CACHED_ROWS, CACHED_ROWS * len(gram) // gram.shape[1])  # fewer columns, more rows
        inner = gram_norm = other_norm = 0.0
        for a, c in zip(gram.split(rows), other.split(rows), strict=True):  # whole products are large
            inner += float((a * c).sum(dtype=torch.float64))
            gram_norm += float((a * a).sum(dtype=torch.float64))
            other_norm += float((c * c).sum(dtype=torch.float64))
        norms = (gram_norm * other_norm) ** 0.5
        return inner / norms if norms > 0 else float("nan")

    def drift(self) -> float:
        """``||L - R||_F / ||R||_F``, from traces alone."""
        if self.bilinear is self.gram:
            return 0.0
        left, cross = self.gram.diagonal().double().sum(), self.diagonal.double().sum()
        squared = float(left - 2 * cross) + self.right_energy
        return (max(squared, 0.0) / self.right_energy) ** 0.5 if self.right_energy > 0 else float("nan")


def of_gram(gram: Tensor, right_energy: float, rows: int, weight: Tensor) -> PairedStatistics:
    """The statistics of inputs that were paired with themselves, from their Gram matrix alone.

    Args:
        gram: see `PairedStatistics`, like `right_energy` and `rows`.
        weight: W, shape (out, in).
    """
    transposed = weight.T.to(gram.dtype).contiguous()
    product = gram @ transposed
    return PairedStatistics(
        gram,
        gram,
        transposed,
        product,
        gram.diagonal(),
        directions=None,
        sketch=None,
        right_energy=right_energy,
        rows=rows,
    )


def accumulate(
    pairs: Iterable[InputPair],
    weight: Tensor | None = None,
    num_batches: int | None = None,
    workspace: Workspace | None = None,
) -> PairedStatistics:
    """Sums over batches, in float32, or float64 where the inputs are float64.

    Args:
        pairs: (left, right) per batch, each of shape (tokens, in) and in any floating dtype; they are upcast before
            the product. Where both are one tensor, one product is computed; of several right ones the mean counts.
        weight: W, shape (out, in), for `product`.
        num_batches: how many pairs there are: then ``C W'`` is computed as ``(L' R) W'`` or as ``L' (R W')``, which is
            cheaper. None: C is formed, and so it is without a weight and where both sides are one tensor.
        workspace: where the matrices lie.

    Raises:
        ValueError: no batch at all.
    """
    workspace = workspace or Workspace()
    sums: Sums | None = None
    for left, right in pairs:
        if sums is None:
            rows = None if num_batches is None else len(left) * num_batches
            forms = rows is None or weight is None or bilinear_is_cheaper(rows, *weight.T.shape)
            sums = Sums(left, weight, same=right is left, forms=forms, workspace=workspace)
        sums.add(left, right)
    if sums is None:
        raise ValueError("There are no inputs to sum: the calibration set of a task is empty.")
    return sums.finish()


class Sums:
    """The running sums of `accumulate`."""

    def __init__(self, left: Tensor, weight: Tensor | None, *, same: bool, forms: bool, workspace: Workspace) -> None:
        self.dtype = torch.promote_types(left.dtype, torch.float32)
        self.same = same
        self.workspace = workspace
        width, device = left.shape[1], left.device
        self.gram = workspace.empty("gram", (width, width), self.dtype, device)  # the first batch fills it
        self.bilinear = self.product = self.factor = self.directions = None
        # Contiguous, which element-wise operations on it need to be fast.
        self.transposed = None if weight is None else weight.T.to(self.dtype).contiguous()
        if self.same:
            self.bilinear = self.gram
        elif forms:
            self.bilinear = workspace.empty("bilinear", (width, width), self.dtype, device)
        self.diagonal = torch.zeros(width, dtype=self.dtype, device=device)
        self.right_energy = torch.zeros((), dtype=torch.float64, device=device)  # read once: that waits for a GPU
        self.rows = 0

    def add(self, left: Tensor, right: Tensor | Sequence[Tensor]) -> None:
        """One batch."""
        left = self._upcast("left", left)
        right = left if self.same else self._upcast("right", right)
        keep = 0 if self.rows == 0 else 1  # nothing was summed before the first batch
        add_gram(self.gram, left, keep)
        if self.bilinear is None:
            factor, product = self._factor_and_product(left, right)
            product.addmm_(left.T, right @ factor, beta=keep)
            for some_left, some_right in zip(left.split(CACHED_ROWS), right.split(CACHED_ROWS), strict=True):
                self.diagonal += (some_left * some_right).sum(0)
        elif not self.same:
            self.bilinear.addmm_(left.T, right, beta=keep)
        self.right_energy += right.norm().double().square()
        self.rows += left.shape[0]

    def _factor_and_product(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """``[W' V]`` and the sum of ``L' R [W' V]``; the first batch tells the directions V."""
        if self.factor is None or self.product is None:
            assert self.transposed is not None
            self.directions = directions_for(left, right)
            self.factor = torch.cat([self.transposed, self.directions], 1)
            self.product = self.workspace.empty("product", tuple(self.factor.shape), self.dtype, left.device)
        return self.factor, self.product

    def _upcast(self, role: str, inputs: Tensor | Sequence[Tensor]) -> Tensor:
        """The inputs, or their mean, in the dtype of the sums; if that is a new tensor, it is valid until the next."""
        first, *others = (inputs,) if isinstance(inputs, Tensor) else inputs
        if not others and first.dtype == self.dtype:
            return first
        mean = self.workspace.empty(role, tuple(first.shape), self.dtype, first.device).copy_(first)
        for other in others:
            mean += other
        return mean.div_(1 + len(others)) if others else mean

    def finish(self) -> PairedStatistics:
        """The whole matrices."""
        mirror_upper(self.gram)
        product, sketch = self.product, None
        if product is not None and self.transposed is not None:
            product, sketch = product.split([self.transposed.shape[1], product.shape[1] - self.transposed.shape[1]], 1)
        elif self.bilinear is not None:
            self.diagonal = self.bilinear.diagonal()
            product = None if self.transposed is None else self.bilinear @ self.transposed
        return PairedStatistics(
            self.gram,
            self.bilinear,
            self.transposed,
            product,
            self.diagonal,
            self.directions,
            sketch,
            float(self.right_energy),
            self.rows,
        )


def add_gram(gram: Tensor, rows: Tensor, keep: float = 1) -> None:
    """Adds ``rows' rows`` to the blocks of `gram` on and above its diagonal: little more than half the products.

    `keep` is 0 where `gram` holds nothing yet.
    """
    for start in range(0, len(gram), GRAM_BLOCK):
        end = start + GRAM_BLOCK
        gram[start:end, start:].addmm_(rows[:, start:end].T, rows[:, start:], beta=keep)


def mirror_upper(gram: Tensor) -> None:
    """Copies the blocks above the diagonal to below it."""
    for start in range(0, len(gram), GRAM_BLOCK):
        end = start + GRAM_BLOCK
        gram[end:, start:end] = gram[start:end, end:].T


def bilinear_is_cheaper(rows: int, width: int, outputs: int) -> bool:
    """Whether ``(L' R) W'`` (N n^2 + n^2 m products for N rows, n inputs, m outputs) beats ``L' (R W')`` (2 N n m)."""
    return rows * width + width * outputs <= 2 * rows * outputs


def directions_for(left: Tensor, right: Tensor) -> Tensor:
    """V with ``E <A V, C V> = <A, C>`` for any A and C, shape (in, two more than `NUM_PROBES`), from one batch.

    The mean inputs, along which the energy of activations lies, and random directions orthogonal to them: what varies
    in the estimate is the rest only (as in Hutch++, Meyer et al. 2021).
    """
    means, _ = torch.linalg.qr(torch.stack([left.mean(0), right.mean(0)], 1).double().nan_to_num())
    random = probes(len(means), means) / NUM_PROBES**0.5
    return torch.cat([means, random - means @ (means.T @ random)], 1).to(left.dtype)


def probes(width: int, like: Tensor) -> Tensor:
    """Fixed random signs, shape (width, `NUM_PROBES`), in dtype and on the device of `like`."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (width, NUM_PROBES), generator=generator, device="cpu")
    return (2 * signs - 1).to(like)
