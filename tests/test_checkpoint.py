"""A merge that ended anywhere goes on where it was, to the same bits; what does not belong to it is refused."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import pico_calibration, pico_experts
from torch import Tensor

from fusion_bench_crossmean import CrossMeanAlgorithm, LOTCrossMeanAlgorithm, RegMeanAlgorithm, checkpoint, sealed
from fusion_bench_crossmean.checkpoint import Checkpoint
from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.memory import GIB, MemoryUse
from fusion_bench_crossmean.method import calibrated
from fusion_bench_crossmean.pseudo_inverse import PseudoInverseSystem
from fusion_bench_crossmean.schedule import Schedule

NUM_GROUPS = 8  # of the pico CLIP with two blocks, under full coverage
SETTINGS = {"coverage": "full", "num_calibration_samples": 8, "batch_size": 3}


class Stopped(Exception):
    """Stands for whatever ends a run."""


def run(folder: Path | None, method: type = CrossMeanAlgorithm, seed: int = 0, **settings: Any) -> dict[str, Any]:
    """The merged tensors and the layers' report rows, everything needed to tell two merges apart."""
    experts, inputs = pico_experts(seed=seed), pico_calibration()
    if method.needs_pretrained:
        experts["_pretrained_"] = pico_experts(num_tasks=1, seed=seed, spread=0.0)["digits"]
    algorithm = method(**SETTINGS | settings, checkpoint_dir=None if folder is None else str(folder))
    merged = algorithm.run(experts, inputs)
    return {"weights": merged.state_dict(), "layers": algorithm.report["layers"], "report": algorithm.report}


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["layers"] == other["layers"]
    assert one["report"]["hashes"] == other["report"]["hashes"]
    for name, tensor in one["weights"].items():
        assert torch.equal(tensor, other["weights"][name]), name


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the groups that are solved from now on."""
    names: list[str] = []
    for system in (LinearSystem, PseudoInverseSystem):
        solve: Callable[..., Any] = system.solve

        def counted(self: LinearSystem, fallback: Tensor, solve: Callable[..., Any] = solve) -> Any:
            names.append(self.name)
            return solve(self, fallback)

        monkeypatch.setattr(system, "solve", counted)
    return names


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends once it has stored so many groups."""
    store = Checkpoint.store

    def stopping(self: Checkpoint, index: int, *arguments: Any) -> None:
        store(self, index, *arguments)
        if index + 1 == count:
            raise Stopped

    monkeypatch.setattr(Checkpoint, "store", stopping)


