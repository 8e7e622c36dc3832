"""What one observed forward tells: tensors by stretch, bytes held, blocks; no stretch lacks a tensor that it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from pico import draw_weights, experts_of, hooks_of, vectors
from tolerances import SAME, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.course import Course, blocks_around, observe
from fusion_bench_crossmean.forwards import WalkError
from fusion_bench_crossmean.linear_system import SingularSystemError

WIDTH = 6
ROWS = 4
#: Bytes of one (rows, width) activation in float64.
UNIT = ROWS * WIDTH * 8
LAYERS = ["mlp.a", "mlp.b", "mlp.c"]
Script = Callable[[Any, Tensor], Any]


class Scripted(nn.Module):
    """Linear layers `a`, `b`, `c` to solve, `other` and `gain` to use, and a forward written by the test."""

    def __init__(self, script: Script, seed: int = 0) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})
        self.other = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))
        self.register_buffer("offset", torch.full((WIDTH,), 0.1))
        self.script = script

    def __getattr__(self, name: str) -> Any:
        return self.mlp[name] if name in ("a", "b", "c") else super().__getattr__(name)

    def forward(self, x: Tensor) -> Any:
        return self.script(self, x)


def course_of(script: Script) -> Course:
    network = Scripted(script).eval()
    with torch.no_grad():
        course = observe(network, Batch(args=(torch.randn(ROWS, WIDTH),)), LAYERS)
    assert not list(hooks_of(network))
    return course


def used(script: Script) -> list[set[str]]:
    return [{name.removeprefix("mlp.") for name in stop.used} for stop in course_of(script).stops]


def chain(net: Scripted, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x * net.gain).tanh()).tanh() + net.offset)


# Tensors


def test_a_stretch_uses_what_runs_between_two_stops() -> None:
    assert used(chain) == [{"gain"}, {"a.weight", "a.bias"}, {"b.weight", "b.bias", "offset"}]


def test_what_is_used_between_stops_is_the_union_of_the_stretches() -> None:
    course = course_of(chain)
    assert course.used_between(None, "mlp.a") == {"gain"}
    assert course.used_between("mlp.b", "mlp.b") == frozenset()
    both = {"mlp.a.weight", "mlp.a.bias", "mlp.b.weight", "mlp.b.bias", "offset"}
    assert course.used_between("mlp.a", "mlp.c") == both
    assert course.used_between(None, "mlp.c") == both | {"gain"}


def functional(net: Scripted, x: Tensor) -> Tensor:
    return net.c(F.linear(net.b(net.a(x)), net.other.weight).tanh())


def twice(net: Scripted, x: Tensor) -> Tensor:
    return net.c((net.b(net.a(x * net.gain).tanh()).tanh()) * net.gain)


def part(net: Scripted, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x).tanh()) * net.other.weight[0])


def out_of_data(net: Scripted, x: Tensor) -> Tensor:
    return net.c(F.linear(net.b(net.a(x)), net.other.weight.data).tanh())


def detached(net: Scripted, x: Tensor) -> Tensor:
    return net.c(F.linear(net.b(net.a(x)), net.other.weight.detach()).tanh())


def captured(net: Scripted, x: Tensor) -> Tensor:
    weight = net.other.weight
    return net.c(F.linear(net.b(net.a(x)), weight).tanh())


def captured_view(net: Scripted, x: Tensor) -> Tensor:
    weight = net.other.weight.T
    return net.c((net.b(net.a(x)) @ weight).tanh())


def captured_layer(net: Scripted, x: Tensor) -> Tensor:
    weight = net.a.weight
    return net.c(F.linear(net.b(net.a(x)), weight).tanh())


def captured_layer_view(net: Scripted, x: Tensor) -> Tensor:
    weight = net.a.weight.T
    return net.c((net.b(net.a(x)) @ weight).tanh())


def computed_early(net: Scripted, x: Tensor) -> Tensor:
    weight = net.other.weight * 2
    return net.c((net.b(net.a(x)) @ weight).tanh())


def read_as_number(net: Scripted, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x)).tanh() * net.gain[0].item())


#: Script -> what it uses beside `b` on the way from `b` to `c`; None: not asked.
WAYS: dict[Script, set[str] | None] = {
    functional: {"other.weight"},
    twice: {"gain"},
    part: {"other.weight"},
    out_of_data: {"other.weight"},
    detached: {"other.weight"},
    captured: {"other.weight"},
    captured_layer: {"a.weight"},
    captured_view: None,
    computed_early: None,
    read_as_number: {"gain"},
}


@pytest.mark.parametrize("script", [script for script, names in WAYS.items() if names])
def test_a_tensor_counts_as_used_however_it_is_used(script: Script) -> None:
    assert used(script)[2] == {"b.weight", "b.bias"} | (WAYS[script] or set())


@pytest.mark.parametrize("path_points", [(0,), (0, 0.5, 1), (1,)], ids=str)
@pytest.mark.parametrize("script", WAYS)
def test_every_stretch_has_the_tensors_that_it_uses(script: Script, path_points: tuple[float, ...]) -> None:
    """Layer `a` is solved before its weight is used once more, where it is."""
    experts = experts_of(lambda seed: Scripted(script, seed), 2)
    inputs = vectors(experts)
    ours = CrossMeanAlgorithm(num_calibration_samples=24, batch_size=10, path_points=path_points)
    theirs = oracles.whole_network(experts, inputs, [[name] for name in LAYERS], path_points=path_points)
    assert state_error(ours.run(experts, inputs).state_dict(), theirs) < SAME


@pytest.mark.parametrize("path_points", [(0,), (0, 0.5, 1)], ids=str)
def test_a_view_of_a_weight_from_before_it_was_solved_is_refused(path_points: tuple[float, ...]) -> None:
    experts = experts_of(lambda seed: Scripted(captured_layer_view, seed), 2)
    merge = CrossMeanAlgorithm(num_calibration_samples=24, batch_size=10, path_points=path_points)
    with pytest.raises(WalkError, match=r"a view \(a slice, a transpose\) of the weight of 'mlp\.a'"):
        merge.run(experts, vectors(experts))


class Tied(nn.Module):
    """Reads a table twice, under two names, far apart."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.mlp = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.load_state_dict(draw_weights(self, seed))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.table
        self.head.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp[0]((x @ self.table).tanh())
        return self.mlp[2](self.head(self.mlp[1](x).tanh()).tanh())


