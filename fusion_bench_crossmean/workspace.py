"""Large buffers that are used again from layer to layer: fresh memory costs a page fault per page."""

from __future__ import annotations

import math

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
