"""The documented commands, run as a user runs them, against a fake hub.

What the networks compute is tested elsewhere; here it is which files and messages a command leaves behind.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from cli import DIRECTORIES, FAST, POOLS, ROOT, failed, fusion_bench, log_folder, read_json, succeeded
from fake_hub import TA8, hashed
from hydra.core.override_parser.overrides_parser import OverridesParser
from transformers import CLIPVisionModel

from fusion_bench_crossmean import CrossMeanAlgorithm

pytest_plugins = ("cli",)
pytestmark = pytest.mark.float32

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def load_state(folder: Path) -> dict[str, torch.Tensor]:
    """A vision tower's weights as transformers loads them, in float64."""
    network, problems = CLIPVisionModel.from_pretrained(folder, output_loading_info=True)
    assert not problems["missing_keys"]
    assert all(tensor.dtype == torch.float32 for tensor in network.parameters())
    return {name: tensor.double() for name, tensor in network.named_parameters()}


def load_from_hub(hub: Path, repository: str) -> dict[str, torch.Tensor]:
    return load_state(hub / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / hashed(repository))


def test_card_command_with_its_defaults(hub, working_directory):
    folder = working_directory("spaces")
    saving = 'merged_model_save_path="{log_dir}/merged model"'
    succeeded(fusion_bench("method=crossmean", *POOLS, saving, cwd=folder, HF_HOME=str(hub)))

    logs = log_folder(folder / "outputs")
    report = read_json(logs / "crossmean_report.json")
    assert report["method"] == "CrossMeanAlgorithm"
    assert report["settings"] == CrossMeanAlgorithm().settings()
    assert {task: len(set(drawn)) for task, drawn in report["calibration_indices"].items()} == dict.fromkeys(TA8, 256)
    assert len(report["layers"]) == 4  # two MLP layers in each of two blocks
    accuracies = read_json(logs / "program_report.json")
    assert set(accuracies) == {*TA8, "average", "model_info"}
    assert all(0 <= accuracies[task]["accuracy"] <= 1 for task in TA8)

    merged = load_state(logs / "merged model")
    experts = [load_from_hub(hub, f"tanganke/clip-vit-base-patch32_{task}") for task in TA8]
    for name, tensor in merged.items():
        average = sum(expert[name] for expert in experts) / len(experts)
        solved = re.search(r"mlp\.fc\d\.weight$", name) is not None
        assert torch.allclose(tensor, average, rtol=1e-5, atol=1e-7) != solved, name


@pytest.mark.parametrize("kind", [kind for kind in DIRECTORIES if kind != "spaces"])
def test_card_command_runs_from_any_directory(hub, working_directory, tmp_path, kind):
    outputs = tmp_path / "outputs"
    place = f"path.output_dir={outputs}"
    succeeded(fusion_bench("method=crossmean", *POOLS, *FAST, place, cwd=working_directory(kind), HF_HOME=str(hub)))
    logs = log_folder(outputs)
    report = read_json(logs / "crossmean_report.json")
    assert {len(drawn) for drawn in report["calibration_indices"].values()} == {8}, "fast_dev_run takes a small batch"
    assert set(TA8) < set(read_json(logs / "program_report.json"))


def test_multirun_over_stock_methods_and_ours(hub, working_directory):
    # The stock method comes first: in a fresh process nothing has cured FusionBench's task pool for it yet.
    methods = (
        "simple_average",
        "task_arithmetic",
        "mine",
        "progressive_regmean",
        "crossmean/regmean",
        "crossmean/cross_statistic",
        "alignment_criterion",
    )
    folder = working_directory("project")
    succeeded(fusion_bench("-m", f"method={','.join(methods)}", *POOLS, *FAST, cwd=folder, HF_HOME=str(hub)))

    logs = log_folder(folder / "outputs")  # FusionBench gives all jobs of a sweep one log folder
    reports = [read_json(path) for path in logs.glob("crossmean_report*.json")]
    merged_by = {report["method"]: report for report in reports}
    assert sorted(merged_by) == [
        "CrossMeanAlgorithm",
        "CrossStatisticAlgorithm",
        "ProgressiveRegMeanAlgorithm",
        "RegMeanAlgorithm",
    ]
    assert merged_by["CrossMeanAlgorithm"]["settings"]["path_points"] == [0.0, 1.0], "the project's own YAML"
    drawn = [report["calibration_indices"] for report in reports]
    assert all(indices == drawn[0] for indices in drawn), "all methods see the same images"
    criterion = read_json(logs / "alignment_criterion.json")
    assert 0 < criterion["rho"] <= 1
    assert set(criterion["per_task"]) == set(TA8)
    assert (logs / "alignment_criterion.png").read_bytes().startswith(PNG_SIGNATURE)
    assert len(list(logs.glob("report*.json"))) == len(methods) - 1, "all but the criterion are evaluated"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            "+method.rigde=1", "CrossMeanAlgorithm has no setting 'rigde'; it has .*relative_ridge", id="misspelt"
        ),
        pytest.param(
            "method.num_calibration_samples=1000",
            r"task 'sun397' has 256,.* task 'dtd' has 256 calibration inputs, 1000 were asked for\. Lower "
            "num_calibration_samples",
            id="too many images",
        ),
        pytest.param(
            "modelpool=CLIPVisionModelPool/clip-vit-base-patch32_TA8_model_only",
            "no training data for task 'sun397'.*Take a pool with train_datasets",
            id="no images",
        ),
    ],
)
def test_wrong_settings_end_the_command_with_a_message(hub, tmp_path, override, message):
    process = fusion_bench("method=crossmean", POOLS[0], override, cwd=tmp_path, HF_HOME=str(hub))
    assert re.search(message, failed(process)), process.stderr[-4000:]
    assert "forwards" not in process.stderr, "the error comes before the first forward pass"


def test_dry_run_prints_the_settings_and_runs_nothing(working_directory):
    folder = working_directory("project")
    output = succeeded(fusion_bench("method=progressive_regmean", *POOLS, "dry_run=true", cwd=folder))
    assert "ProgressiveRegMeanAlgorithm" in output
    assert not list(folder.rglob("*.json"))


def test_help_lists_our_methods_beside_the_stock_ones(working_directory):
    output = succeeded(fusion_bench("--help", cwd=working_directory("project")))
    for name in (
        "crossmean",
        "progressive_regmean",
        "alignment_criterion",
        "simple_average",
        "clip-vit-base-patch32_TA8",
    ):
        assert re.search(rf"\b{name}\b", output), name


def test_commands_in_the_readme_are_valid():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(
        r"\bfusion_bench (.*=.*)$", "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)), re.M
    )
    assert commands
    for command in commands:
        words = shlex.split(command.replace("--config-name ", "--config-name="))
        OverridesParser.create().parse_overrides([word for word in words if not word.startswith("-")])
