"""The methods whose costs are compared, each behind the same call, and their peak memory.

    python benchmarks/merge_methods.py crossmean_mlp FOLDER --size vit-b-32 --layers 12 --tasks 4 --samples 64

merges the experts that `Workload.save` wrote below FOLDER once and prints the peak memory of this process in GiB as
JSON: the largest resident set of any moment, or what CUDA allocated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from omegaconf import OmegaConf
from random_experts import SIZES, RandomExpertPool, random_images, save_experts
from torch import Tensor, nn
from tqdm.auto import tqdm

import fusion_bench_crossmean as ours  # before RegMean++: it cures its import

# isort: split
from fusion_bench.method import RegMeanAlgorithmForCLIP, RegMeanAlgorithmForCLIPPlusPlus

#: Images per forward, for every method.
BATCH_SIZE = 32


class WithoutHeads:
    """What this benchmark leaves out of FusionBench's two methods: their zero-shot heads.

    They need a text tower and class names, and no statistic depends on them. FusionBench is slightly cheaper for it,
    so every ratio over it errs against us.
    """

    compute_logits: Any

    def on_regmean_start(self) -> None:
        """Builds no head; `clip_processor` is loaded from the pool when it is first asked for."""

    def print_profile_summary(self, *_: Any, **__: Any) -> None:
        """Prints nothing."""


class FusionBenchRegMean(WithoutHeads, RegMeanAlgorithmForCLIP):
    """FusionBench's RegMean without its zero-shot heads."""

    def compute_logits(self, module: nn.Module, batch: Any, task: str) -> Tensor:
        return module(batch[0])[1]


class FusionBenchRegMeanPlusPlus(WithoutHeads, RegMeanAlgorithmForCLIPPlusPlus):
    """FusionBench's RegMean++ without its zero-shot heads; under transformers 5 with the cures of `compat`."""


def regmean_settings(samples: int) -> dict[str, Any]:
    """FusionBench's settings of RegMean and RegMean++."""
    return {
        "num_regmean_examples": samples,
        "exclude_param_names_regex": [],
        "reduce_non_diagonal_ratio": 0.95,
        "weight_transpose": True,
        "dataloader_kwargs": OmegaConf.create({"batch_size": BATCH_SIZE, "num_workers": 0}),
    }


def our_method(algorithm: type[Any], **settings: Any) -> Callable[[int], Any]:
    """Builds one of ours from the number of images per task."""
    return lambda samples: algorithm(num_calibration_samples=samples, batch_size=BATCH_SIZE, **settings)


@dataclass(frozen=True)
class Method:
    """A method by name.

    Args:
        label: in tables.
        build: images per task -> algorithm.
    """

    label: str
    build: Callable[[int], Any]


METHODS = {
    "fusion_bench_regmean": Method(
        "FusionBench RegMean", lambda samples: FusionBenchRegMean(**regmean_settings(samples))
    ),
    "fusion_bench_regmean_plusplus": Method(
        "FusionBench RegMean++",
        lambda samples: FusionBenchRegMeanPlusPlus(**regmean_settings(samples)),
    ),
    "regmean_mlp": Method("RegMean, mlp", our_method(ours.RegMeanAlgorithm)),
    "progressive_regmean_mlp": Method("Progressive RegMean, mlp", our_method(ours.ProgressiveRegMeanAlgorithm)),
    "crossmean_mlp": Method("CrossMean, mlp", our_method(ours.CrossMeanAlgorithm)),
    "crossmean_full": Method("CrossMean, full", our_method(ours.CrossMeanAlgorithm, coverage="full")),
    "crossmean_mixed": Method("CrossMean, mlp, mixed", our_method(ours.CrossMeanAlgorithm, precision="mixed")),
    "alignment_criterion_mlp": Method("alignment criterion, mlp", our_method(ours.AlignmentCriterionAnalyzer)),
}


@dataclass(frozen=True)
class Workload:
    """What is merged.

    Args:
        root: the folder below which experts are saved.
        size: a key of `SIZES`.
        layers: blocks of every network.
        tasks: how many experts.
        samples: images per task.
    """

    root: Path
    size: str
    layers: int
    tasks: int
    samples: int

    @property
    def folder(self) -> Path:
        """Where its experts are; workloads that differ in tasks and samples only share them."""
        return self.root / f"{self.size}-{self.layers}"

    def save(self) -> None:
        """Writes its experts."""
        save_experts(self.folder, SIZES[self.size], layers=self.layers, tasks=self.tasks)

    def pool(self) -> RandomExpertPool:
        """The experts, and images in memory."""
        return RandomExpertPool(self.folder, random_images(SIZES[self.size], tasks=self.tasks, samples=self.samples))

    def as_record(self) -> dict[str, Any]:
        """Everything but the folder."""
        return {"size": self.size, "layers": self.layers, "tasks": self.tasks, "samples": self.samples}


def fabric_for(device: str) -> Fabric:
    """One device of the kind `device`: `cpu` or `cuda`."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # RegMean++ takes a GPU wherever it sees one
    return Fabric(accelerator=device, devices=1)


def merge(method: str, workload: Workload, pool: RandomExpertPool, fabric: Fabric) -> Any:
    """Runs a method from the checkpoints to the merged model; returns the algorithm, which may hold a report."""
    algorithm = METHODS[method].build(workload.samples)
    algorithm._fabric_instance = fabric
    torch.manual_seed(0)  # FusionBench draws from torch's global generator
    with silence():
        algorithm.run(pool)
    if fabric.device.type == "cuda":
        torch.cuda.synchronize()
    return algorithm


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """No progress bars and no prints inside the block; a bar that exists already goes on."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def silence_logs() -> None:
    """Random experts provoke warnings that would bury the table."""
    for name in ("fusion_bench", "fusion_bench_crossmean", "transformers", "lightning", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def resident_peak() -> float:
    """The largest resident set of this process so far, in GiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    if found is None:
        raise RuntimeError("This system does not tell the peak memory of a process.")
    return int(found.group(1)) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("root", type=Path, help="folder with saved experts")
    parser.add_argument("--size", choices=SIZES, default="vit-b-32")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64, help="images per task")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    silence_logs()
    shape = (arguments.size, arguments.layers, arguments.tasks, arguments.samples)
    workload = Workload(arguments.root, *shape)
    fabric, pool = fabric_for(arguments.device), workload.pool()
    before = resident_peak()
    merge(arguments.method, workload, pool, fabric)
    if arguments.device == "cuda":
        peaks = {"before_gib": 0.0, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    else:
        peaks = {"before_gib": before, "peak_gib": resident_peak()}
    tqdm.write(json.dumps(peaks))


if __name__ == "__main__":
    main()
