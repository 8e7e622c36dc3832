"""RegMean, Progressive RegMean and CrossMean on text encoders, by the size of the calibration set.

    python benchmarks/text_table.py --pool mini-bert_T4 --num-calibration-samples 256 512 1024

writes the numbers as JSON and the table as Markdown. Models come from a pool of FusionBench and are evaluated by the
task pool of the same name; margins are paired within a calibration seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from pathlib import Path
from typing import Any

import torch
from fusion_bench.method import SimpleAverageAlgorithm
from mini_table import METHODS as ALL_METHODS
from mini_table import pools, spread
from tqdm.auto import tqdm

import fusion_bench_crossmean as ours
from fusion_bench_crossmean.report import environment, written_whole

METHODS = {name: ALL_METHODS[name] for name in ("RegMean", "Progressive RegMean", "CrossMean")}


def scores(taskpool: Any, model: torch.nn.Module) -> dict[str, float]:
    """Task -> score in percent, and their `mean`."""
    report = taskpool.evaluate(model)
    return {task: 100 * report[task]["score"] for task in taskpool.test_datasets} | {
        "mean": 100 * report["average"]["score"]
    }


def experts(modelpool: Any, taskpool: Any) -> dict[str, float]:
    """Every expert on its own task."""
    found, everything = {}, taskpool.test_datasets
    for task in modelpool.model_names:
        taskpool.test_datasets = {task: everything[task]}
        found[task] = scores(taskpool, modelpool.load_model(task))[task]
    taskpool.test_datasets = everything
    return found | {"mean": statistics.mean(found.values())}


def markdown(rows: list[dict[str, Any]], rho: dict[int, list[float]]) -> str:
    """The table; margins are over RegMean of the same draw."""
    regmean = {(row["samples"], row["seed"]): row["mean"] for row in rows if row["method"] == "RegMean"}
    lines = ["| texts per task | " + " | ".join(METHODS) + " | rho |", "| --- |" + " --- |" * (len(METHODS) + 1)]
    for samples, values in rho.items():
        cells = []
        for method in METHODS:
            these = [row for row in rows if (row["method"], row["samples"]) == (method, samples)]
            cell = spread([row["mean"] for row in these])
            if method != "RegMean":
                cell += f" ({spread([row['mean'] - regmean[samples, row['seed']] for row in these], sign='+')})"
            cells.append(cell)
        lines.append(f"| {samples} | {' | '.join(cells)} | {spread(values, digits=4)} |")
    single = ", ".join(f"{row['method']} {row['mean']:.2f}" for row in rows if row["samples"] is None)
    return "\n".join([*lines, "", f"Without calibration texts: {single}."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", default="mini-bert_T4", help="short name of a model pool and a task pool")
    parser.add_argument("--coverage", choices=("mlp", "full"), default="full")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="calibration seeds")
    parser.add_argument("--num-calibration-samples", type=int, nargs="+", default=[256, 512, 1024], help="per task")
    parser.add_argument("--output", type=Path, help="without suffix; the default is named after the pool")
    arguments = parser.parse_args()
    logging.getLogger("fusion_bench_crossmean").setLevel(logging.WARNING)
    output = arguments.output or Path("benchmarks/results") / f"text_table_{arguments.pool}"
    modelpool, taskpool = pools(arguments.pool)
    rows: list[dict[str, Any]] = []
    rho: dict[int, list[float]] = {}

    def add(method: str, samples: int | None, seed: int, found: dict[str, float]) -> None:
        rows.append({"method": method, "samples": samples, "seed": seed, **found})

    add("experts", None, 0, experts(modelpool, taskpool))
    add("averaging (FusionBench)", None, 0, scores(taskpool, SimpleAverageAlgorithm().run(modelpool)))
    cells = [(samples, seed) for samples in arguments.num_calibration_samples for seed in arguments.seeds]
    for samples, seed in tqdm(cells, desc="calibration sets"):
        settings = {"coverage": arguments.coverage, "num_calibration_samples": samples, "seed": seed}
        for method, algorithm in METHODS.items():
            add(method, samples, seed, scores(taskpool, algorithm(**settings).run(modelpool)))
        analyzer = ours.AlignmentCriterionAnalyzer(**settings)
        analyzer.run(modelpool)
        rho.setdefault(samples, []).append(analyzer.report["rho"])

    text = markdown(rows, rho)
    with written_whole(output.with_suffix(".md")) as path:
        path.write_text(text, encoding="utf-8")
    with written_whole(output.with_suffix(".json")) as path:
        content = {
            "pool": arguments.pool,
            "coverage": arguments.coverage,
            "versions": environment(),
            "rho": rho,
            "rows": rows,
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tqdm.write(text)


if __name__ == "__main__":
    main()
