"""Folders of the mini benchmarks' weights, for the configs: shipped ones, or built ones in a cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_crossmean.compat import apply_cures
from fusion_bench_crossmean.mini.tasks import register_tasks

WEIGHTS_DIR = Path(__file__).parent / "weights"
BUILD_COMMANDS = {
    "mini-clip-gelu": "python -m fusion_bench_crossmean.mini.build_clip --activation gelu",
    "mini-bert": "python -m fusion_bench_crossmean.mini.build_bert",
}


def cache_folder() -> Path:
    """Where built weights live: `$FUSION_BENCH_CROSSMEAN_CACHE`, else a folder in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusion_bench_crossmean"
    return Path(os.environ.get("FUSION_BENCH_CROSSMEAN_CACHE") or default)


def asset_folder(name: str) -> Path:
    """The folder of ``mini-clip``, ``mini-clip-gelu`` or ``mini-bert``, ready for use.

    Folder names end in a hash of the weights, because FusionBench caches zero-shot heads by model path.

    Raises:
        ValueError: no such asset.
        FileNotFoundError: it has to be built first; the message has the command.
    """
    places = {
        "mini-clip": (WEIGHTS_DIR, "mini-clip-quick_gelu"),
        "mini-clip-gelu": (cache_folder(), "mini-clip-gelu"),
        "mini-bert": (cache_folder(), "mini-bert"),
    }
    if name not in places:
        raise ValueError(f"There is no asset {name!r}; there are {', '.join(places)}.")
    root, prefix = places[name]
    found = sorted(root.glob(f"{prefix}-*/pretrained/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        command = BUILD_COMMANDS.get(name, "install the package again")
        raise FileNotFoundError(f"The weights of {name!r} are not in {root}. Build them (10 to 20 minutes): {command}")
    apply_cures()
    register_tasks()
    return found[-1].parents[1]


def publish(folder: Path, name: Path, record: Mapping[str, Any]) -> Path:
    """Moves freshly built weights to `name` and a hash of them, with the record of their making; returns the place."""
    (folder / "build.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    final = name.with_name(f"{name.name}-{hash_of(folder)}")
    if not final.exists():
        folder.rename(final)
    return final


def hash_of(folder: Path) -> str:
    """Eight hex digits that change with any weight in `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
