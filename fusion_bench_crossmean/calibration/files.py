"""Calibration inputs from a user's own files: a folder of images, a text file or a JSON-lines file per task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import datasets
import pyarrow as pa
from PIL import Image

from fusion_bench_crossmean.calibration.batch import Batch

TEXT_SUFFIXES, JSON_SUFFIXES = (".txt",), (".jsonl", ".json")


class WrappingSource(Protocol):
    """A pool's source that takes rows of other data too."""

    @property
    def preprocessor(self) -> Any:
        """What is saved beside a model, with `save_pretrained`; None: there is none."""
        ...

    def dataset(self, task: str) -> Any: ...

    def wrap(self, rows: Any, task: str) -> Any:
        """Rows as the pool's own data sets give them, made ready for `collate`."""
        ...

    def collate(self, items: Sequence[Any]) -> Batch: ...


class FilesSource:
    """Files for some tasks, the pool's own data for the others.

    Args:
        files: task -> folder of images, text file (a text per line) or JSON-lines file (an object per line, its text
            columns named as in `text.rows.TEXT_COLUMNS`).
        pool: the pool's source.
    """

    def __init__(self, files: Mapping[str, str | Path], pool: WrappingSource) -> None:
        self.files = files
        self.pool = pool

    def dataset(self, task: str) -> Any:
        if task not in self.files:
            return self.pool.dataset(task)
        return self.pool.wrap(read_rows(Path(self.files[task]).expanduser(), task), task)

    def collate(self, items: Sequence[Any]) -> Batch:
        return self.pool.collate(items)


def read_rows(path: Path, task: str) -> Any:
    """What a path holds, as a sequence of rows.

    Raises:
        ValueError: nothing, or nothing that can be read.
    """
    where = f"calibration_data.{task} is {path}"
    if path.is_dir():
        readable = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in readable and p.is_file())
        if not found:
            raise ValueError(f"{where}, a folder without images.")
        return ImageFiles(found)
    if not path.is_file():
        raise ValueError(f"{where}, which does not exist.")
    if path.suffix in TEXT_SUFFIXES:
        return datasets.Dataset.from_dict({"text": [line for line in read_lines(path, where) if line.strip()]})
    if path.suffix in JSON_SUFFIXES:
        rows = read_json_lines(path, where)
        columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
        try:
            return datasets.Dataset.from_dict(columns)
        except pa.ArrowException as error:
            raise ValueError(f"{where}, whose columns do not have one type each: {error}") from error
    raise ValueError(
        f"{where}; it must be a folder of images, a text file ({', '.join(TEXT_SUFFIXES)}) or a JSON-lines file "
        f"({', '.join(JSON_SUFFIXES)})."
    )


def read_lines(path: Path, where: str) -> list[str]:
    """The lines of a UTF-8 file, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}, which is not UTF-8 ({error}). Convert it.") from error


def read_json_lines(path: Path, where: str) -> list[dict[str, Any]]:
    """One object per line."""
    rows = []
    for number, line in enumerate(read_lines(path, where), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}; its line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}; its line {number} is no object but {type(row).__name__}.")
        rows.append(row)
    return rows


class ImageFiles:
    """Image files as rows of `image` and a `label` that means nothing; an image is read when it is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            with Image.open(self.paths[index]) as image:
                return {"image": image.convert("RGB"), "label": 0}
        except OSError as error:
            raise ValueError(f"{self.paths[index]} cannot be read as an image: {error}") from error
