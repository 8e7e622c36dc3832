"""Where a pool's models come from: names on the hub or paths, and revisions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from fusion_bench.modelpool import BaseModelPool
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import nn

#: Keys of a pool's entry that say where its weights are, the first that it has.
PLACES = ("pretrained_model_name_or_path", "state_dict_path", "pickle_path", "path", "_target_")
#: A folder of the hub's cache, and the revision in it.
SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})")

#: `source` and `revision` of a model.
Origin = Mapping[str, str | None]


def origin_of(modelpool: BaseModelPool, name: str, model: nn.Module) -> Origin:
    """`source` and `revision` of one of a pool's models, as it was loaded.

    The source is a name on the hub or a path; of a module in memory, its class. The revision is the hub's commit, null
    where there is none.
    """
    entry = modelpool._models[name]
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    if isinstance(entry, str):
        source = entry
    elif isinstance(entry, Mapping):
        source = str(next((entry[key] for key in PLACES if entry.get(key)), dict(entry)))
    else:
        source = f"{type(model).__name__} in memory"
    if found := SNAPSHOT.search(f"{source} {getattr(model, 'name_or_path', '')}"):
        revision = revision or found["revision"]
        if SNAPSHOT.search(source):
            source = found["name"].replace("--", "/")
    return {"source": source, "revision": revision}


def public(origin: Origin) -> Origin:
    """A source without the folders of the machine that it lay on."""
    source = origin["source"] or ""
    return {**origin, "source": source if is_hub_name(source) else Path(source).name}


def is_hub_name(source: str | None) -> bool:
    """Whether it is the name of a repository: two parts, and no such folder here."""
    if source is None or source.count("/") != 1 or Path(source).exists():
        return False
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True
