"""The built wheel: what is in it, and that it works alone, without the source tree."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from cli import DIRECTORIES, FAST, POOLS, ROOT, log_folder, read_json, run, succeeded
from omegaconf import OmegaConf

from fusion_bench_crossmean import __version__

pytest_plugins = ("cli",)

DIST_INFO = f"fusion_bench_crossmean-{__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
    ]
    succeeded(run([*pip, str(ROOT)], folder))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def interpreter(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that holds the wheel, and the tests' environment for everything else.

    The latter comes in as a plain folder, whose own .pth files are not read: an editable installation of the source
    tree stays invisible.
    """
    folder = tmp_path_factory.mktemp("an environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    site_packages = Path(paths["purelib"])
    target = ["--no-deps", "--no-index", "--target", str(site_packages), str(wheel)]
    succeeded(run([sys.executable, "-m", "pip", "install", *target], folder))
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "the_tests_environment.pth").write_text("\n".join(sorted(others)) + "\n")
    return Path(paths["scripts"]) / Path(sys.executable).name


def test_wheel_holds_what_is_needed_and_nothing_at_the_top_level(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"fusion_bench_crossmean", "hydra_plugins", DIST_INFO}
    assert "hydra_plugins/__init__.py" not in names
    assert "hydra_plugins/fusion_bench_crossmean_searchpath/__init__.py" in names
    assert "fusion_bench_crossmean/py.typed" in names
    assert f"{DIST_INFO}/licenses/LICENSE" in names
    assert f"{DIST_INFO}/licenses/fusion_bench_crossmean/mini/data/NOTICE.md" in names
    assert not [name for name in names if "__pycache__" in name or "/outputs/" in name]
    for source, target in (("config", "fusion_bench_crossmean/config"), ("fusion_bench_crossmean",) * 2):
        shipped = [path for path in (ROOT / source).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        missing = {f"{target}/{path.relative_to(ROOT / source).as_posix()}" for path in shipped} - names
        assert not missing


def test_wheel_alone_brings_its_configs_and_assets(interpreter, tmp_path):
    command = [str(interpreter), "-m", "fusion_bench.scripts.cli", "method=crossmean"]
    output = succeeded(run([*command, *POOLS, "--info", "searchpath"], tmp_path))
    (ours,) = [line for line in output.splitlines() if "fusion_bench_crossmean/config" in line]
    inside = str(interpreter.parents[1])
    assert inside in ours
    assert str(ROOT) not in output, "the source tree must not help"
    output = succeeded(run([*command, "modelpool=mini-clip_TA8", "--cfg", "job", "--resolve"], tmp_path))
    config = OmegaConf.create(output)
    assert config.method._target_ == "fusion_bench_crossmean.CrossMeanAlgorithm"
    for folder in config.modelpool.models.values():
        assert folder.startswith(inside)
        assert (Path(folder) / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_wheel_runs_the_card_command_from_any_directory(interpreter, hub, working_directory, tmp_path, kind):
    outputs = tmp_path / "outputs"
    command = [str(interpreter), "-m", "fusion_bench.scripts.cli", "method=crossmean", *POOLS, *FAST]
    succeeded(run([*command, f"path.output_dir={outputs}"], working_directory(kind), HF_HOME=str(hub)))
    logs = log_folder(outputs)
    assert read_json(logs / "crossmean_report.json")["versions"]["fusion-bench-crossmean"] == __version__
    assert (logs / "program_report.json").is_file()
