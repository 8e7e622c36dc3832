"""The course of one forward pass, observed once: order and shared inputs of the layers, the blocks around them, which
tensors each stretch uses and how much memory waits at each stop. Nothing is guessed from names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import greenlet
from torch import nn

from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.forwards import NO_KEYWORDS, WalkError
from fusion_bench_crossmean.messages import shorten
from fusion_bench_crossmean.recorder import Recorder, Stop, leaves_of, version_of


@dataclass(frozen=True)
class Course:
    """What one forward of one batch does.

    Args:
        groups: the layer groups in depth order; a group's layers receive one tensor object directly after each other.
        stops: every stop in the order of the forward.
        blocks: per group the name of the block around it, None where there is none.
        peak: bytes of activations alive at once, at most.
        batch_size: how many inputs that batch had.
        obstacle: why blocks cannot be replayed; None where they can.
    """

    groups: list[LayerGroup]
    stops: list[Stop]
    blocks: list[str | None]
    peak: int
    batch_size: int
    obstacle: str | None

    def used_between(self, start: str | None, end: str) -> frozenset[str]:
        """Names of the tensors that a forward uses from stop `start` (None: its beginning) to stop `end`."""
        names = [stop.name for stop in self.stops]
        first = 0 if start is None else names.index(start) + 1
        return frozenset[str]().union(*(stop.used for stop in self.stops[first : names.index(end) + 1]))

    def own_arguments(self, name: str) -> frozenset[int]:
        """See `Stop.own`."""
        return next(stop.own for stop in self.stops if stop.name == name)

    def held_at(self, names: Sequence[str]) -> int:
        """Bytes of activations of a forward of one batch that waits at one of these stops, at most."""
        return max((stop.held for stop in self.stops if stop.name in names), default=0)

    @property
    def group_stops(self) -> list[str]:
        """Where a forward waits when nothing is replayed: in front of every group."""
        return [group.names[0] for group in self.groups]

    @property
    def block_stops(self) -> list[str]:
        """Where a forward waits when blocks are replayed: in front of every block, and of groups outside any."""
        return list(dict.fromkeys(b or g.names[0] for b, g in zip(self.blocks, self.groups, strict=True)))


def observe(network: nn.Module, batch: Batch, layers: Sequence[str]) -> Course:
    """The course of `layers`, from one forward pass of a network whose tensors are all there.

    Raises:
        WalkError: a layer is never reached, or reached twice; the forward writes into its own input, or uses a view of
            a layer's weight that it took before that layer was reached.
    """
    versions = [version_of(tensor) for tensor in batch.tensors()]
    block_of = blocks_around(network, layers)
    recorder = Recorder(network, batch, layers)
    here = greenlet.getcurrent()
    with contextlib.ExitStack() as stack:

        def listen(name: str, event: str) -> None:
            def before(_: Any, args: Any, kwargs: Mapping[str, Any] = NO_KEYWORDS) -> None:
                if greenlet.getcurrent() is here:
                    recorder.arrive(event, name, args, kwargs)

            stack.callback(network.get_submodule(name).register_forward_pre_hook(before, with_kwargs=True).remove)

        for name in layers:
            listen(name, "layer")
        for name in dict.fromkeys(block for block in block_of.values() if block is not None):
            listen(name, "block")

            def leave(*_: Any, name: str = name) -> None:
                if greenlet.getcurrent() is here:
                    recorder.leave(name)

            stack.callback(network.get_submodule(name).register_forward_hook(leave).remove)
        with recorder:
            batch.run(network)
    if versions != [version_of(tensor) for tensor in batch.tensors()]:
        raise WalkError(
            "The model's forward writes into its own input, which all networks share. Let it work on a copy."
        )
    if recorder.stale:
        raise WalkError(
            f"The forward uses a view (a slice, a transpose) of the weight of {shorten(sorted(recorder.stale))} that "
            "it took before that layer was solved. Let it take the view where it uses it."
        )
    check_nothing_kept(network, batch, recorder)
    check_reached([name for group in recorder.groups for name in group], layers)
    groups = [LayerGroup(tuple(names)) for names in recorder.groups]
    return Course(
        groups,
        recorder.finished_stops(),
        [block_of[group.names[0]] for group in groups],
        recorder.peak,
        batch.size,
        recorder.obstacle(block_of),
    )


def check_nothing_kept(network: nn.Module, batch: Batch, recorder: Recorder) -> None:
    """Raises `WalkError` where a forward leaves in the network what the forward of another one or batch would use."""
    passed_on, cached = recorder.kept(as_cache=False), recorder.kept(as_cache=True)
    if cached:  # those that every forward computes anew do not matter
        batch.run(network)
        for name, tensors in cached.items():
            owner, _, key = name.rpartition(".")
            now = {id(tensor) for tensor in leaves_of(vars(network.get_submodule(owner)).get(key))}
            if now & {id(tensor) for tensor in tensors}:
                passed_on[name] = tensors
    if passed_on:
        raise WalkError(
            f"The forward leaves values in {shorten(sorted(passed_on))} that depend on weights or inputs, and another "
            "network's or batch's forward would use them. Let it hand them on as arguments, or compute them where it "
            "uses them."
        )


def blocks_around(network: nn.Module, layers: Sequence[str]) -> dict[str, str | None]:
    """Per layer the nearest module around it that is an item of a `ModuleList` or `Sequential`; None: there is none.

    Where one such block lies inside another, the outer one stands for both.
    """
    modules = dict(network.named_modules())

    def block_of(layer: str) -> str | None:
        around = layer.rpartition(".")[0]
        while around:
            parent = around.rpartition(".")[0]
            if isinstance(modules[parent], (nn.ModuleList, nn.Sequential)):
                return around
            around = parent
        return None

    blocks = {layer: block_of(layer) for layer in layers}
    outermost = sorted({block for block in blocks.values() if block is not None}, key=len)
    return {
        layer: next((outer for outer in outermost if f"{block}.".startswith(f"{outer}.")), None) if block else None
        for layer, block in blocks.items()
    }


def check_reached(reached: Sequence[str], layers: Sequence[str]) -> None:
    """Raises `WalkError` unless every one of `layers` was reached just once."""
    if missing := [name for name in layers if name not in set(reached)]:
        raise WalkError(
            f"{len(missing)} of {len(layers)} covered layers were never reached by a forward: {shorten(missing)}. "
            "Take modules that the model does not use out of the experts. An nn.MultiheadAttention has layers to solve "
            "where query, key and value are one tensor only: coverage=mlp leaves it out."
        )
    if repeated := sorted({name for name in reached if reached.count(name) > 1}):
        raise WalkError(
            f"{len(repeated)} covered layers are called more than once in one forward: {shorten(repeated)}. "
            "A layer that is used at two depths has no single place in depth order."
        )
