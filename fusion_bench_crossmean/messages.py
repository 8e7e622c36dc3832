"""Pieces of messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Differences between two records that are told.
NUM_DIFFERENCES = 4


def shorten(names: Sequence[str], limit: int = 8) -> str:
    """Names for a message: the first few in quotes, and how many more.

    Example:
        >>> shorten(["a", "b", "c"], limit=2)
        "'a', 'b' and 1 more"
    """
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def is_writable(text: str) -> bool:
    """Whether text can be written down: a lone surrogate cannot.

    Example:
        >>> is_writable("ö"), is_writable("\\ud800")
        (True, False)
    """
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """In words: the first entries in which two nested records differ; empty where they do not.

    Example:
        >>> differing({"seed": 0, "experts": {"a": "x"}}, {"seed": 1, "experts": {"a": "x"}})
        'seed is 0 there and 1 here'
    """
    found = list(differences(there, here))
    more = " and more" if len(found) > NUM_DIFFERENCES else ""
    return "; ".join(found[:NUM_DIFFERENCES]) + more


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """In words: every entry in which two nested records differ."""
    for key in dict.fromkeys([*there, *here]):
        old, new = there.get(key), here.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} is {old!r} there and {new!r} here"
