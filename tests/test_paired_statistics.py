"""The sums over paired inputs, in either order of products, block by block, and what is read off them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import FLOAT32, SAME, relative_error
from torch import Tensor

from fusion_bench_crossmean.linear_system import relative_residual
from fusion_bench_crossmean.paired_statistics import (
    GRAM_BLOCK,
    NUM_PROBES,
    accumulate,
    bilinear_is_cheaper,
    directions_for,
    float32_products,
)
from fusion_bench_crossmean.workspace import Workspace

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def paired(rows: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Right is left through a linear map, so that C is no symmetric matrix, and some noise."""
    left = drawn(rows, width, seed=seed) + 0.5
    return left, left @ drawn(width, width, seed=seed + 1) / width**0.5 + 0.1 * drawn(rows, width, seed=seed + 2)


def batched(left: Tensor, right: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(left.split(size), right.split(size), strict=True))


# Orders of the product


@settings(deadline=None, max_examples=60)
@given(
    width=st.integers(1, 24), outputs=st.integers(1, 24), rows=st.integers(1, 40), size=st.integers(1, 40),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_both_orders_give_the_same_sums(width: int, outputs: int, rows: int, size: int, seed: int) -> None:
    left, right = paired(rows, width, seed)
    weight = drawn(outputs, width, seed=seed + 3)
    pairs = batched(left, right, size)
    formed = accumulate(pairs, weight)
    given_count = accumulate(pairs, weight, num_batches=len(pairs))
    expected = left.T @ right
    assert formed.bilinear is not None
    assert relative_error(formed.bilinear, expected) < SAME
    for statistics in (formed, given_count):
        assert statistics.product is not None
        scale = float(left.norm() * right.norm() * weight.norm())
        assert float((statistics.product - expected @ weight.T).norm()) < SAME * scale
        assert float((statistics.diagonal - expected.diagonal()).norm()) < SAME * float(left.norm() * right.norm())
        assert relative_error(statistics.gram, left.T @ left) < SAME
        assert statistics.right_energy == pytest.approx(float(right.square().sum()), rel=SAME)
        assert statistics.rows == rows


@pytest.mark.parametrize(
    ("rows", "width", "outputs", "forms"), [(40, 20, 40, True), (10, 20, 40, False), (40, 20, 3, False)]
)
def test_the_cheaper_order_is_taken(rows: int, width: int, outputs: int, forms: bool) -> None:
    costs = rows * width**2 + width**2 * outputs, 2 * rows * width * outputs
    assert bilinear_is_cheaper(rows, width, outputs) == (costs[0] <= costs[1]) == forms
    left, right = paired(rows, width)
    pairs = batched(left, right, 5)
    statistics = accumulate(pairs, drawn(outputs, width), num_batches=len(pairs))
    assert (statistics.bilinear is not None) == forms
    assert (statistics.sketch is None) == (statistics.bilinear is not None)
    assert accumulate(pairs, drawn(outputs, width)).bilinear is not None
    assert accumulate(pairs).product is None


def test_a_workspace_that_held_something_else_changes_nothing() -> None:
    workspace = Workspace()
    for width, outputs in ((30, 50), (12, 40), (25, 60), (12, 2)):
        left, right = paired(20, width)
        weight = drawn(outputs, width)
        again = accumulate(batched(left, right, 6), weight, num_batches=4, workspace=workspace)
        assert again.product is not None
        assert relative_error(again.product, left.T @ right @ weight.T) < SAME
        assert relative_error(again.gram, left.T @ left) < SAME


# The Gram matrix


@pytest.mark.parametrize("width", [1, GRAM_BLOCK - 1, GRAM_BLOCK, GRAM_BLOCK + 1, 2 * GRAM_BLOCK, 800])
def test_the_gram_matrix_is_whole_though_half_of_it_is_computed(width: int) -> None:
    left = drawn(30, width)
    gram = accumulate(batched(left, left, 13)).gram
    assert relative_error(gram, left.T @ left) < SAME
    assert torch.equal(gram[:GRAM_BLOCK, GRAM_BLOCK:], gram[GRAM_BLOCK:, :GRAM_BLOCK].T)


def test_one_tensor_on_both_sides_is_one_product() -> None:
    left = drawn(30, 8)
    weight = drawn(50, 8)
    statistics = accumulate([(rows, rows) for rows in left.split(7)], weight, num_batches=5)
    assert statistics.bilinear is statistics.gram
    assert statistics.product is not None
    assert relative_error(statistics.product, left.T @ left @ weight.T) < SAME
    assert (statistics.alignment(), statistics.drift()) == (1.0, 0.0)


# What is read off them


@pytest.mark.parametrize("seed", range(4))
def test_alignment_and_drift_are_those_of_the_definition(seed: int) -> None:
    left, right = paired(60, 12, seed)
    statistics = accumulate(batched(left, right, 16))
    assert statistics.alignment() == pytest.approx(oracles.alignment(left, right), abs=1e-12)
    assert statistics.alignment() < 0.9
    assert statistics.drift() == pytest.approx(float((left - right).norm() / right.norm()), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("offset", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0])
def test_the_alignment_of_the_sketch_is_close_to_the_exact_one(noise: float, offset: float, seed: int) -> None:
    """Also where the inputs share a direction, as activations do; only the first batch tells which."""
    left = drawn(100, 200, seed=10 * seed) + offset
    right = left + noise * left @ drawn(200, 200, seed=10 * seed + 1) / 200**0.5
    batches = list(zip(left.split(50), right.split(50), strict=True))
    statistics = accumulate(batches, drawn(400, 200, seed=2), num_batches=2)
    assert statistics.bilinear is None
    assert statistics.directions is not None
    assert statistics.sketch is not None
    assert relative_error(statistics.sketch, left.T @ right @ statistics.directions) < SAME
    assert statistics.alignment() == pytest.approx(oracles.alignment(left, right), abs=0.05)
    assert statistics.drift() == pytest.approx(float((left - right).norm() / right.norm()), abs=1e-6)


def test_directions_reproduce_inner_products_on_average() -> None:
    """What lies along the means is exact; the rest is unbiased over the random signs, so close for many features."""
    left, right = drawn(50, 300) + 2.0, drawn(50, 300, seed=1) + 2.0
    directions = directions_for(left, right)
    assert directions.shape == (300, NUM_PROBES + 2)
    means, random = directions[:, :2], directions[:, 2:]
    assert relative_error(means.T @ means, torch.eye(2)) < SAME
    assert float((means.T @ random).norm()) < SAME * 300
    assert relative_error(means @ (means.T @ left.mean(0)), left.mean(0)) < SAME
    assert float(random.square().sum()) == pytest.approx(298, rel=0.1)


@pytest.mark.parametrize("num_batches", [None, 1])
def test_of_several_right_inputs_the_mean_counts(num_batches: int | None) -> None:
    left, rights, weight = drawn(40, 30), [drawn(40, 30, seed=i) for i in (1, 2, 3)], drawn(4, 30, seed=4)
    ours = accumulate([(left, rights)], weight, num_batches)
    theirs = accumulate([(left, sum(rights) / 3)], weight, num_batches)
    assert (ours.bilinear is None) == (num_batches is not None)
    assert ours.product is not None
    assert theirs.product is not None
    assert relative_error(ours.product, theirs.product) < SAME
    assert relative_error(ours.diagonal, theirs.diagonal) < SAME
    assert ours.right_energy == pytest.approx(theirs.right_energy, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_inputs_are_averaged_in_float32(dtype: torch.dtype) -> None:
    """Three times 40,000 overflows float16; a third of it is not."""
    inputs = torch.full((1, 1), 40000.0, dtype=dtype)
    statistics = accumulate([(torch.ones(1, 1, dtype=dtype), [inputs] * 3)])
    assert statistics.diagonal.dtype == torch.float32
    assert float(statistics.diagonal) == pytest.approx(float(inputs))


@pytest.mark.parametrize(("rows", "formed"), [(10, False), (40, True)])
def test_equal_inputs_in_two_tensors_are_aligned(rows: int, formed: bool) -> None:
    left = drawn(rows, 30)
    statistics = accumulate([(left, left.clone())], drawn(200, 30), num_batches=1)
    assert (statistics.bilinear is not None) == formed
    assert statistics.alignment() == pytest.approx(1.0, abs=1e-12)
    assert statistics.drift() == pytest.approx(0.0, abs=1e-6)


def test_nothing_on_one_side_has_no_alignment() -> None:
    zeros = torch.zeros(5, 4, **DOUBLE)
    statistics = accumulate([(drawn(5, 4), zeros)])
    assert statistics.alignment() != statistics.alignment()
    assert statistics.drift() != statistics.drift()
    with pytest.raises(ValueError, match="no inputs to sum"):
        accumulate([])


# Dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("outputs", [2, 100])
def test_low_precision_inputs_are_upcast_before_they_are_multiplied(outputs: int, dtype: torch.dtype) -> None:
    left, right = (tensor.to(dtype) for tensor in paired(64, 24))
    weight = drawn(outputs, 24).float()
    statistics = accumulate(batched(left, right, 16), weight, num_batches=4)
    assert statistics.gram.dtype == torch.float32
    assert statistics.product is not None
    assert statistics.product.dtype == torch.float32
    exact = left.double().T @ right.double()
    assert relative_error(statistics.gram, left.double().T @ left.double()) < FLOAT32
    assert relative_error(statistics.product, exact @ weight.double().T) < FLOAT32
    assert relative_error(statistics.diagonal, exact.diagonal()) < FLOAT32
    assert statistics.right_energy == pytest.approx(float(right.double().square().sum()), rel=FLOAT32)
    coarse = (left.T @ left).double()
    assert dtype == torch.float32 or relative_error(coarse, left.double().T @ left.double()) > FLOAT32


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_precision_of_products_is_as_before_afterwards(precision: Any) -> None:
    seen = []
    torch.set_float32_matmul_precision("high")
    try:
        with contextlib.suppress(ZeroDivisionError), float32_products(precision):
            seen.append(torch.get_float32_matmul_precision())
            _ = 1 / 0
        seen.append(torch.get_float32_matmul_precision())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [precision, "high"]


# The residual


@pytest.mark.parametrize("outputs", [1, NUM_PROBES, NUM_PROBES + 1, 100])
@pytest.mark.parametrize("width", [3, 256, 300])
@pytest.mark.parametrize("error", [1e-8, 1e-3, 1.0])
def test_the_residual_is_estimated_within_a_factor_of_two(error: float, width: int, outputs: int) -> None:
    lhs = drawn(2 * width, width).T @ drawn(2 * width, width)
    ratio, diagonal = 0.9, lhs.diagonal() * 1.1
    system = ratio * lhs
    system.diagonal().copy_(diagonal)
    rhs = drawn(width, outputs, seed=5)
    weight = torch.linalg.solve(system, rhs).T
    weight = weight + error * weight.norm() * drawn(outputs, width, seed=6) / (outputs * width) ** 0.5
    exact = float((system @ weight.T - rhs).norm() / rhs.norm())
    estimate = relative_residual(lhs, ratio, diagonal, weight.contiguous(), rhs)
    assert exact / 2 < estimate < exact * 2
    if outputs <= NUM_PROBES:
        assert estimate == pytest.approx(exact, rel=1e-6)


@pytest.fixture
def newer_switches() -> Iterator[Any]:
    """torch's switches per backend, where it has them; as before afterwards."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        pytest.skip("this torch has one switch for all backends")
    yield backends
    for backend in (backends, backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv):
        backend.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("setting", ["cuda.matmul", "mkldnn.matmul", ""])
def test_precision_set_per_backend_is_heeded_and_restored(newer_switches: Any, setting: str, precision: Any) -> None:
    """torch refuses to read its older switch then."""
    place = newer_switches
    for part in filter(None, setting.split(".")):
        place = getattr(place, part)
    matmuls = (newer_switches.cuda.matmul, newer_switches.mkldnn.matmul)
    for backend in matmuls:
        backend.fp32_precision = "none"
    place.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    before = [backend.fp32_precision for backend in matmuls]
    with contextlib.suppress(ZeroDivisionError), float32_products(precision):
        assert [backend.fp32_precision for backend in matmuls] == {"highest": ["ieee"] * 2, "medium": ["tf32", "bf16"]}[
            precision
        ]
        _ = 1 / 0
    assert [backend.fp32_precision for backend in matmuls] == before
