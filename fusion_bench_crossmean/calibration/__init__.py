"""Calibration: from a task's unlabelled inputs to batches. One module per pool family; no statistics here."""

from fusion_bench_crossmean.calibration.batch import Batch
from fusion_bench_crossmean.calibration.draw import draw_indices
from fusion_bench_crossmean.calibration.load import (
    Calibration,
    CalibrationSource,
    load_calibration,
    load_probes,
    open_datasets,
    preprocessor_of,
    source_for,
)

__all__ = [
    "Batch",
    "Calibration",
    "CalibrationSource",
    "draw_indices",
    "load_calibration",
    "load_probes",
    "open_datasets",
    "preprocessor_of",
    "source_for",
]
