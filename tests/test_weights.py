"""Tensors by name, hollow modules, and tensors on disk: what is found there is what the network holds."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import PicoMLP, pico_clip
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPVisionModel

from fusion_bench_crossmean.weights import (
    StoredWeights,
    checkpoint_of,
    hollow,
    is_finite,
    placeholder,
    size_of,
    tensors_of,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Everything(nn.Module):
    """A tied pair, every kind of buffer, and a module that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = self.first
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.register_buffer("table", torch.randn(2))
        self.register_buffer("same_table", self.table)
        self.register_buffer("nothing", None)
        self.alias = [self.first.weight]  # no registered name


def test_tensors_are_parameters_and_persistent_buffers_and_tied_ones_appear_once() -> None:
    network = Everything()
    tensors = tensors_of(network)
    assert set(tensors) == {
        "frozen",
        "first.weight",
        "first.bias",
        "second.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "table",
    }
    assert tensors["first.weight"] is network.second.weight
    assert tensors["table"] is network.table
    assert tensors.keys() <= network.state_dict().keys()


def test_names_are_those_of_the_state_dict() -> None:
    assert tensors_of(pico_clip()).keys() == pico_clip().state_dict().keys()
    assert tensors_of(nn.Linear(2, 2)).keys() == {"weight", "bias"}


def filled(network: nn.Module) -> nn.Module:
    return hollow(network, lambda tensor: torch.full_like(tensor, 7.0))


def test_a_hollow_module_keeps_structure_ties_and_flags() -> None:
    network = Everything()
    network.norm.eval()
    made: Any = filled(network)
    assert type(made) is Everything
    assert made.first.weight is made.second.weight is made.alias[0]
    assert made.again is made.first
    assert made.table is made.same_table
    assert made.nothing is None
    assert [name for name, p in made.named_parameters() if not p.requires_grad] == ["frozen"]
    assert all(isinstance(p, nn.Parameter) for p in made.parameters())
    assert not isinstance(made.table, nn.Parameter)
    assert (made.training, made.norm.training) == (True, False)
    assert made.state_dict().keys() == network.state_dict().keys()
    assert "hidden" not in made.state_dict()


def test_a_hollow_module_has_the_values_that_fill_makes_and_copies_the_rest() -> None:
    network = Everything()
    made: Any = filled(network)
    for tensor in tensors_of(made).values():
        assert not tensor.is_floating_point() or torch.equal(tensor, torch.full_like(tensor, 7.0))
    assert torch.equal(made.hidden, network.hidden)
    assert torch.equal(made.norm.num_batches_tracked, network.norm.num_batches_tracked)


def storages(network: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}


@pytest.mark.parametrize("make", [Everything, pico_clip])
def test_a_hollow_module_shares_nothing_and_changes_nothing(make: Any) -> None:
    network = make()
    before = copy.deepcopy(network.state_dict())
    made = filled(network)
    assert not storages(network) & storages(made)
    assert not set(network.modules()) & set(made.modules())
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_hollow_module_takes_no_memory_on_the_meta_device_and_runs_once_filled() -> None:
    network = pico_clip().eval()
    made = hollow(network, lambda tensor: torch.empty_like(tensor, device="meta"))
    assert all(t.device.type == "meta" for t in tensors_of(made).values() if t.is_floating_point())
    again = hollow(made, lambda tensor: torch.empty_like(tensor, device="cpu"))
    with torch.no_grad():
        for name, tensor in tensors_of(again).items():
            tensor.copy_(tensors_of(network)[name])
        x = torch.randn(2, 3, 16, 16)
        assert torch.equal(again(x).last_hidden_state, network(x).last_hidden_state)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_placeholder_is_nan_in_shape_and_takes_no_memory(dtype: torch.dtype) -> None:
    held = placeholder(torch.zeros(1000, 1000), torch.device("cpu"), dtype)
    assert held.shape == (1000, 1000)
    assert held.dtype == dtype
    assert held.untyped_storage().nbytes() <= 8
    assert held[::100].isnan().all()


# On disk


def kinds_of_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    whole = torch.randn(6, 4).to(dtype)
    return {
        "whole": whole.clone(),
        "rows": whole[1:3],
        "columns": whole[:, 1:3],
        "transposed": whole.clone().T,
        "expanded": whole[:1].expand(5, 4),
        "scalar": torch.tensor(1.5, dtype=dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "strided": whole.clone()[::2],
        "with/slash.and dot": torch.randn(2).to(dtype),
        "parameter": nn.Parameter(torch.randn(3).to(dtype)),
        "extremes": torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).tiny, -0.0], dtype=dtype),
    }


@pytest.mark.parametrize("dtype", FLOATS)
def test_stored_tensors_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = kinds_of_tensors(dtype)
    stored = StoredWeights.write(tmp_path / "a.safetensors", tensors)
    assert list(stored) == list(tensors)
    assert len(stored) == len(tensors)
    for name, tensor in tensors.items():
        assert stored[name].dtype == dtype
        assert torch.equal(stored[name], tensor)
        assert not stored[name].requires_grad
    assert stored["whole"] is not stored["whole"]
    with pytest.raises(KeyError):
        stored["absent"]


