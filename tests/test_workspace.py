"""Buffers are used again where they fit, and never mixed up."""

from __future__ import annotations

import torch

from fusion_bench_crossmean.workspace import Workspace

CPU = torch.device("cpu")


def test_a_role_uses_its_memory_again_in_every_shape_that_fits() -> None:
    workspace = Workspace()
    first = workspace.empty("gram", (8, 8), torch.float32, CPU)
    for shape in ((8, 8), (4, 16), (3, 5), (64,), ()):
        again = workspace.empty("gram", shape, torch.float32, CPU)
        assert again.shape == shape
        assert again.is_contiguous()
        assert again.data_ptr() == first.data_ptr()


def test_more_or_another_dtype_takes_new_memory() -> None:
    workspace = Workspace()
    first = workspace.empty("gram", (2, 2), torch.float32, CPU)
    larger = workspace.empty("gram", (3, 3), torch.float32, CPU)
    assert larger.shape == (3, 3)
    assert larger.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    double = workspace.empty("gram", (2, 2), torch.float64, CPU)
    assert double.dtype == torch.float64
    assert workspace.empty("gram", (2, 2), torch.float64, CPU).data_ptr() == double.data_ptr()


def test_roles_do_not_share_memory() -> None:
    workspace = Workspace()
    one, other = (workspace.zeros(role, (3,), torch.float64, CPU) for role in ("one", "other"))
    one.fill_(1)
    assert other.tolist() == [0, 0, 0]
    assert workspace.empty("one", (3,), torch.float64, CPU).tolist() == [1, 1, 1]


def test_zeros_are_zero_whatever_was_there() -> None:
    workspace = Workspace()
    workspace.empty("rhs", (4, 4), torch.float64, CPU).fill_(float("nan"))
    assert torch.equal(workspace.zeros("rhs", (2, 3), torch.float64, CPU), torch.zeros(2, 3))


def test_two_workspaces_share_nothing() -> None:
    one, other = (Workspace().zeros("lhs", (2,), torch.float64, CPU) for _ in range(2))
    one.fill_(1)
    assert other.sum() == 0
