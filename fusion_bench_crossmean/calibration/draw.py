"""Which inputs of a task are used: drawn without replacement from a seed, disjoint between purposes."""

from __future__ import annotations

import zlib

import numpy as np

#: Inputs that a dataset may say it has.
LARGEST = 2**32


def draw_indices(task: str, size: int, count: int, seed: int, offset: int = 0) -> list[int]:
    """`count` different indices below `size`, the same for the same task and seed whatever the other tasks are.

    Args:
        task: its name; tasks draw independently.
        size: how many inputs there are.
        count: how many to draw.
        seed: of the draw.
        offset: how many draws of the same seed to skip: ``offset=256`` is disjoint from the 256 calibration inputs,
            which is where validation inputs come from.

    Raises:
        ValueError: fewer than `offset` + `count` inputs.

    Example:
        >>> first, second = draw_indices("a", 10, 6, seed=0), draw_indices("a", 10, 4, seed=0, offset=6)
        >>> sorted(first + second) == list(range(10))
        True
    """
    if size > LARGEST:
        raise ValueError(f"Task {task!r} says that it has {size} inputs; that is more than can be drawn from.")
    if offset + count > size:
        raise ValueError(f"Task {task!r} has {size} inputs, {offset + count} were asked for.")
    order = np.random.default_rng([seed, zlib.crc32(task.encode())]).permutation(size)
    return order[offset : offset + count].tolist()
