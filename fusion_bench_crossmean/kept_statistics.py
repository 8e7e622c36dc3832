"""The statistics of a merge on disk: a manifest that says where they are from, and one file per layer group and task.

What was measured on the experts alone can be merged again under other ratios, ridges, weights or fewer tasks, without a
forward. What was measured on a merged prefix belongs to that one merge; it is kept to be looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.messages import differing, shorten
from fusion_bench_crossmean.paired_statistics import PairedStatistics, of_gram
from fusion_bench_crossmean.report import as_json
from fusion_bench_crossmean.sealed import DamagedError, read_record, read_tensors, write_record, write_tensors

log = logging.getLogger(__name__)

MANIFEST = "statistics.json"
#: Path points of a merge whose statistics do not depend on what was merged: the experts' own.
EXPERTS_ALONE = (1.0,)


def sums_path(folder: Path, group: int, task: int) -> Path:
    """The file of one layer group and task, both counted in the manifest's order."""
    return folder / f"sums-{group:04d}-{task:03d}.safetensors"


def side_path(folder: Path, task: int) -> Path:
    """The file of what a method measures of a task before the walk."""
    return folder / f"norms-{task:03d}.safetensors"


class KeptStatistics:
    """Where a merge keeps its statistics.

    Args:
        folder: made where it does not exist. None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.complaints: list[str] = []
        self._tasks: list[str] = []
        self._groups: list[str] = []

    def __bool__(self) -> bool:
        return self.folder is not None

    def begin(self, identity: Mapping[str, Any], tasks: Sequence[str], groups: Sequence[LayerGroup]) -> None:
        """Writes down what the statistics depend on.

        Args:
            identity: of the merge, with its `calibration_indices` and `path_points`.
            tasks: names of the experts.
            groups: of layers, in depth order.

        Raises:
            ValueError: the folder holds the statistics of another merge.
        """
        if self.folder is None:
            return
        self._tasks = list(tasks)
        self._groups = [group.name for group in groups]
        own = as_json({"identity": identity, "tasks": tasks, "groups": [group.names for group in groups]})
        path = self.folder / MANIFEST
        try:
            there = read_record(path)
        except FileNotFoundError:
            if found := sorted(self.folder.glob("sums-*.safetensors")):
                message = f"{self.folder} has {found[0].name} but no {MANIFEST}: choose another save_statistics."
                raise ValueError(message) from None
            write_record(path, own)
            return
        except DamagedError as error:
            raise ValueError(f"{error} Remove the folder, or choose another save_statistics.") from error
        if differences := differing(there, own):
            raise ValueError(
                f"save_statistics {str(self.folder)!r} holds those of another merge: {differences}. Choose another "
                "folder, or remove this one."
            )

    def holds(self, group: int) -> bool:
        """Whether all statistics of a group are there, or none are kept at all."""
        folder = self.folder
        return folder is None or all(sums_path(folder, group, index).exists() for index in range(len(self._tasks)))

    def keep(self, group: int, task: str, sums: PairedStatistics) -> None:
        """Keeps the sums of one layer group and task. Where that fails, a warning: the merge goes on without it."""
        if self.folder is None:
            return
        tensors = {"gram": sums.gram}
        if sums.bilinear is not None and sums.bilinear is not sums.gram:
            tensors["bilinear"] = sums.bilinear
        notes = {"group": self._groups[group], "task": task, "rows": sums.rows, "right_energy": sums.right_energy}
        self._write(sums_path(self.folder, group, self._tasks.index(task)), tensors, notes)

    def keep_beside(self, measured: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Keeps what a method measured before the walk, task -> name -> tensor."""
        for task, tensors in measured.items():
            if self.folder is not None:
                self._write(side_path(self.folder, self._tasks.index(task)), tensors, {"task": task})

    def _write(self, path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
        try:
            write_tensors(path, tensors, notes)
        except (OSError, SafetensorError) as error:
            self.complaints.append(f"The statistics in {self.folder} are not complete: {error}.")
            log.warning("%s The merge goes on without them.", self.complaints[-1])
            self.folder = None


class StoredStatistics:
    """Kept statistics, to merge from.

    Args:
        folder: see `KeptStatistics`.

    Raises:
        ValueError: there are none, or only such as belong to one merge.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            manifest = read_record(folder / MANIFEST)
        except FileNotFoundError:
            message = f"load_statistics {str(folder)!r} has no {MANIFEST}. Make it by save_statistics."
            raise ValueError(message) from None
        except DamagedError as error:
            raise ValueError(f"{error} Make it anew by save_statistics.") from error
        self.identity: dict[str, Any] = manifest["identity"]
        self.tasks: list[str] = manifest["tasks"]
        self.groups = [LayerGroup(tuple(names)) for names in manifest["groups"]]
        points, self.indices = self.identity["path_points"], self.identity["calibration_indices"]
        self.method, self.hashes = self.identity["method"], self.identity["experts"]
        if tuple(points) != EXPERTS_ALONE:
            raise ValueError(
                f"The statistics in {folder} are {self.method}'s, measured on its merged prefix: they belong to that "
                "one merge. Those of RegMean and LOT, which measure experts alone, can be merged again."
            )

    def check_tasks(self, tasks: Sequence[str]) -> None:
        """Raises `ValueError` for tasks that were not measured."""
        if unknown := [task for task in tasks if task not in self.tasks]:
            raise ValueError(
                f"The statistics in {self.folder} have no task {shorten(unknown)}; they have {self.tasks}."
            )

    def numbered(self, tasks: Sequence[str], layers: Sequence[str]) -> list[tuple[int, LayerGroup]]:
        """The groups of the covered `layers` with their numbers, in depth order.

        Raises:
            ValueError: a layer was not measured, or a file is missing.
        """
        wanted = [(index, group) for index, group in enumerate(self.groups) if set(group.names) <= set(layers)]
        there = {name for _, group in wanted for name in group.names}
        if missing := [name for name in layers if name not in there]:
            coverage = self.identity.get("settings", {}).get("coverage")
            raise ValueError(
                f"The statistics in {self.folder} were measured at coverage={coverage} and have no layer "
                f"{shorten(missing)}."
            )
        paths = [sums_path(self.folder, index, self.tasks.index(task)) for index, _ in wanted for task in tasks]
        if gone := [path.name for path in paths if not path.exists()]:
            raise ValueError(
                f"The statistics in {self.folder} are not complete: {shorten(gone)}. Was their merge stopped? Give its "
                "command again."
            )
        return wanted

    def check_experts(self, hashes: Mapping[str, str], activation: str) -> None:
        """Raises `ValueError` for experts that are not those that were measured."""
        if activation != self.identity["activation"]:
            raise ValueError(
                f"The statistics in {self.folder} were measured with activation {self.identity['activation']}, these "
                f"experts run with {activation}. Make them anew by save_statistics."
            )
        if changed := [task for task, found in hashes.items() if task in self.tasks and self.hashes.get(task) != found]:
            raise ValueError(
                f"The statistics in {self.folder} were measured on other weights of {shorten(changed)}. Make them anew "
                "by save_statistics."
            )

    def sums(self, group: int, task: str, weight: Tensor) -> PairedStatistics:
        """The sums of one layer group and task.

        Args:
            group: its number.
            task: name of the expert.
            weight: W, shape (out, in), for the product; its device is where the sums go.

        Raises:
            ValueError: the file is damaged, or another's.
        """
        path = sums_path(self.folder, group, self.tasks.index(task))
        tensors, notes = read_own(path, {"group": self.groups[group].name, "task": task})
        return of_gram(tensors["gram"].to(weight.device), notes["right_energy"], notes["rows"], weight)

    def beside(self, tasks: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """What was measured before the walk, task -> name -> tensor; tasks of which there is nothing are left out."""
        paths = {task: side_path(self.folder, self.tasks.index(task)) for task in tasks}
        return {task: read_own(path, {"task": task})[0] for task, path in paths.items() if path.exists()}


def read_own(path: Path, expected: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and notes of a file that is of what is `expected`.

    Raises:
        ValueError: it is damaged, or of something else.
    """
    try:
        tensors, notes = read_tensors(path)
    except DamagedError as error:
        raise ValueError(f"{error} Remove it, and give the merge's command again.") from error
    if differences := differing({key: notes.get(key) for key in expected}, expected):
        raise ValueError(f"{path} is not the file that belongs there: {differences}. Make it anew by save_statistics.")
    return tensors, notes
