"""The mini benchmark's table: every method, both coverages, several calibration seeds, one evaluation.

    python benchmarks/mini_table.py --seeds 0 1 2 --output benchmarks/results/mini_table

writes the numbers as JSON and the table as Markdown. Models are merged from and evaluated with FusionBench's stock
pools of `modelpool=mini-clip_TA8 taskpool=mini-clip_TA8`; margins are paired within a seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fusion_bench import instantiate
from fusion_bench.method import RegMeanAlgorithmForCLIP, SimpleAverageAlgorithm
from fusion_bench.utils.hydra_utils import initialize_hydra_config
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from tqdm.auto import tqdm

import fusion_bench_crossmean as ours
from fusion_bench_crossmean.report import environment, written_whole

METHODS: dict[str, Callable[..., Any]] = {
    "RegMean": ours.RegMeanAlgorithm,
    "Progressive RegMean": ours.ProgressiveRegMeanAlgorithm,
    "cross statistic alone": ours.CrossStatisticAlgorithm,
    "CrossMean": ours.CrossMeanAlgorithm,
    "CrossMean, precision=mixed": functools.partial(ours.CrossMeanAlgorithm, precision="mixed"),
}


def pools(name: str) -> tuple[Any, Any]:
    """FusionBench's model pool and task pool of one short name."""
    GlobalHydra.instance().clear()
    config = initialize_hydra_config(
        "fabric_model_fusion", overrides=[f"modelpool={name}", f"taskpool={name}"], return_hydra_config=False
    )
    parts = {}
    for key in ("modelpool", "taskpool"):
        part = OmegaConf.create(OmegaConf.to_container(config[key], resolve=True))
        parts[key] = instantiate(part, _recursive_=False)
    return parts["modelpool"], parts["taskpool"]


def load_pools(name: str) -> tuple[Any, Any]:
    """The same for image tasks; the test images are processed once."""
    modelpool, taskpool = pools(name)
    taskpool.setup()
    loaders = taskpool.test_dataloaders
    taskpool.test_dataloaders = {task: list(loader) for task, loader in tqdm(loaders.items(), desc="test images")}
    return modelpool, taskpool


def evaluate(taskpool: Any, model: torch.nn.Module) -> dict[str, float]:
    """Task -> accuracy in percent, and their `mean`."""
    report = taskpool.evaluate(model)
    scores = {task: 100 * report[task]["accuracy"] for task in taskpool.test_dataloaders}
    return scores | {"mean": statistics.mean(scores.values())}


def evaluate_experts(modelpool: Any, taskpool: Any) -> dict[str, float]:
    """Every expert on its own task."""
    scores, loaders = {}, taskpool.test_dataloaders
    for task in modelpool.model_names:
        taskpool.test_dataloaders = {task: loaders[task]}
        scores[task] = evaluate(taskpool, modelpool.load_model(task))[task]
    taskpool.test_dataloaders = loaders
    return scores | {"mean": statistics.mean(scores.values())}


def fusion_bench_regmean(seed: int) -> RegMeanAlgorithmForCLIP:
    """FusionBench's RegMean at its own settings; its draw is a shuffle of torch's global generator."""
    torch.manual_seed(seed)
    return RegMeanAlgorithmForCLIP(
        num_regmean_examples=256,
        exclude_param_names_regex=[],
        reduce_non_diagonal_ratio=0.95,
        weight_transpose=True,
        dataloader_kwargs=OmegaConf.create({"batch_size": 32, "num_workers": 0}),
    )


def markdown(rows: list[dict[str, Any]], rho: dict[str, list[float]]) -> str:
    """The table; margins are over RegMean (ours) of the same coverage and seed."""
    lines = ["| method | coverage | accuracy (%) | margin over RegMean |", "| --- | --- | --- | --- |"]
    regmean = {(row["coverage"], row["seed"]): row["mean"] for row in rows if row["method"] == "RegMean"}
    keys = list(dict.fromkeys((row["method"], row["coverage"]) for row in rows))
    for method, coverage in keys:
        these = [row for row in rows if (row["method"], row["coverage"]) == (method, coverage)]
        accuracy = spread([row["mean"] for row in these])
        margin = ""
        if method in METHODS and method != "RegMean":
            margin = spread([row["mean"] - regmean[coverage, row["seed"]] for row in these], sign="+")
        lines.append(f"| {method} | {coverage} | {accuracy} | {margin} |")
    found = ", ".join(f"{spread(values, digits=4)} ({coverage})" for coverage, values in rho.items())
    return "\n".join([*lines, "", f"Alignment criterion rho: {found}."]) + "\n"


def spread(values: list[float], digits: int = 2, sign: str = "") -> str:
    """Mean, and standard deviation where there are several values."""
    text = f"{statistics.mean(values):{sign}.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", default="mini-clip_TA8", help="short name of a model pool and a task pool")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="calibration seeds")
    parser.add_argument("--num-calibration-samples", type=int, default=256, help="images per task")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/mini_table"), help="without suffix")
    arguments = parser.parse_args()
    logging.getLogger("fusion_bench_crossmean").setLevel(logging.WARNING)
    modelpool, taskpool = load_pools(arguments.pool)
    rows: list[dict[str, Any]] = []
    rho: dict[str, list[float]] = {"mlp": [], "full": []}

    def add(method: str, coverage: str, seed: int, merge: Callable[[], torch.nn.Module]) -> None:
        rows.append({"method": method, "coverage": coverage, "seed": seed, **evaluate(taskpool, merge())})

    rows.append({"method": "experts", "coverage": "", "seed": 0, **evaluate_experts(modelpool, taskpool)})
    add("pretrained", "", 0, lambda: modelpool.load_model("_pretrained_"))
    add("averaging (FusionBench)", "", 0, lambda: SimpleAverageAlgorithm().run(modelpool))
    for seed in tqdm(arguments.seeds, desc="calibration seeds"):
        add("RegMean (FusionBench)", "full", seed, lambda seed=seed: fusion_bench_regmean(seed).run(modelpool))
    for coverage in rho:
        settings = {"coverage": coverage, "num_calibration_samples": arguments.num_calibration_samples}
        for seed in tqdm(arguments.seeds, desc=f"coverage {coverage}"):
            for method, algorithm in METHODS.items():
                add(method, coverage, seed, lambda a=algorithm, s=seed, kw=settings: a(seed=s, **kw).run(modelpool))
            analyzer = ours.AlignmentCriterionAnalyzer(seed=seed, **settings)
            analyzer.run(modelpool)
            rho[coverage].append(analyzer.report["rho"])

    text = markdown(rows, rho)
    with written_whole(arguments.output.with_suffix(".md")) as path:
        path.write_text(text, encoding="utf-8")
    with written_whole(arguments.output.with_suffix(".json")) as path:
        content = {"pool": arguments.pool, "versions": environment(), "rho": rho, "rows": rows}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tqdm.write(text)


if __name__ == "__main__":
    main()
