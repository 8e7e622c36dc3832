"""What the sources of all pools ask of them."""

from __future__ import annotations

from typing import Any


def check_training_data(modelpool: Any, task: str, cure: str) -> None:
    """Raises `ValueError`, ending in `cure`, where a pool has no training data for a task."""
    if task not in modelpool.train_dataset_names:
        have = ", ".join(map(repr, modelpool.train_dataset_names)) or "none"
        raise ValueError(
            f"The pool has no training data for task {task!r} (it has {have}), and calibration inputs come from there. "
            f"{cure}"
        )
