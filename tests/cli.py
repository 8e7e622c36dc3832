"""The command line in processes of its own: how tests call it, where from, and against which hub.

A pytest plugin: test modules that need its fixtures name it in `pytest_plugins`. They import it before that, hence
PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import write_hub

ROOT = Path(__file__).parents[1]
POOLS = ("modelpool=clip-vit-base-patch32_TA8", "taskpool=clip-vit-base-patch32_TA8")
#: One small batch per task, and no worker processes to start.
FAST = ("fast_dev_run=true", "taskpool.dataloader_kwargs.num_workers=0")
#: What a command's result must not depend on.
PRIVATE_VARIABLES = ("PYTHONPATH", "HYDRA_FULL_ERROR", "FUSION_BENCH_PROJECT_ROOT", "FUSION_BENCH_CACHE_DIR")


def run(command: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command without terminal, network or GPU; its output is text, whatever its exit status."""
    environment = {name: value for name, value in os.environ.items() if name not in PRIVATE_VARIABLES}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "300", "NO_COLOR": "1"}
    environment |= {"OMP_NUM_THREADS": "1"}  # on networks as small as these, threads only wait for each other
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def fusion_bench(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The installed `fusion_bench` command; see `run`."""
    return run([str(Path(sysconfig.get_path("scripts")) / "fusion_bench"), *arguments], cwd, **variables)


def python(code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python code in an interpreter of its own; see `run`."""
    return run([sys.executable, "-c", code], cwd, **variables)


def succeeded(process: subprocess.CompletedProcess[str]) -> str:
    """The standard output of a command that must have ended well."""
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    return process.stdout


def failed(process: subprocess.CompletedProcess[str]) -> str:
    """Everything that a command wrote which must not have ended well, on one line."""
    assert process.returncode != 0, process.stdout[-4000:]
    return " ".join((process.stdout + process.stderr).split())


def log_folder(outputs: Path) -> Path:
    """FusionBench's log folder of the only run below `outputs`."""
    (folder,) = outputs.glob("fabric_model_fusion/*")
    return folder


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fake hub with FusionBench's eight ViT-B/32 tasks: the folder for `HF_HOME`."""
    with torch.random.fork_rng(devices=[]):
        yield write_hub(tmp_path_factory.mktemp("hub") / "home")


@pytest.fixture
def working_directory(tmp_path: Path) -> Callable[[str], Path]:
    """Kind -> a folder to run a command in."""

    def make(kind: str) -> Path:
        if kind == "repository":
            return ROOT
        folder = tmp_path / ("a path with spaces" if kind == "spaces" else kind)
        folder.mkdir()
        if kind == "project":  # one of the user's own, whose `config` FusionBench takes for its primary folder
            (folder / "config" / "method").mkdir(parents=True)
            (folder / "config" / "method" / "mine.yaml").write_text(
                "defaults:\n  - crossmean@_here_\n  - _self_\npath_points: [0.0, 1.0]\n"
            )
        return folder

    return make


#: Where commands are run from.
DIRECTORIES = ("empty", "repository", "project", "spaces")
