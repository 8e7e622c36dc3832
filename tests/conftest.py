"""Float64, a seed per test, nothing from the network."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "float32: the test keeps torch's own default dtype")


@pytest.fixture(autouse=True)
def _default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """Float64 is the default dtype, except under the marker `float32`; as before afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if request.node.get_closest_marker("float32") else torch.float64)
    yield
    torch.set_default_dtype(before)
    assert torch.is_grad_enabled(), "the test leaves gradients switched off"
    assert not torch.is_autocast_enabled("cpu"), "the test leaves autocast on"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The tensors are tiny: more threads only wait for each other, for long where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Every test has a seed of its own, from its name: the order of the tests does not matter."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class ForwardCounter:
    """Counts calls of networks: modules that are called while no other module is being called."""

    def __init__(self) -> None:
        self.count = 0
        self._depth = 0

    def enter(self, *_: Any) -> None:
        self.count += self._depth == 0
        self._depth += 1

    def leave(self, *_: Any) -> None:
        self._depth -= 1


@pytest.fixture
def forwards() -> Iterator[ForwardCounter]:
    """The number of forward passes in this test, of any module; only for forwards that are not paused."""
    counter = ForwardCounter()
    hooks = [
        nn.modules.module.register_module_forward_pre_hook(counter.enter),
        nn.modules.module.register_module_forward_hook(counter.leave, always_call=True),
    ]
    yield counter
    for hook in hooks:
        hook.remove()
