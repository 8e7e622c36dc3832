"""Both schedules and every store give the same merge, refuse what cannot be replayed, and leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import oracles
import pytest
import torch
from pico import draw_weights, experts_of, hooks_of, pico_calibration, pico_clip, pico_experts, vectors
from test_networks import Nested
from tolerances import SAME, relative_error, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import (
    AlignmentCriterionAnalyzer,
    CrossMeanAlgorithm,
    CrossStatisticAlgorithm,
    ProgressiveRegMeanAlgorithm,
    RegMeanAlgorithm,
)
from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.course import observe
from fusion_bench_crossmean.coverage import covered_layers
from fusion_bench_crossmean.forwards import WalkError

N = 24
WIDTH = 6
STORES = ("device", "cpu", "disk")
METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "crossmean-0": (CrossMeanAlgorithm, {"path_points": (0,)}),
    "crossmean-1": (CrossMeanAlgorithm, {"path_points": (1,)}),
    "crossmean-path": (CrossMeanAlgorithm, {"path_points": (0, 0.5, 1)}),
    "progressive": (ProgressiveRegMeanAlgorithm, {}),
    "regmean": (RegMeanAlgorithm, {}),
    "cross-statistic": (CrossStatisticAlgorithm, {}),
}


def run(experts: Any, inputs: Any, method: str = "crossmean-path", **settings: Any) -> tuple[dict[str, Tensor], dict]:
    """The merged tensors and the report."""
    kind, own = METHODS[method]
    algorithm = kind(**{"num_calibration_samples": N, "batch_size": 10} | own | settings)
    return algorithm.run(experts, inputs).state_dict(), algorithm.report


def check_replay(experts: Any, inputs: Any, stores: tuple[str, ...] = STORES, **settings: Any) -> dict[str, Tensor]:
    """Replayed from every store, a merge equals the paused one bit for bit, experts stay as they are; returns it."""
    before = {task: {k: v.clone() for k, v in e.state_dict().items()} for task, e in experts.items()}
    paused, report = run(experts, inputs, schedule="paused", **settings)
    assert report["schedule"] == {"kind": "paused", "activation_store": "device"}
    for store in stores:
        replayed, report = run(experts, inputs, schedule="replay", activation_store=store, **settings)
        assert report["schedule"] == {"kind": "replay", "activation_store": store}
        assert state_error(replayed, paused) == 0
    assert all(state_error(expert.state_dict(), before[task]) == 0 for task, expert in experts.items())
    return paused


def exit_code(call: Callable[[], Any]) -> int | None:
    """Of a process of its own that makes this call: memory that is gone would take all the other tests along."""
    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join()
    return process.exitcode


def blocks_of(network: nn.Module, inputs: Tensor, coverage: Any = "mlp") -> list[str | None]:
    with torch.no_grad():
        return observe(network.eval(), Batch(args=(inputs,)), covered_layers(network, coverage)).blocks


# CLIP


@pytest.mark.parametrize(("coverage", "hidden_act"), [("mlp", "gelu"), ("full", "quick_gelu")])
@pytest.mark.parametrize("method", METHODS)
def test_replay_equals_paused(method: str, coverage: str, hidden_act: str) -> None:
    experts = pico_experts(2, hidden_act=hidden_act)
    check_replay(experts, pico_calibration(experts), method=method, coverage=coverage)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("coverage", "path_points"), [("mlp", (1,)), ("full", (0, 0.5, 1))], ids=str)
def test_replay_equals_whole_network(coverage: str, path_points: tuple[float, ...], store: str) -> None:
    experts = pico_experts(2)
    inputs = pico_calibration(experts)
    ours, _ = run(
        experts, inputs, schedule="replay", activation_store=store, coverage=coverage, path_points=path_points
    )
    groups = oracles.clip_groups(experts["digits"], coverage)
    assert state_error(ours, oracles.whole_network(experts, inputs, groups, path_points=path_points)) < SAME


@pytest.mark.parametrize("batch_size", [3, 7, 24])
def test_replay_equals_paused_whatever_the_batches(batch_size: int) -> None:
    """7 leaves a last batch of 3."""
    experts = pico_experts(2)
    merged = check_replay(experts, pico_calibration(experts), batch_size=batch_size, coverage="full")
    whole, _ = run(experts, pico_calibration(experts), batch_size=24, coverage="full", schedule="paused")
    assert state_error(merged, whole) < SAME


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_replay_drops_the_same_tokens(coverage: str) -> None:
    experts = pico_experts(2)
    merged = check_replay(experts, pico_calibration(experts), token_dropout=0.4, coverage=coverage, batch_size=7)
    whole, _ = run(experts, pico_calibration(experts), coverage=coverage, schedule="paused")
    assert state_error(merged, whole) > 1e-3


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_replay_finds_the_blocks_of_a_nested_layout(coverage: str) -> None:
    experts = {task: Nested(expert) for task, expert in pico_experts(2).items()}
    images = pico_calibration(experts)
    assert None not in blocks_of(experts["digits"], images["digits"][:2], coverage)
    check_replay(experts, images, coverage=coverage)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_the_criterion_is_the_same_under_both_schedules(coverage: Any, store: Any) -> None:
    experts, reports = pico_experts(), []
    for settings in ({"schedule": "paused"}, {"schedule": "replay", "activation_store": store}):
        analyzer = AlignmentCriterionAnalyzer(
            num_calibration_samples=N,
            batch_size=7,
            coverage=coverage,
            **settings,  # type: ignore[arg-type]
        )
        analyzer.run(experts, pico_calibration())
        reports.append(analyzer.report)
    paused, replayed = reports
    assert replayed["schedule"]["kind"] == "replay"
    assert paused["rho"] < 0.99
    for key in ("rho", "prefix_drift", "per_task", "layers"):
        assert paused[key] == replayed[key]


# Nothing left behind


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x.tanh()).tanh())


class Holding(nn.Module):
    """Blocks whose every activation is watched by a weak reference; it fails where the test says."""

    watched: ClassVar[list[weakref.ref]] = []
    fails: ClassVar[Callable[[], None]] = lambda: None

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))
        self.blocks[1].second.register_forward_pre_hook(lambda *_: type(self).fails())

    def forward(self, x: Tensor) -> Tensor:
        activations = [x * 1]
        for block in self.blocks:
            self.watched.append(weakref.ref(activations[-1]))
            activations.append(block(activations[-1]))
        return activations[-1]


class Watched(CrossMeanAlgorithm):
    """Keeps the networks, and looks at the temporary files at every layer."""

    def networks(self, *args: Any) -> Any:
        self.kept = super().networks(*args)
        self.most_files = 0
        return self.kept

    def linear_system(self, **options: Any) -> Any:
        self.most_files = max(self.most_files, len(list(Path(tempfile.gettempdir()).glob("crossmean-activations-*/*"))))
        assert any(reference() is not None for reference in Holding.watched)
        return super().linear_system(**options)


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def fail_at(count: int, error: type[BaseException]) -> Callable[[], None]:
    calls = []

    def fails() -> None:
        calls.append(1)
        if len(calls) == count:
            raise error

    return fails


@pytest.mark.parametrize("ends", ["success", "solve", "first forward", "a replay", "interrupted"])
@pytest.mark.parametrize("store", ["paused", *STORES])
def test_nothing_is_left_however_a_merge_ends(
    store: str, ends: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Holding, "watched", [])
    count = {"first forward": 1, "a replay": 8, "interrupted": 8}.get(ends, 10**6)
    error = KeyboardInterrupt if ends == "interrupted" else ZeroDivisionError
    monkeypatch.setattr(Holding, "fails", staticmethod(fail_at(count, error)))
    schedule = {"schedule": "paused"} if store == "paused" else {"schedule": "replay", "activation_store": store}
    method = Watched(num_calibration_samples=N, batch_size=10, coverage="full", **schedule)  # type: ignore[arg-type]
    if ends == "solve":
        solve = method.linear_system

        def fail(**options: Any) -> Any:
            if options["name"] == "blocks.1.second":
                raise ZeroDivisionError
            return solve(**options)

        method.linear_system = fail  # type: ignore[method-assign]
    experts = experts_of(Holding, 2)
    hooks = len(list(hooks_of(experts["digits"])))
    with without_gc():
        try:
            method.run(experts, vectors(experts))
            assert ends == "success"
        except (WalkError, ZeroDivisionError, KeyboardInterrupt):
            assert ends != "success"
        assert Holding.watched
        assert not [reference for reference in Holding.watched if reference() is not None]
        for network in (method.kept.runner, method.kept.merged, *experts.values()):
            assert len(list(hooks_of(network))) == hooks
    assert bool(method.most_files) == (store == "disk" and ends != "first forward")
    assert not list(tmp_path.iterdir())


# Switches and precision


class Residuals(nn.Module):
    """Opens autocast and switches gradients on around its blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = block(x)
            return x


