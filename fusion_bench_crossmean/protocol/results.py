"""Finished cells as tidy tables, and what is read off them: margins, ranks, correlations."""

# pandas' own annotations are too wide to be checked against.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fusion_bench_crossmean.protocol.catalogue import Row
from fusion_bench_crossmean.protocol.cells import Cell

#: Resamples of the bootstrap interval, and permutations behind the p-value.
NUM_RESAMPLES = 10_000
#: What tells a column of a table from another.
SETTING = ["pool", "task_set", "num_tasks", "coverage", "num_samples"]


def tidy(finished: Iterable[tuple[Row, Cell, Mapping[str, Any]]], pool: str = "") -> pd.DataFrame:
    """One line per cell and task, the mean over the tasks as task `mean`; scores in percent.

    Methods without a coverage or calibration inputs have NA there. `rho` and `prefix_drift` stand in the lines of the
    criterion, which have no score.
    """
    lines = []
    for row, cell, found in finished:
        common = {
            "method": row.name,
            "title": row.title,
            "pool": pool,
            "activation": found.get("activation"),
            "task_set": cell.task_set,
            "num_tasks": len(cell.tasks),
            "coverage": cell.coverage,
            "num_samples": cell.num_samples,
            "seed": cell.seed,
            "scale": found.get("scale"),
            "seconds": found["seconds"],
        }
        if criterion := found.get("criterion"):
            rho = {"rho": criterion["rho"], "prefix_drift": criterion["prefix_drift"]}
            lines.append(common | {"task": "mean", "score": None} | rho)
        if "scores" in found:
            scores = {task: values["score"] for task, values in found["scores"].items()} | {"mean": found["mean"]}
            lines += [common | {"task": task, "score": 100 * score} for task, score in scores.items()]
    frame = pd.DataFrame(lines)
    for name in ("rho", "prefix_drift"):
        if name not in frame:
            frame[name] = np.nan
    kinds = {"coverage": "string", "num_samples": "Int64", "seed": "Int64", "score": "float64", "scale": "float64"}
    return frame.astype(kinds)


def expanded(frame: pd.DataFrame) -> pd.DataFrame:
    """Lines of methods without seed, coverage or calibration inputs, repeated for each of those that others have.

    Methods stay in their order.
    """
    order = {method: index for index, method in enumerate(frame["method"].unique())}
    for name in ("seed", "coverage", "num_samples"):
        values = frame[name].dropna().unique()
        if len(values):
            missing = frame[frame[name].isna()]
            copies = [missing.assign(**{name: value}) for value in values]
            frame = pd.concat([frame[frame[name].notna()], *copies], ignore_index=True).astype(
                {name: frame[name].dtype}
            )
    return frame.sort_values("method", key=lambda methods: methods.map(order), kind="stable", ignore_index=True)


def with_margins(frame: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """The lines with a score, and their `margin` over the baseline in the same setting, task and seed (paired)."""
    lines = expanded(frame[frame["score"].notna()])
    keys = [*SETTING, "task", "seed"]
    base = lines[lines["method"] == baseline].set_index(keys)["score"]
    index = pd.MultiIndex.from_frame(lines[keys])
    return lines.assign(margin=lines["score"].to_numpy() - base.reindex(index).to_numpy())


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation over settings.

    Args:
        estimate: the coefficient.
        low, high: percentile bootstrap 95 % interval.
        p_value: two-sided, by permutation.
        size: how many settings.
    """

    estimate: float
    low: float
    high: float
    p_value: float
    size: int


def rank_correlation(x: Sequence[float], y: Sequence[float], seed: int = 0) -> Correlation:
    """Between two values per setting; NaN where one of them never differs.

    Raises:
        ValueError: fewer than three settings.
    """
    if len(x) < 3:
        raise ValueError(f"A rank correlation needs at least three settings, there are {len(x)}.")
    values = np.asarray(x, float), np.asarray(y, float)
    ranks = tuple(stats.rankdata(side) for side in values)
    (estimate,) = correlations(ranks[0][None], ranks[1][None])
    if np.isnan(estimate):
        return Correlation(*[float("nan")] * 4, len(x))
    with warnings.catch_warnings():
        # A resample of one value only tells nothing: it is NaN, and left out below.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        resampled = stats.bootstrap(
            values,
            lambda x, y, axis: correlations(stats.rankdata(x, axis=axis), stats.rankdata(y, axis=axis)),
            paired=True,
            vectorized=True,
            method="percentile",
            n_resamples=NUM_RESAMPLES,
            rng=np.random.default_rng(seed),
        ).bootstrap_distribution
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    test = stats.permutation_test(
        (ranks[0],),
        lambda x, axis: correlations(x, np.broadcast_to(ranks[1], x.shape)),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=NUM_RESAMPLES,
        rng=np.random.default_rng(seed),
    )
    return Correlation(float(estimate), float(low), float(high), float(test.pvalue), len(x))


def correlations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's coefficient of every line, of ranks Spearman's; NaN where one side is constant."""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))


def margins_by_setting(frame: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """One line per method and setting: means over the seeds of `score`, `margin`, `rho` and `prefix_drift`."""
    lines = with_margins(frame, baseline)
    means = (
        lines[lines["task"] == "mean"].groupby(["method", "title", *SETTING], dropna=False)[["score", "margin"]].mean()
    )
    criterion = frame[frame["rho"].notna()].groupby(SETTING, dropna=False)[["rho", "prefix_drift"]].mean()
    return means.reset_index().merge(criterion.reset_index(), on=SETTING, how="left")
