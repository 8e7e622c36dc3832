"""What a merge costs: times, memory and use of the machine, against FusionBench's RegMean on the same experts.

    python benchmarks/cost_table.py --size vit-b-32 --tasks 4 --samples 64 --repeats 3

writes the numbers as JSON and the table as Markdown. Experts are random networks of the given size in a temporary
folder, and every method goes the whole way from these checkpoints to the merged model. Times come from one process in
which the methods take turns; in each repeat every method runs once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from cost_rows import ROWS, Comparison, Row, Run, comparisons, memory_row, ratio_row, share_row
from merge_methods import METHODS, Workload, fabric_for, merge, silence, silence_logs
from operations import OperationCounter, product_rate, reached_share, synchronise
from random_experts import SIZES, RandomExpertPool
from tqdm.auto import tqdm

from fusion_bench_crossmean.report import environment, written_whole

#: Whose memory is measured, and whose operations are counted.
WEIGHED = ("crossmean_mlp", "fusion_bench_regmean")
COUNTED = (*WEIGHED, "alignment_criterion_mlp")


@dataclass
class Measurement:
    """Everything that was measured.

    Args:
        seconds: run -> one time per repeat.
        stages: run -> seconds per stage of its last repeat, where the algorithm reports them.
        operations: method -> kind -> dtype -> operations.
        profiles: method -> kind -> seconds inside those operations, in the run that counts them.
        rates: dtype -> operations per second, one per repeat.
        peaks: method -> peak memory in GiB.
    """

    seconds: dict[Run, list[float]] = field(default_factory=dict)
    stages: dict[Run, dict[str, float]] = field(default_factory=dict)
    operations: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    profiles: dict[str, dict[str, float]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, dict[str, float]] = field(default_factory=dict)


class Bench:
    """Runs merges and takes their measures, with one progress bar over all of them.

    Args:
        device: `cpu` or `cuda`.
        cells: how many measurements there will be.
    """

    def __init__(self, device: str, cells: int) -> None:
        self.device = device
        self.fabric = fabric_for(device)
        self.bar = tqdm(total=cells, dynamic_ncols=True)
        self._pools: dict[Workload, RandomExpertPool] = {}

    def open(self, workload: Workload) -> None:
        """Makes a workload's images, once and outside of every time."""
        if workload not in self._pools:
            self._pools[workload] = workload.pool()

    def merge(self, run: Run) -> Any:
        """One merge of an opened workload."""
        return merge(run.method, run.workload, self._pools[run.workload], self.fabric)

    def timed(self, run: Run) -> tuple[float, dict[str, float]]:
        """The seconds of one merge, and of its stages where it reports them."""
        self._next(f"{METHODS[run.method].label}")
        gc.collect()  # what the method before left behind is not this one's to clear away
        synchronise(self.fabric.device)
        start = time.perf_counter()
        algorithm = self.merge(run)
        seconds = time.perf_counter() - start
        return seconds, dict(getattr(algorithm, "report", {}).get("seconds", {}))

    def counted(self, run: Run) -> OperationCounter:
        """The operations of one merge."""
        self._next(f"operations of {METHODS[run.method].label}")
        with OperationCounter() as counter:
            self.merge(run)
        return counter

    def rate(self, dtype: str) -> float:
        """Operations per second of a product in `dtype`."""
        self._next(f"rate of {dtype}")
        return product_rate(dtype, self.fabric.device)

    def peak(self, run: Run) -> dict[str, float]:
        """Peak memory of one merge in a process of its own."""
        self._next(f"memory of {METHODS[run.method].label}")
        work = run.workload
        command = [sys.executable, str(Path(__file__).with_name("merge_methods.py")), run.method, str(work.root)]
        for option, value in (work.as_record() | {"device": self.device}).items():
            command += [f"--{option}", str(value)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            raise RuntimeError(f"{run.method} failed in its own process:\n{finished.stderr}")
        return json.loads(finished.stdout.splitlines()[-1])

    def _next(self, description: str) -> None:
        if self.bar.desc:
            self.bar.update()
        self.bar.set_description(description)


def measure(
    arguments: argparse.Namespace, compared: Sequence[Comparison], workload: Workload, warm_up: Workload
) -> Measurement:
    """Takes every measure that the rows need."""
    wanted = [run for row in compared for run in (row.numerator, row.denominator)]
    counts_operations = "share_of_rate" in arguments.rows
    if counts_operations:
        wanted.append(Run("crossmean_mlp", workload))
    runs = list(dict.fromkeys(wanted))
    methods = list(dict.fromkeys(run.method for run in runs))
    # The rates of a repeat are unknown until the dtypes are: the bar counts two.
    cells = len(methods) + arguments.repeats * (len(runs) + 2 * counts_operations)
    weighs = "peak_memory" in arguments.rows
    bench = Bench(arguments.device, cells + len(COUNTED) * counts_operations + len(WEIGHED) * weighs)
    for opened in (warm_up, workload, *(run.workload for run in runs)):
        bench.open(opened)
    found = Measurement(seconds={run: [] for run in runs})
    for method in methods:  # what is imported and initialised once in a process is not timed
        bench.timed(Run(method, warm_up))
    dtypes: list[str] = []
    if counts_operations:
        for method in COUNTED:
            counter = bench.counted(Run(method, workload))
            found.operations[method], found.profiles[method] = counter.by_kind(), dict(counter.seconds)
            if method == "crossmean_mlp":
                dtypes = list(counter.by_dtype())
        found.rates = {dtype: [] for dtype in dtypes}
    for _ in range(arguments.repeats):
        for dtype in dtypes:
            found.rates[dtype].append(bench.rate(dtype))
        for run in runs:
            seconds, found.stages[run] = bench.timed(run)
            found.seconds[run].append(seconds)
    if weighs:
        found.peaks = {method: bench.peak(Run(method, workload)) for method in WEIGHED}
    bench.bar.update()
    bench.bar.close()
    return found


def save_all(workloads: Sequence[Workload]) -> None:
    """Writes the experts of all workloads: per folder those of the workload with the most tasks."""
    largest: dict[Path, Workload] = {}
    for workload in sorted(workloads, key=lambda each: each.tasks):
        largest[workload.folder] = workload
    for workload in largest.values():
        workload.save()


def shares(found: Measurement, workload: Workload) -> list[float]:
    """One share of the machine's rate per repeat, from the rates and the time of that repeat."""
    totals: dict[str, float] = {}
    for counts in found.operations["crossmean_mlp"].values():
        for dtype, operations in counts.items():
            totals[dtype] = totals.get(dtype, 0.0) + operations
    return [
        reached_share(totals, {dtype: rates[repeat] for dtype, rates in found.rates.items()}, seconds)
        for repeat, seconds in enumerate(found.seconds[Run("crossmean_mlp", workload)])
    ]


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    return {
        "cpu": model.group(1).strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def markdown(rows: Sequence[Row], found: Measurement, described: Mapping[str, Any]) -> str:
    """The table, and below it the seconds, operations and rates that it was made from."""
    lines = table(["row", "paper", "target", "measured", "met?"], [row.cells() for row in rows])
    times = [
        [
            METHODS[run.method].label,
            ", ".join(f"{value} {key}" for key, value in list(run.workload.as_record().items())[1:]),
            f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})",
            ", ".join(f"{stage} {time:.2f}" for stage, time in found.stages[run].items()),
        ]
        for run, seconds in found.seconds.items()
    ]
    if times:
        lines += ["", *table(["method", "workload", "seconds", "stages (last repeat)"], times)]
    counted = [
        [METHODS[method].label, kind, per_dtype(found.operations[method].get(kind, {})), f"{seconds:.2f}"]
        for method, profile in found.profiles.items()
        for kind, seconds in sorted(profile.items(), key=lambda item: -item[1])
    ]
    if counted:
        rates = per_dtype({dtype: statistics.median(each) for dtype, each in found.rates.items()})
        lines += ["", *table(["method", "kind", "operations (1e9)", "seconds inside them"], counted)]
        lines += ["", f"Rates of a large product (1e9 per second): {rates}."]
    if found.peaks:
        parts = [f"{METHODS[m].label} {p['peak_gib']:.2f} ({p['before_gib']:.2f})" for m, p in found.peaks.items()]
        lines += ["", f"Peak memory in GiB (before the merge): {', '.join(parts)}."]
    lines += ["", "; ".join(f"{key}: {value}" for key, value in described.items()) + "."]
    return "\n".join(lines) + "\n"


