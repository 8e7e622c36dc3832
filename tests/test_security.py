"""Files from strangers run nothing here, and nothing is written outside the folders that were named."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli import ROOT
from families import pico_architectures
from fusion_bench.models.open_clip import ImageEncoder
from pico import pico_calibration, pico_clip, pico_experts

from fusion_bench_crossmean import CrossMeanAlgorithm, RegMeanAlgorithm
from fusion_bench_crossmean.openclip import encoder_from_pickle
from fusion_bench_crossmean.protocol.program import as_file_name
from fusion_bench_crossmean.weights import find_tensors

PACKAGE = ROOT / "fusion_bench_crossmean"
#: Calls that run what a file or a string says.
RUNNING = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads"}
RUNNING |= {"pickle.Unpickler", "joblib.load", "yaml.load", "yaml.unsafe_load"}


def calls_in(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a module by its dotted name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def complaints_about(path: Path) -> list[str]:
    found = []
    for name, call in calls_in(path):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        unsafe = (
            name in RUNNING
            or (name == "torch.load" and keywords.get("weights_only") != "True")
            or (name == "np.load" and keywords.get("allow_pickle") != "False")
            or keywords.get("trust_remote_code", "False") != "False"
            or keywords.get("shell", "False") != "False"
        )
        if unsafe:
            found.append(f"{path.name}:{call.lineno} {ast.unparse(call)[:80]}")
    return found


def test_no_code_of_the_package_runs_what_a_file_says() -> None:
    assert [found for path in sorted(PACKAGE.rglob("*.py")) for found in complaints_about(path)] == []


@pytest.mark.parametrize(
    "line",
    ["torch.load(p)", "pickle.load(f)", "eval(x)", "os.system(x)", "np.load(p)", "f(trust_remote_code=True)"],
)
def test_the_search_for_such_code_finds_it(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert len(complaints_about(tmp_path / "module.py")) == 1


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def architectures(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "architectures").mkdir()
    with pico_architectures(tmp_path / "architectures"):
        yield


def test_a_pickled_encoder_with_a_trap_is_refused(tmp_path: Path, architectures: None) -> None:
    encoder = ImageEncoder("pico__init__")
    encoder.trap = Trap(tmp_path / "sprung")  # type: ignore[assignment]
    torch.save(encoder, tmp_path / "encoder.pt")
    with pytest.raises(ValueError, match=r"encoder\.pt cannot be read safely"):
        encoder_from_pickle(tmp_path / "encoder.pt", "pico__init__")
    assert not (tmp_path / "sprung").exists()


def test_a_state_dict_with_a_trap_is_refused(tmp_path: Path, architectures: None) -> None:
    from families import OpenCLIPPool  # the pool's class has to be cured first, see there

    torch.save({"weight": torch.zeros(1), "trap": Trap(tmp_path / "sprung")}, tmp_path / "state.pt")
    models = {"mood": {"model_name": "pico__init__", "state_dict_path": str(tmp_path / "state.pt")}}
    with pytest.raises(ValueError, match=r"state\.pt"):
        OpenCLIPPool(models).load_model("mood")
    assert not (tmp_path / "sprung").exists()


SETTINGS: dict[str, Any] = {"num_calibration_samples": 8, "batch_size": 8}


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("task", ["../../escaped", "/escaped", "a/b", "..", "with\nline", "x" * 300])
def test_names_of_tasks_are_no_paths(task: str, tmp_path: Path) -> None:
    experts, inputs = list(pico_experts().values()), list(pico_calibration().values())
    inside = tmp_path / "a" / "b"
    folders = {name: str(inside / name) for name in ("checkpoint_dir", "save_statistics")}
    method = RegMeanAlgorithm(**SETTINGS, **folders, report_path=str(inside / "report.json"))
    method.run({"digits": experts[0], task: experts[1]}, {"digits": inputs[0], task: inputs[1]})
    assert {path.partition("/")[0] for path in listing(tmp_path)} == {"a"}
    assert {path.split("/")[1] for path in listing(tmp_path / "a") if "/" in path} >= {"report.json"}
    assert set(os.listdir(inside)) == {"checkpoint_dir", "save_statistics", "report.json"}
    assert not Path("/escaped").exists()


@pytest.mark.parametrize("name", ["lock", "manifest.json", "group-0000.safetensors"])
def test_links_in_a_checkpoint_are_not_written_through(name: str, tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "checkpoint"
    precious.write_text("precious")
    folder.mkdir()
    (folder / name).symlink_to(precious)
    method = CrossMeanAlgorithm(**SETTINGS, checkpoint_dir=str(folder))
    with pytest.raises((OSError, ValueError), match=name):
        method.run(pico_experts(), pico_calibration())
    assert precious.read_text() == "precious"


def test_a_link_in_the_reports_place_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "report.json").symlink_to(precious)
    method = CrossMeanAlgorithm(**SETTINGS, report_path=str(tmp_path / "report.json"))
    method.run(pico_experts(), pico_calibration())
    assert precious.read_text() == "precious"
    assert json.loads((tmp_path / "report.json").read_text())["method"] == "CrossMeanAlgorithm"


def test_shards_outside_the_checkpoints_folder_are_not_read(tmp_path: Path) -> None:
    network = pico_clip()
    network.save_pretrained(tmp_path / "elsewhere")
    index = tmp_path / "expert" / "model.safetensors.index.json"
    index.parent.mkdir()
    names = dict.fromkeys(network.state_dict(), "../elsewhere/model.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(ValueError, match="Invalid name"):
        find_tensors(network, index)


@pytest.mark.parametrize("text", ["..", ".", "", "a\0b"])
def test_names_that_lead_elsewhere_are_no_file_names(text: str) -> None:
    with pytest.raises(ValueError, match=r"pool must be a file name"):
        as_file_name(text, "pool")
    assert as_file_name("../x", "pool") == "..-x"
