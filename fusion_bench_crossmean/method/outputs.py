"""Where a run writes, and the check that it can, before any long work."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fusion_bench_crossmean.report import check_writable, unused


def report_path(setting: str | None, log_dir: str | Path | None, name: str) -> Path | None:
    """Where a report goes; None: nowhere.

    Args:
        setting: `report_path`, with ``{log_dir}`` for FusionBench's log folder; None: into that folder.
        log_dir: that folder; None outside FusionBench's programs.
        name: of the file there.

    Raises:
        ValueError: the setting speaks of a log folder where there is none.
    """
    if setting is not None:
        if log_dir is None and "{log_dir}" in setting:
            raise ValueError(f"report_path is {setting!r}, but outside FusionBench there is no log folder.")
        return Path(setting.replace("{log_dir}", str(log_dir)))
    if log_dir is not None:
        return unused(Path(log_dir) / name)  # the jobs of one `-m` share their log folder
    return None


def saved_at(setting: str | None, log_dir: str | Path | None) -> Path | None:
    """Where FusionBench is going to save the merged model; None: nowhere."""
    if setting is None:
        return None
    if log_dir is not None and "{log_dir}" in setting:  # as FusionBench does
        setting = setting.format(log_dir=log_dir)
    return Path(setting)


def check_outputs(report: Path | None, saved: Path | None, folders: Mapping[str, str], *, is_folder: bool) -> None:
    """Raises `OSError` for what cannot be written.

    Args:
        report: its path.
        saved: where FusionBench is going to save the model.
        folders: setting -> folder that is going to be written to.
        is_folder: whether the pool saves its models as folders.
    """
    if report is not None:
        check_writable(report)
    if saved is not None:
        check_saved(saved, is_folder=is_folder)
    for setting, folder in folders.items():
        check_folder(setting, Path(folder))


def check_saved(saved: Path, *, is_folder: bool) -> None:
    """Raises `OSError` unless FusionBench can save a model, as a folder or as a file, at `saved`."""
    if is_folder:
        check_folder("merged_model_save_path", saved)
    else:
        check_writable(saved)


def check_folder(setting: str, folder: Path) -> None:
    """Raises `OSError` unless files can be made in a folder, which need not exist yet; leaves nothing behind."""
    try:
        there = next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))
        with tempfile.TemporaryFile(dir=there):
            pass
        with contextlib.suppress(FileNotFoundError):  # it is going to be made; a name that is too long is another error
            (folder / "x").stat()
    except OSError as error:
        raise OSError(f"{setting} {str(folder)!r} cannot be used: {error}. Choose another folder.") from error