def test_stored_tensors_may_share_their_memory(tmp_path: Path) -> None:
    """Parameters of their own on one storage are not tied, and common after `a.data = b.data`."""
    network = PicoMLP()
    network.mlp[1].weight.data = network.mlp[0].weight.data
    network.register_buffer("steps", torch.tensor(3))
    stored = StoredWeights.write(tmp_path / "a.safetensors", tensors_of(network))
    assert torch.equal(stored["mlp.1.weight"], network.mlp[0].weight)
    assert torch.equal(stored["steps"], torch.tensor(3))


def test_sizes_and_finiteness() -> None:
    assert size_of({"a": torch.zeros(2, dtype=torch.float16), "b": torch.zeros(3, dtype=torch.int64)}) == 28
    assert is_finite(torch.full((4,), 60000.0, dtype=torch.float16))
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not is_finite(torch.tensor([1.0, bad, 2.0]))
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


# Checkpoints


def loaded(path: Path, **settings: Any) -> CLIPVisionModel:
    return CLIPVisionModel.from_pretrained(path, **{"torch_dtype": torch.float32} | settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pico_clip().float().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def check_found(network: nn.Module, files: int) -> None:
    stored = checkpoint_of(network)
    assert stored is not None
    assert stored.keys() == tensors_of(network).keys()
    assert len({path for path, _ in stored._places.values()}) == files
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors_of(network).items())


def test_the_checkpoint_that_a_network_was_loaded_from_is_found(folder: Path) -> None:
    check_found(loaded(folder), 1)


def test_a_checkpoint_in_several_files_is_found(tmp_path: Path) -> None:
    pico_clip().float().save_pretrained(tmp_path, max_shard_size="8KB")
    files = len(list(tmp_path.glob("*.safetensors")))
    assert files > 2
    check_found(loaded(tmp_path), files)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_of_low_precision_is_found(dtype: torch.dtype, tmp_path: Path) -> None:
    pico_clip().to(dtype).save_pretrained(tmp_path)
    check_found(loaded(tmp_path, torch_dtype=dtype), 1)


def test_one_other_value_in_memory_or_on_disk_is_another_network(folder: Path) -> None:
    network = loaded(folder)
    with torch.no_grad():
        next(iter(tensors_of(network).values())).view(-1)[0] += 1e-6
    assert checkpoint_of(network) is None
    network = loaded(folder)
    tensors = load_file(folder / "model.safetensors")
    last = list(tensors)[-1]
    tensors[last].view(-1)[-1] += 1e-6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert checkpoint_of(network) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_is_another_network(folder: Path, dtype: torch.dtype) -> None:
    network = loaded(folder)
    assert checkpoint_of(network.to(dtype)) is None
    assert checkpoint_of(loaded(folder, torch_dtype=dtype)) is None


def test_a_tensor_that_is_not_in_the_file_is_another_network(folder: Path) -> None:
    network = loaded(folder)
    network.register_parameter("added", nn.Parameter(torch.zeros(2)))
    assert checkpoint_of(network) is None
    network = loaded(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["renamed"] = tensors.pop(next(iter(tensors)))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert checkpoint_of(network) is None


def test_a_file_may_hold_more_than_the_network(folder: Path) -> None:
    network = loaded(folder)
    tensors = load_file(folder / "model.safetensors") | {"text_model.more": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check_found(network, 1)


def test_a_network_that_is_not_from_disk_has_no_checkpoint() -> None:
    assert checkpoint_of(pico_clip()) is None
    assert checkpoint_of(PicoMLP()) is None


@pytest.mark.parametrize("name", ["someone/not-in-the-cache", "/nowhere/at all/model", "./nowhere/model", "no model!"])
def test_a_name_that_leads_nowhere_is_no_checkpoint(name: str) -> None:
    network: Any = PicoMLP()
    network.name_or_path = name
    assert checkpoint_of(network) is None


def test_a_checkpoint_that_is_gone_is_none(folder: Path) -> None:
    network = loaded(folder)
    shutil.rmtree(folder)
    assert checkpoint_of(network) is None


def test_a_checkpoint_that_is_no_safetensors_file_is_none(folder: Path) -> None:
    network = loaded(folder)
    torch.save(network.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert checkpoint_of(network) is None


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1", b"", b"\xff" * 100])
def test_a_file_that_is_not_what_its_name_says_is_no_checkpoint(folder: Path, content: bytes) -> None:
    network = loaded(folder)
    (folder / "model.safetensors").write_bytes(content)
    assert checkpoint_of(network) is None


def test_an_index_whose_files_are_gone_is_no_checkpoint(tmp_path: Path) -> None:
    network = pico_clip()
    network.save_pretrained(tmp_path, max_shard_size="10KB")
    network = type(network).from_pretrained(tmp_path)
    next(tmp_path.glob("model-00002*")).unlink()
    assert checkpoint_of(network) is None


def test_a_file_that_is_replaced_while_in_use_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    stored = StoredWeights.write(path, {"a": torch.ones(3)})
    assert torch.equal(stored["a"], torch.ones(3))
    path.unlink()
    StoredWeights.write(path, {"a": torch.zeros(3), "b": torch.zeros(1)})
    with pytest.raises(OSError, match="was changed while its weights were in use"):
        stored["a"]
