"""Walks many networks through their layers at once: every forward pauses in front of each layer group.

A forward runs in a greenlet of its own; a pre-hook on the first layer of every group switches back to the walker
with the layer's input, and the walker resumes it once the group is solved. Whatever lies before a group is final when
the group is measured, so one pass per network and batch replaces one pass per layer. No algebra, no method here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import greenlet
import torch
from torch import Tensor, nn

from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.coverage import LayerGroup, shorten

log = logging.getLogger(__name__)

#: For a hook that another thread calls while it is being registered: torch marks it as one with keywords only then.
NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})
#: What a layer group receives from one calibration batch: path point -> inputs of shape (tokens, in).
Inputs = dict[float, Tensor]


class NetworkSource(Protocol):
    """What the walker needs to know of the networks: the path points, and the module of one task at one of them."""

    path_points: tuple[float, ...]

    def network(self, task: str, path_point: float) -> nn.Module: ...


class WalkError(RuntimeError):
    """The networks cannot be walked layer by layer; the message names the layer and the reason."""


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
        self._forwards: dict[tuple[str, int, float], _Forward] = {}
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
                    forward = _Forward(module, batch, self._owner)
                    self._forwards[task, index, point] = forward
                    self._stack.callback(forward.cancel)
        for module in modules.values():
            for group in self.groups:
                first = module.get_submodule(group.names[0])
                pause = _Pause(group.names[0], self._owner)
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
    calls: list[tuple[str, Tensor]] = []  # holds the inputs, so that no identity is reused
    here = greenlet.getcurrent()
    with contextlib.ExitStack() as stack:
        for name in layers:

            def record(_: Any, args: Any, kwargs: Mapping[str, Any] = NO_KEYWORDS, name: str = name) -> None:
                if greenlet.getcurrent() is here:
                    calls.append((name, input_of(args, kwargs)))

            hook = network.get_submodule(name).register_forward_pre_hook(record, with_kwargs=True)
            stack.callback(hook.remove)
        batch.run(network)
    reached = [name for name, _ in calls]
    if missing := [name for name in layers if name not in set(reached)]:
        raise WalkError(
            f"{len(missing)} of {len(layers)} covered layers were never reached by a forward: {shorten(missing)}. "
            "A fused attention does not call its projections as layers; use coverage=mlp."
        )
    if repeated := sorted({name for name in reached if reached.count(name) > 1}):
        raise WalkError(
            f"{len(repeated)} covered layers are called more than once in one forward: {shorten(repeated)}. "
            "A layer that is used at two depths has no single place in depth order."
        )
    groups: list[list[str]] = []
    previous: Tensor | None = None
    for name, tensor in calls:
        if tensor is previous:
            groups[-1].append(name)
        else:
            groups.append([name])
        previous = tensor
    return [LayerGroup(tuple(names)) for names in groups]


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a linear layer, however it was called."""
    return args[0] if args else kwargs["input"]


@functools.cache
def autocast_devices() -> tuple[str, ...]:
    """Devices whose autocast is saved and restored; asked once, since looking for CUDA takes longer than a switch."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class _Pause:
    """The pre-hook of a layer: hands the layer's input to the walker if this call comes from one of its forwards.

    Any other greenlet or thread runs straight through. The hook keeps nothing in local variables across the switch:
    what it held there would live as long as the paused forward.
    """

    def __init__(self, layer: str, owner: object) -> None:
        self.layer = layer
        self.owner = owner

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = NO_KEYWORDS) -> None:
        current = greenlet.getcurrent()
        if isinstance(current, _Forward) and current.owner is self.owner:
            current.pause(self.layer, input_of(args, kwargs))


class _Forward(greenlet.greenlet):
    """One forward pass that can be paused; see `Walker`."""

    def __init__(self, module: nn.Module, batch: Batch, owner: object) -> None:
        super().__init__()
        self.owner = owner
        self._module = module
        self._batch = batch
        self._waits_at: str | None = None
        self._modes = _ThreadModes.now()

    def run(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  (the documented way)
        self._modes.restore()
        self._batch.run(self._module)

    def pause(self, layer: str, tensor: Tensor) -> None:
        """Called inside the forward: switches to the walker and comes back when it resumes this forward."""
        modes = _ThreadModes.now()
        self._modes.check_against(modes, layer)
        assert self.parent is not None  # a forward that runs was started by the walker
        self.parent.switch((layer, self._batch.rows(tensor)))
        modes.restore()

    def advance(self, layer: str) -> Tensor:
        """Runs on until the forward waits in front of `layer`; returns the layer's inputs, shape (tokens, in)."""
        reached = self._resume()
        if reached is None:
            raise WalkError(f"A forward ended before it reached layer {layer!r}: it depends on its input.")
        name, rows = reached
        if name != layer:
            raise WalkError(f"A forward reached layer {name!r} where {layer!r} was expected: it depends on its input.")
        return rows

    def finish(self) -> None:
        """Runs the forward to its end."""
        if (reached := self._resume()) is not None:
            raise WalkError(f"A forward reached layer {reached[0]!r} a second time: it depends on its input.")

    def cancel(self) -> None:
        """Ends an unfinished forward; its frames, and the activations they hold, are freed."""
        self.parent = greenlet.getcurrent()
        for _ in range(100):  # a forward may catch what is thrown into it and reach another pause
            if not self:
                break
            with _ThreadModes.kept():
                try:
                    self.throw(greenlet.GreenletExit)
                except Exception:  # its own clean-up failed: no reason to hide why the walk ends
                    log.warning("A paused forward failed while it was being ended.", exc_info=True)

    def _resume(self) -> tuple[str, Tensor] | None:
        # An exception in a greenlet surfaces in its parent: whoever resumes the forward must be that parent.
        self.parent = greenlet.getcurrent()
        with _ThreadModes.kept():
            return self.switch()


@dataclass(frozen=True)
class _ThreadModes:
    """The modes that belong to a thread and not to a greenlet: what a pause inside them would leak to the others."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    inference: bool
    function_modes: int
    dispatch_modes: int

    @classmethod
    def now(cls) -> _ThreadModes:
        return cls(
            torch.is_grad_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in autocast_devices()),
            torch.is_autocast_cache_enabled(),
            torch.is_inference_mode_enabled(),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        )

    @classmethod
    @contextlib.contextmanager
    def kept(cls) -> Iterator[None]:
        """Whatever happens inside the block, the modes are as before afterwards."""
        modes = cls.now()
        try:
            yield
        finally:
            modes.restore()

    def restore(self) -> None:
        """Sets the grad mode and autocast; the other modes are refused at a pause and need no restoring."""
        torch._C._set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)

    def check_against(self, inside: _ThreadModes, layer: str) -> None:
        """Raises `WalkError` where a forward pauses inside a mode that it entered and that cannot be switched."""
        entered = [
            name
            for name, differs in (
                ("torch.inference_mode", self.inference != inside.inference),
                (
                    "a torch function mode (such as 'with torch.device(...)')",
                    self.function_modes != inside.function_modes,
                ),
                ("a torch dispatch mode", self.dispatch_modes != inside.dispatch_modes),
            )
            if differs
        ]
        if entered:
            raise WalkError(
                f"The model calls layer {layer!r} inside {' and '.join(entered)}. That belongs to the whole thread, so "
                "the forward cannot be paused there: take it out of the model's forward."
            )
