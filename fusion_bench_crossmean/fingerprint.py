"""Hashes that tell whether two runs had the same experts and inputs, and made the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fusion_bench_crossmean.calibration import Batch

#: Digits of a hash in reports and manifests.
NUM_DIGITS = 32


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and every bit; tensors are looked up one by one, and their order does not matter."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()[:NUM_DIGITS]


def hash_batches(batches: Iterable[Batch]) -> str:
    """Of what networks are called with, and of how it is split into batches."""
    digest = hashlib.sha256()
    for batch in batches:
        tensors = {str(index): value for index, value in enumerate(batch.args) if isinstance(value, Tensor)}
        tensors |= {key: value for key, value in batch.kwargs.items() if isinstance(value, Tensor)}
        if batch.token_mask is not None:
            tensors["token_mask"] = batch.token_mask
        digest.update(f"{hash_tensors(tensors)} {batch.token_dropout} {batch.dropout_seeds}\n".encode())
    return digest.hexdigest()[:NUM_DIGITS]


def bytes_of(tensor: Tensor) -> memoryview:
    """The content as bytes, without a copy where it is contiguous and in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
