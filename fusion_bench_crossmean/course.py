"""The course of one forward pass, observed once: order and shared inputs of the layers, the blocks around them, which
tensors each stretch uses and how much memory waits at each stop. Nothing is guessed from names.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import greenlet
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.coverage import LayerGroup, shorten
from fusion_bench_crossmean.forwards import NO_KEYWORDS, WalkError, input_of
from fusion_bench_crossmean.weights import tensors_of


@dataclass(frozen=True)
class Stop:
    """A place where a forward can pause: in front of a block, or of the first layer of a group.

    Args:
        name: of the module.
        used: names of the tensors (parameters, buffers) used since the stop before.
        held: bytes of activations alive there.
    """

    name: str
    used: frozenset[str]
    held: int


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
        WalkError: a layer is never reached, or reached twice; the forward writes into its own input.
    """
    versions = [version_of(tensor) for tensor in batch.tensors()]
    block_of = blocks_around(network, layers)
    recorder = Recorder(network, batch)
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
    check_reached([name for group in recorder.groups for name in group], layers)
    groups = [LayerGroup(tuple(names)) for names in recorder.groups]
    return Course(
        groups,
        recorder.stops,
        [block_of[group.names[0]] for group in groups],
        recorder.peak,
        batch.size,
        recorder.obstacle(block_of),
    )


class Recorder(TorchDispatchMode):
    """Notes what happens between the stops of one forward, operation by operation."""

    def __init__(self, network: nn.Module, batch: Batch) -> None:
        super().__init__()
        tensors = tensors_of(network)
        self.groups: list[list[str]] = []
        self.stops: list[Stop] = []
        self.peak = 0
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        given = (*tensors.values(), *network.buffers(), *batch.tensors())
        self._not_activations = {tensor.untyped_storage()._cdata for tensor in given}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._used: set[str] = set()
        self._previous: tuple[Callable[[], Tensor | None], int] = (lambda: None, 0)
        self._open: list[tuple[str, list[tuple[Tensor, int]]]] = []
        self._inside: dict[str, str | None] = {}
        self._changed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (name := self._names.get(id(value))) is not None:
                self._used.add(name)
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._not_activations:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self._held())
        return result

    def arrive(self, event: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward is in front of a layer, or of a block."""
        if event == "block":
            self._stop(name)
            tensors = [value for value in tree_leaves((args, dict(kwargs))) if isinstance(value, Tensor)]
            self._open.append((name, [(tensor, version_of(tensor)) for tensor in tensors]))
            return
        tensor = input_of(args, kwargs)
        version = version_of(tensor)
        # Changed in place, it is another input; weakly referred to, its identity is not taken for a dead one's.
        if tensor is self._previous[0]() and version == self._previous[1]:
            self.groups[-1].append(name)
            return
        self.groups.append([name])
        self._previous = (weakref.ref(tensor), version)
        self._inside[name] = self._open[-1][0] if self._open else None
        self._stop(name)

    def leave(self, name: str) -> None:
        """A block has ended."""
        while self._open:
            ended, tensors = self._open.pop()
            if any(version_of(tensor) != version for tensor, version in tensors):
                self._changed.append(ended)
            if ended == name:
                return

    def obstacle(self, block_of: Mapping[str, str | None]) -> str | None:
        """Why the blocks cannot be run again from their inputs, if so."""
        names = [stop.name for stop in self.stops]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            return f"{shorten(repeated)} is called more than once in one forward"
        if self._changed:
            return f"{shorten(self._changed)} writes into its own input"
        if outside := [name for name, block in self._inside.items() if block != block_of[name]]:
            return f"{shorten(outside)} is not reached from within its block"
        return None

    def _stop(self, name: str) -> None:
        self.stops.append(Stop(name, frozenset(self._used), self._held()))
        self._used.clear()

    def _held(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(size for _, size in self._alive.values())


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
            "A fused attention (nn.MultiheadAttention) does not call its projections as layers: use coverage=mlp if "
            "the model has modules called 'mlp'."
        )
    if repeated := sorted({name for name in reached if reached.count(name) > 1}):
        raise WalkError(
            f"{len(repeated)} covered layers are called more than once in one forward: {shorten(repeated)}. "
            "A layer that is used at two depths has no single place in depth order."
        )


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place; 0 for one made in inference mode, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version
