"""Watches one forward pass, operation by operation, and notes at every stop what a walk has to know of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.forwards import input_of
from fusion_bench_crossmean.messages import shorten
from fusion_bench_crossmean.weights import tensors_of


@dataclass(frozen=True)
class Stop:
    """A place where a forward can pause: in front of a block, or of the first layer of a group.

    Args:
        name: of the module.
        used: names of the tensors (parameters, buffers) used since the stop before.
        held: bytes of activations alive there.
        own: which of the arguments (leaves, counted) are activations of this forward alone; weights, the batch's own
            tensors and what the model keeps from one forward to the next are not.
    """

    name: str
    used: frozenset[str]
    held: int
    own: frozenset[int] = frozenset()


class Recorder(TorchDispatchMode):
    """Notes what happens between the stops of one forward, operation by operation."""

    def __init__(self, network: nn.Module, batch: Batch, layers: Sequence[str]) -> None:
        super().__init__()
        tensors = tensors_of(network)
        self.groups: list[list[str]] = []
        self.stops: list[Stop] = []
        self.peak = 0
        #: Layers whose weight is used through a view from before they were reached.
        self.stale: set[str] = set()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        given = [*tensors.values(), *network.buffers(), *leaves_of((batch.args, dict(batch.kwargs)))]
        self._not_activations = {tensor.untyped_storage()._cdata for tensor in given}
        self._covered = {tensors[f"{layer}.weight"].untyped_storage()._cdata: layer for layer in layers}
        self._views: dict[int, tuple[Callable[[], Tensor | None], str, int]] = {}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._arguments: dict[str, dict[int, StorageWeakRef]] = {}
        self._used: set[str] = set()
        self._previous: tuple[Callable[[], Tensor | None], int] = (lambda: None, 0)
        self._buffers = list(network.buffers())
        self._open: list[tuple[str, list[tuple[Tensor, int]]]] = []
        self._inside: dict[str, str | None] = {}
        self._changed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in leaves_of((args, kwargs)):
            if (name := self._names.get(id(value))) is not None:
                self._used.add(name)
            elif (view := self._views.get(id(value))) and view[0]() is value and view[2] < len(self.stops):
                self.stale.add(view[1])
        result = func(*args, **kwargs)
        for value in leaves_of(result):
            storage = value.untyped_storage()
            if (layer := self._covered.get(storage._cdata)) is not None and id(value) not in self._names:
                self._views[id(value)] = (weakref.ref(value), layer, len(self.stops))
            elif storage._cdata not in self._not_activations:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self._held())
        return result

    def arrive(self, event: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward is in front of a layer, or of a block."""
        tensors = leaves_of((args, dict(kwargs)))
        if event == "block":
            self._stop(name, tensors)
            self._open.append((name, [(tensor, version_of(tensor)) for tensor in (*tensors, *self._buffers)]))
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
        self._stop(name, tensors)

    def leave(self, name: str) -> None:
        """A block has ended."""
        while self._open:
            ended, tensors = self._open.pop()
            if any(version_of(tensor) != version for tensor, version in tensors):
                self._changed.append(ended)
            if ended == name:
                return

    def finished_stops(self) -> list[Stop]:
        """The stops once the forward has ended and its result is gone: what still lives then is not its own."""
        return [
            replace(stop, own=frozenset(i for i, s in self._arguments[stop.name].items() if s.expired()))
            for stop in self.stops
        ]

    def obstacle(self, block_of: Mapping[str, str | None]) -> str | None:
        """Why the blocks cannot be run again from their inputs, if so."""
        names = [stop.name for stop in self.stops]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            return f"{shorten(repeated)} is called more than once in one forward"
        if self._changed:
            return f"{shorten(self._changed)} writes into its own input or into a buffer"
        if outside := [name for name, block in self._inside.items() if block != block_of[name]]:
            return f"{shorten(outside)} is not reached from within its block"
        return None

    def _stop(self, name: str, arguments: Sequence[Tensor]) -> None:
        self.stops.append(Stop(name, frozenset(self._used), self._held()))
        self._used.clear()
        storages = {index: tensor.untyped_storage() for index, tensor in enumerate(arguments)}
        self._arguments[name] = {
            index: StorageWeakRef(storage)
            for index, storage in storages.items()
            if storage._cdata not in self._not_activations
        }

    def _held(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(size for _, size in self._alive.values())


def leaves_of(values: Any) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place; 0 for one made in inference mode, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version
