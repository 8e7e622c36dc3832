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
from pico import PicoMLP, PicoText, draw_weights, experts_of, hooks_of, pico_calibration, pico_clip, pico_experts
from pico import vectors as pico_vectors
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
            num_calibration_samples=N, batch_size=7, coverage=coverage, **settings  # type: ignore[arg-type]
        )
        analyzer.run(experts, pico_calibration())
        reports.append(analyzer.report)
    paused, replayed = reports
    assert replayed["schedule"]["kind"] == "replay"
    assert paused["rho"] < 0.99
    for key in ("rho", "prefix_drift", "per_task", "layers"):
        assert paused[key] == replayed[key]


# Other models


class Block(nn.Module):
    """Takes two more tensors and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.mlp(self.norm(x) * scale + shift), scale + 1


class Scripted(nn.Module):
    """Two blocks, a layer outside any, two parameters for the blocks, and a forward written by the test."""

    def __init__(self, seed: int, script: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList((Writing if script is writes_into_its_input else Block)() for _ in range(2))
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))
        self.script = script

    def forward(self, x: Tensor) -> Any:
        return self.script(self, x)


def further_arguments(net: Scripted, x: Tensor) -> Tensor:
    scale, shift = 1 + x.square().mean(-1, keepdim=True), x.roll(1, -1) * net.shift
    for block in net.blocks:
        x, scale = block(x, scale, shift=shift)
    return net.mlp(x)


def views_as_arguments(net: Scripted, x: Tensor) -> Tensor:
    """Both lie in one tensor."""
    both = torch.cat([x * net.scale, x + net.shift], -1)
    for block in net.blocks:
        x, _ = block(x, both[..., :WIDTH], shift=both[..., WIDTH:])
    return net.mlp(x)


def the_input_as_argument(net: Scripted, x: Tensor) -> Tensor:
    given = x
    for block in net.blocks:
        x, _ = block(x, given, shift=given)
    return net.mlp(x)


def gradients_off(net: Scripted, x: Tensor) -> Tensor:
    with torch.no_grad():
        return further_arguments(net, x)


def gradients_on(net: Scripted, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return further_arguments(net, x)


def bfloat16(net: Scripted, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return further_arguments(net, x)


def parameters_as_arguments(net: Scripted, x: Tensor) -> Tensor:
    for block in net.blocks:
        x, _ = block(x, net.scale, shift=net.shift)
    return net.mlp(x)


def parts_of_parameters_as_arguments(net: Scripted, x: Tensor) -> Tensor:
    for block in net.blocks:
        x, _ = block(x, net.scale[:], shift=net.shift.unsqueeze(0))
    return net.mlp(x)


def scripted(script: Callable[[Any, Tensor], Any], num_tasks: int = 2) -> dict[str, nn.Module]:
    return experts_of(lambda seed: Scripted(seed, script), num_tasks)


@pytest.mark.parametrize("coverage", ["mlp", "full"])
@pytest.mark.parametrize(
    "script", [further_arguments, views_as_arguments, the_input_as_argument, gradients_off, gradients_on]
)
def test_replay_gives_a_block_its_arguments_and_modes(script: Any, coverage: str) -> None:
    experts = scripted(script)
    inputs = pico_vectors(experts)
    layers = [["blocks.0.mlp.0"], ["blocks.0.mlp.2"], ["blocks.1.mlp.0"], ["blocks.1.mlp.2"], ["mlp"]]
    layers = layers[:4] if coverage == "mlp" else layers

    def check() -> None:
        ours = check_replay(experts, inputs, coverage=coverage, batch_size=7)
        assert state_error(ours, oracles.whole_network(experts, inputs, layers, path_points=(0, 0.5, 1))) < SAME

    assert exit_code(check) == 0


@pytest.mark.float32
def test_replay_runs_a_block_in_the_autocast_of_the_model() -> None:
    ours = check_replay(scripted(bfloat16), pico_vectors(("digits", "letters")))
    plain, _ = run(scripted(further_arguments), pico_vectors(("digits", "letters")))
    assert state_error(ours, plain) > 1e-4


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("script", [parameters_as_arguments, parts_of_parameters_as_arguments])
def test_replay_gives_a_block_the_parameters_that_the_model_passes_on(script: Any, store: str) -> None:
    experts = scripted(script)
    assert exit_code(lambda: check_replay(experts, pico_vectors(experts), stores=(store,), batch_size=7)) == 0


@pytest.mark.parametrize("store", STORES)
def test_replay_leaves_layers_outside_any_block_where_they_are(store: str) -> None:
    experts = experts_of(lambda seed: PicoMLP(seed=seed), 2)
    inputs = pico_vectors(experts)
    assert blocks_of(experts["digits"], inputs["digits"]) == [None] * 3
    assert exit_code(lambda: check_replay(experts, inputs, stores=(store,))) == 0


@pytest.mark.parametrize("store", STORES)
def test_replay_does_without_padding(store: str) -> None:
    """Nothing of this text encoder is a block, and its pooler receives an activation of its own."""
    experts = experts_of(lambda seed: text_encoder(seed), 2)
    inputs = {task: texts(index) for index, task in enumerate(experts)}
    whole = {task: data | {"attention_mask": torch.ones(N, 5, dtype=torch.long)} for task, data in inputs.items()}

    def check() -> None:
        masked = check_replay(experts, inputs, stores=(store,), coverage="full", batch_size=7)
        unmasked, _ = run(experts, whole, coverage="full")
        assert state_error(masked, unmasked) > 1e-3

    assert exit_code(check) == 0


def text_encoder(seed: int) -> PicoText:
    network = PicoText().to(torch.get_default_dtype())
    network.load_state_dict(draw_weights(network, seed))
    return network


def texts(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (N, 1), generator=generator)
    return {
        "input_ids": torch.randint(0, 20, (N, 5), generator=generator),
        "attention_mask": (torch.arange(5) < lengths).long(),
    }


class MaskedBlocks(nn.Module):
    """Blocks on tokens, which get the attention mask."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, scale = self.embedding(input_ids), attention_mask.unsqueeze(-1).to(torch.get_default_dtype())
        shift = (x * scale).sum(1, keepdim=True) / scale.sum(1, keepdim=True)
        for block in self.blocks:
            x, _ = block(x, scale, shift=shift)
        return x


