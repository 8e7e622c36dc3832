"""The record of a run: settings, calibration inputs, one entry per layer group, times and memory; as JSON and table."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import resource
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

log = logging.getLogger(__name__)

#: A list of integers, as `json.dumps` spreads it over many lines.
NUMBER_LIST = re.compile(r"\[[\s\d,-]*\]")
#: What the command `fusion_bench` runs where no other is named.
DEFAULT_PROGRAM = "fabric_model_fusion"
PACKAGES = ("fusion-bench-crossmean", "fusion-bench", "torch", "transformers")


def environment() -> dict[str, str]:
    """Versions of what a result depends on."""
    return {"python": sys.version.split()[0]} | {package: version(package) for package in PACKAGES}


def command() -> str | None:
    """The command line that repeats this run; None outside of FusionBench's (Hydra's) programs."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    # As they were given: interpolations may hold what is secret, or the folder of this very run.
    overrides = OmegaConf.to_container(hydra.overrides, resolve=False)
    assert isinstance(overrides, dict)
    words = ["fusion_bench"]
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            words += ["--config-dir", source.path]
    if hydra.job.config_name != DEFAULT_PROGRAM:
        words += ["--config-name", hydra.job.config_name]
    own = [override for override in overrides["hydra"] if not override.startswith("hydra.mode=")]
    return shlex.join([*words, *own, *overrides["task"]])


def peak_memory() -> dict[str, float]:
    """Peak memory of this process so far, in GiB: `resident`, and `cuda_allocated` where there is such a device."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes there, KiB elsewhere
    peaks = {"resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if torch.cuda.is_available():
        peaks["cuda_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return peaks


def mean(values: Sequence[float]) -> float:
    """Mean of the finite values; NaN where there is none.

    Example:
        >>> mean([1.0, float("nan"), 3.0])
        2.0
    """
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else float("nan")


def as_json(value: Any) -> Any:
    """`value` with JSON's types only: tuples become lists, numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed to it at the end, removed after an error.

    What was written is on the disk before it has its name: neither a kill nor a power cut leaves half a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say where
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` to `path`, whole or not at all."""
    with written_whole(path) as temporary:
        text = json.dumps(as_json(content), indent=1)
        text = NUMBER_LIST.sub(lambda found: " ".join(found.group().split()), text)  # one line each
        temporary.write_text(text + "\n", encoding="utf-8")
    log.info("Report written to %s", path)


def unused(path: Path) -> Path:
    """`path`, or the first of ``name_1.json``, ``name_2.json`` ... that does not exist yet."""
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(1))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def check_writable(path: Path) -> None:
    """Raises `OSError` naming `path` where it cannot be written; leaves nothing but its parent folder behind."""
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix):  # as it will be
            pass
    except (OSError, ValueError) as error:
        raise OSError(f"The output {str(path)!r} cannot be written: {error}. Choose another path.") from error


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of text, numbers to the right.

    Example:
        >>> print(table(["layer", "rank"], [["fc1", 7], ["fc2", 12]]))
        layer  rank
        fc1       7
        fc2      12
    """
    texts = [[str(cell) for cell in row] for row in (header, *rows)]
    first, *others = [max(len(row[i]) for row in texts) for i in range(len(header))]
    lines = []
    for row in texts:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], others, strict=True)]
        lines.append("  ".join([row[0].ljust(first), *numbers]).rstrip())
    return "\n".join(lines)
