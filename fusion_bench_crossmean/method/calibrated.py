"""What every algorithm here needs first: its settings checked, the experts loaded and checked, the inputs drawn."""

from __future__ import annotations

import contextlib
import itertools
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from fusion_bench import BaseAlgorithm, RuntimeConstants, auto_register_config
from fusion_bench.modelpool import BaseModelPool

from fusion_bench_crossmean.calibration import Calibration, load_calibration, load_probes, open_datasets, source_for
from fusion_bench_crossmean.coverage import Coverage, covered_layers
from fusion_bench_crossmean.expert_checks import NO_EXPERTS
from fusion_bench_crossmean.expert_loading import Experts, load_experts
from fusion_bench_crossmean.kept_statistics import StoredStatistics
from fusion_bench_crossmean.memory import memory_of
from fusion_bench_crossmean.method.material import Material
from fusion_bench_crossmean.method.outputs import check_outputs, report_path, saved_at
from fusion_bench_crossmean.method.publishing import Companions, expands_home, is_saved_as_folder
from fusion_bench_crossmean.method.running import Running
from fusion_bench_crossmean.method.settings import check_choice, check_flag, check_integer, check_number, check_path

log = logging.getLogger(__name__)

#: Inputs per task under FusionBench's ``fast_dev_run=true``.
FAST_DEV_SAMPLES = 8
#: In GiB.
LARGEST_MEMORY = 2**30
#: What FusionBench sends along with the settings.
BOOKKEEPING = ("_usage_", "_version_", "_recursive_")


