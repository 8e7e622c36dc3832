"""The rows of a comparison: which method each is, and what the protocol has to know of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Where FusionBench's methods have their number of calibration inputs; ours call it as the last one.
SAMPLE_SETTINGS = ("num_regmean_examples", "num_fisher_examples", "num_calibration_samples")

#: The row that is no merge: every expert on its own task.
EXPERTS = "experts"


@dataclass(frozen=True)
class Row:
    """One method of the catalogue.

    Args:
        name: its key.
        title: in tables.
        method: FusionBench's config of the algorithm; empty for `EXPERTS` only.
        scale: the setting that is chosen on validation rows; None: there is none.
        coverage: of a method that has no such setting, where it solves layers; None: it solves none.
        is_random: whether it draws something besides calibration rows.
        needs_pretrained: whether the pool must have a pretrained model.
        note: for the tables' notes.
    """

    name: str
    title: str
    method: Mapping[str, Any] = field(default_factory=dict)
    scale: str | None = None
    coverage: str | None = None
    is_random: bool = False
    needs_pretrained: bool = False
    note: str | None = None

    @property
    def samples_setting(self) -> str | None:
        """Where its number of calibration inputs stands; None: it uses none."""
        return next((name for name in SAMPLE_SETTINGS if name in self.method), None)

    @property
    def has_coverage(self) -> bool:
        """Whether its coverage can be chosen."""
        return "coverage" in self.method

    @property
    def uses_seed(self) -> bool:
        """Whether its result depends on a seed."""
        return self.samples_setting is not None or self.scale is not None or self.is_random or "seed" in self.method

    def configured(
        self, *, seed: int | None, coverage: str | None, num_samples: int | None, scale: float | None = None
    ) -> dict[str, Any]:
        """The algorithm's config for one cell."""
        config = copy.deepcopy(dict(self.method))
        if self.samples_setting is not None:
            config[self.samples_setting] = num_samples
        if "seed" in config:
            config["seed"] = seed
        if self.has_coverage:
            config["coverage"] = coverage
        if self.scale is not None and scale is not None:
            config[self.scale] = scale
        return config


def rows_of(catalogue: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[Row]:
    """The rows called `names`.

    Args:
        catalogue: name -> the other arguments of `Row`.
        names: in the order of the table.

    Raises:
        ValueError: no such row, or twice the same.
    """
    if unknown := [name for name in names if name not in catalogue]:
        raise ValueError(f"The catalogue has no method {', '.join(unknown)}; it has {', '.join(catalogue)}.")
    if len(set(names)) < len(names):
        raise ValueError(f"methods names one twice: {list(names)}.")
    rows = [Row(name, **catalogue[name]) for name in names]
    if empty := [row.name for row in rows if not row.method and row.name != EXPERTS]:
        raise ValueError(f"Of {', '.join(empty)} the catalogue does not say what it is: add catalogue.<name>.method.")
    return rows