def test_replay_leaves_padding_out_of_blocks() -> None:
    experts = experts_of(MaskedBlocks, 2)
    inputs = {task: texts(index) for index, task in enumerate(experts)}
    check_replay(experts, inputs, batch_size=7, token_dropout=0.2)


class Stacked(nn.Module):
    """Blocks in `nn.Sequential`, one nested in another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = nn.Sequential(Residual(), nn.Sequential(Residual(), nn.Tanh()), Residual())
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x.tanh()).tanh())


def test_replay_finds_blocks_in_a_sequential() -> None:
    experts = experts_of(Stacked, 2)
    blocks = blocks_of(experts["digits"], pico_vectors()["digits"], "full")
    assert blocks == ["net.0"] * 2 + ["net.1.0"] * 2 + ["net.2"] * 2
    check_replay(experts, pico_vectors(experts), coverage="full")


# Blocks that cannot be replayed


def writes_into_its_input(net: Scripted, x: Tensor) -> Tensor:
    return further_arguments(net, x * 1)


class Writing(Block):
    """Changes its input once its layers have been reached."""

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        new, scale = super().forward(x, scale, shift=shift)
        return new + x.mul_(1.1), scale


def called_twice(net: Scripted, x: Tensor) -> Tensor:
    first, second = net.blocks
    x, scale = first(x, x.square(), shift=x)
    forward, second.forward = second.forward, lambda x: x * 2
    x = second(x)
    second.forward = forward
    x, _ = second(x, scale, shift=x)
    return net.mlp(x)


def from_without(net: Scripted, x: Tensor) -> Tensor:
    first, second = net.blocks
    x, scale = first(x, x.square(), shift=x)
    return net.mlp(second.mlp(x * scale))


OBSTACLES = {
    writes_into_its_input: r"'blocks\.0', 'blocks\.1' writes into its own input",
    called_twice: r"'blocks\.1' is called more than once",
    from_without: r"'blocks\.1\.mlp\.0', 'blocks\.1\.mlp\.2' is not reached from within its block",
}


@pytest.mark.parametrize("script", OBSTACLES)
def test_blocks_that_cannot_be_replayed_are_refused_with_the_reason(script: Any) -> None:
    experts = scripted(script)
    with pytest.raises(WalkError, match=f"cannot be replayed: {OBSTACLES[script]}.*schedule=paused"):
        run(experts, pico_vectors(experts), schedule="replay")
    assert not [hook for expert in experts.values() for hook in hooks_of(expert)]


@pytest.mark.parametrize("settings", [{}, {"max_memory_gib": 1000}, {"activation_store": "device"}], ids=str)
@pytest.mark.parametrize("script", OBSTACLES)
def test_blocks_that_cannot_be_replayed_are_paused_by_default(script: Any, settings: dict[str, Any]) -> None:
    experts = scripted(script)
    merged, report = run(experts, pico_vectors(experts), schedule="auto", **settings)
    assert report["schedule"]["kind"] == "paused"
    groups = [["blocks.0.mlp.0"], ["blocks.0.mlp.2"], ["blocks.1.mlp.0"], ["blocks.1.mlp.2"]]
    theirs = oracles.whole_network(experts, pico_vectors(experts), groups, path_points=(0, 0.5, 1))
    assert state_error(merged, theirs) < SAME


# Nothing left behind


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

    def linear_system(self, *args: Any) -> Any:
        self.most_files = max(self.most_files, len(list(Path(tempfile.gettempdir()).glob("crossmean-activations-*/*"))))
        assert any(reference() is not None for reference in Holding.watched)
        return super().linear_system(*args)


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

        def fail(group: Any, workspace: Any) -> Any:
            if group.name == "blocks.1.second":
                raise ZeroDivisionError
            return solve(group, workspace)

        method.linear_system = fail  # type: ignore[method-assign]
    experts = experts_of(Holding, 2)
    hooks = len(list(hooks_of(experts["digits"])))
    with without_gc():
        try:
            method.run(experts, pico_vectors(experts))
            assert ends == "success"
        except (ZeroDivisionError, KeyboardInterrupt):
            assert ends != "success"
        assert Holding.watched
        assert not [reference for reference in Holding.watched if reference() is not None]
        for network in (method.kept.runner, method.kept.merged, *experts.values()):
            assert len(list(hooks_of(network))) == hooks
    assert bool(method.most_files) == (store == "disk" and ends != "first forward")
    assert not list(tmp_path.iterdir())


# Switches and precision


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
    experts = scripted(bfloat16)
    inputs = pico_vectors(experts)
    if fails:
        experts["digits"].blocks[1].mlp[2].weight.data.fill_(1e38)  # type: ignore[index, union-attr]
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