@pytest.mark.parametrize("count", [1, 3, NUM_GROUPS])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule": "replay", "activation_store": "disk"},
        {"method": RegMeanAlgorithm},
        {"method": LOTCrossMeanAlgorithm},
    ],
    ids=str,
)
def test_a_stopped_merge_goes_on_to_the_same_bits(
    count: int,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    solved: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = run(None, **settings)
    assert len(solved) == NUM_GROUPS
    with monkeypatch.context() as patch:
        stop_after(count, patch)
        with pytest.raises(Stopped):
            run(tmp_path, **settings)
    solved.clear()
    with caplog.at_level(logging.INFO):
        check_same(run(tmp_path, **settings), whole)
    assert len(solved) == NUM_GROUPS - count
    assert f"{count} of {NUM_GROUPS} layer groups are read from {tmp_path}" in caplog.text


def test_a_finished_merge_needs_no_forward(tmp_path: Path, solved: list[str]) -> None:
    first = run(tmp_path)
    solved.clear()
    again = run(tmp_path)
    check_same(again, first)
    assert not solved
    assert again["report"]["seconds"]["forwards"] == 0


def test_another_merge_is_refused_and_says_in_what_it_differs(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ValueError, match=r"settings\.relative_ridge is 0\.0001 there and 0\.01 here"):
        run(tmp_path, relative_ridge=1e-2)
    with pytest.raises(ValueError, match="method is 'CrossMeanAlgorithm' there and 'RegMeanAlgorithm' here"):
        run(tmp_path, RegMeanAlgorithm)
    with pytest.raises(ValueError, match=r"experts\.digits is '\w+' there and '\w+' here"):
        run(tmp_path, seed=1)
    other = pico_calibration(seed=1)
    with pytest.raises(ValueError, match=r"calibration\.letters is"):
        CrossMeanAlgorithm(**SETTINGS, checkpoint_dir=str(tmp_path)).run(pico_experts(), other)


def test_settings_without_effect_do_not_matter(tmp_path: Path, solved: list[str]) -> None:
    run(tmp_path)
    solved.clear()
    run(tmp_path, max_memory_gib=1000.0, report_path=str(tmp_path / "report.json"))
    assert not solved


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    """One bit of the weight."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def exchange(path: Path) -> None:
    """Another group's file in its place."""
    shutil.copy(path.with_name("group-0000.safetensors"), path)


@pytest.mark.parametrize("damage", [cut, empty, flip, exchange])
def test_a_damaged_group_is_made_again(
    damage: Callable[[Path], None], tmp_path: Path, solved: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(tmp_path)
    solved.clear()
    damage(tmp_path / "group-0003.safetensors")
    check_same(run(tmp_path), whole)
    assert len(solved) == 1
    assert re.search(r"group-0003\.safetensors is (damaged|not what was stored for layer group)", caplog.text)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"identity": {}}'])
def test_a_damaged_manifest_is_an_error(content: str, tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        run(tmp_path)


def test_groups_of_unknown_origin_are_refused(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"group-0000\.safetensors but no manifest"):
        run(tmp_path)


def test_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.05)
    with Checkpoint(tmp_path), pytest.raises(OSError, match="Another run uses checkpoint_dir"):
        run(tmp_path)
    run(tmp_path)


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".group-0000.x7a.safetensors").write_bytes(b"half")
    (tmp_path / ".manifest.x7a.json").write_bytes(b"half")
    (tmp_path / ".settings.json").write_bytes(b"somebody else's")
    run(tmp_path)
    assert [path.name for path in tmp_path.glob(".*")] == [".settings.json"]


def test_a_full_disk_ends_the_checkpoint_and_not_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(None)
    save, calls = sealed.save_file, []

    def failing(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        save(*arguments, **options)

    monkeypatch.setattr(sealed, "save_file", failing)
    check_same(run(tmp_path), whole)
    assert "ends before layer group" in caplog.text
    assert "No space left on device" in caplog.text
    assert len(calls) == 3
    assert len(list(tmp_path.glob("group-*"))) == 2
    assert not list(tmp_path.glob(".*")), "half a file stayed"
    check_same(run(tmp_path), whole)


def test_threads_and_schedule_are_those_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(Stopped):
            run(tmp_path)
    manifest = sealed.read_record(tmp_path / "manifest.json")
    assert manifest["course"] == {"threads": 1, "schedule": vars(Schedule("paused"))}
    manifest["course"]["threads"] = 2
    sealed.write_record(tmp_path / "manifest.json", manifest)
    seen = []
    store = Checkpoint.store
    monkeypatch.setattr(
        Checkpoint, "store", lambda self, *a: (seen.append(torch.get_num_threads()), store(self, *a))[1]
    )
    monkeypatch.setattr(calibrated, "memory_of", lambda *_: MemoryUse(GIB, GIB + 1))  # would choose replay
    with caplog.at_level(logging.INFO):
        found = run(tmp_path)
    assert found["report"]["schedule"]["kind"] == "paused"
    assert set(seen) == {2}
    assert torch.get_num_threads() == 1
    assert "Going on with 2 threads" in caplog.text


def test_half_precision_experts_are_stored_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(folder: Path | None) -> dict[str, Tensor]:
        experts = {task: expert.bfloat16() for task, expert in pico_experts().items()}
        algorithm = CrossMeanAlgorithm(**SETTINGS, checkpoint_dir=None if folder is None else str(folder))
        return algorithm.run(experts, pico_calibration()).state_dict()

    with monkeypatch.context() as patch:
        stop_after(4, patch)
        with pytest.raises(Stopped):
            merge(tmp_path)
    whole = merge(None)
    for name, tensor in merge(tmp_path).items():
        assert torch.equal(tensor, whole[name]), name
