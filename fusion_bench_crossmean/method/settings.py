"""Checks of single settings: what is wrong, and which values there are."""

from __future__ import annotations

import math
import os
from typing import Any

from fusion_bench_crossmean.messages import is_writable


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises `ValueError` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")


def check_integer(name: str, value: Any, at_least: int) -> None:
    """Raises `ValueError` unless `value` is an integer of at least `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, not {value!r}.")


def check_number(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raises `ValueError` unless `value` is a number in [low, high]."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or value == math.inf:
        limits = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"of at least {low:g}"
        raise ValueError(f"{name} must be a number {limits}, not {value!r}.")


def check_path(name: str, value: Any) -> str | None:
    """A path as text, None as it is; raises `ValueError` for anything else."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not isinstance(text := os.fspath(value), str):
        raise ValueError(f"{name} must be a path, not {value!r}.")
    if not text or "\0" in text or not is_writable(text):
        raise ValueError(f"{name} must be a path, not {text!r}.")
    return text


def check_flag(name: str, value: object) -> None:
    """Raises `ValueError` unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}.")
