"""Pieces of messages."""

from __future__ import annotations

from collections.abc import Sequence


def shorten(names: Sequence[str], limit: int = 8) -> str:
    """Names for a message: the first few in quotes, and how many more.

    Example:
        >>> shorten(["a", "b", "c"], limit=2)
        "'a', 'b' and 1 more"
    """
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
