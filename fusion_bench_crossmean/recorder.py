"""Watches one forward pass, operation by operation, and notes at every stop what a walk has to know of it."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.coverage import weight_name
from fusion_bench_crossmean.forwards import input_of
from fusion_bench_crossmean.messages import shorten
from fusion_bench_crossmean.weights import tensors_of

#: Arguments of a block that it cannot change, or whose changes are seen.
UNCHANGING = (Tensor, bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))


#: Attributes that every module has: its parameters, buffers, modules and hooks.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Stop:
    """A place where a forward can pause: in front of a block, or of the first layer of a group.

    Args:
        name: of the module.
        used: names of the tensors (parameters, buffers) used since the stop before.
        held: bytes of activations alive there.
        own: which of the arguments (by their place among all leaves) are activations of this forward alone; weights,
            the batch's own tensors and what the model keeps from one forward to the next are not.
    """

    name: str
    used: frozenset[str]
    held: int
    own: frozenset[int] = frozenset()


@dataclass
class Made:
    """A storage that a forward has made.

    Args:
        storage: without keeping it.
        size: in bytes.
        sources: what its values depend on: `weights`, `inputs`, both or neither.
        stop: how many stops there were before.
        is_used_later: whether it is used after a stop that came later.
    """

    storage: StorageWeakRef
    size: int
    sources: frozenset[str]
    stop: int
    is_used_later: bool = False


class Recorder(TorchDispatchMode):
    """Notes what happens between the stops of one forward, operation by operation."""

    def __init__(self, network: nn.Module, batch: Batch, layers: Sequence[str]) -> None:
        super().__init__()
        tensors = tensors_of(network)
        self._network = network
        self.groups: list[list[str]] = []
        self.stops: list[Stop] = []
        self.peak = 0
        #: Layers whose weight is used through a view from before they were reached.
        self.stale: set[str] = set()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        inputs = leaves_of((batch.args, dict(batch.kwargs)))
        self._covered = {tensors[weight_name(layer)].untyped_storage()._cdata: layer for layer in layers}
        self._not_activations = storages_of([*tensors.values(), *network.buffers(), *inputs])
        self._sources = dict.fromkeys(storages_of(network.parameters()), frozenset({"weights"}))
        self._sources |= dict.fromkeys(storages_of(inputs), frozenset({"inputs"}))
        self._views: dict[int, tuple[Callable[[], Tensor | None], str, int]] = {}
        self._alive: dict[int, Made] = {}
        self._arguments: dict[str, dict[int, StorageWeakRef]] = {}
        self._used: set[str] = set()
        self._previous: tuple[Callable[[], Tensor | None], int] = (lambda: None, 0)
        self._buffers = list(network.buffers())
        self._open: list[tuple[str, list[tuple[Tensor, int]]]] = []
        self._inside: dict[str, str | None] = {}
        self._changed: list[str] = []
        self._mutable: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = frozenset[str]()
        for value in leaves_of((args, kwargs)):
            key = value.untyped_storage()._cdata
            if (made := self._alive.get(key)) is not None:
                sources |= made.sources
                made.is_used_later |= made.stop < len(self.stops)
            sources |= self._sources.get(key, frozenset())
            if (name := self._names.get(id(value))) is not None:
                self._used.add(name)
            elif (view := self._views.get(id(value))) and view[0]() is value and view[2] < len(self.stops):
                self.stale.add(view[1])
        result = func(*args, **kwargs)
        for value in leaves_of(result):
            storage = value.untyped_storage()
            if (layer := self._covered.get(storage._cdata)) is not None and id(value) not in self._names:
                self._views[id(value)] = (weakref.ref(value), layer, len(self.stops))
            elif (made := self._alive.get(storage._cdata)) is not None and not made.storage.expired():
                made.sources |= sources  # a view, or changed in place
            elif storage._cdata not in self._not_activations:
                self._alive[storage._cdata] = Made(StorageWeakRef(storage), storage.nbytes(), sources, len(self.stops))
        self.peak = max(self.peak, self._held())
        return result

    def arrive(self, event: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward is in front of a layer, or of a block."""
        leaves = tree_leaves((args, dict(kwargs)))
        if event == "block":
            self._stop(name, leaves)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._open.append((name, [(tensor, version_of(tensor)) for tensor in (*tensors, *self._buffers)]))
            self._mutable |= {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, UNCHANGING)}
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
        self._stop(name, leaves)

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

    def kept(self, *, as_cache: bool) -> dict[str, list[Tensor]]:
        """Attributes of the network, by name, in which the forward has left tensors; to be asked once it has ended.

        Either those that depend on weights alone (`as_cache`), or those that depend on inputs and are used beyond a
        stop.
        """
        found: dict[str, list[Tensor]] = {}
        for prefix, module in self._network.named_modules():
            for key, value in vars(module).items():
                if key in OF_EVERY_MODULE:
                    continue
                for tensor in leaves_of(value):
                    made = self._alive.get(tensor.untyped_storage()._cdata)
                    is_cache = made is not None and made.sources == {"weights"}
                    is_passed_on = made is not None and "inputs" in made.sources and made.is_used_later
                    if is_cache if as_cache else is_passed_on:
                        found.setdefault(f"{prefix}.{key}".lstrip("."), []).append(tensor)
        return found

    def obstacle(self, block_of: Mapping[str, str | None]) -> str | None:
        """Why the blocks cannot be run again from their inputs, if so."""
        names = [stop.name for stop in self.stops]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            return f"{shorten(repeated)} is called more than once in one forward"
        if self._changed:
            return f"{shorten(self._changed)} writes into its own input or into a buffer"
        if self._mutable:
            return f"blocks receive a {' and a '.join(sorted(self._mutable))}, which running one twice may change twice"
        if outside := [name for name, block in self._inside.items() if block != block_of[name]]:
            return f"{shorten(outside)} is not reached from within its block"
        return None

    def _stop(self, name: str, arguments: Sequence[Any]) -> None:
        self.stops.append(Stop(name, frozenset(self._used), self._held()))
        self._used.clear()
        storages = {i: leaf.untyped_storage() for i, leaf in enumerate(arguments) if isinstance(leaf, Tensor)}
        self._arguments[name] = {
            index: StorageWeakRef(storage)
            for index, storage in storages.items()
            if storage._cdata not in self._not_activations
        }

    def _held(self) -> int:
        self._alive = {key: made for key, made in self._alive.items() if not made.storage.expired()}
        return sum(made.size for made in self._alive.values())


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Their storages, by address."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def leaves_of(values: Any) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place; 0 for one made in inference mode, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version
