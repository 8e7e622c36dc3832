"""The benchmarks run as their docstrings say; what they measure is nothing that a test could hold them to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli import ROOT, run, succeeded


def results(tmp_path: Path, script: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON and the Markdown that a benchmark writes."""
    output = tmp_path / "result"
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--output", str(output), *arguments]
    succeeded(run(command, tmp_path))
    return json.loads(output.with_suffix(".json").read_text()), output.with_suffix(".md").read_text()


def test_the_cost_table_has_a_row_for_everything_that_is_asked_for(tmp_path: Path) -> None:
    rows = ["crossmean_mlp", "regmean_plusplus", "twice_the_layers", "peak_memory", "share_of_rate"]
    workload = ["--size", "tiny", "--tasks", "2", "--samples", "4", "--repeats", "1"]
    content, text = results(tmp_path, "cost_table.py", *workload, "--rows", *rows)
    assert [row["name"] for row in content["rows"]] == rows
    assert all(row["measured"] > 0 for row in content["rows"])
    counted = content["operations"]["crossmean_mlp"]
    # Two layers per block (64 and 256 features), two blocks: n^3 / 3 each, whichever library computes them.
    assert counted["Cholesky factors"]["float64"] == pytest.approx(2 * (64**3 + 256**3) / 3)
    assert counted["Cholesky solves"]["float64"] == pytest.approx(2 * 2 * (64**2 * 256 + 256**2 * 64))
    assert "| CrossMean, mlp / FusionBench RegMean | 31.2 | <= 1.75 |" in text


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_whole_forward_passes_merge_to_the_same_model(tmp_path: Path, coverage: str) -> None:
    workload = ["--size", "tiny", "--layers", "2", "--tasks", "2", "--samples", "40", "--repeats", "1"]
    content, _ = results(tmp_path, "whole_network_cost.py", *workload, "--coverage", coverage)
    assert content["largest_relative_difference"] < 1e-4  # float32, ill-conditioned random systems
    assert content["ratio"] > 0
