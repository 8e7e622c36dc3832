"""Walks many networks through their layers at once: every forward pauses in front of each layer group.

A forward runs in a greenlet of its own; a pre-hook on the first layer of every group switches back to the walker
with the layer's input, and the walker resumes it once the group is solved. Whatever lies before a group is final when
the group is measured, so one pass per network and batch replaces one pass per layer. No algebra, no method here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import greenlet
from torch import Tensor, nn

from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.coverage import LayerGroup, shorten
from fusion_bench_crossmean.forwards import NO_KEYWORDS, Forward, Pause, WalkError, input_of

log = logging.getLogger(__name__)

#: What a layer group receives from one calibration batch: path point -> inputs of shape (tokens, in).
Inputs = dict[float, Tensor]


class NetworkSource(Protocol):
    """What the walker needs to know of the networks: the path points, and the module of one task at one of them."""

    path_points: tuple[float, ...]

    def network(self, task: str, path_point: float) -> nn.Module: ...


class Walker:
    """Iterates over ``(group, inputs)`` in depth order; ``inputs[task]`` is a list with one `Inputs` per batch.

    While the loop body runs, every forward waits in front of `group`; what it does to the group's weights is what the
    forwards go on with. Use it as a context manager: leaving ends every unfinished forward and removes every hook.

    Args:
        networks: the modules to walk, see `NetworkSource`. They must be in eval mode.
        calibration: task -> batches, shared by all networks.
        layers: names of the layers to stop at.

    Raises:
        WalkError: a layer that no forward reaches, or that one forward reaches twice; a forward that changes its
            course from batch to batch, or that pauses inside a thread-wide context other than grad mode and autocast.
    """

    def __init__(
        self, networks: NetworkSource, calibration: Mapping[str, Sequence[Batch]], layers: Sequence[str]
    ) -> None:
        self.networks = networks
        self.calibration = calibration
        self.layers = layers
        self.groups: list[LayerGroup] = []
        self._forwards: dict[tuple[str, int, float], Forward] = {}
        self._stack = contextlib.ExitStack()
        self._owner = object()  # tells this walker's forwards from another's on the same modules

    def __enter__(self) -> Walker:
        task, batches = next(iter(self.calibration.items()))
        self.groups = probe(self.networks.network(task, self.networks.path_points[0]), batches[0], self.layers)
        modules: dict[int, nn.Module] = {}
        for task, batches in self.calibration.items():
            for point in self.networks.path_points:
                module = self.networks.network(task, point)
                modules[id(module)] = module
                for index, batch in enumerate(batches):
                    forward = Forward(module, batch, self._owner)
                    self._forwards[task, index, point] = forward
                    self._stack.callback(forward.cancel)
        for group in self.groups:
            first_layers = [module.get_submodule(group.names[0]) for module in modules.values()]
            for first in dict.fromkeys(first_layers):  # once each: experts may share a module
                pause = Pause(group.names[0], self._owner)
                self._stack.callback(first.register_forward_pre_hook(pause, with_kwargs=True).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stack.close()  # the hooks, then every forward, whatever goes wrong with one of them
        finally:
            self._forwards.clear()

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[tuple[LayerGroup, dict[str, list[Inputs]]]]:
        for group in self.groups:
            inputs: dict[str, list[Inputs]] = {
                task: [
                    {point: self._forwards[task, index, point].advance(group.names[0]) for point in self._points}
                    for index in range(len(batches))
                ]
                for task, batches in self.calibration.items()
            }
            yield group, inputs
            inputs.clear()
        for forward in self._forwards.values():
            forward.finish()

    @property
    def _points(self) -> tuple[float, ...]:
        return self.networks.path_points


def probe(network: nn.Module, batch: Batch, layers: Sequence[str]) -> list[LayerGroup]:
    """Depth order and shared inputs of `layers`, observed in one forward pass.

    Layers that receive the same tensor object, one directly after the other, form a group.

    Raises:
        WalkError: a layer is never reached, or reached twice.
    """
    calls: list[tuple[str, Tensor, int]] = []  # holds the inputs, so that no identity is reused
    versions = [version_of(tensor) for tensor in batch.tensors()]
    here = greenlet.getcurrent()
    with contextlib.ExitStack() as stack:
        for name in layers:

            def record(_: Any, args: Any, kwargs: Mapping[str, Any] = NO_KEYWORDS, name: str = name) -> None:
                if greenlet.getcurrent() is here:
                    tensor = input_of(args, kwargs)
                    calls.append((name, tensor, version_of(tensor)))

            hook = network.get_submodule(name).register_forward_pre_hook(record, with_kwargs=True)
            stack.callback(hook.remove)
        batch.run(network)
    if versions != [version_of(tensor) for tensor in batch.tensors()]:
        raise WalkError(
            "The model's forward writes into its own input, which all networks share. Let it work on a copy."
        )
    reached = [name for name, *_ in calls]
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
    groups: list[list[str]] = []
    previous: tuple[Tensor | None, int] = (None, 0)
    for name, tensor, version in calls:
        if tensor is previous[0] and version == previous[1]:  # a tensor changed in place is another input
            groups[-1].append(name)
        else:
            groups.append([name])
        previous = (tensor, version)
    return [LayerGroup(tuple(names)) for names in groups]


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place; 0 for one made in inference mode, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version
