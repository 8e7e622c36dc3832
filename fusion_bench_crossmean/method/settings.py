"""Checks of single settings: what is wrong, and which values there are."""

from __future__ import annotations

import math
from typing import Any


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")


def check_integer(name: str, value: Any, at_least: int) -> None:
    """Raises `ValueError` unless `value` is an integer of at least `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, not {value!r}.")


def check_number(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raises `ValueError` unless `value` is a number in [low, high]."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        limits = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"of at least {low:g}"
        raise ValueError(f"{name} must be a number {limits}, not {value!r}.")


def check_flag(name: str, value: object) -> None:
    """Raises `ValueError` unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}.")
