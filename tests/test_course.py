"""What one observed forward tells: tensors by stretch, bytes held, blocks; and no stretch that lacks a tensor it uses."""

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
Script = Callable[[Any, Tensor], Any]


class Scripted(nn.Module):
    """Linear layers `a`, `b`, `c` to solve, `other` and `gain` to use, and a forward written by the test."""

    def __init__(self, script: Script, seed: int = 0) -> None:
        super().__init__()
        self.a, self.b, self.c, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))
        self.register_buffer("offset", torch.full((WIDTH,), 0.1))
        self.script = script

    def forward(self, x: Tensor) -> Any:
        return self.script(self, x)


def course_of(script: Script, layers: str = "abc") -> Course:
    network = Scripted(script).eval()
    with torch.no_grad():
        course = observe(network, Batch(args=(torch.randn(ROWS, WIDTH),)), list(layers))
    assert not list(hooks_of(network))
    return course


def used(script: Script, layers: str = "abc") -> list[set[str]]:
    return [set(stop.used) for stop in course_of(script, layers).stops]


def chain(net: Scripted, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x * net.gain).tanh()).tanh() + net.offset)


# Tensors


def test_a_stretch_uses_what_runs_between_two_stops() -> None:
    assert used(chain) == [{"gain"}, {"a.weight", "a.bias"}, {"b.weight", "b.bias", "offset"}]


def test_what_is_used_between_stops_is_the_union_of_the_stretches() -> None:
    course = course_of(chain)
    assert course.used_between(None, "a") == {"gain"}
    assert course.used_between("a", "c") == {"a.weight", "a.bias", "b.weight", "b.bias", "offset"}
    assert course.used_between("b", "b") == frozenset()
    everything = frozenset[str]().union(*(stop.used for stop in course.stops))
    assert course.used_between(None, "c") == everything
    assert everything == {"gain", "offset", "a.weight", "a.bias", "b.weight", "b.bias"}


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


def listed(net: Scripted, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x)).tanh() * net.gain.tolist()[1])


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
    captured_layer_view: None,
    computed_early: None,
    read_as_number: {"gain"},
    listed: {"gain"},
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
    groups = covered_by("abc", experts, inputs)
    ours = CrossMeanAlgorithm(num_calibration_samples=24, batch_size=10, coverage="full", path_points=path_points)
    theirs = oracles.whole_network(with_unused_tied_off(experts), inputs, groups, path_points=path_points)
    assert state_error(ours.run(experts, inputs).state_dict(), theirs) < SAME
