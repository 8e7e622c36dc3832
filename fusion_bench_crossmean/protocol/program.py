"""The program behind ``fusion_bench --config-name crossmean_protocol``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusion_bench import BaseHydraProgram, RuntimeConstants, auto_register_config, instantiate
from fusion_bench.mixins import LightningFabricMixin
from fusion_bench.utils.rich_utils import print_config_tree
from omegaconf import DictConfig, OmegaConf
from tqdm.auto import tqdm

from fusion_bench_crossmean.protocol.catalogue import rows_of
from fusion_bench_crossmean.protocol.comparison import Comparison

log = logging.getLogger(__name__)


@auto_register_config
class ProtocolProgram(LightningFabricMixin, BaseHydraProgram):
    """Merges experts with many methods and compares what comes out.

    Every finished cell (method, task set, seed, coverage, number of calibration inputs) is a file below `results`; a
    second run computes what is missing only.

    Args:
        modelpool, taskpool: FusionBench's configs.
        catalogue: name of a method -> title, config and what else `Row` takes.
        recipe: `name`, `title`, `baseline`, `outputs` and `notes` of the comparison.
        methods: of the catalogue, in the order of the tables.
        task_sets: see `task_sets_of`.
        seeds: of the draws, shared by all methods.
        coverages: for the methods that have such a choice.
        num_calibration_samples: unlabelled training rows per task, one number or several.
        num_validation_samples: labelled training rows per task, on which scales are chosen.
        scales: among which.
        pool: the pools' name, in tables and folders.
        results: folder of cells, tables and figures.
        fabric: config of Lightning's Fabric.
        path: FusionBench's paths.
        fast_dev_run: one small batch everywhere: the numbers mean nothing.
        print_config: print the config first.
        dry_run: stop there.
        kwargs: what FusionBench sends along.

    Raises:
        ValueError: an unknown method, task or output; too few rows; a method that needs a pretrained model which the
            pool does not have.
    """

    # `modelpool` and `fabric` are to be the objects, not their configs.
    _config_mapping = BaseHydraProgram._config_mapping | {"_modelpool": "modelpool", "_fabric": "fabric"}

    def __init__(
        self,
        *,
        modelpool: DictConfig,
        taskpool: DictConfig,
        catalogue: DictConfig,
        recipe: DictConfig,
        methods: Sequence[str],
        task_sets: Any = "all",
        seeds: Sequence[int] = (0, 1, 2),
        coverages: Sequence[str] = ("mlp",),
        num_calibration_samples: int | Sequence[int] = 256,
        num_validation_samples: int = 256,
        scales: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4, 2.0),
        pool: str = "pool",
        results: str = "outputs/crossmean_protocol",
        fabric: DictConfig | None = None,
        path: DictConfig | None = None,
        fast_dev_run: bool = False,
        print_config: bool = True,
        dry_run: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        RuntimeConstants.debug = fast_dev_run
        RuntimeConstants.print_function_call = False
        if path is not None:
            RuntimeConstants().cache_dir = path.get("cache_dir")
        if print_config:
            print_config_tree(self.config, print_order=["recipe", "methods", "modelpool", "taskpool"])
        recipe_ = plain(recipe)
        self.is_dry = dry_run
        #: FusionBench's OpenCLIP task pool asks its program for the model pool.
        self.modelpool: Any = None
        self.comparison = Comparison(
            modelpool=plain(modelpool),
            taskpool=plain(taskpool),
            rows=rows_of(plain(catalogue), several(methods)),
            title=recipe_["title"],
            baseline=recipe_["baseline"],
            outputs=recipe_["outputs"],
            pool=as_file_name(pool, "pool"),
            folder=Path(results) / as_file_name(recipe_["name"], "recipe.name"),
            cells=Path(results) / "cells",
            build=self.build,
            task_sets=plain(task_sets),
            machine={"device": str(self.fabric.device), "precision": str(self.fabric._precision.precision)},
            seeds=several(seeds),
            coverages=several(coverages),
            sample_counts=several(num_calibration_samples),
            num_validation=num_validation_samples,
            scales=several(scales),
            notes=recipe_.get("notes") or [],
            is_trial=fast_dev_run,
            is_main=self.fabric.is_global_zero,
        )

    def build(self, config: Mapping[str, Any]) -> Any:
        """A pool or an algorithm from its config, with this program's Fabric."""
        made = instantiate(OmegaConf.create(dict(config)), _recursive_=config.get("_recursive_", False))
        if hasattr(made, "load_train_dataset"):
            self.modelpool = made
        if hasattr(made, "_program"):
            made._program = self
        if hasattr(made, "_fabric_instance"):
            made._fabric_instance = self.fabric
        return made

    def run(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  (FusionBench's returns nothing)
        """Computes what is missing, and writes tables and figures."""
        if self.is_dry:
            log.info("dry_run: nothing is computed.")
            return {}
        outcome = self.comparison.run()
        for table in sorted(outcome.folder.glob("*.md")):
            tqdm.write(f"{table}\n{table.read_text(encoding='utf-8')}")
        return {"folder": str(outcome.folder)}


def several(value: Any) -> list[Any]:
    """A list from a list or from one value."""
    value = plain(value)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def plain(value: Any) -> Any:
    """A config as plain containers."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def as_file_name(text: str, setting: str) -> str:
    """A name as one part of a path; its slashes become dashes.

    Raises:
        ValueError: it would lead elsewhere.

    Example:
        >>> as_file_name("CLIPVisionModelPool/mine", "pool")
        'CLIPVisionModelPool-mine'
    """
    name = str(text).replace("/", "-")
    if name in ("", ".", "..") or "\0" in name:
        raise ValueError(f"{setting} must be a file name, not {text!r}.")
    return name
