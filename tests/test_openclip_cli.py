"""The OpenCLIP command on checkpoints of the true format and size: whole encoders, pickled by the original code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli import fusion_bench, log_folder, read_json, succeeded
from fake_hub import TA8

from fusion_bench_crossmean.compat import apply_cures

apply_cures(openclip=True)

from fusion_bench.models.open_clip import ClassificationHead, ImageEncoder, modeling  # noqa: E402

pytest_plugins = ("cli",)
pytestmark = pytest.mark.float32

#: FusionBench's name of a task -> that of its folder.
FOLDERS = {"sun397": "SUN397", "stanford-cars": "Cars", "dtd": "DTD", "resisc45": "RESISC45", "eurosat": "EuroSAT"}
FOLDERS |= {"svhn": "SVHN", "gtsrb": "GTSRB", "mnist": "MNIST"}


@contextlib.contextmanager
def as_in_the_original_code() -> Iterator[None]:
    """Classes are pickled under the module names of the code that made the published checkpoints."""
    before = {kind: kind.__module__ for kind in (ImageEncoder, ClassificationHead)}
    names = {name: sys.modules.get(name) for name in ("src", "src.modeling")}
    sys.modules |= dict.fromkeys(names, modeling)
    try:
        for kind in before:
            kind.__module__ = "src.modeling"
        yield
    finally:
        for kind, name in before.items():
            kind.__module__ = name
        for name, module in names.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FusionBench's `model_dir`: a pretrained encoder and two experts, which the eight tasks share."""
    root = tmp_path_factory.mktemp("checkpoints")
    folder = root / "ViT-B-32"
    folder.mkdir()
    torch.manual_seed(0)
    encoder = ImageEncoder("ViT-B-32-quickgelu__init__")
    with as_in_the_original_code():
        torch.save(encoder, folder / "zeroshot.pt")
        for index in range(2):
            with torch.no_grad():
                for parameter in encoder.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1 * float(parameter.std(correction=0)))
            torch.save(encoder, folder / f"expert{index}.pt")
        for index, (task, name) in enumerate(FOLDERS.items()):
            (folder / name).mkdir()
            (folder / name / "finetuned.pt").symlink_to(folder / f"expert{index % 2}.pt")
            head = ClassificationHead(normalize=True, weights=torch.randn(TA8[task].num_classes, 512))
            torch.save(head, folder / f"head_{name}.pt")
    return root


def test_openclip_command_runs_on_checkpoints_of_the_true_format(hub: Path, checkpoints: Path, tmp_path: Path) -> None:
    places = [f"modelpool.model_dir={checkpoints}/", f"taskpool.model_dir={checkpoints}/"]
    fast = ["fast_dev_run=true", "taskpool.fast_dev_run=true", "taskpool.dataloader_kwargs.num_workers=0"]
    fast += ["taskpool.dataloader_kwargs.batch_size=4", "method.num_calibration_samples=2"]
    pools = ["modelpool=ViT-B-32_TA8", "taskpool=ViT-B-32_TA8"]
    saved = "merged_model_save_path='{log_dir}/merged.pt'"
    command = ["method=crossmean", "method.coverage=full", *pools, *places, *fast, saved]
    succeeded(fusion_bench(*command, cwd=tmp_path, HF_HOME=str(hub)))
    logs = log_folder(tmp_path / "outputs")
    report = read_json(logs / "crossmean_report.json")
    assert report["activation"] == "QuickGELU"
    assert len(report["layers"]) == 48
    assert report["layers"][0]["name"] == "model.visual.transformer.resblocks.0.attn.fused_in_proj"
    assert set(TA8) < set(read_json(logs / "report.json"))
    weights = torch.load(logs / "merged.pt", weights_only=True)
    encoder = ImageEncoder("ViT-B-32-quickgelu__init__")
    encoder.load_state_dict(weights)


def test_methods_are_compared_on_openclip_pools(hub: Path, checkpoints: Path, tmp_path: Path) -> None:
    places = [f"modelpool.model_dir={checkpoints}/", f"taskpool.model_dir={checkpoints}/"]
    fast = ["fast_dev_run=true", "taskpool.fast_dev_run=true", "taskpool.dataloader_kwargs.num_workers=0"]
    fast += ["taskpool.dataloader_kwargs.batch_size=4", "num_calibration_samples=2", "seeds=[0]", "print_config=false"]
    pools = ["modelpool=ViT-B-32_TA8", "taskpool=ViT-B-32_TA8"]
    methods = "methods=[averaging,regmean]"
    command = ["--config-name", "crossmean_protocol", "task_sets=[mnist,dtd]", methods, *pools, *places, *fast]
    succeeded(fusion_bench(*command, cwd=tmp_path, HF_HOME=str(hub)))
    cells = [read_json(path) for path in (tmp_path / "outputs" / "crossmean_protocol" / "cells").iterdir()]
    assert {cell["cell"]["row"] for cell in cells} == {"averaging", "regmean"}
    for cell in cells:
        for scores in cell["found"]["scores"].values():
            assert len(scores["predictions"]) == 4
