"""Counts the floating-point operations of a run, and measures how many of them the machine does in a second.

A multiplication and an addition count as two. What is counted is what reaches PyTorch's dispatcher in the calling
thread, and scipy's Cholesky factorisations. Element-wise operations do not count: what bounds them is memory; the time
they take is told.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import scipy.linalg
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

#: Name of an operator without its trailing underscore -> kind; PyTorch's own formulas count these.
PRODUCTS = {
    "mm": "matrix products",
    "addmm": "matrix products",
    "bmm": "matrix products",
    "baddbmm": "matrix products",
    "convolution": "convolutions",
}
ATTENTION = "_scaled_dot_product"
#: Kind of everything that is not counted.
ELEMENTWISE = "element-wise operations, copies and sums"

#: Kind and count of one call from its tensors; n is the size of the system, m its number of right-hand sides.
FACTORISATIONS: dict[str, tuple[str, Callable[[list[Tensor]], float]]] = {
    "linalg_cholesky_ex": ("Cholesky factors", lambda t: systems(t[0]) * t[0].shape[-1] ** 3 / 3),
    "cholesky_solve": ("Cholesky solves", lambda t: 2 * t[0].numel() * t[1].shape[-1]),
    "linalg_solve_triangular": ("triangular solves", lambda t: t[1].numel() * t[0].shape[-1]),
    "linalg_inv_ex": ("inverses", lambda t: 2 * systems(t[0]) * t[0].shape[-1] ** 3),
    "cholesky_inverse": ("inverses", lambda t: 2 * systems(t[0]) * t[0].shape[-1] ** 3 / 3),
}

#: Shape of the product that measures a rate, (rows, inner, columns): about what one batch adds to a Gram matrix.
RATE_SHAPE = (3072, 3200, 3072)


def kind_of(name: str) -> str:
    """The kind of an operator from its name without its trailing underscore."""
    if name in PRODUCTS:
        return PRODUCTS[name]
    if name.startswith(ATTENTION) and "backward" not in name:
        return "attention"
    return FACTORISATIONS[name][0] if name in FACTORISATIONS else ELEMENTWISE


def systems(matrix: Tensor) -> int:
    """How many matrices a batch holds."""
    return matrix.numel() // (matrix.shape[-1] * matrix.shape[-2])


class OperationCounter(TorchDispatchMode):
    """Counts inside its `with` block.

    `counts` maps kind -> dtype -> operations, `seconds` kind -> time inside the operations, which is meaningful on a
    CPU only: a GPU works on while the next one is called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.seconds: dict[str, float] = defaultdict(float)
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> OperationCounter:
        for name, count in (("cho_factor", self._count_factor), ("cho_solve", self._count_solve)):
            wrapped = functools.partial(count, getattr(scipy.linalg, name))
            self._patches.enter_context(mock.patch.object(scipy.linalg, name, wrapped))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _count_factor(self, factorise: Callable[..., Any], matrix: Any, *args: Any, **kwargs: Any) -> Any:
        self.counts["Cholesky factors"][str(matrix.dtype)] += len(matrix) ** 3 / 3
        with self._timed("Cholesky factors"):
            return factorise(matrix, *args, **kwargs)

    def _count_solve(self, solve: Callable[..., Any], factor: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        self.counts["Cholesky solves"][str(rhs.dtype)] += 2 * len(rhs) * rhs.size
        with self._timed("Cholesky solves"):
            return solve(factor, rhs, *args, **kwargs)

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - start

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__.rstrip("_")
        with self._timed(kind := kind_of(name)):
            result = func(*args, **kwargs)
        tensors = [value for value in args if isinstance(value, Tensor)]
        if name in PRODUCTS:
            count = flop_registry[getattr(torch.ops.aten, name)](*args, **kwargs, out_val=result)
            self._add(kind, tensors[-1], count)
        elif kind == "attention":
            self._add(kind, tensors[0], sdpa_flop_count(*(tensor.shape for tensor in tensors[:3])))
        elif name in FACTORISATIONS:
            self._add(kind, tensors[0], FACTORISATIONS[name][1](tensors))
        return result

    def _add(self, kind: str, operand: Tensor, operations: float) -> None:
        self.counts[kind][str(operand.dtype).removeprefix("torch.")] += operations

    def by_kind(self) -> dict[str, dict[str, float]]:
        """kind -> dtype -> operations."""
        return {kind: dict(counts) for kind, counts in self.counts.items()}

    def by_dtype(self) -> dict[str, float]:
        """dtype -> operations of all kinds."""
        totals: dict[str, float] = defaultdict(float)
        for counts in self.counts.values():
            for dtype, operations in counts.items():
                totals[dtype] += operations
        return dict(totals)


def product_rate(dtype: str, device: torch.device, repeats: int = 3) -> float:
    """Operations per second of one large matrix product, the median of a few."""
    rows, inner, columns = RATE_SHAPE
    left = torch.randn(rows, inner, device=device).to(getattr(torch, dtype))
    right = torch.randn(inner, columns, device=device).to(left.dtype)
    torch.mm(left, right)  # the first one allocates and starts the library
    seconds = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        torch.mm(left, right)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * rows * inner * columns / statistics.median(seconds)


def synchronise(device: torch.device) -> None:
    """Waits for everything that was sent to `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reached_share(operations: Mapping[str, float], rates: Mapping[str, float], seconds: float) -> float:
    """The time that the operations would take at the machine's rates, over the time that they took.

    Example:
        >>> reached_share({"float32": 6e9, "float64": 1e9}, {"float32": 2e9, "float64": 1e9}, seconds=8.0)
        0.5
    """
    return sum(count / rates[dtype] for dtype, count in operations.items()) / seconds
