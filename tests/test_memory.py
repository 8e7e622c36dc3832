"""Which schedule is chosen, what a walk is expected to need, and that a budget is kept."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import pico_calibration, pico_experts
from torch import nn

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.course import Course
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.linear_system import bytes_needed
from fusion_bench_crossmean.memory import GIB, MemoryUse, free_in_group, memory_of
from fusion_bench_crossmean.recorder import Stop
from fusion_bench_crossmean.schedule import Need, Schedule, choose_schedule

PAUSED, REPLAY = Schedule("paused"), Schedule("replay")
CPU, DISK = Schedule("replay", "cpu"), Schedule("replay", "disk")


def course(obstacle: str | None = None) -> Course:
    """Two groups in one block: 100 bytes wait in front of the block, 1000 in front of the second group."""
    stops = [
        Stop("block", frozenset({"stem.weight"}), 100),
        Stop("block.a", frozenset(), 300),
        Stop("block.b", frozenset({"block.a.weight", "block.a.bias"}), 1000),
    ]
    groups = [LayerGroup(("block.a",)), LayerGroup(("block.b",))]
    return Course(groups, stops, ["block", "block"], peak=2000, batch_size=4, obstacle=obstacle)


TENSORS = {
    "stem.weight": torch.zeros(10, 10, dtype=torch.float32),
    "block.a.weight": torch.zeros(3, 4, dtype=torch.float32),
    "block.a.bias": torch.zeros(3, dtype=torch.float32),
    "block.b.weight": torch.zeros(5, 3, dtype=torch.float32),
}
#: 10 batches of 4 inputs, with 3 points each.
NEED = Need(course(), num_batches=10, num_points=3, other=500)


def use(free: float) -> MemoryUse:
    return MemoryUse(used=GIB, limit=GIB + int(free))


def chosen(free: float, need: Need = NEED, **settings: Any) -> Schedule:
    defaults = {"kind": "auto", "store": "auto", "on_host": False, "is_budget": True}
    return replace(choose_schedule(need, use(free), **defaults | settings), returns_memory=False)


# What is needed


def test_the_need_counts_batches_of_the_observed_size_and_the_largest_stretch_and_system() -> None:
    need = Need.of(course(), num_inputs=40, num_points=3, tensors=TENSORS)
    assert need.num_batches == 10
    assert need.num_points == 3
    assert need.other == 3 * 400 + max(bytes_needed(4, 3), bytes_needed(3, 5))


def test_a_stretch_counts_no_tensor_that_is_not_known() -> None:
    """Such as a buffer outside the state dict, which is never loaded."""
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != "stem.weight"}
    need = Need.of(course(), num_inputs=6, num_points=1, tensors=tensors)
    assert need.num_batches == 1.5
    assert need.other == (12 + 3) * 4 + max(bytes_needed(4, 3), bytes_needed(3, 5))


def test_every_forward_needs_memory_where_it_waits() -> None:
    """30 forwards with 1000 bytes when paused; with 100 when replayed, and one per point inside the block."""
    assert NEED.bytes_for(PAUSED) >= 30 * 1000 + 2000 + 500
    assert NEED.bytes_for(PAUSED) < 2 * (30 * 1000 + 2000 + 500)
    assert NEED.bytes_for(REPLAY) >= 30 * 100 + 3 * 1000 + 2000 + 500
    assert NEED.bytes_for(REPLAY) < NEED.bytes_for(PAUSED)
    assert NEED.bytes_for(CPU) < NEED.bytes_for(REPLAY)
    assert NEED.bytes_for(DISK) == NEED.bytes_for(CPU)


# The choice


def test_the_first_schedule_that_fits_is_chosen() -> None:
    needs = [NEED.bytes_for(schedule) for schedule in (PAUSED, REPLAY, CPU)]
    assert chosen(needs[0]) == PAUSED
    assert chosen(needs[0] - 1) == REPLAY
    assert chosen(needs[1]) == REPLAY
    assert chosen(needs[1] - 1) == CPU
    assert chosen(needs[2]) == CPU
    with pytest.raises(MemoryError):
        chosen(needs[2] - 1)


@pytest.mark.parametrize(("free", "on_host", "returns"), [(1.5, True, True), (1.5, False, False), (3, True, False)])
def test_freed_memory_goes_back_where_memory_is_short(free: float, on_host: bool, returns: bool) -> None:
    schedule = choose_schedule(
        NEED, use(free * NEED.bytes_for(PAUSED)), kind="paused", store="auto", on_host=on_host, is_budget=False
    )
    assert schedule.returns_memory is returns


def test_on_the_host_its_memory_is_no_other_place() -> None:
    assert chosen(NEED.bytes_for(CPU), on_host=True) == DISK
    assert chosen(1e9, on_host=True, store="cpu") == CPU
    assert NEED.bytes_for(CPU, on_host=True) == NEED.bytes_for(REPLAY) > NEED.bytes_for(CPU)
    with pytest.raises(MemoryError):
        chosen(NEED.bytes_for(REPLAY) - 1, on_host=True, store="cpu")


@pytest.mark.parametrize(
    ("kind", "store", "roomy", "tight", "on_host"),
    [
        *(
            (*case, on_host)
            for on_host in (False, True)
            for case in (
                ("auto", "auto", PAUSED, DISK),
                ("auto", "device", PAUSED, REPLAY),
                ("auto", "disk", DISK, DISK),
                ("paused", "auto", PAUSED, PAUSED),
                ("paused", "device", PAUSED, PAUSED),
                ("replay", "auto", REPLAY, DISK),
                ("replay", "device", REPLAY, REPLAY),
                ("replay", "disk", DISK, DISK),
            )
        ),
        *((kind, "cpu", CPU, CPU, on_host) for kind in ("auto", "replay") for on_host in (False, True)),
    ],
)
def test_settings_leave_the_schedules_that_they_name(
    kind: str, store: str, roomy: Schedule, tight: Schedule, on_host: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"kind": kind, "store": store, "on_host": on_host, "is_budget": False}
    assert chosen(1e9, **settings) == roomy
    assert "may run out of memory" not in caplog.text
    with caplog.at_level(logging.WARNING):
        assert chosen(0, **settings) == tight
    assert "may run out of memory: lower num_calibration_samples or batch_size" in caplog.text


@pytest.mark.parametrize("is_budget", [False, True])
@pytest.mark.parametrize("store", ["auto", "device"])
def test_blocks_that_cannot_be_replayed_are_not(store: str, is_budget: bool) -> None:
    need = Need(course("'block' writes into its own input"), 10, 3, 500)
    assert chosen(1e9, need, store=store) == PAUSED
    if is_budget:
        with pytest.raises(MemoryError, match=r"\(paused, activations on device\)"):
            chosen(NEED.bytes_for(REPLAY), need, store=store)
    else:
        assert chosen(0, need, store=store, is_budget=False) == PAUSED


@pytest.mark.parametrize("store", ["cpu", "disk"])
@pytest.mark.parametrize("is_budget", [False, True])
def test_a_store_for_blocks_that_cannot_be_replayed_is_no_crash(
    store: str, is_budget: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` falls back to paused, as it does without a store."""
    need = Need(course("'block' writes into its own input"), 10, 3, 500)
    with caplog.at_level(logging.WARNING):
        assert chosen(1e9, need, store=store, is_budget=is_budget) == PAUSED
    assert f"activation_store={store} has nothing to store: 'block' writes into its own input" in caplog.text


