"""Figures; matplotlib is imported here only."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from fusion_bench_crossmean.criterion import Criterion
from fusion_bench_crossmean.report import written_whole


def plot_alignment(criterion: Criterion, path: Path) -> None:
    """Writes a PNG: alignment and prefix drift by depth, one thin line per expert, the mean in black."""
    figure = Figure(figsize=(9, 6), layout="constrained")  # no pyplot: no global state, no display
    upper, lower = figure.subplots(2, 1, sharex=True)
    depth = range(1, len(criterion.layers) + 1)
    for axis, name, whole in (
        (upper, "alignment", criterion.rho),
        (lower, "prefix_drift", criterion.prefix_drift),
    ):
        values = [getattr(layer, name) for layer in criterion.layers]
        for task in values[0]:
            axis.plot(depth, [layer[task] for layer in values], linewidth=1, alpha=0.7, label=task)
        means = [sum(layer.values()) / len(layer) for layer in values]
        axis.plot(depth, means, color="black", linewidth=2, marker="o", markersize=3, label=f"mean ({whole:.3f})")
        axis.set_ylabel(name.replace("_", " "))
        axis.grid(alpha=0.3)
    upper.set_title(f"Alignment of merged and expert inputs by depth, rho = {criterion.rho:.3f}")
    upper.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the curves, not on them
    lower.set_xlabel("layer group in depth order")
    lower.set_xticks(list(depth), [layer.group.name for layer in criterion.layers], rotation=90, fontsize=6)
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
