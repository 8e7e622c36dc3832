"""The command that tries bad inputs: it counts right, and it sees what it is there to see."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli import ROOT, run
from torch import nn

KINDS = (
    *("settings", "outputs", "pools", "tensors", "modules"),
    *("inputs", "text inputs", "checkpoints", "statistics", "expert files"),
)
COUNT = 60


@pytest.fixture
def bad_inputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The command as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    threads = torch.get_num_threads()
    yield importlib.import_module("bad_inputs")
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if name.startswith(("bad_inputs", "bad_input_kinds")):
            del sys.modules[name]


def rows_of(output: str) -> dict[str, list[int]]:
    """Kind -> the numbers of its row in the table."""
    lines = output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("kind "))
    found = {}
    for line in lines[start + 1 :]:
        name, *numbers = line.rsplit(maxsplit=5)
        found[name] = [int(number) for number in numbers]
        if name == "all":
            break
    return found


def test_every_case_is_counted_once_and_none_fails(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "bad_inputs.py")
    command = [sys.executable, script, "--count", str(COUNT), "--seed", "0", "--kind", *KINDS]
    process = run(command, tmp_path, TMPDIR=str(tmp_path))
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    rows = rows_of(process.stdout)
    assert set(rows) == {*KINDS, "all"}
    assert all(sum(outcomes) == cases for cases, *outcomes in rows.values())
    assert [sum(column) for column in zip(*(rows[kind] for kind in KINDS), strict=True)] == rows["all"]
    assert rows["all"][0] == COUNT
    assert rows["all"][-1] == 0
    assert not list(tmp_path.iterdir()), "something is left"


def raising(error: Exception) -> Callable[[Path], Any]:
    def run(_: Path) -> Any:
        raise error

    return run


def returning(value: Any) -> Callable[[Path], Any]:
    return lambda _: value


def leaving(name: str) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        (folder / name).write_text("half")
        return nn.Linear(2, 2)

    return run


def torch_error(_: Path) -> Any:
    return torch.ones(2) @ torch.ones(3)


def value_error_of_torch(_: Path) -> Any:
    return nn.Conv1d(1, 1, 1, padding_mode="odd")


def endless(_: Path) -> Any:
    while True:
        time.sleep(0.01)


def not_finite() -> nn.Module:
    network = nn.Linear(2, 2)
    nn.init.constant_(network.bias, float("nan"))
    return network


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (raising(RuntimeError("on purpose")), "RuntimeError: on purpose"),
        (raising(ValueError("not said by the package")), "ValueError: not said by the package"),
        (torch_error, "RuntimeError: inconsistent tensor size"),
        (value_error_of_torch, "ValueError: padding_mode must be one of"),
        (endless, "a hang"),
        (returning(None), "no model, and no error"),
        (returning(7), "a int instead of a model"),
        (returning(nn.Linear(2, 2, bias=False)), "other keys: ['bias']"),
        (returning(nn.Linear(3, 2)), "weight is on cpu in the shape (2, 3), not (2, 2)"),
        (returning(not_finite()), "bias is not finite"),
        (leaving(".report.abcd1234.json"), "a half-written file is left"),
        (leaving("report.json"), "report.json is not whole"),
        (leaving("group-0000.safetensors"), "group-0000.safetensors is not whole"),
        (leaving("../../../tmp/x"), "a temporary file is left: x"),
    ],
)
def test_what_may_not_come_of_a_case_is_a_failure(
    act: Callable[[Path], Any],
    reason: str,
    bad_inputs: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(_: Any, folder: Path) -> Any:
        return bad_inputs.Attempt("broken", lambda: act(folder), nn.Linear(2, 2))

    monkeypatch.setitem(bad_inputs.KINDS, "broken", broken)
    monkeypatch.setattr(bad_inputs, "LIMIT", 1)
    counts = bad_inputs.run_cases(["broken"], 1, 7)
    assert counts["broken"] == {bad_inputs.FAILED: 1}
    assert f"--kind broken --seed 7 --count 1: broken: {reason}" in capsys.readouterr().out


def test_a_right_result_and_a_clear_error_are_told_apart(bad_inputs: ModuleType) -> None:
    def attempt(experts: Any) -> Any:
        made = bad_inputs.Attempt
        algorithm = bad_inputs.fusion_bench_crossmean.CrossMeanAlgorithm(num_calibration_samples=4, coverage="full")
        inputs = {"a": torch.randn(4, 2)}
        return made("one expert", lambda: algorithm.run(experts, inputs), next(iter(experts.values()), None))

    with bad_inputs.quiet():
        assert bad_inputs.classify(attempt({"a": nn.Sequential(nn.Linear(2, 2))})).verdict == bad_inputs.RIGHT
        clear = bad_inputs.classify(attempt({}))
    assert clear.verdict == bad_inputs.CLEAR
    assert clear.reason.startswith("ValueError: The pool has no experts")
