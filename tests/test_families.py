"""The common suite: every family of models, saved and loaded through FusionBench's own pool classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from families import FAMILIES, drawn, experts_of, pico_architectures
from test_schedules import exit_code
from tolerances import SAME, state_error
from torch import nn

from fusion_bench_crossmean import AlignmentCriterionAnalyzer, CrossMeanAlgorithm

N = 24

pytestmark = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@pytest.fixture(scope="module", autouse=True)
def _architectures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pico_architectures(tmp_path_factory.mktemp("architectures")):
        yield


def merged_by(pool: Any, **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    algorithm = CrossMeanAlgorithm(**{"num_calibration_samples": N, "batch_size": 7} | settings)
    return algorithm.run(pool), algorithm.report


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_paused_replayed_and_whole_network_merges_are_the_same(family: Any, coverage: str, tmp_path: Path) -> None:
    pool = family.pool(tmp_path / "pool")
    paused, report = merged_by(pool, coverage=coverage)
    expected = oracles.whole_network(
        experts_of(pool), drawn(pool, report), family.groups(coverage), path_points=(0, 0.5, 1)
    )
    assert state_error(paused.state_dict(), expected) < SAME

    def replays(store: str) -> None:
        replayed, _ = merged_by(pool, coverage=coverage, schedule="replay", activation_store=store)
        assert state_error(replayed.state_dict(), paused.state_dict()) == 0

    for store in ("device", "disk"):
        assert exit_code(lambda store=store: replays(store)) == 0


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_everything_that_was_asked_for_is_measured_on_every_token(family: Any, coverage: str, tmp_path: Path) -> None:
    pool = family.pool(tmp_path / "pool")
    _, report = merged_by(pool, coverage=coverage)
    assert [layer["layers"] for layer in report["layers"]] == family.groups(coverage)
    assert report["num_covered_layers"] == sum(len(group) for group in family.groups(coverage))
    tokens = 0
    for inputs in drawn(pool, report).values():
        mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
        tokens += N * 5 if mask is None else int(mask.sum())
    for layer in report["layers"]:  # a pooler sees the first token only
        assert layer["tokens"] == (2 * N if "pooler" in layer["name"] else tokens)


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_identical_experts_return_the_expert(family: Any, coverage: str, tmp_path: Path) -> None:
    pool = family.pool(tmp_path / "pool")
    pool._models = dict.fromkeys(pool._models, pool._models["mood"])
    merged, _ = merged_by(pool, coverage=coverage, relative_ridge=1e-12)
    assert state_error(merged.state_dict(), experts_of(pool)["mood"].state_dict()) < 1e-6


def test_batches_and_their_padding_do_not_matter(family: Any, tmp_path: Path) -> None:
    pool = family.pool(tmp_path / "pool")
    once, _ = merged_by(pool, coverage="full", batch_size=1)
    together, _ = merged_by(pool, coverage="full", batch_size=N)
    assert state_error(together.state_dict(), once.state_dict()) < 1e-9


def test_a_merge_is_saved_and_loads_again(family: Any, tmp_path: Path) -> None:
    pool = family.pool(tmp_path / "pool")
    merged, report = merged_by(pool, coverage="full", dtype="float32")
    loaded = family.reload(pool, merged, tmp_path / "merged")
    assert state_error(loaded.state_dict(), merged.state_dict()) == 0
    inputs = drawn(pool, report)["mood"]
    outputs = []
    for model in (merged.to(torch.get_default_dtype()), loaded):
        result = model.eval()(**inputs) if isinstance(inputs, dict) else model.eval()(inputs)
        outputs.append(result if isinstance(result, torch.Tensor) else result[0])
    assert torch.equal(*outputs)


def test_the_criterion_measures_every_layer(family: Any, tmp_path: Path) -> None:
    analyzer = AlignmentCriterionAnalyzer(num_calibration_samples=N, coverage="full")
    analyzer.run(family.pool(tmp_path / "pool"))
    assert [layer["layers"] for layer in analyzer.report["layers"]] == family.groups("full")
    assert 0 < analyzer.report["rho"] < 1
