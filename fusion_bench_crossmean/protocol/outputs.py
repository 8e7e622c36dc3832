"""What a comparison leaves behind once its cells are finished: tidy results, tables, figures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fusion_bench_crossmean.protocol import figures, tables
from fusion_bench_crossmean.protocol.catalogue import Row
from fusion_bench_crossmean.protocol.cells import Cell
from fusion_bench_crossmean.protocol.results import tidy
from fusion_bench_crossmean.report import written_whole

log = logging.getLogger(__name__)

Finished = Sequence[tuple[Row, Cell, Mapping[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """A finished comparison.

    Args:
        title: of the recipe.
        finished: every cell with its row and what was found.
        frame: the same, see `tidy`.
        baseline: the row that margins are over.
        folder: to write to.
        notes: below every table.
    """

    title: str
    finished: Finished
    frame: pd.DataFrame
    baseline: str
    folder: Path
    notes: Sequence[str]


def write_scores(outcome: Outcome) -> None:
    tables.score_table(outcome.frame, outcome.baseline, outcome.title, outcome.notes).write(outcome.folder / "scores")


def write_by_task(outcome: Outcome) -> None:
    for index, table in enumerate(tables.task_table(outcome.frame, outcome.title, outcome.notes)):
        table.write(outcome.folder / f"by_task{index or ''}")


def write_correlations(outcome: Outcome) -> None:
    table = tables.correlation_table(
        outcome.frame, outcome.baseline, f"{outcome.title}: rank correlations", outcome.notes
    )
    table.write(outcome.folder / "correlations")


def write_seconds(outcome: Outcome) -> None:
    title = f"{outcome.title}: time"
    tables.seconds_table(outcome.frame, outcome.baseline, title, outcome.notes).write(outcome.folder / "seconds")


def draw_margins(outcome: Outcome) -> None:
    figures.save(figures.margin_by_alignment(outcome.frame, outcome.baseline), outcome.folder / "margin_by_alignment")


def draw_samples(outcome: Outcome) -> None:
    figures.save(figures.score_by_samples(outcome.frame), outcome.folder / "score_by_samples")


def draw_depth(outcome: Outcome) -> None:
    criteria = [
        (f"{cell.task_set}, {cell.coverage}, N = {cell.num_samples}", found["criterion"])
        for _, cell, found in outcome.finished
        if "criterion" in found and cell.seed == min(c.seed or 0 for _, c, f in outcome.finished if "criterion" in f)
    ]
    figures.save(figures.alignment_by_depth(criteria), outcome.folder / "alignment_by_depth")


#: What a recipe may ask for under `outputs`.
OUTPUTS: dict[str, Callable[[Outcome], None]] = {
    "scores": write_scores,
    "by_task": write_by_task,
    "correlations": write_correlations,
    "seconds": write_seconds,
    "margin_by_alignment": draw_margins,
    "score_by_samples": draw_samples,
    "alignment_by_depth": draw_depth,
}


#: Of these, what puts several pools into one table or figure.
OVER_POOLS = ("scores", "correlations", "margin_by_alignment", "score_by_samples")


def check_outputs(asked: Sequence[str]) -> None:
    """Raises `ValueError` for an output that does not exist."""
    if unknown := [name for name in asked if name not in OUTPUTS]:
        raise ValueError(f"outputs names {', '.join(unknown)}; there are {', '.join(OUTPUTS)}.")


def write_outputs(
    finished: Finished,
    *,
    title: str,
    pool: str,
    baseline: str,
    asked: Sequence[str],
    folder: Path,
    notes: Sequence[str],
) -> Outcome:
    """Writes tidy results and what was asked for to `folder` / `pool`.

    Where other pools have results below `folder`, what is `OVER_POOLS` is made there once more, of all pools.
    """
    frame, own = tidy(finished, pool), folder / pool
    own.mkdir(parents=True, exist_ok=True)
    for old in [path for kind in ("*.md", "*.tex", "*.png", "*.pdf") for path in own.glob(kind)]:
        old.unlink()  # of other settings
    with written_whole(own / "results.parquet") as path:
        frame.to_parquet(path)
    with written_whole(own / "results.csv") as path:
        frame.to_csv(path, index=False)
    rows = {row.name: row for row, _, _ in finished}
    remarks = [*notes, *(f"{row.title}: {row.note}" for row in rows.values() if row.note)]
    outcome = Outcome(f"{title} ({pool})", finished, frame, baseline, own, remarks)
    for name in asked:
        OUTPUTS[name](outcome)
    frames = [pd.read_parquet(path) for path in sorted(folder.glob("*/results.parquet"))]
    if len(frames) > 1:
        everything = Outcome(title, finished, pd.concat(frames, ignore_index=True), baseline, folder, remarks)
        for name in OVER_POOLS:
            if name in asked:
                OUTPUTS[name](everything)
    return outcome
