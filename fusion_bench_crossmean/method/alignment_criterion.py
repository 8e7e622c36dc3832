"""The analyzer: rho and prefix drift of a pool, from one pass of the averaged model and one of each expert."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fusion_bench import auto_register_config
from fusion_bench.modelpool import BaseModelPool
from torch import nn

from fusion_bench_crossmean.criterion import Criterion, advice, measure
from fusion_bench_crossmean.method.calibrated import CalibratedAlgorithm
from fusion_bench_crossmean.method.material import as_pool, closing, hashes_of
from fusion_bench_crossmean.method.settings import check_flag
from fusion_bench_crossmean.plots import plot_alignment
from fusion_bench_crossmean.report import mean, table, write_json

log = logging.getLogger(__name__)


@auto_register_config
class AlignmentCriterionAnalyzer(CalibratedAlgorithm):
    """Measures how far the merged-prefix mismatch goes, without labels and without a merge.

    Writes a JSON report and, beside it, a PNG of rho by depth.

    Args:
        return_averaged_model: return the weight-averaged model that was measured, so that a task pool evaluates it;
            otherwise there is no model to return.
        kwargs: see `CalibratedAlgorithm`.

    References: CrossMean, arXiv 2610.14762, Section 4.
    """

    report_name = "alignment_criterion.json"
    return_averaged_model: bool  # stored by `auto_register_config`

    def __init__(self, *, return_averaged_model: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_flag("return_averaged_model", return_averaged_model)

    def run(  # pyright: ignore[reportIncompatibleMethodOverride]  (FusionBench's returns nothing)
        self, modelpool: BaseModelPool | Mapping[str, nn.Module], calibration: Mapping[str, Any] | None = None
    ) -> nn.Module | None:
        """Measures the criterion; see `LayerwiseMerge.run` for arguments and errors.

        Returns:
            None, or the averaged model under `return_averaged_model`. The numbers are in `report`.
        """
        pool = as_pool(modelpool)
        self.profiler.recorded_durations.clear()
        with self.computing(), self.prepared(pool, calibration) as material:
            networks = self.networks(material, (0.0, 1.0))
            with self.walking(material, networks) as walker, self.profile("statistics"):
                if self.preflight_only:
                    self.preflight(material, networks, walker, hashes_of(material, self.progress), {})
                    return None
                criterion = measure(self.walked(walker))
            common = self.common_report(material, walker, walker.seconds + walker.replay_seconds)
            self.report = as_record(criterion) | common | closing(material)
        if self._is_rank_zero():
            self._announce(criterion)
        return networks.finish(networks.dtype) if self.return_averaged_model else None

    def _announce(self, criterion: Criterion) -> None:
        log.info("Alignment criterion by depth, means over the experts:\n%s", summary(criterion))
        log.info(self.report["advice"])
        with self.outliving_outputs():
            if (path := self.output_path()) is not None:
                write_json(path, self.report)
                plot_alignment(criterion, path.with_suffix(".png"))


def as_record(criterion: Criterion) -> dict[str, Any]:
    """The criterion in the report."""
    return {
        "rho": criterion.rho,
        "prefix_drift": criterion.prefix_drift,
        "advice": advice(criterion.rho),
        "per_task": criterion.per_task(),
        "layers": [
            {
                "layers": list(layer.group.names),
                "name": layer.group.name,
                "alignment": layer.alignment,
                "prefix_drift": layer.prefix_drift,
            }
            for layer in criterion.layers
        ],
    }


def summary(criterion: Criterion) -> str:
    """A short table: the means over the experts, layer by layer, and over all."""
    rows = [
        [layer.group.name, *(f"{mean(list(v.values())):.4f}" for v in (layer.alignment, layer.prefix_drift))]
        for layer in criterion.layers
    ]
    rows.append(["mean (rho, drift)", f"{criterion.rho:.4f}", f"{criterion.prefix_drift:.4f}"])
    return table(["layer", "alignment", "prefix drift"], rows)
