"""The tensors of an expert by name, in memory or on disk, and modules without tensors of their own.

Nothing here computes; `networks` decides what is read when, and is the only code that writes a weight.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

log = logging.getLogger(__name__)

#: The tensors of one expert by name; a look-up may read from disk.
Weights = Mapping[str, Tensor]


#: Floating-point types that experts and inputs may have.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def unusual(tensor: object) -> str:
    """What keeps a tensor from being computed with here, in words; empty for a plain one."""
    if not isinstance(tensor, Tensor):  # quantized layers have other things in their state dict
        return f"a {type(tensor).__name__}, no tensor"
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return "a tensor without a shape (of a lazy layer that has never run)"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.device.type == "meta":
        return "a tensor without values (on the meta device)"
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype not in FLOATING):
        return f"a tensor of {str(tensor.dtype).removeprefix('torch.')}"
    return ""


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, the tensors themselves; what is tied appears once."""
    tensors: dict[str, Tensor] = dict(network.named_parameters())
    seen = {id(tensor) for tensor in tensors.values()}
    for prefix, module in network.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set and id(buffer) not in seen:
                tensors[f"{prefix}.{key}".lstrip(".")] = buffer
                seen.add(id(buffer))
    return tensors


class StoredWeights(Weights):
    """Tensors in safetensors files, read when they are asked for; nothing of them is kept.

    Args:
        places: name -> file and the tensor's name there.

    Raises:
        OSError: a file is gone, or another one than at first.
    """

    def __init__(self, places: Mapping[str, tuple[Path, str]]) -> None:
        self._places = places
        self._stamps = {path: stamp_of(path) for path, _ in places.values()}

    @classmethod
    def write(cls, path: Path, tensors: Weights) -> StoredWeights:
        """Stores `tensors` at `path`."""
        seen, kept = set[int](), {}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage._cdata not in seen
            seen.add(storage._cdata)
            # Neither a part of what it lies in, nor in the same place as another: the format has no word for it.
            kept[name] = tensor.detach() if whole else tensor.detach().clone(memory_format=torch.contiguous_format)
        save_file(kept, path)
        return cls({name: (path, name) for name in tensors})

    def __getitem__(self, name: str) -> Tensor:
        path, key = self._places[name]
        if stamp_of(path) != self._stamps[path]:
            raise OSError(f"{path} was changed while its weights were in use. Run the merge again.")
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def checkpoint_of(network: nn.Module) -> StoredWeights | None:
    """The safetensors checkpoint on disk that `network` was loaded from, if it holds just these values.

    Which it was, transformers notes in `name_or_path`. That is a hint only: every tensor is compared.
    """
    name = getattr(network, "name_or_path", "")
    if not name:
        return None
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    options = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    try:
        found = [path for file in names if (path := cached_file(name, file, **options))]
    except (OSError, ValueError):  # no such folder, and no name on the hub either
        return None
    if not found:
        return None
    try:
        return find_tensors(network, Path(found[0]))
    except (OSError, ValueError, KeyError, SafetensorError) as error:  # not what its name says, or not whole
        log.debug("%s is not read from: %s", found[0], error)
        return None


def find_tensors(network: nn.Module, first: Path) -> StoredWeights | None:
    """The tensors of `network` in a safetensors file, or in those that an index names, if all of them are there."""
    files = [first]
    if first.suffix == ".json":
        shards = json.loads(first.read_text(encoding="utf-8"))["weight_map"].values()
        files = [first.with_name(shard) for shard in dict.fromkeys(shards)]
    # Some classes leave out, or add, the name of the part that they are; parts of one checkpoint may look alike.
    by_name: dict[str, list[tuple[Path, str]]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():
                by_name.setdefault(key, []).insert(0, (file, key))
                by_name.setdefault(key.partition(".")[2], []).append((file, key))
    places = {}
    for name, tensor in tensors_of(network).items():
        candidates = [*by_name.get(name, []), *by_name.get(name.partition(".")[2], [])]
        place = next((place for place in candidates if is_stored_at(place, tensor)), None)
        if place is None:
            return None
        places[name] = place
    return StoredWeights(places)


def stamp_of(path: Path) -> tuple[int, int, int]:
    """What tells a file from another one of the same name."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_stored_at(place: tuple[Path, str], tensor: Tensor) -> bool:
    """Whether a file holds just this tensor under a key."""
    path, key = place
    with safe_open(path, framework="pt") as file:
        stored = file.get_tensor(key)
    return stored.dtype == tensor.dtype and torch.equal(stored, tensor.detach().cpu())


def hollow(network: nn.Module, fill: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of `network` whose floating-point parameters and persistent buffers are made by `fill`.

    Nothing large is copied. Parameters stay parameters and tied ones stay tied.

    Raises:
        TypeError: it holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in tensors_of(network).values():
        if tensor.is_floating_point():
            made = fill(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
    try:
        return copy.deepcopy(network, memo)
    except Exception as error:  # of whatever a module has for attributes
        raise TypeError(
            f"A {type(network).__name__} cannot be copied: {type(error).__name__}: {error} Take out what it holds "
            "besides tensors and settings; bake weight norms and pruning into the weights first, with "
            "remove_weight_norm() or torch.nn.utils.prune.remove()."
        ) from error


def placeholder(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """One NaN in the shape of `tensor`: takes no memory, and no result that used it goes unnoticed."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(tensor.shape)


def size_of(tensors: Weights) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def is_finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor infinity, which a sum shows; only a sum that overflows needs a second look."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def parameter_dtypes(network: nn.Module) -> set[torch.dtype]:
    """The floating-point dtypes of its parameters."""
    return {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
