"""What can happen to a merge from outside, at its worst moments: nothing is lost, and nothing is left behind.

Every merge runs in a process of its own, forked from this one.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import pico_calibration, pico_experts
from safetensors.torch import save
from torch import Tensor

from fusion_bench_crossmean import CrossMeanAlgorithm, sealed
from fusion_bench_crossmean.checkpoint import Checkpoint
from fusion_bench_crossmean.linear_system import LinearSystem

SETTINGS: dict[str, Any] = {"coverage": "full", "num_calibration_samples": 24, "batch_size": 5}
NUM_GROUPS, NUM_TASKS = 8, 3  # of the pico CLIP with two blocks, under full coverage
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000

Calibration = dict[str, Any]
Fault = Callable[[Calibration, Path], None]


def kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(*_: Any, **__: Any) -> None:
    """As Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def tear(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes half a file and dies."""
    content = save(tensors, metadata)
    path.write_bytes(content[: len(content) // 2])
    kill()


def unreadable() -> None:
    raise OSError("cannot identify image file 'seven.png'")


def at_call(count: int, owner: Any, name: str, event: Callable[..., None]) -> Fault:
    """`event` instead of the call of a function with this number, from zero."""

    def fault(*_: Any) -> None:
        calls, method = iter(range(sys.maxsize)), getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            return (event if next(calls) == count else method)(*arguments, **options)

        setattr(owner, name, counted)

    return fault


class Dataset:
    """Images, the last of which is not read as it should be."""

    def __init__(self, images: Tensor, event: Callable[[], None]) -> None:
        self.images = images
        self.event = event

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        if index == len(self) - 1:
            self.event()
        return self.images[index]


def in_loader(event: Callable[[], None]) -> Fault:
    def fault(calibration: Calibration, _: Path) -> None:
        calibration["letters"] = Dataset(calibration["letters"], event)

    return fault


def small_disk(kilobytes: int, used: int = 0) -> Fault:
    """A disk of this size, part of it used, at ``disk``; seen by this process alone."""

    def fault(_: Calibration, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        assert libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        options = f"size={kilobytes}k".encode()
        mounted = libc.mount(b"none", str(folder / "disk").encode(), b"tmpfs", 0, options)
        assert mounted == 0, os.strerror(ctypes.get_errno())
        (folder / "disk" / "other").write_bytes(bytes(1024 * used))

    return fault


def child(fault: Fault | None, folder: Path, settings: dict[str, Any]) -> None:
    sys.stdout = sys.stderr = (folder / "messages").open("a", buffering=1)
    logging.basicConfig(stream=sys.stderr, force=True)
    if "num_workers" not in settings:  # whose sockets lie there, with names of at most 108 bytes
        tempfile.tempdir = str(folder / "tmp")
    torch.set_default_dtype(torch.float64)
    calibration: Calibration = dict(pico_calibration())
    if fault is not None:
        fault(calibration, folder)
    algorithm = CrossMeanAlgorithm(**SETTINGS | settings)
    algorithm.run(pico_experts(), calibration)
    kept = ("hashes", "layers", "warnings")
    (folder / "result.json").write_text(json.dumps({key: algorithm.report[key] for key in kept}))


def merge(folder: Path, fault: Fault | None = None, **settings: Any) -> tuple[int | None, str]:
    """Exit code and messages of a merge; ``disk`` in `folder` is for what it keeps, ``tmp`` for temporary files."""
    for name in ("disk", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "messages").write_text("")
    process = multiprocessing.get_context("fork").Process(target=child, args=(fault, folder, settings))
    process.start()
    process.join()
    return process.exitcode, (folder / "messages").read_text()


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert merge(folder)[0] == 0
    assert not list((folder / "tmp").iterdir())
    return result_of(folder)


@pytest.mark.parametrize(
    ("fault", "num_stored"),
    [
        *((at_call(count, Checkpoint, "store", kill), count) for count in (0, 1, 4, NUM_GROUPS - 1)),
        *((at_call(count, LinearSystem, "add_task", kill), count // NUM_TASKS) for count in (0, 2, 10)),
        *((at_call(count, LinearSystem, "solve", kill), count) for count in (0, 5)),
        *((at_call(count, sealed, "save_file", tear), count) for count in (0, 4)),
    ],
)
def test_a_killed_merge_goes_on_to_the_same_bits(
    fault: Fault, num_stored: int, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    assert merge(tmp_path, fault, checkpoint_dir=str(folder))[0] == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    assert len(list(folder.glob("group-*.safetensors"))) == num_stored
    assert merge(tmp_path, checkpoint_dir=str(folder))[0] == 0
    assert result_of(tmp_path) == undisturbed
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_ctrl_c_ends_a_merge_that_goes_on_later(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    folder, report = tmp_path / "checkpoint", tmp_path / "report.json"
    fault = at_call(3, LinearSystem, "solve", interrupt)
    code, messages = merge(tmp_path, fault, checkpoint_dir=str(folder), report_path=str(report))
    assert code == 1
    assert "KeyboardInterrupt" in messages
    assert len(list(folder.glob("group-*.safetensors"))) == 3
    assert not list((tmp_path / "tmp").iterdir()), "temporary files are left"
    assert not report.exists()
    assert merge(tmp_path, checkpoint_dir=str(folder))[0] == 0
    assert result_of(tmp_path) == undisturbed


@pytest.mark.parametrize(
    ("event", "num_workers", "message"),
    [
        (unreadable, 0, r"OSError: cannot identify image file 'seven\.png'"),
        (unreadable, 1, r"OSError: .*cannot identify image file 'seven\.png'"),
        (kill, 1, r"RuntimeError: DataLoader worker \(pid\S* \d+\) (exited unexpectedly|is killed)"),
    ],
)
def test_a_loader_that_fails_names_the_task(
    event: Callable[[], None], num_workers: int, message: str, tmp_path: Path
) -> None:
    settings = {"num_workers": num_workers, "report_path": str(tmp_path / "report.json")}
    code, messages = merge(tmp_path, in_loader(event), **settings)
    assert code == 1
    assert re.search(rf"ValueError: The calibration inputs of task 'letters': {message}", messages, re.DOTALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "messages", "tmp"]


def test_a_disk_that_is_full_from_the_beginning_is_an_error_before_long_work(tmp_path: Path) -> None:
    code, messages = merge(tmp_path, small_disk(8, used=8), save_statistics=str(tmp_path / "disk" / "s"))
    assert code == 1
    assert f"No space left on device: '{tmp_path}/disk/s/statistics.json'" in messages
    assert "forwards" not in messages


@pytest.mark.parametrize("kilobytes", [24, 64])
def test_a_full_disk_costs_what_is_kept_on_it_and_not_the_model(
    kilobytes: int, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    settings = {"checkpoint_dir": f"{disk}/c", "save_statistics": f"{disk}/s", "report_path": f"{disk}/report.json"}
    code, messages = merge(tmp_path, small_disk(kilobytes), **settings)
    assert code == 0, messages
    assert "No space left on device" in messages
    assert result_of(tmp_path)["layers"] == undisturbed["layers"]
