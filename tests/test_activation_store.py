"""What is put away comes back bit for bit, frees its memory in between, and leaves what is shared alone."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_bench_crossmean.activation_store import ActivationStore, StoredInputs, as_bytes

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def path_in(folder: Path, kind: str) -> Path | None:
    return folder / "0" if kind == "disk" else None


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    tensors = [
        torch.randn(3, 4, 5).to(dtype),
        torch.tensor([float("nan"), float("inf"), -0.0, torch.finfo(dtype).tiny], dtype=dtype),
        torch.randn(4, 6).to(dtype).T,
        torch.tensor(2.5, dtype=dtype),
        torch.empty(0, 3, dtype=dtype),
    ]
    contents = [as_bytes(tensor.untyped_storage()).clone() for tensor in tensors]
    stored = StoredInputs(tensors, path_in(tmp_path, kind))
    for _ in range(3):
        stored.put_away()
        assert [nbytes(tensor) for tensor in tensors] == [0] * len(tensors)
        stored.bring_back()
        for tensor, content in zip(tensors, contents, strict=True):
            assert torch.equal(as_bytes(tensor.untyped_storage()), content)
    assert tensors[0].shape == (3, 4, 5)
    assert tensors[2].stride() == (1, 6)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_views_of_one_storage_are_stored_once_and_come_back_together(kind: str, tmp_path: Path) -> None:
    whole = torch.randn(100, 4)
    views = [whole[:50], whole[50:], whole.T, whole]
    expected = [view.clone() for view in views]
    stored = StoredInputs(views, path_in(tmp_path, kind))
    if kind == "disk":
        assert (tmp_path / "0").stat().st_size == whole.nbytes
    stored.put_away()
    assert {nbytes(view) for view in views} == {0}
    stored.bring_back()
    assert all(torch.equal(view, before) for view, before in zip(views, expected, strict=True))
    views[0].fill_(7)
    assert (whole[:50] == 7).all()


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_a_part_brings_its_whole_storage_back(kind: str, tmp_path: Path) -> None:
    """A frame may hold the rest of it."""
    whole = torch.randn(10, 4)
    before = whole.clone()
    stored = StoredInputs([whole[2:3]], path_in(tmp_path, kind))
    stored.put_away()
    stored.bring_back()
    assert torch.equal(whole, before)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_tensors_of_any_dtype_are_put_away(kind: Any) -> None:
    tensors = [torch.randn(2, 3), torch.randn(4), torch.ones(2, 3, dtype=torch.bool), torch.tensor([1, 2])]
    expected = [tensor.clone() for tensor in tensors]
    with ActivationStore(kind) as store:
        stored = store.hold(tensors, store.new_path())
        assert stored is not None
        stored.put_away()
        assert [nbytes(tensor) for tensor in tensors] == [0, 0, 0, 0]
        stored.bring_back()
        for tensor, before in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, before)


def test_the_device_keeps_everything_where_it_is() -> None:
    tensor = torch.randn(3)
    with ActivationStore("device") as store:
        assert store.new_path() is None
        assert store.hold([tensor], None) is None
    assert nbytes(tensor) == tensor.nbytes


def test_the_disk_has_one_file_per_forward_and_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ActivationStore("disk") as store:
        paths = [store.new_path() for _ in range(3)]
        assert len(set(paths)) == 3
        for path in paths:
            store.hold([torch.randn(3)], path)
        assert len(list(tmp_path.glob("crossmean-activations-*/*"))) == 3
    assert not list(tmp_path.iterdir())
    with contextlib.suppress(ZeroDivisionError), ActivationStore("disk") as store:
        store.hold([torch.randn(3)], store.new_path())
        _ = 1 / 0
    assert not list(tmp_path.iterdir())
    with ActivationStore("cpu") as store:
        assert store.new_path() is None
        assert not list(tmp_path.iterdir())


def test_a_file_that_was_cut_short_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "0"
    tensors = [torch.randn(8), torch.randn(8)]
    stored = StoredInputs(tensors, path)
    stored.put_away()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"0 ends too soon"):
        stored.bring_back()


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    stored = StoredInputs([torch.randn(8)], tmp_path / "0")
    stored.put_away()
    (tmp_path / "0").unlink()
    with pytest.raises(FileNotFoundError):
        stored.bring_back()


def test_a_folder_that_is_gone_is_an_error_where_it_is_written_to(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Point TMPDIR at a folder with more space"):
        StoredInputs([torch.randn(8)], tmp_path / "gone" / "0")


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_nothing_to_put_away_is_no_error(kind: str, tmp_path: Path) -> None:
    stored = StoredInputs([], path_in(tmp_path, kind))
    stored.put_away()
    stored.bring_back()


def test_memory_that_was_written_to_inside_a_block_comes_back_as_it_was_put_away(tmp_path: Path) -> None:
    """The content is that of the first time, whatever happened to it since: see the schedule's obstacles."""
    tensor = torch.ones(3)
    stored = StoredInputs([tensor], tmp_path / "0")
    tensor.add_(1)
    stored.put_away()
    stored.bring_back()
    assert torch.equal(tensor, torch.ones(3))
