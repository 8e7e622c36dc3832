"""Folders of the mini benchmarks' weights, for the configs: shipped ones, or built ones in a cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench_crossmean.compat import apply_cures
from fusion_bench_crossmean.mini.tasks import register_tasks

WEIGHTS_DIR = Path(__file__).parent / "weights"
#: Of the mini CLIP's vision tower, where nothing else is said.
NUM_LAYERS = 6
#: Digits at the end of a folder's name.
HASH_DIGITS = 8


@dataclass(frozen=True)
class Variant:
    """One set of the mini CLIP's weights.

    Args:
        activation: `quick_gelu` or `gelu`.
        tasks: a key of `TASK_SETS`.
        layers: of the vision tower.
    """

    activation: str = "quick_gelu"
    tasks: str = "TA8"
    layers: int = NUM_LAYERS

    @property
    def folder(self) -> str:
        """The beginning of its folder's name; a hash follows."""
        tasks = [self.tasks] if self.tasks != "TA8" else []
        layers = [f"{self.layers}layers"] if self.layers != NUM_LAYERS else []
        return "-".join(["mini-clip", self.activation, *tasks, *layers])

    @property
    def command(self) -> str:
        """What builds it."""
        options = f"--activation {self.activation} --tasks {self.tasks} --layers {self.layers}"
        return f"python -m fusion_bench_crossmean.mini.build_clip {options}"


#: Names of the mini CLIP's weights in the configs.
VARIANTS = {
    "mini-clip": Variant(),
    "mini-clip-gelu": Variant("gelu"),
    "mini-clip-TALL14": Variant(tasks="TALL14"),
    "mini-clip-gelu-TALL14": Variant("gelu", "TALL14"),
    "mini-clip-deep-TALL14": Variant(tasks="TALL14", layers=12),
    "mini-clip-gelu-deep-TALL14": Variant("gelu", "TALL14", 12),
}
BERT_COMMAND = "python -m fusion_bench_crossmean.mini.build_bert"


def cache_folder() -> Path:
    """Where built weights live: `$FUSION_BENCH_CROSSMEAN_CACHE`, else a folder in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusion_bench_crossmean"
    return Path(os.environ.get("FUSION_BENCH_CROSSMEAN_CACHE") or default)


def asset_folder(name: str) -> Path:
    """The folder of an asset (a key of `VARIANTS`, or ``mini-bert``), ready for use.

    Folder names end in a hash of the weights, because FusionBench caches zero-shot heads by model path.

    Raises:
        ValueError: no such asset.
        FileNotFoundError: it has to be built first; the message has the command.
    """
    prefixes = {key: variant.folder for key, variant in VARIANTS.items()} | {"mini-bert": "mini-bert"}
    if name not in prefixes:
        raise ValueError(f"There is no asset {name!r}; there are {', '.join(prefixes)}.")
    root = WEIGHTS_DIR if name == "mini-clip" else cache_folder()
    pattern = f"{prefixes[name]}-{'?' * HASH_DIGITS}/pretrained/config.json"
    found = sorted(root.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        command = BERT_COMMAND if name == "mini-bert" else VARIANTS[name].command
        raise FileNotFoundError(f"The weights of {name!r} are not in {root}. Build them (10 to 20 minutes): {command}")
    apply_cures()
    register_tasks()
    return found[-1].parents[1]


@contextlib.contextmanager
def building(output: Path | None) -> Iterator[tuple[Path, Path]]:
    """(the folder that weights are published in, a temporary one in it to build them in): `output`, or the cache."""
    root = output or cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".building-") as temporary:
        yield root, Path(temporary) / "weights"


def publish(folder: Path, name: Path, record: Mapping[str, Any]) -> Path:
    """Moves freshly built weights to `name` and a hash of them, with the record of their making; returns the place."""
    (folder / "build.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    final = name.with_name(f"{name.name}-{hash_of(folder)}")
    if not final.exists():
        folder.rename(final)
    return final


def hash_of(folder: Path) -> str:
    """Hex digits that change with any weight in `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:HASH_DIGITS]
