"""How much memory there is: used by this process, free on a device, kept by the C library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

GIB = 2**30
#: Part of the free memory that is planned with, where no budget is set: estimates err, and others need some too.
CAUTION = 0.8


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use on a device, and how many may be.

    Args:
        used: by this process.
        limit: how many it may use in all.
    """

    used: int
    limit: int

    def with_more(self, size: int) -> MemoryUse:
        """After so many bytes more have been used."""
        return MemoryUse(self.used + size, self.limit)

    @property
    def free(self) -> int:
        return self.limit - self.used


def memory_of(device: torch.device, max_memory_gib: float | None = None) -> MemoryUse:
    """Memory of this process on a device and its limit: the budget, or what is used and most of what is free."""
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used
    else:
        used = psutil.Process().memory_info().rss
        free = min(psutil.virtual_memory().available, free_in_group())
    limit = used + int(CAUTION * free) if max_memory_gib is None else int(max_memory_gib * GIB)
    return MemoryUse(used, limit)


def free_in_group(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that a container's limit (control group, version 2) leaves; without one, more than there can be."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return 2**63 - 1
    return limit - used + int(counts.get("inactive_file", 0))  # files read before make way


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
