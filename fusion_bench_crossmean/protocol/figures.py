"""The figures of a comparison, as PNG and PDF."""

# pandas' own annotations are too wide to be checked against.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fusion_bench_crossmean.protocol.results import margins_by_setting
from fusion_bench_crossmean.report import written_whole

#: Lines of a legend that have room in the axes.
SHORT_LEGEND = 10


def save(figure: Figure, path: Path) -> None:
    """Writes `path` with the suffixes .png and .pdf."""
    for suffix in (".png", ".pdf"):
        with written_whole(path.with_suffix(suffix)) as temporary:
            figure.savefig(temporary, format=suffix[1:], dpi=150)


def finished(figure: Figure) -> Figure:
    """With a legend, beside the axes where it is a long one, and a grid."""
    (axis,) = figure.axes
    axis.grid(alpha=0.3)
    labels = axis.get_legend_handles_labels()[1]
    if len(labels) <= SHORT_LEGEND:
        axis.legend(fontsize="small")
    else:
        figure.set_size_inches(10, max(4, 0.2 * len(labels)))
        figure.legend(fontsize="small", loc="outside right upper")
    return figure


def margin_by_alignment(frame: pd.DataFrame, baseline: str) -> Figure:
    """Margin over the baseline against rho, a point per method and setting."""
    means = margins_by_setting(frame, baseline).dropna(subset=["rho", "margin"])
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for (method, title), own in means.groupby(["method", "title"], sort=False):
        if method != baseline:
            axis.scatter(own["rho"].to_numpy(float), own["margin"].to_numpy(float), s=18, label=title)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel("alignment criterion rho")
    axis.set_ylabel("margin over the baseline (points)")
    return finished(figure)


def score_by_samples(frame: pd.DataFrame) -> Figure:
    """Score against the number of calibration inputs, error bars over the seeds; one line per method."""
    lines = frame[(frame["task"] == "mean") & frame["score"].notna() & frame["num_samples"].notna()]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    several = [name for name in ("pool", "task_set", "coverage") if lines[name].nunique() > 1]
    for keys, own in lines.groupby(["title", *several], sort=False):
        title = ", ".join(map(str, keys))
        by = own.groupby("num_samples")["score"].agg(["mean", "std"])
        counts = by.index.to_numpy(float)
        axis.errorbar(counts, by["mean"], yerr=by["std"].fillna(0), marker="o", markersize=3, capsize=3, label=title)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("calibration inputs per task")
    axis.set_ylabel("mean score (%)")
    return finished(figure)


def alignment_by_depth(criteria: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure:
    """Alignment by depth, means over the experts, one line per measurement."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for label, criterion in criteria:
        means = [sum(layer["alignment"].values()) / len(layer["alignment"]) for layer in criterion["layers"]]
        axis.plot(range(1, len(means) + 1), means, marker="o", markersize=3, label=f"{label} ({criterion['rho']:.3f})")
    axis.set_xlabel("layer group in depth order")
    axis.set_ylabel("alignment")
    return finished(figure)
