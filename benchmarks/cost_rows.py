"""The rows of the cost table: what is compared with what, what the paper has and what we aim at."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from merge_methods import METHODS, Workload


@dataclass(frozen=True)
class Run:
    """One thing that is timed."""

    method: str
    workload: Workload


@dataclass(frozen=True)
class Comparison:
    """A row that is the ratio of two timed runs.

    Args:
        name: on the command line.
        label: in the table.
        numerator, denominator: the runs.
        paper: the ratio of the paper, if it has one.
        target: the largest ratio that we want, if we want one.
    """

    name: str
    label: str
    numerator: Run
    denominator: Run
    paper: float | None = None
    target: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table; `measured`, `lowest` and `highest` are None where nothing could be measured."""

    name: str
    label: str
    paper: float | None
    target: float | None
    measured: float | None = None
    lowest: float | None = None
    highest: float | None = None
    note: str = ""
    at_least: bool = False

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where there is none, or nothing to hold against it."""
        if self.target is None or self.measured is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def as_record(self) -> dict[str, Any]:
        """The row for JSON."""
        return asdict(self) | {"met": self.is_met}

    def cells(self) -> list[str]:
        """The row for Markdown."""
        measured = self.note
        if self.measured is not None:
            measured = f"{self.measured:.2f}"
            if self.lowest is not None and self.highest is not None:
                measured += f" ({self.lowest:.2f}-{self.highest:.2f})"
            measured += f"; {self.note}" if self.note else ""
        target = "" if self.target is None else f"{'>=' if self.at_least else '<='} {self.target:g}"
        met = {None: "", True: "yes", False: "no"}[self.is_met]
        return [self.label, "" if self.paper is None else f"{self.paper:g}", target, measured, met]


#: Row -> numerator, denominator, the paper's ratio, the largest that we want.
RATIOS: dict[str, tuple[str, str, float | None, float | None]] = {
    "crossmean_mlp": ("crossmean_mlp", "fusion_bench_regmean", 31.2, 1.75),
    "regmean_ours": ("crossmean_mlp", "regmean_mlp", None, 2.1),
    "crossmean_full": ("crossmean_full", "fusion_bench_regmean", None, 2.2),
    "progressive_regmean": ("progressive_regmean_mlp", "fusion_bench_regmean", 24.4, 1.0),
    "alignment_criterion": ("alignment_criterion_mlp", "fusion_bench_regmean", None, 1.0),
    "crossmean_mixed": ("crossmean_mixed", "fusion_bench_regmean", None, 0.8),
    "regmean_plusplus": ("fusion_bench_regmean_plusplus", "fusion_bench_regmean", None, None),
    "crossmean_over_regmean_plusplus": ("crossmean_mlp", "fusion_bench_regmean_plusplus", None, None),
}
#: Twice the work may take this much longer.
LARGEST_DOUBLING = 2.2
SCALING = ("twice_the_layers", "twice_the_samples", "twice_the_tasks")
#: Rows that are no ratio of two times.
OTHERS = ("peak_memory", "share_of_rate")
ROWS = (*RATIOS, *SCALING, *OTHERS)

PAPER_MEMORY, LARGEST_MEMORY = 0.69, 0.7
SMALLEST_SHARE = 0.75


def comparisons(
    rows: Sequence[str], workload: Workload, depths: Sequence[int], at_depth: Callable[[int], Workload]
) -> list[Comparison]:
    """What `rows` compare at `workload`.

    Args:
        rows: names from `ROWS`; those of `OTHERS` compare no times and are passed over.
        workload: of all rows but those that change it.
        depths: numbers of blocks; each is compared with the one before.
        at_depth: the workload at another number of blocks.
    """
    found = [
        Comparison(
            name,
            f"{METHODS[numerator].label} / {METHODS[denominator].label}",
            Run(numerator, workload),
            Run(denominator, workload),
            paper,
            target,
        )
        for name, (numerator, denominator, paper, target) in RATIOS.items()
        if name in rows
    ]

    def add(name: str, label: str, larger: Workload, smaller: Workload, factor: float = 2.0) -> None:
        target = LARGEST_DOUBLING if factor == 2 else None
        runs = Run("crossmean_mlp", larger), Run("crossmean_mlp", smaller)
        found.append(Comparison(name, f"CrossMean, mlp: {label}", *runs, target=target))

    if "twice_the_layers" in rows:
        for fewer, more in itertools.pairwise(depths):
            add("twice_the_layers", f"{more} / {fewer} layers", at_depth(more), at_depth(fewer), more / fewer)
    if "twice_the_samples" in rows:
        more = replace(workload, samples=2 * workload.samples)
        add("twice_the_samples", f"{more.samples} / {workload.samples} images per task", more, workload)
    if "twice_the_tasks" in rows:
        more = replace(workload, tasks=2 * workload.tasks)
        add("twice_the_tasks", f"{more.tasks} / {workload.tasks} tasks", more, workload)
    return found


def ratio_row(comparison: Comparison, seconds: Mapping[Run, Sequence[float]]) -> Row:
    """The median over the repeats of the ratio within a repeat: a slow minute of the machine is in both halves."""
    row = Row(comparison.name, comparison.label, comparison.paper, comparison.target)
    times = seconds[comparison.numerator], seconds[comparison.denominator]
    ratios = [ours / theirs for ours, theirs in zip(*times, strict=True)]
    return replace(row, measured=statistics.median(ratios), lowest=min(ratios), highest=max(ratios))


def memory_row(peaks: Mapping[str, Mapping[str, float]]) -> Row:
    """Peak memory from method -> `peak_gib` and `before_gib`."""
    ours, theirs = (peaks[method]["peak_gib"] for method in ("crossmean_mlp", "fusion_bench_regmean"))
    return Row(
        "peak_memory",
        "peak memory, CrossMean, mlp / FusionBench RegMean",
        PAPER_MEMORY,
        LARGEST_MEMORY,
        ours / theirs,
        note=f"{ours:.2f} GiB / {theirs:.2f} GiB",
    )


def share_row(shares: Sequence[float]) -> Row:
    """The share of the machine's rate, one value per repeat."""
    return Row(
        "share_of_rate",
        "share of the machine's matrix-product rate that CrossMean, mlp reaches",
        None,
        SMALLEST_SHARE,
        statistics.median(shares),
        min(shares),
        max(shares),
        at_least=True,
    )
