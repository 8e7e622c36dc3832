"""Reading what users hand over, whose code may fail in any way: the task is named, and what went wrong."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")

#: Seconds from a broken connection to the signal that says why.
DEATH_NOTICE = 0.5


def told(loader: Iterable[Item], task: str) -> Iterator[Item]:
    """One after the other; what is wrong with an input, or with what reads it, is said together with its task."""
    try:
        yield from loader
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as first:  # noqa: BLE001  (a user's dataset may raise anything for an odd input)
        error = deeper(first)
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"The calibration inputs of task {task!r}: {kind}{error}") from error


def deeper(error: Exception) -> Exception:
    """The error, or what is behind it where a process of a loader has died, which torch says a moment later."""
    try:
        if isinstance(error, (EOFError, ConnectionError)):
            time.sleep(DEATH_NOTICE)
        traceback.clear_frames(error.__traceback__)  # with them the loader ends; nobody will be told any more
    except RuntimeError as death:
        return death
    return error


def length_of(data: Any, task: str) -> int:
    """How many inputs a dataset has.

    Raises:
        ValueError: it does not say so.
    """
    try:
        return len(data)
    except Exception as error:  # of a user's own dataset, see `told`
        kind = type(data).__name__
        raise ValueError(
            f"The calibration inputs of task {task!r}, a {kind}, have no length: {type(error).__name__}: {error}"
        ) from error
