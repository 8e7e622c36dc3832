"""Makes this package's configs, and FusionBench's own, visible to every FusionBench command.

Hydra imports this file in every program of the environment, so it imports neither torch nor FusionBench.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

log = logging.getLogger(__name__)

PROVIDER = "fusion-bench-crossmean"


def package_folder(name: str) -> Path | None:
    """Folder of a top-level package, without importing it."""
    # find_spec raises once FusionBench has put its lazy importer into sys.modules.
    module = sys.modules.get(name)
    spec = None if module else importlib.util.find_spec(name)
    locations = module.__path__ if module else spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def config_folders() -> list[Path]:
    """Our config folder and FusionBench's, those that exist.

    An installed wheel carries ours inside the package, a source tree beside it. FusionBench's is added because it
    takes a folder called `config` in the working directory for its own.
    """
    ours, fusion_bench = package_folder("fusion_bench_crossmean"), package_folder("fusion_bench")
    candidates = [ours / "config", ours.parent / "config"] if ours else []
    found = [folder for folder in candidates if (folder / "method" / "crossmean.yaml").is_file()][:1]
    if fusion_bench:
        beside = fusion_bench.parent
        primary = [beside / "config", beside / "fusion_bench_config"]
        found += [folder for folder in primary if (folder / "fabric_model_fusion.yaml").is_file()][:1]
    return found


def asset(name: str) -> str:
    """Folder of something the package ships, e.g. ``${crossmean_asset:mini-clip}``; applies our cures on the way."""
    from fusion_bench_crossmean.mini.assets import asset_folder

    return str(asset_folder(name))


def cured(value: str) -> str:
    """`value` itself, with the cures for FusionBench's defects applied before it instantiates anything."""
    from fusion_bench_crossmean.compat import apply_cures

    apply_cures(openclip="OpenCLIP" in value)
    return value


class CrossMeanSearchPathPlugin(SearchPathPlugin):
    """Appends the config folders and registers the resolvers `crossmean_asset` and `crossmean_cured`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # An exception here would stop every Hydra program of the environment, whatever it is about.
        try:
            OmegaConf.register_new_resolver("crossmean_asset", asset, replace=True)
            OmegaConf.register_new_resolver("crossmean_cured", cured, replace=True)
            for folder in config_folders():
                search_path.append(provider=PROVIDER, path=f"file://{folder}")
        except Exception as error:  # noqa: BLE001
            log.warning("fusion-bench-crossmean is not available to Hydra: %s", error)
