"""The cells of a comparison: what each of them stands for, and the files in which finished ones are kept."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench_crossmean.report import as_json, written_whole

log = logging.getLogger(__name__)

#: Digits of the hash in a file's name.
NUM_DIGITS = 16


@dataclass(frozen=True)
class Cell:
    """One method on one set of tasks, with one draw.

    Args:
        row: the method's key in the catalogue.
        task_set: the set's name.
        tasks: its tasks.
        seed: of the draws; None where nothing is drawn.
        coverage: None where the method has no such choice.
        num_samples: calibration inputs per task; None where there are none.
        settings: everything else that the result depends on: method, pools, validation, versions.
    """

    row: str
    task_set: str
    tasks: tuple[str, ...]
    seed: int | None
    coverage: str | None
    num_samples: int | None
    settings: Mapping[str, Any]

    def as_record(self) -> dict[str, Any]:
        """All of it with JSON's types."""
        return as_json({**vars(self), "settings": dict(self.settings)})

    @property
    def digest(self) -> str:
        """A hash of everything that the result depends on: the names of method and set do not matter."""
        record = self.as_record()
        for name in ("row", "task_set"):
            del record[name]
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:NUM_DIGITS]

    @property
    def name(self) -> str:
        """For people: progress bars and file names."""
        parts = (self.row, self.task_set, self.coverage, self.num_samples, f"seed{self.seed}")
        return "-".join(str(part) for part in parts if part is not None and part != "seedNone")


class CellStore:
    """A folder of finished cells, one JSON file each, written whole or not at all.

    Args:
        folder: made when it is first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path_of(self, cell: Cell) -> Path:
        """Where a cell is kept. A changed setting changes it."""
        return self.folder / f"{cell.digest}.json"

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """What was found for a cell; None where it is missing or its file is damaged, which is said."""
        path = self.path_of(cell)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = content["found"]
            if Cell(**content["cell"]).digest != cell.digest:
                raise ValueError("it belongs to another cell")
            if "seconds" not in found or not {"scores", "criterion"} & found.keys():
                raise ValueError("it has no result")
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("%s is damaged (%s) and is made again.", path, error)
            return None
        return found

    def write(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Keeps what was found.

        Raises:
            OSError: it cannot be written; cells that are there already stay as they are.
        """
        with written_whole(self.path_of(cell)) as temporary:
            temporary.write_text(json.dumps({"cell": cell.as_record(), "found": as_json(found)}, indent=1) + "\n")