def test_a_tied_tensor_is_there_under_every_name_and_in_every_stretch() -> None:
    experts = experts_of(Tied, 2)
    inputs = vectors(experts)
    layers = [f"mlp.{index}" for index in range(3)]
    with torch.no_grad():
        stops = observe(experts["digits"], Batch(args=(inputs["digits"],)), layers).stops
    assert ["table" in stop.used for stop in stops] == [True, False, True]
    merged = CrossMeanAlgorithm(num_calibration_samples=24, batch_size=10).run(experts, inputs)
    assert merged.get_parameter("head.weight") is merged.get_parameter("table")
    theirs = oracles.whole_network(experts, inputs, [[name] for name in layers], path_points=(0, 0.5, 1))
    assert state_error(merged.state_dict(), theirs) < SAME


def some_scaled(net: Scripted, x: Tensor, sign: int) -> Tensor:
    """Every input's first entry decides: `gain` is not touched where it decides against it for the whole batch."""
    chosen = sign * x[:, :1] > 0
    x = net.b(net.a(x)).tanh()
    return net.c(torch.where(chosen, x * net.gain, x) if chosen.any() else x)


def test_a_tensor_that_only_some_batches_use_gives_the_right_merge_or_none() -> None:
    """The observed batch uses it under one of the signs: then it is there for all; else the others find NaN."""
    outcomes = []
    for sign in (1, -1):
        experts = experts_of(lambda seed, sign=sign: Scripted(lambda net, x: some_scaled(net, x, sign), seed), 2)
        inputs = vectors(experts)
        theirs = oracles.whole_network(experts, inputs, [[name] for name in LAYERS], path_points=(0, 1))
        try:
            merged = CrossMeanAlgorithm(num_calibration_samples=24, batch_size=1, path_points=(0, 1)).run(
                experts, inputs
            )
        except (SingularSystemError, WalkError):
            outcomes.append("refused")
        else:
            outcomes.append("right" if state_error(merged.state_dict(), theirs) < SAME else "wrong")
    assert sorted(outcomes) == ["refused", "right"]


# Bytes


