"""Solved layer groups of an unfinished merge on disk, so that a run that was killed goes on where it was.

A folder holds `manifest.json`, what the run depends on, and one safetensors file per solved group with its weight, its
report row and a hash of its statistics. Files appear whole or not at all; a lock keeps a second run out.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from safetensors import SafetensorError
from torch import Tensor

from fusion_bench_crossmean.fingerprint import hash_tensors
from fusion_bench_crossmean.messages import differing
from fusion_bench_crossmean.report import as_json
from fusion_bench_crossmean.schedule import Schedule
from fusion_bench_crossmean.sealed import DamagedError, read_record, read_tensors, write_record, write_tensors

log = logging.getLogger(__name__)

MANIFEST, LOCK, GROUP_FILES = "manifest.json", "lock", "group-*.safetensors"
#: What a run that was killed while it wrote leaves behind, see `written_whole`; nothing else in the folder is removed.
HALF_WRITTEN = (".group-*.safetensors", ".manifest.*.json")
#: Seconds to wait for the lock: what a killed run leaves behind (workers that load data) needs some to end.
PATIENCE = 10.0


class Checkpoint:
    """The checkpoint of one merge. Use it as a context manager: inside, the folder is this run's alone.

    Args:
        folder: made where it does not exist. None: nothing is stored, and nothing found.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._identity: dict[str, Any] = {}
        self._course: dict[str, Any] = {}  # threads and schedule; they change last bits, hence are kept
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Checkpoint:
        if self.folder is not None:
            with contextlib.ExitStack() as stack:  # the lock is given back if something goes wrong
                take(stack.enter_context(open_lock(self.folder)), self.folder)
                for pattern in HALF_WRITTEN:
                    for left in self.folder.glob(pattern):
                        left.unlink()
                self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()  # the file and with it the lock

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Says what the run depends on; where the folder has a merge already, goes on with its number of threads.

        Raises:
            ValueError: the folder has another merge, or files of which nobody knows where they come from.
        """
        if self.folder is None:
            return
        self._identity = as_json(identity)
        path = self.folder / MANIFEST
        try:
            manifest = read_record(path)
        except FileNotFoundError:
            if found := sorted(self.folder.glob(GROUP_FILES)):
                raise ValueError(
                    f"{self.folder} has {found[0].name} but no {MANIFEST}: choose another checkpoint_dir."
                ) from None
            return
        except DamagedError as error:
            raise ValueError(f"{error} Remove the folder to begin anew.") from error
        there, self._course = manifest["identity"], manifest["course"]
        if differences := differing(there, self._identity):
            raise ValueError(
                f"checkpoint_dir {str(self.folder)!r} holds another merge: {differences}. Choose another folder, or "
                "remove this one to begin anew."
            )
        threads = torch.get_num_threads()
        if threads != self._course["threads"]:
            log.info("Going on with %d threads, as the run before.", self._course["threads"])
            self._stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(self._course["threads"])

    def settle(self, choose: Callable[[], Schedule]) -> Schedule:
        """The schedule of the run that goes on here, else the one that is chosen now, which is noted."""
        if self.folder is None:
            return choose()
        if not self._course:
            self._course = {"threads": torch.get_num_threads(), "schedule": asdict(choose())}
            manifest = {"identity": self._identity, "course": self._course}
            write_record(self.folder / MANIFEST, manifest)
        return Schedule(**self._course["schedule"])

    def load(self, index: int, name: str, like: Tensor) -> tuple[Tensor, dict[str, Any]] | None:
        """Weight and report row of a solved group; None where it is not there, or damaged, or not this group's.

        Args:
            index: of the group in depth order.
            name: of the group.
            like: what its weight looks like.
        """
        if self.folder is None or not (path := self._path(index)).exists():
            return None
        try:
            tensors, notes = read_tensors(path)
            weight, record = tensors["weight"], notes["record"]
            if record["name"] != name or weight.shape != like.shape or weight.dtype != like.dtype:
                raise DamagedError(f"{path} is not what was stored for layer group {name}.")
        except DamagedError as error:
            log.warning("%s It is made again.", error)
            return None
        return weight, record

    def store(self, index: int, weight: Tensor, record: Mapping[str, Any], statistics: Mapping[str, Tensor]) -> None:
        """Keeps a solved group. Where that fails, a warning: the merge itself goes on, without a checkpoint.

        Args:
            index: of the group in depth order.
            weight: as written to the merged network.
            record: its row in the report.
            statistics: what it was solved from; only a hash is kept.
        """
        if self.folder is None:
            return
        notes = {"record": record, "statistics": hash_tensors(statistics)}
        try:
            write_tensors(self._path(index), {"weight": weight}, notes)
        except (OSError, SafetensorError) as error:
            log.warning(
                "The checkpoint in %s ends before layer group %s: %s. The merge goes on without it.",
                self.folder,
                record["name"],
                error,
            )
            self.folder = None

    def _path(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"group-{index:04d}.safetensors"


def open_lock(folder: Path) -> TextIO:
    """The lock's file, opened; the folder is made where it does not exist.

    Raises:
        OSError: there is no such folder to be had, or the file is a link, which may lead anywhere.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), "w")
    except OSError as error:
        raise OSError(f"checkpoint_dir {str(folder)!r} cannot be used: {error}. Choose another folder.") from error


def take(file: TextIO, folder: Path) -> None:
    """Locks `file`, until it is closed or the process ends.

    Raises:
        OSError: another run has it, or the file system has no locks.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"Another run uses checkpoint_dir {str(folder)!r}. Wait for it, or choose another folder."
                ) from error
            time.sleep(PATIENCE / 50)
        else:
            return