def switches() -> tuple[Any, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
        torch.get_default_dtype(),
    )


@pytest.mark.float32
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("schedule", ["paused", "replay"])
@pytest.mark.parametrize("precision", ["full", "mixed"])
def test_switches_are_as_before_after_a_merge(precision: str, schedule: str, fails: bool) -> None:
    """Each of them is unlike torch's default before."""
    experts = experts_of(lambda seed: Residuals(seed), 2)
    inputs = vectors(experts)
    if fails:
        experts["digits"].blocks[1].second.weight.data.fill_(1e38)  # type: ignore[index, union-attr]
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            before = switches()
            with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
                run(experts, inputs, precision=precision, schedule=schedule, coverage="full")
            assert switches() == before
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")


@pytest.mark.float32
@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_mixed_precision_stays_close_to_full(coverage: str) -> None:
    experts, inputs = pico_experts(), pico_calibration()
    full, _ = run(experts, inputs, coverage=coverage)
    merged, report = run(experts, inputs, coverage=coverage, precision="mixed")
    assert report["settings"]["precision"] == "mixed"
    assert all(tensor.dtype == full[name].dtype for name, tensor in merged.items())
    assert 1e-5 < state_error(merged, full) < 5e-2
    replayed, _ = run(experts, inputs, coverage=coverage, precision="mixed", schedule="replay", activation_store="disk")
    assert state_error(replayed, merged) == 0
    unsolved = [key for key in full if "weight" not in key and full[key].is_floating_point()]
    assert all(relative_error(merged[key], full[key]) == 0 for key in unsolved)


def test_pico_clip_has_blocks_around_all_its_layers() -> None:
    """Otherwise nothing above would be replayed."""
    assert None not in blocks_of(pico_clip(), pico_calibration()["digits"][:2], "full")
