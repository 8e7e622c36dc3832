"""Configs of pools: restricted to some tasks, and what in them tells the weights that they name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Parts of a model pool's config from which rows could reach a merge besides the calibration rows.
OTHER_ROWS = ("test_datasets", "val_datasets")
#: What files hold weights.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")


def limited(config: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """A pool's config with the models and data sets of some tasks, and its special models."""
    config = copy.deepcopy(dict(config))
    for part in ("models", "train_datasets", "test_datasets"):
        if isinstance(entries := config.get(part), Mapping):
            config[part] = {k: v for k, v in entries.items() if k in tasks or k.startswith("_")}
    return config


def strings_in(value: Any) -> Iterator[str]:
    """Every string that nested containers hold as a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def stamps(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of the weights at a path; nothing where it is no path: then its name says it."""
    place = Path(path)
    try:
        files = [place] if place.is_file() else [file for kind in WEIGHT_FILES for file in sorted(place.glob(kind))]
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except (OSError, ValueError):
        return []


def without_other_rows(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model pool's config without rows that no merge is to see."""
    return {key: value for key, value in config.items() if key not in OTHER_ROWS}
