"""The price of not pausing: CrossMean by whole forward passes, as the paper has it, against CrossMean's paused ones.

    python benchmarks/whole_network_cost.py --layers 4 --tasks 2 --samples 32

The paper's procedure runs, for every layer group and path point, every network over every batch from the first block to
the last, and keeps the inputs of that one group. Statistics, system and solve are the package's in both, so what is
left is the price of the forwards. It grows with depth; the two merged models are the same but for rounding.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch
from merge_methods import BATCH_SIZE, Workload, fabric_for, silence, silence_logs
from operations import synchronise
from random_experts import SIZES, RandomExpertPool
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.course import observe
from fusion_bench_crossmean.coverage import Coverage, LayerGroup, covered_layers
from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.report import environment, written_whole
from fusion_bench_crossmean.workspace import Workspace

PATH_POINTS = (0.0, 0.5, 1.0)

#: Merges the experts of a pool.
Merge = Callable[[RandomExpertPool], nn.Module]


def layer_inputs(network: nn.Module, images: Tensor, layer: str) -> Tensor:
    """What `layer` receives in one whole forward pass of `network`, shape (tokens, in)."""
    seen: list[Tensor] = []
    handle = network.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        network(images)
    finally:
        handle.remove()
    (inputs,) = seen
    return inputs.flatten(0, -2)


@torch.no_grad()
def merge_by_whole_forwards(pool: RandomExpertPool, coverage: Coverage, device: torch.device) -> nn.Module:
    """CrossMean at its own settings, every forward pass run from end to end for every layer group."""
    experts = {task: load(pool, task, device) for task in pool.model_names}
    batches = {
        task: torch.stack([image for image, _ in pool.load_train_dataset(task)]).to(device).split(BATCH_SIZE)
        for task in experts
    }
    merged = load(pool, "_pretrained_", device)
    for name, tensor in merged.named_parameters():
        tensor.copy_(torch.stack([expert.get_parameter(name) for expert in experts.values()]).mean(0))
    networks: dict[tuple[str, float], nn.Module] = {}
    for task, expert in experts.items():
        for point in PATH_POINTS:
            network = {0.0: merged, 1.0: expert}.get(point) or copy.deepcopy(merged)
            if 0 < point < 1:
                for name, tensor in network.named_parameters():
                    tensor.lerp_(expert.get_parameter(name), point)
            networks[task, point] = network

    def pairs(task: str, layer: str) -> Iterator[tuple[Tensor, Tensor]]:
        for images in batches[task]:
            inputs = [layer_inputs(networks[task, point], images, layer) for point in PATH_POINTS]
            yield inputs[0], torch.stack(inputs).mean(0)

    workspace = Workspace()
    first_batch = Batch(args=(next(iter(batches.values()))[0],))
    for group in observe(merged, first_batch, covered_layers(merged, coverage)).groups:
        system = LinearSystem(name=group.name, workspace=workspace)
        for task, expert in experts.items():
            weight = stacked_weight(group, expert)
            system.add_task(pairs(task, group.names[0]), weight, task=task, num_batches=len(batches[task]))
        solved = system.solve(fallback=stacked_weight(group, merged)).weight
        write(group, solved, merged, networks, experts)
    return merged


def load(pool: RandomExpertPool, name: str, device: torch.device) -> nn.Module:
    """A model of the pool, ready to run."""
    return cast(nn.Module, pool.load_model(name)).to(device).eval()  # transformers' own `to` has no usable signature


def stacked_weight(group: LayerGroup, network: nn.Module) -> Tensor:
    """The weights of a group one above the other, shape (out, in)."""
    return torch.cat([network.get_parameter(f"{name}.weight") for name in group.names])


def write(
    group: LayerGroup,
    solved: Tensor,
    merged: nn.Module,
    networks: Mapping[tuple[str, float], nn.Module],
    experts: Mapping[str, nn.Module],
) -> None:
    """Stores a solved weight in the merged network and in those on the paths."""
    start = 0
    for name in (f"{layer}.weight" for layer in group.names):
        stored = merged.get_parameter(name)
        stored.copy_(solved[start : start + len(stored)])
        start += len(stored)
        for (task, point), network in networks.items():
            if 0 < point < 1:
                network.get_parameter(name).copy_(torch.lerp(stored, experts[task].get_parameter(name), point))


@torch.no_grad()
def largest_difference(first: nn.Module, second: nn.Module) -> float:
    """The largest relative difference ``||a - b|| / ||b||`` of a tensor of two networks."""
    others = dict(second.named_parameters())
    differences = [
        float((tensor - others[name]).norm() / others[name].norm())
        for name, tensor in first.named_parameters()
        if others[name].norm() > 0
    ]
    return max(differences)


def timed(merge: Merge, pool: RandomExpertPool, device: torch.device) -> tuple[float, nn.Module]:
    """The seconds of one merge, and the merged model."""
    gc.collect()
    synchronise(device)
    start = time.perf_counter()
    with silence():
        merged = merge(pool)
    synchronise(device)
    return time.perf_counter() - start, merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=SIZES, default="vit-b-32")
    parser.add_argument("--layers", type=int, default=4, help="blocks")
    parser.add_argument("--tasks", type=int, default=2, help="experts")
    parser.add_argument("--samples", type=int, default=32, help="images per task")
    parser.add_argument("--coverage", choices=("mlp", "full"), default="mlp")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/whole_network_cost"))
    arguments = parser.parse_args()
    silence_logs()
    fabric = fabric_for(arguments.device)

    def by_paused_forwards(pool: RandomExpertPool) -> nn.Module:
        algorithm = CrossMeanAlgorithm(
            coverage=arguments.coverage,
            num_calibration_samples=arguments.samples,
            batch_size=BATCH_SIZE,
            path_points=PATH_POINTS,
        )
        algorithm._fabric_instance = fabric
        return algorithm.run(pool)

    def by_whole_forwards(pool: RandomExpertPool) -> nn.Module:
        return merge_by_whole_forwards(pool, arguments.coverage, fabric.device)

    ways: dict[str, Merge] = {"whole": by_whole_forwards, "paused": by_paused_forwards}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    merged: dict[str, nn.Module] = {}
    with tempfile.TemporaryDirectory(prefix="random_experts_") as name:
        shape = (arguments.size, arguments.layers, arguments.tasks, arguments.samples)
        workload = Workload(Path(name), *shape)
        warm_up = Workload(Path(name) / "warm-up", "tiny", layers=2, tasks=2, samples=arguments.samples)
        with silence():
            workload.save()
            warm_up.save()
        small, pool = warm_up.pool(), workload.pool()
        for merge in ways.values():  # what is imported and initialised once in a process is not timed
            timed(merge, small, fabric.device)
        for _ in tqdm(range(arguments.repeats), desc="repeats"):
            for way, merge in ways.items():
                taken, merged[way] = timed(merge, pool, fabric.device)
                seconds[way].append(taken)

    ratios = [whole / paused for whole, paused in zip(seconds["whole"], seconds["paused"], strict=True)]
    result: dict[str, Any] = {
        "settings": workload.as_record() | {"coverage": arguments.coverage, "device": arguments.device},
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": environment(),
        "seconds": seconds,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "largest_relative_difference": largest_difference(merged["whole"], merged["paused"]),
    }
    lines = ["| procedure | seconds | relative to paused |", "| --- | --- | --- |"]
    for way, ratio in (("whole", f"{result['ratio']:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"), ("paused", "1")):
        lines.append(f"| {way} forward passes | {statistics.median(seconds[way]):.2f} | {ratio} |")
    settings = ", ".join(f"{key} {value}" for key, value in result["settings"].items())
    lines += ["", f"{settings}, {arguments.repeats} repeats; {result['torch_threads']} threads, {result['date']}."]
    lines += [f"Largest relative difference of the merged weights: {result['largest_relative_difference']:.1e}."]
    text = "\n".join(lines) + "\n"
    with written_whole(arguments.output.with_suffix(".json")) as path:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    with written_whole(arguments.output.with_suffix(".md")) as path:
        path.write_text(text, encoding="utf-8")
    tqdm.write(text)


if __name__ == "__main__":
    main()
