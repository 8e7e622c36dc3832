"""The comparison program as users call it: every recipe composes, FusionBench's methods run, a killed run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest
from cli import POOLS, ROOT, failed, fusion_bench, succeeded
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import hydra_plugins.fusion_bench_crossmean_searchpath as searchpath
from fusion_bench_crossmean.protocol.catalogue import rows_of
from fusion_bench_crossmean.protocol.outputs import check_outputs

pytest_plugins = ("cli",)
pytestmark = pytest.mark.float32

RECIPES = sorted(path.stem for path in (ROOT / "config/recipe").glob("*.yaml"))
PROTOCOL = ("--config-name", "crossmean_protocol")
SMALL = ("num_calibration_samples=4", "num_validation_samples=4", "scales=[0.3]", "seeds=[0]", "print_config=false")
FAST = ("fast_dev_run=true", "taskpool.dataloader_kwargs.num_workers=0", "taskpool.dataloader_kwargs.batch_size=4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_with_the_stock_pools(recipe: str) -> None:
    with initialize_config_dir(str(searchpath.config_folders()[-1]), version_base=None):
        config = compose("crossmean_protocol", [f"recipe={recipe}", *POOLS])
    assert config.recipe.name == recipe
    catalogue = OmegaConf.to_container(config.catalogue)
    rows = rows_of(catalogue, config.methods)
    assert config.recipe.baseline in [row.name for row in rows]
    assert all(row.title for row in rows_of(catalogue, list(catalogue)))
    assert all("_target_" in row.method for row in rows_of(catalogue, list(catalogue)) if row.name != "experts")
    check_outputs(config.recipe.outputs)


@pytest.mark.parametrize("recipe", ["table2", "table3"])
def test_recipes_run_on_the_stock_pools(recipe: str, hub: Path, tmp_path: Path) -> None:
    """Together they have every method of the catalogue but the ablations and mixed precision."""
    command = [*PROTOCOL, f"recipe={recipe}", *POOLS, *SMALL, *FAST]
    output = succeeded(fusion_bench(*command, cwd=tmp_path, HF_HOME=str(hub)))
    folder = tmp_path / "outputs" / "crossmean_protocol"
    table = (folder / recipe / "clip-vit-base-patch32_TA8" / "scores.md").read_text()
    assert "CrossMean" in table
    assert "A trial run" in table
    assert "CrossMean" in output
    cells = set((folder / "cells").iterdir())
    stamps = {path: path.stat().st_mtime_ns for path in cells}
    succeeded(fusion_bench(*command, cwd=tmp_path, HF_HOME=str(hub)))
    assert {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()} == stamps


def test_the_other_recipes_run_on_the_stock_pools(hub: Path, tmp_path: Path) -> None:
    others = sorted({*RECIPES} - {"table2", "table3", "table5"})  # table5 is for text encoders
    sets = "task_sets={one: [mnist, svhn], two: [eurosat, dtd], three: [mnist, dtd, eurosat]}"
    command = ["-m", *PROTOCOL, f"recipe={','.join(others)}", *POOLS, *SMALL, *FAST, sets]
    succeeded(fusion_bench(*command, cwd=tmp_path, HF_HOME=str(hub)))
    for recipe in others:
        (folder,) = (tmp_path / "outputs" / "crossmean_protocol" / recipe).iterdir()
        assert (folder / "results.parquet").is_file()
        with initialize_config_dir(str(searchpath.config_folders()[-1]), version_base=None):
            asked = compose("crossmean_protocol", [f"recipe={recipe}"]).recipe.outputs
        made = {path.stem for path in folder.iterdir()}
        assert set(asked) <= made, recipe


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [*PROTOCOL, "recipe=table3", "seeds=[0]", "methods=[averaging,regmean,progressive_regmean,crossmean]"]
    command += ["num_calibration_samples=16", "num_validation_samples=0", "print_config=false", *FAST]
    script = str(Path(sysconfig.get_path("scripts")) / "fusion_bench")
    variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([script, *command], cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL)
    cells = tmp_path / "outputs" / "crossmean_protocol" / "cells"
    deadline = time.monotonic() + 300
    while not (cells.is_dir() and len(list(cells.glob("[0-9a-f]*.json"))) >= 2):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in cells.glob("[0-9a-f]*.json")}
    assert len(before) < 4
    succeeded(fusion_bench(*command, cwd=tmp_path))
    after = {path: path.stat().st_mtime_ns for path in cells.glob("[0-9a-f]*.json")}
    assert len(after) == 4
    assert before.items() <= after.items()


def test_an_unknown_method_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    message = failed(fusion_bench(*PROTOCOL, "methods=[regmean,regmeen]", "print_config=false", cwd=tmp_path))
    assert "The catalogue has no method regmeen; it has" in message
