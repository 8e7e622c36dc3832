"""Kills merges of the mini benchmark at random moments and resumes them: how many end in the same model, bit for bit.

    python benchmarks/kill_points.py --count 100

Every merge runs in a process of its own, is killed (SIGKILL) at a random moment of an undisturbed one's time, goes on
in another process, which may be killed again, and is compared in the end: weights, report rows and hashes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tqdm.auto import tqdm

SETTINGS = {"coverage": "full", "num_calibration_samples": 32, "batch_size": 16}


def merge(folder: Path, checkpoint: Path | None) -> None:
    """Merges the mini benchmark's experts; leaves the result's fingerprints in `folder`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    from fusion_bench.modelpool import CLIPVisionModelPool
    from omegaconf import OmegaConf

    from fusion_bench_crossmean import CrossMeanAlgorithm
    from fusion_bench_crossmean.mini.assets import asset_folder
    from fusion_bench_crossmean.mini.tasks import PREFIX, TASK_SETS

    weights, loader = asset_folder("mini-clip"), "fusion_bench_crossmean.mini.tasks.load_split"
    tasks = [PREFIX + name for name in TASK_SETS["TA8"]]
    rows = {task: {"_target_": loader, "task": task, "split": "train"} for task in tasks}
    pool = CLIPVisionModelPool(
        OmegaConf.create({task: str(weights / task) for task in tasks}),
        train_datasets=OmegaConf.create(rows),
        processor=str(weights / "pretrained"),
    )
    algorithm = CrossMeanAlgorithm(**SETTINGS, checkpoint_dir=None if checkpoint is None else str(checkpoint))
    algorithm.run(pool)
    result = {"hashes": algorithm.report["hashes"], "layers": algorithm.report["layers"]}
    temporary = folder / "result.tmp"
    temporary.write_text(json.dumps(result))
    temporary.rename(folder / "result.json")


def start(folder: Path, checkpoint: Path | None) -> multiprocessing.Process:
    """A merge in a process of its own, in which everything is imported and nothing was computed yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fusion_bench.modelpool", "fusion_bench_crossmean.mini.assets", "transformers"])
    process = context.Process(target=merge, args=(folder, checkpoint))
    process.start()
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="kill points (100)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    kills = resumed = wrong = groups = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for _ in range(2):  # the first one waits for the imports
            began = time.monotonic()
            process = start(root, None)
            process.join()
        duration = time.monotonic() - began
        if process.exitcode:
            sys.exit("The undisturbed merge failed.")
        expected = (root / "result.json").read_text()
        with tqdm(total=arguments.count, dynamic_ncols=True) as bar:
            while kills < arguments.count:
                run = root / f"run{resumed}"
                run.mkdir()
                while not (run / "result.json").exists():
                    process = start(run, run / "checkpoint")
                    process.join(generator.uniform(0, 1.1 * duration) if kills < arguments.count else None)
                    if process.is_alive() and process.pid is not None:
                        os.kill(process.pid, signal.SIGKILL)
                        process.join()
                        kills += 1
                        groups += len(list((run / "checkpoint").glob("group-*.safetensors")))
                        bar.update()
                    elif process.exitcode:
                        sys.exit(f"A resumed merge failed with exit code {process.exitcode}.")
                resumed += 1
                wrong += (run / "result.json").read_text() != expected
    tqdm.write(
        f"{kills} kills in {resumed} merges ({groups / kills:.1f} layer groups were there at a kill, on average): "
        f"{resumed - wrong} merges ended in the same model, bit for bit, {wrong} in another."
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