@auto_register_config
class CalibratedAlgorithm(Running, BaseAlgorithm):
    """Base of the merges and the analyzer: shared settings, experts and calibration inputs.

    Args:
        coverage: `mlp` (the linear layers of every block's MLP) or `full` (every linear layer).
        num_calibration_samples: unlabelled images or texts per task, at least 1.
        calibration_data: task -> folder of images, text file or JSON-lines file to draw calibration inputs from,
            instead of the pool's training data.
        seed: of the calibration draw (and of token dropout).
        batch_size: inputs per forward; the result does not depend on it.
        num_workers: processes that load data, 0 for none.
        token_dropout: fraction of the calibration tokens left out of every statistic at random, in [0, 1), to ablate.
        precision: `full`: forwards in the experts' common dtype (float32 where they differ), full float32 products.
            `mixed`: forwards in bfloat16, products as torch's float32 precision `medium` (bfloat16 operands where the
            CPU has them, TF32 on CUDA); sums stay float32 and solutions float64.
        schedule: `paused` holds every forward's activations, `replay` only the inputs of the current block and runs its
            beginning again for every layer in it; `auto` takes the first that fits into memory. Results are equal.
        activation_store: where `replay` keeps blocks' inputs: `device`, `cpu` (on a CPU it saves nothing) or `disk`;
            `auto` as memory demands. One that is named asks for `replay`.
        max_memory_gib: budget for this process on the device, in GiB, with all that is loaded; None: most of what is
            free, and nothing is refused.
        preflight_only: check everything, run one batch, and say what the run would take, without doing it.
        report_path: where the JSON report goes; ``{log_dir}`` is FusionBench's log folder. None: into that folder,
            or nowhere where there is none (then `report` holds it).

    Raises:
        TypeError: a setting that does not exist.
        ValueError: a setting out of range.
    """

    #: Default file name of the report.
    report_name = "crossmean_report.json"
    #: Whether the pretrained model's weights are used, not its structure alone.
    needs_pretrained = False

    # Stored by `auto_register_config`:
    coverage: Coverage
    num_calibration_samples: int
    seed: int
    batch_size: int
    num_workers: int
    token_dropout: float
    precision: Literal["full", "mixed"]
    schedule: Literal["auto", "paused", "replay"]
    activation_store: Literal["auto", "device", "cpu", "disk"]
    max_memory_gib: float | None
    preflight_only: bool
    report_path: str | None

    def __init__(
        self,
        *,
        coverage: Coverage = "mlp",
        num_calibration_samples: int = 256,
        calibration_data: Mapping[str, str] | None = None,
        seed: int = 0,
        batch_size: int = 32,
        num_workers: int = 0,
        token_dropout: float = 0.0,
        precision: Literal["full", "mixed"] = "full",
        schedule: Literal["auto", "paused", "replay"] = "auto",
        activation_store: Literal["auto", "device", "cpu", "disk"] = "auto",
        max_memory_gib: float | None = None,
        preflight_only: bool = False,
        report_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        if unknown := [key for key in kwargs if key not in BOOKKEEPING]:
            raise TypeError(
                f"{type(self).__name__} has no setting {', '.join(map(repr, unknown))}; "
                f"it has {', '.join(self.setting_names())}."
            )
        super().__init__(**kwargs)
        check_choice("coverage", coverage, ("mlp", "full"))
        check_integer("num_calibration_samples", num_calibration_samples, at_least=1)
        if calibration_data is not None and not isinstance(calibration_data, Mapping):
            raise ValueError(f"calibration_data must be task -> path, {{mnist: photos/}}, not {calibration_data!r}.")
        self.calibration_data = dict(calibration_data or {}) or None
        check_integer("seed", seed, at_least=0)
        check_integer("batch_size", batch_size, at_least=1)
        check_integer("num_workers", num_workers, at_least=0)
        check_number("token_dropout", token_dropout, 0, 1)
        if token_dropout == 1:
            raise ValueError("token_dropout must be below 1: at 1 no token is left.")
        check_choice("precision", precision, ("full", "mixed"))
        check_choice("schedule", schedule, ("auto", "paused", "replay"))
        check_choice("activation_store", activation_store, ("auto", "device", "cpu", "disk"))
        if schedule == "paused" and activation_store in ("cpu", "disk"):
            raise ValueError(
                f"activation_store={activation_store} needs schedule=replay or auto: a paused forward's activations "
                "stay where they are."
            )
        if max_memory_gib is not None:
            check_number("max_memory_gib", max_memory_gib, 0, LARGEST_MEMORY)
        check_flag("preflight_only", preflight_only)
        self.report_path = check_path("report_path", report_path)
        #: The last run's report, as written.
        self.report: dict[str, Any] = {}

    @classmethod
    def setting_names(cls) -> list[str]:
        """Every setting of the class, as in its YAML."""
        return [key for key in cls._config_mapping.values() if key not in BOOKKEEPING]

    def settings(self) -> dict[str, Any]:
        """Every setting with its value."""
        return {name: getattr(self, name) for name in self.setting_names()}

    @contextlib.contextmanager
    def prepared(self, modelpool: BaseModelPool, calibration: Mapping[str, Any] | None) -> Iterator[Material]:
        """Loads and checks everything a run needs, the cheap checks first; its temporary files go with the block.

        Args:
            modelpool: FusionBench's pool.
            calibration: task -> inputs, see `calibration.plain`; None takes them from the pool.
        """
        self._check_pool(modelpool)
        tasks, count = modelpool.model_names, self.num_calibration_samples
        if RuntimeConstants().debug:
            count = min(count, FAST_DEV_SAMPLES, self.batch_size)
            log.warning("fast_dev_run: %d inputs per task, whatever the settings say; the numbers mean nothing.", count)
        source = source_for(modelpool, calibration, self.calibration_data)
        datasets = open_datasets(source, tasks, count)
        probes = load_probes(source, datasets, num_samples=count, seed=self.seed)
        companions = self._companions(modelpool)
        with self._loaded(modelpool) as experts:
            layers = covered_layers(experts.template, self.coverage)
            with self.profile("load calibration"):
                drawn = load_calibration(
                    source,
                    datasets,
                    num_samples=min(count, self.batch_size) if self.preflight_only else count,
                    seed=self.seed,
                    batch_size=self.batch_size,
                    num_workers=self.num_workers,
                    token_dropout=self.token_dropout,
                    progress=self.progress,
                )
            yield Material.checked(experts, layers, drawn, count, probes, companions)

    @contextlib.contextmanager
    def prepared_again(self, modelpool: BaseModelPool, stored: StoredStatistics) -> Iterator[Material]:
        """The same from kept statistics, which stand for calibration inputs."""
        self._check_pool(modelpool)
        companions = self._companions(modelpool)
        with self._loaded(modelpool) as experts:
            layers = covered_layers(experts.template, self.coverage)
            tasks = list(experts.weights)
            indices = {task: stored.indices[task] for task in tasks if task in stored.indices}
            calibration = Calibration({task: [] for task in tasks}, indices)
            yield Material(experts, layers, calibration, 0, {}, companions, stored.beside(tasks))

    def _check_pool(self, modelpool: BaseModelPool) -> None:
        is_folder = is_saved_as_folder(modelpool)
        check_outputs(self.output_path(), self.saved_path(modelpool), self.written_folders(), is_folder=is_folder)
        if not (tasks := modelpool.model_names):
            raise ValueError(NO_EXPERTS)
        if self.needs_pretrained and not modelpool.has_pretrained:
            raise ValueError(
                f"{type(self).__name__} needs the pretrained model; the pool has {', '.join(map(repr, tasks))}. Add "
                "'_pretrained_' to modelpool.models."
            )

    def _companions(self, modelpool: BaseModelPool) -> Companions | None:
        return None if (saved := self.saved_path(modelpool)) is None else Companions.of(modelpool, saved)

    @contextlib.contextmanager
    def _loaded(self, modelpool: BaseModelPool) -> Iterator[Experts]:
        with tempfile.TemporaryDirectory(prefix="crossmean-experts-") as folder:
            numbers = itertools.count()
            with self.profile("load experts"):
                experts = load_experts(
                    modelpool,
                    fits=self._experts_fit,
                    new_file=lambda: Path(folder) / f"{next(numbers)}.safetensors",
                    keep_pretrained=self.needs_pretrained,
                    progress=self.progress,
                )
            yield experts

    def _experts_fit(self, size: int) -> bool:
        """Whether so many bytes of experts may stay in memory: in half of what is free, the rest is to work in."""
        budget = self.max_memory_gib if self.device.type == "cpu" else None
        return size <= memory_of(torch.device("cpu"), budget).free / 2

    def saved_path(self, modelpool: BaseModelPool) -> Path | None:
        """Where FusionBench is going to save the merged model; None: nowhere."""
        saved = saved_at(getattr(self._program, "merged_model_save_path", None), self.log_dir)
        # FusionBench's pools of language models expand it, those of image encoders do not.
        return saved.expanduser() if saved is not None and expands_home(modelpool) else saved

    def written_folders(self) -> dict[str, str]:
        """Setting -> folder that a run is going to write to."""
        return {}

    def output_path(self) -> Path | None:
        """Where the report goes; None: nowhere."""
        return report_path(self.report_path, self.log_dir, self.report_name)
