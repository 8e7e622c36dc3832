"""Where the inputs of blocks wait while a walk replays: on the device, in host memory or on disk."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

StoreKind = Literal["device", "cpu", "disk"]


class StoredInputs:
    """The tensors that one paused forward holds, put away and brought back.

    The forward's own frames hold the tensor objects, so their memory is taken from below them and given back: nothing
    may use them in between. Their content does not change, and is copied once.

    Args:
        tensors: of which each storage counts once.
        path: of the file to write; None keeps the content in host memory.
    """

    def __init__(self, tensors: Iterable[Tensor], path: Path | None) -> None:
        self._storages = list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        # Copies also on the way to a file: torch no longer resizes memory that numpy has seen.
        contents = (as_bytes(storage).to("cpu", copy=True) for storage in self._storages)
        self._path = path
        self._contents = list(contents) if path is None else []
        if path is not None:
            try:
                with path.open("wb") as file:
                    for content in contents:
                        content.numpy().tofile(file)
            except OSError as error:
                raise OSError(
                    f"The activations that wait cannot be written to {path.parent}: {error}. Point TMPDIR at a folder "
                    "with more space, or set activation_store=device."
                ) from error

    def put_away(self) -> None:
        """Frees the tensors' memory."""
        for storage in self._storages:
            storage.resize_(0)

    def bring_back(self) -> None:
        """Gives the tensors their memory and content again."""
        for storage, content in zip(self._storages, self._read(), strict=True):
            storage.resize_(content.numel())
            as_bytes(storage).copy_(content)

    def _read(self) -> Iterator[Tensor]:
        if self._path is None:
            yield from self._contents
            return
        with self._path.open("rb") as file:
            for size in self._sizes:
                content = np.fromfile(file, dtype=np.uint8, count=size)
                if len(content) != size:
                    raise OSError(f"{self._path} ends too soon: something else has written to it.")
                yield torch.from_numpy(content)


class ActivationStore:
    """Makes `StoredInputs`; use it as a context manager, which leaves nothing on disk.

    Args:
        kind: `device` leaves everything where it is, `cpu` is host memory, `disk` a temporary folder (of `TMPDIR`).
    """

    def __init__(self, kind: StoreKind = "device") -> None:
        self.kind = kind
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count()

    def __enter__(self) -> ActivationStore:
        if self.kind == "disk":
            self._folder = tempfile.TemporaryDirectory(prefix="crossmean-activations-")
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def new_path(self) -> Path | None:
        """A file for one forward; None where nothing goes to disk."""
        return None if self._folder is None else Path(self._folder.name) / str(next(self._numbers))

    def hold(self, tensors: Iterable[Tensor], path: Path | None) -> StoredInputs | None:
        """Takes tensors that nothing but one paused forward uses; None: they stay as they are."""
        return None if self.kind == "device" else StoredInputs(tensors, path)


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a flat tensor of bytes that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