def per_dtype(operations: Mapping[str, float]) -> str:
    """Operations, in 1e9, for a cell."""
    return ", ".join(f"{dtype} {count / 1e9:.1f}" for dtype, count in operations.items())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def write(output: Path, rows: Sequence[Row], found: Measurement, described: Mapping[str, Any]) -> str:
    """Writes JSON and Markdown; returns the latter."""
    text = markdown(rows, found, described)
    content = {
        "settings": described,
        "rows": [row.as_record() for row in rows],
        "runs": [
            {
                "method": run.method,
                "workload": run.workload.as_record(),
                "seconds": seconds,
                "stages": found.stages[run],
            }
            for run, seconds in found.seconds.items()
        ],
        "operations": found.operations,
        "profiles": found.profiles,
        "rates": found.rates,
        "peak_memory": found.peaks,
    }
    with written_whole(output.with_suffix(".json")) as path:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with written_whole(output.with_suffix(".md")) as path:
        path.write_text(text, encoding="utf-8")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tasks", type=int, default=4, help="experts")
    parser.add_argument("--samples", type=int, default=64, help="images per task")
    parser.add_argument("--size", choices=SIZES, default="vit-b-32")
    parser.add_argument("--depths", type=int, nargs="+", help="blocks, each against the one before; once and twice")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cost_table"), help="without suffix")
    arguments = parser.parse_args()
    silence_logs()
    size = SIZES[arguments.size]
    depths = arguments.depths or [size.layers, 2 * size.layers]
    with tempfile.TemporaryDirectory(prefix="random_experts_") as name:

        def at_depth(layers: int) -> Workload:
            return Workload(Path(name), arguments.size, layers, arguments.tasks, arguments.samples)

        workload = at_depth(size.layers)
        warm_up = Workload(Path(name) / "warm-up", "tiny", layers=2, tasks=2, samples=2)
        compared = comparisons(arguments.rows, workload, depths, at_depth)
        with silence():
            warm_up.save()
            save_all([workload, *(run.workload for row in compared for run in (row.numerator, row.denominator))])
        found = measure(arguments, compared, workload, warm_up)

    rows = [ratio_row(comparison, found.seconds) for comparison in compared]
    if found.peaks:
        rows.append(memory_row(found.peaks))
    if found.operations:
        rows.append(share_row(shares(found, workload)))
    settings = {key: getattr(arguments, key) for key in ("size", "tasks", "samples", "repeats")}
    tqdm.write(write(arguments.output, rows, found, settings | machine(arguments.device) | environment()))


if __name__ == "__main__":
    main()
