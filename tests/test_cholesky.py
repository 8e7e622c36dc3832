"""The factorisation: right solutions in the memory it is given, None where there is no factor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import relative_error
from torch import Tensor

from fusion_bench_crossmean.cholesky import CholeskyFactor, factorise


def positive(size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * size, size, generator=generator, dtype=torch.float64)
    return rows.T @ rows / (2 * size) + 0.1 * torch.eye(size, dtype=torch.float64)


def factor_of(matrix: Tensor) -> CholeskyFactor:
    factor = factorise(matrix)
    assert factor is not None
    return factor


@given(size=st.integers(1, 40), columns=st.integers(1, 30), seed=st.integers(0, 1000))
def test_solutions_are_those_of_the_general_solver(size: int, columns: int, seed: int) -> None:
    matrix = positive(size, seed)
    rhs = torch.randn(size, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.linalg.solve(matrix, rhs)
    solved = factor_of(matrix.clone()).solve(rhs.T.contiguous())
    assert solved.shape == (columns, size)
    assert relative_error(solved, expected.T) < 1e-12


@given(size=st.integers(1, 40), seed=st.integers(0, 1000))
def test_pivots_are_the_squared_diagonal_of_the_factor(size: int, seed: int) -> None:
    matrix = positive(size, seed)
    expected = torch.linalg.cholesky(matrix).diagonal().square()
    assert relative_error(factor_of(matrix.clone()).pivots, expected) < 1e-12


def test_a_factor_solves_more_than_once() -> None:
    matrix = positive(12)
    factor = factor_of(matrix.clone())
    for seed in range(3):
        rhs = torch.randn(5, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert relative_error(factor.solve(rhs.clone()) @ matrix, rhs) < 1e-12


def test_matrix_and_right_hand_side_are_worked_on_where_they_lie() -> None:
    matrix = positive(300)
    rhs = torch.randn(40, 300, dtype=torch.float64)
    before, there = matrix.clone(), rhs.data_ptr()
    factor = factor_of(matrix)
    assert not torch.equal(matrix, before)
    solved = factor.solve(rhs)
    assert solved.data_ptr() == there
    assert torch.equal(solved, rhs)
    assert relative_error(solved @ before, torch.linalg.solve(before, (solved @ before).T).T @ before) < 1e-12


def test_only_one_half_of_the_matrix_has_to_be_right() -> None:
    """Rounding makes the halves of a sum differ: the same one is read whatever lies in the other."""
    matrix, rhs = positive(9), torch.randn(2, 9, dtype=torch.float64)
    expected = torch.linalg.solve(matrix, rhs.T).T
    halves = [matrix.tril() + 7 * torch.ones(9, 9).triu(1), matrix.triu() + 7 * torch.ones(9, 9).tril(-1)]
    errors = []
    for half in halves:
        factor = factorise(half.clone())
        errors.append(1.0 if factor is None else relative_error(factor.solve(rhs.clone()), expected))
    assert min(errors) < 1e-12


@pytest.mark.parametrize(
    "matrix",
    [
        -torch.eye(3, dtype=torch.float64),
        torch.diag(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)),
        torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64),
    ],
    ids=["negative", "singular", "indefinite"],
)
def test_a_matrix_that_is_not_positive_definite_has_no_factor(matrix: Tensor) -> None:
    assert factorise(matrix) is None