def test_blocks_that_cannot_be_replayed_stay_a_choice_where_replay_was_asked_for() -> None:
    """The walker refuses them with the reason."""
    assert chosen(1e9, Need(course("reason"), 10, 3, 500), kind="replay") == REPLAY


def test_a_budget_that_nothing_fits_is_refused_with_the_numbers() -> None:
    need = Need(course(), num_batches=10, num_points=3, other=3 * GIB)
    with pytest.raises(MemoryError) as refused:
        chosen(GIB, need)
    assert "needs about 4.00 GiB (replay, activations on cpu), the budget max_memory_gib is 2.00; 1.00 GiB" in str(
        refused.value
    )
    assert "Raise it, or lower num_calibration_samples or batch_size, or set precision=mixed." in str(refused.value)
    with pytest.raises(MemoryError, match="leave schedule and activation_store at auto"):
        chosen(GIB, need, kind="replay")


def test_below_what_is_in_use_no_setting_is_advised() -> None:
    with pytest.raises(
        MemoryError, match=r"1\.00 GiB are in use before it starts\. That is more than the budget already"
    ):
        chosen(-GIB / 2)


# What there is


@pytest.mark.parametrize(
    ("limit", "current", "free"),
    [("1000\n", "300\n", 750), ("max\n", "300\n", 2**63 - 1), ("1000", None, 2**63 - 1), (None, "300", 2**63 - 1)],
)
def test_free_memory_of_a_container(limit: str | None, current: str | None, free: int, tmp_path: Path) -> None:
    stat = "anon 200\ninactive_file 50\n"
    for name, text in (("memory.max", limit), ("memory.current", current), ("memory.stat", stat)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert free_in_group(tmp_path) == free


def test_a_budget_is_the_limit_and_without_one_most_of_what_is_free_is() -> None:
    budget = memory_of(torch.device("cpu"), 1.5)
    assert budget.limit == 1.5 * GIB
    assert budget.free == budget.limit - budget.used
    assert 0 < budget.used < 64 * GIB
    free = memory_of(torch.device("cpu"))
    assert 0 < free.free < 2**62


# Settings


@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_a_store_for_paused_forwards_is_refused(store: Any) -> None:
    with pytest.raises(ValueError, match=f"activation_store={store} needs schedule=replay or auto"):
        CrossMeanAlgorithm(schedule="paused", activation_store=store)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_memory_gib": -1}, r"max_memory_gib must be a number in \[0, .*\], not -1"),
        ({"max_memory_gib": "2"}, r"max_memory_gib must be a number in \[0, .*\], not '2'"),
        ({"schedule": "fast"}, "schedule must be one of auto, paused, replay, not 'fast'"),
        ({"activation_store": "gpu"}, "activation_store must be one of auto, device, cpu, disk, not 'gpu'"),
        ({"precision": "half"}, "precision must be one of full, mixed, not 'half'"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_choices(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CrossMeanAlgorithm(**settings)


def test_a_budget_that_is_too_small_is_refused_before_anything_is_solved() -> None:
    class Watched(CrossMeanAlgorithm):
        def linear_system(self, **options: Any) -> Any:
            pytest.fail("a layer was begun")

    with pytest.raises(MemoryError, match=r"the budget max_memory_gib is 0\.01; \d+\.\d\d GiB are in use"):
        Watched(num_calibration_samples=24, max_memory_gib=0.01).run(pico_experts(2), pico_calibration())


# The budget is kept

MERGE = """
import json, sys
import psutil, torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel
from fusion_bench_crossmean import CrossMeanAlgorithm

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

torch.set_num_threads(1)
experts = {}
for task in "abcd":
    torch.manual_seed(ord(task))
    config = CLIPVisionConfig(hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
                              image_size=64, patch_size=8)
    experts[task] = CLIPVisionModel(config)
inputs = {task: torch.randn(128, 3, 64, 64) for task in experts}
solved = []

class Counted(CrossMeanAlgorithm):
    def linear_system(self, **options):
        solved.append(1)
        return super().linear_system(**options)

before = psutil.Process().memory_info().rss
assert peak() < before + 2**26
method = Counted(num_calibration_samples=128, **json.loads(sys.argv[1]))
error = None
try:
    method.run(experts, inputs)
except MemoryError as refused:
    error = str(refused)
schedule = method.report.get("schedule")
print(json.dumps({"before": before, "peak": peak(), "schedule": schedule, "error": error, "solved": len(solved)}))
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


def merge(**settings: Any) -> dict[str, Any]:
    """A merge in a process of its own: bytes in use before, at most, and what was done."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", MERGE, json.dumps({"coverage": "full"} | settings)]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def paused() -> dict[str, Any]:
    result = merge(schedule="paused")
    assert result["peak"] - result["before"] > 0.7 * GIB
    return result


@needs_proc
@pytest.mark.parametrize(("part", "kinds"), [(0.45, {"replay"}), (0.75, {"paused", "replay"})])
def test_a_budget_that_is_accepted_is_kept(part: float, kinds: set[str], paused: dict[str, Any]) -> None:
    """It lies between what is in use before and the peak of paused forwards that have all the memory they want.

    A little below that peak it is the heap's holes that must not be there, further down the activations.
    """
    budget = paused["before"] + part * (paused["peak"] - paused["before"])
    result = merge(max_memory_gib=budget / GIB)
    assert result["error"] is None
    assert result["peak"] <= budget, f"{result['schedule']}: {(result['peak'] - budget) / GIB:.2f} GiB over the budget"
    assert result["schedule"]["kind"] in kinds


@needs_proc
def test_a_budget_that_cannot_be_kept_is_refused_at_once(paused: dict[str, Any]) -> None:
    budget = paused["before"] + 0.05 * (paused["peak"] - paused["before"])
    result = merge(max_memory_gib=budget / GIB)
    assert "budget max_memory_gib" in result["error"]
    assert result["solved"] == 0
    assert result["peak"] < paused["peak"]


def test_the_script_above_is_about_a_model_of_this_size() -> None:
    """Its widest activation, of 32 images of 65 tokens, takes 8 MB: more than an allocator keeps in its heap."""
    assert 32 * 65 * 1024 * 4 > 8e6
    assert nn.Linear(256, 1024, dtype=torch.float32).weight.nbytes == GIB / 1024
