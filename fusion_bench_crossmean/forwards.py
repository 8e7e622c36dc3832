"""One forward pass that can be paused, in a greenlet of its own, and the hook that pauses it.

Grad mode, autocast and their like belong to the thread and not to a greenlet: they are saved and restored at every
switch, or refused where they cannot be.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import greenlet
import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

#: For a hook that another thread calls while it is being registered: torch marks it as one with keywords only then.
NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})

#: Positional and keyword arguments of a module's call.
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class WalkError(RuntimeError):
    """The networks cannot be walked layer by layer; the message names the layer and the reason."""


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a linear layer, however it was called."""
    return args[0] if args else kwargs["input"]


@functools.cache
def autocast_devices() -> tuple[str, ...]:
    """Devices whose autocast is saved and restored; asked once, since looking for CUDA takes longer than a switch."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class Pause:
    """The pre-hook of a layer or block: lets a forward of the walker pause there.

    Any other greenlet or thread runs straight through. The hook keeps nothing in local variables across the switch:
    what it held there would live as long as the paused forward.
    """

    def __init__(self, name: str, owner: object) -> None:
        self.name = name
        self.owner = owner

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = NO_KEYWORDS) -> None:
        current = greenlet.getcurrent()
        if isinstance(current, Forward) and current.owner is self.owner and self.name in current.stops:
            current.pause(self.name, args, kwargs)


class Forward(greenlet.greenlet):
    """One forward pass that can be paused.

    Args:
        call: runs the pass.
        stops: names of the modules in front of which it pauses, where they have a `Pause` of the same owner.
        owner: tells the forwards of one walker from another's on the same modules.
        modes: of the thread, in which the pass begins; None takes those of now.
    """

    def __init__(
        self, call: Callable[[], object], stops: Collection[str], owner: object, modes: ThreadModes | None = None
    ) -> None:
        super().__init__()
        self.owner = owner
        self.stops = stops
        self._call = call
        self._modes = modes or ThreadModes.now()
        #: The modes at the last pause.
        self.modes_there = self._modes

    def run(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  (the documented way)
        self._modes.restore()
        self._call()

    def pause(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called inside the forward: switches to the walker and comes back when it resumes this forward."""
        self.modes_there = ThreadModes.now()
        self._modes.check_against(self.modes_there, name)
        assert self.parent is not None  # a forward that runs was started by the walker
        self.parent.switch((name, args, kwargs))
        self.modes_there.restore()

    def advance(self, name: str) -> Arguments:
        """Runs on until the forward waits in front of the module called `name`; returns that module's arguments."""
        reached = self._resume()
        if reached is None:
            raise WalkError(f"A forward ended before it reached layer {name!r}: it depends on its input.")
        found, args, kwargs = reached
        if found != name:
            raise WalkError(f"A forward reached layer {found!r} where {name!r} was expected: it depends on its input.")
        return args, kwargs

    def cancel(self) -> None:
        """Ends an unfinished forward; its frames, and the activations they hold, are freed."""
        self.parent = greenlet.getcurrent()
        for _ in range(100):  # a forward may catch what is thrown into it and reach another pause
            if not self:
                break
            with ThreadModes.kept():
                try:
                    self.throw(greenlet.GreenletExit)
                except Exception:  # its own clean-up failed: no reason to hide why the walk ends
                    log.warning("A paused forward failed while it was being ended.", exc_info=True)

    def _resume(self) -> tuple[str, tuple[Any, ...], Mapping[str, Any]] | None:
        # An exception in a greenlet surfaces in its parent: whoever resumes the forward must be that parent.
        self.parent = greenlet.getcurrent()
        with ThreadModes.kept():
            return self.switch()


@dataclass(frozen=True)
class ThreadModes:
    """The modes that belong to a thread and not to a greenlet: what a pause inside them would leak to the others."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    inference: bool
    function_modes: int
    dispatch_modes: int

    @classmethod
    def now(cls) -> ThreadModes:
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

    def check_against(self, inside: ThreadModes, layer: str) -> None:
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