def test_bytes_held_at_a_stop_are_those_of_the_living_activations() -> None:
    def script(net: Scripted, x: Tensor) -> Tensor:
        kept = x * 2  # one unit
        wide = torch.cat([x, x], -1)  # two more, until the second stop
        y = net.a(kept)  # stop 1: 3 units
        del wide
        y = net.b(y)  # stop 2: `kept` and the output of `a`
        return net.c(y[:1]) + kept  # stop 3: `kept` and the whole output of `b`

    course = course_of(script)
    assert [stop.held for stop in course.stops] == [3 * UNIT, 2 * UNIT, 2 * UNIT]
    assert course.held_at(LAYERS) == 3 * UNIT
    assert course.held_at(LAYERS[1:]) == 2 * UNIT
    assert course.held_at([]) == 0
    assert course.peak >= 4 * UNIT


def test_views_inputs_and_weights_are_no_activations() -> None:
    def script(net: Scripted, x: Tensor) -> Tensor:
        views = [x.T, x[:2], net.other.weight.T, net.offset.unsqueeze(0), net.gain.view(2, 3)]
        y = net.b(net.a(x))
        return net.c(y) * len(views)

    course = course_of(script)
    assert [stop.held for stop in course.stops] == [0, UNIT, UNIT]


def test_a_storage_counts_once_and_whole_however_many_tensors_view_it() -> None:
    def script(net: Scripted, x: Tensor) -> Tensor:
        both = torch.cat([x, x], -1)
        first, second = both.chunk(2, -1)
        del both
        return net.c(net.b(net.a(first)) + second)

    assert [stop.held for stop in course_of(script).stops] == [2 * UNIT, 3 * UNIT, 3 * UNIT]


@pytest.mark.parametrize("script", [chain, functional, twice, computed_early])
def test_the_peak_is_at_least_what_is_held_anywhere(script: Script) -> None:
    course = course_of(script)
    assert course.peak >= max(stop.held for stop in course.stops) > 0
    assert course.batch_size == ROWS


# Blocks


def test_blocks_are_items_of_lists_and_sequentials_and_nested_ones_merge_to_the_outer() -> None:
    network = nn.Module()
    block = nn.Module()
    block.first = nn.Linear(2, 2)
    block.inner = nn.Sequential(nn.Linear(2, 2), nn.Module())
    block.inner[1].second = nn.Linear(2, 2)
    network.layers = nn.ModuleList([block])
    network.stem = nn.Sequential(nn.Linear(2, 2))
    network.towers = nn.ModuleDict({"left": nn.Linear(2, 2)})
    network.deep = nn.ModuleList([nn.ModuleList([nn.Module()])])
    network.deep[0][0].third = nn.Linear(2, 2)
    assert blocks_around(
        network, ["layers.0.first", "layers.0.inner.0", "layers.0.inner.1.second", "stem.0", "deep.0.0.third"]
    ) == {
        "layers.0.first": "layers.0",
        "layers.0.inner.0": "layers.0",
        "layers.0.inner.1.second": "layers.0",
        "stem.0": None,
        "deep.0.0.third": "deep.0.0",
    }
    assert blocks_around(network, ["towers.left"]) == {"towers.left": None}
    alone = blocks_around(network, ["layers.0.inner.1.second"])
    assert alone == {"layers.0.inner.1.second": "layers.0.inner.1"}


def test_names_that_begin_alike_are_no_nested_blocks() -> None:
    network = nn.ModuleDict({"net": nn.ModuleList(nn.Sequential(nn.ModuleList([Holder()])) for _ in range(11))})
    layers = [f"net.{index}.0.0.layer" for index in (1, 10)]
    assert blocks_around(network, layers) == {layer: layer.removesuffix(".layer") for layer in layers}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_stops_are_blocks_and_groups_in_the_order_of_the_forward() -> None:
    network = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)), nn.Linear(2, 2))
    layers = ["0.0", "0.1", "1.0", "1.1", "2"]
    with torch.no_grad():
        course = observe(network, Batch(args=(torch.ones(3, 2),)), layers)
    assert course.blocks == ["0", "0", "1", "1", None]
    assert [stop.name for stop in course.stops] == ["0", "0.0", "0.1", "1", "1.0", "1.1", "2"]
    assert course.group_stops == layers
    assert course.block_stops == ["0", "1", "2"]
    assert course.used_between("0", "0.1") == {"0.0.weight", "0.0.bias"}
    assert course.used_between("0", "1") == {"0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"}
    assert course.obstacle is None
