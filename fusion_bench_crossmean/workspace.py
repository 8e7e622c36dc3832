"""Large buffers that are used again from layer to layer: fresh memory costs a page fault per page."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor


class Workspace:
    """Buffers by role. A role's tensor is valid until the role is asked for again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def empty(self, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor."""
        size, buffer = math.prod(shape), self._buffers.get(role)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype or buffer.device != device:
            self._buffers.pop(role, None)
            self._buffers[role] = buffer = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)

    def zeros(self, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of zeros."""
        return self.empty(role, shape, dtype, device).zero_()


def return_free_memory() -> None:
    """Gives memory that was freed back to the system where the C library keeps it (glibc); elsewhere does nothing.

    Activations of many sizes that live and die in between leave holes in the heap, in which later ones do not fit:
    more than half as much again as what is in use.
    """
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return lambda _: None
