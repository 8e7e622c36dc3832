"""Weights out of a whole module that was saved with `torch.save`, without running anything that the file asks for.

torch's own restricted unpickler reads it; what it does not know (every class and function) becomes an empty `Shell`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Shell:
    """Stands for an object of a class that is not imported; keeps what it was made from and its attributes."""

    arguments: tuple[Any, ...]
    state: Mapping[str, Any]

    def __new__(cls, *arguments: Any) -> Shell:
        shell = super().__new__(cls)
        shell.arguments, shell.state = arguments, {}
        return shell

    def __init__(self, *arguments: Any) -> None:
        """Takes what `__new__` has taken already."""

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, Mapping) else {}


@dataclass(frozen=True)
class PickledModule:
    """What a file with a whole module holds.

    Args:
        state_dict: its parameters and persistent buffers.
        classes: full names of every class and function that it mentions.
        settings: its modules' attributes that are numbers, e.g. ``attn.num_heads``.
    """

    state_dict: dict[str, Tensor]
    classes: frozenset[str]
    settings: dict[str, float]


def read_pickled_module(path: str | Path) -> PickledModule:
    """The module saved at `path`, on the CPU.

    Raises:
        ValueError: the file holds no module, or asks for something that is never allowed.
        OSError: it cannot be read.
    """
    try:
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        shells: list[Any] = [shell_for(name) for name in classes]
        with torch.serialization.safe_globals(shells):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except (pickle.UnpicklingError, ValueError, RuntimeError, EOFError, OSError) as error:  # the last: cut short
        raise ValueError(
            f"{path} cannot be read safely as a module saved by torch.save: {error} Load it where it was made, save "
            "its weights with torch.save(model.state_dict(), path), and give that file as state_dict_path."
        ) from error
    if not isinstance(content, Shell) or "_modules" not in content.state:
        raise ValueError(f"{path} holds a {type(content).__name__}, not a whole module: give it as state_dict_path.")
    return PickledModule(dict(persistent_tensors(content)), frozenset(classes), dict(numbers_of(content)))


def shell_for(name: str) -> type[Shell]:
    """A `Shell` that torch's unpickler takes for the class or function of this full name."""
    module, _, own = name.rpartition(".")
    return type(own, (Shell,), {"__module__": module})


def persistent_tensors(module: Shell, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a module and those within, as its state dict would have them."""
    passing: Any = module.state.get("_non_persistent_buffers_set", ())
    if isinstance(passing, Shell):  # a set, made from the list of its items
        passing = passing.arguments[0] if passing.arguments else ()
    hidden = set(passing)
    for name, tensor in {**module.state.get("_parameters", {}), **module.state.get("_buffers", {})}.items():
        if isinstance(tensor, Tensor) and name not in hidden:
            yield prefix + name, tensor.detach()
    for name, child in module.state.get("_modules", {}).items():
        if isinstance(child, Shell):
            yield from persistent_tensors(child, f"{prefix}{name}.")


def numbers_of(module: Shell, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, value) of every attribute of a module and those within that is a number."""
    for name, value in module.state.items():
        if isinstance(value, (int, float)):
            yield prefix + name, value
    for name, child in module.state.get("_modules", {}).items():
        if isinstance(child, Shell):
            yield from numbers_of(child, f"{prefix}{name}.")
