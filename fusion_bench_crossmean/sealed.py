"""Files that tell whether they are what was written: records and tensors, each with a hash of all that it holds.

They appear whole or not at all; one that was cut short, changed, or put in another's place is found out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fusion_bench_crossmean.fingerprint import NUM_DIGITS, hash_tensors
from fusion_bench_crossmean.report import as_json, written_whole

SEAL = "seal"


class DamagedError(ValueError):
    """A file is not what was written."""


def seal_of(content: Mapping[str, Any]) -> str:
    """A hash of a record with JSON's types."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:NUM_DIGITS]


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON."""
    content = as_json(record)
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(content | {SEAL: seal_of(content)}, indent=1) + "\n", encoding="utf-8")


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` wrote.

    Raises:
        DamagedError: it is not that.
        FileNotFoundError: there is no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.pop(SEAL, None) != seal_of(content):
            raise ValueError("its content has changed")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged ({error}).") from error
    return content


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Writes tensors and notes with JSON's types as safetensors."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    content = json.loads(json.dumps(notes))  # as it is going to be read: NaN stays, tuples become lists
    seal = seal_of({"tensors": hash_tensors(whole), "notes": content})
    with written_whole(path) as temporary:
        save_file(whole, temporary, metadata={"notes": json.dumps(content), SEAL: seal})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and notes that `write_tensors` wrote.

    Raises:
        DamagedError: they are not that, or not there.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        notes = json.loads(metadata.get("notes", "null"))
        if metadata.get(SEAL) != seal_of({"tensors": hash_tensors(tensors), "notes": notes}):
            raise ValueError("its content has changed")
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged ({error}).") from error
    return tensors, notes
