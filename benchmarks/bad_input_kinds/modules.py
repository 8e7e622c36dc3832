"""Experts whose forward, parts or hooks are not what a merge expects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from bad_input_kinds.networks import WIDTH, Attempt, Kind, Net, OnPurpose, attempt_of, one_of, vectors


def calling(step: Callable[[Net, Tensor], Any]) -> Callable[[], nn.Module]:
    """What makes networks with another forward."""

    class Odd(Net):
        def forward(self, x: Tensor) -> Any:
            return step(self, x)

    return Odd


def with_part(change: Callable[[Net], Any]) -> Callable[[], nn.Module]:
    """What makes networks that `change` was done to; where it returns a module, that."""

    def make() -> nn.Module:
        network = Net()
        other = change(network)
        return other if isinstance(other, nn.Module) else network

    return make


def raising(*_: Any) -> None:
    raise OnPurpose("in a forward")


def swallowing(network: Net, x: Tensor) -> Tensor:
    try:
        return Net.forward(network, x)
    except BaseException:  # noqa: BLE001  (as careless as users' code may be)
        return x


def in_thread(network: Net, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(Net.forward(network, x)))
    thread.start()
    thread.join()
    return found[0]


def under(context: Callable[[], Any]) -> Callable[[Net, Tensor], Any]:
    """A forward within a context."""

    def step(network: Net, x: Tensor) -> Any:
        with context():
            return Net.forward(network, x)

    return step


def middle(change: Callable[[Tensor], Any]) -> Callable[[Net, Tensor], Any]:
    """A forward that changes what lies between its blocks."""
    return lambda network, x: network.head(network.blocks[1](change(network.blocks[0](x))))


def set_layer(layer: Callable[[], nn.Module], name: str = "head") -> Callable[[Net], None]:
    return lambda network: network.set_submodule(name, layer())


class Undeepcopyable(Net):
    """A network that holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def deeper(network: Net, x: Tensor) -> Tensor:
    return deeper(network, x)


def remembering(network: Net, x: Tensor) -> Tensor:
    network.last = network.blocks[0](x) + getattr(network, "last", 0)
    return network.head(network.blocks[1](network.last))


#: In words -> what makes the experts.
ODD_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "raises": calling(raising),
    "raises at the end": calling(lambda n, x: raising(Net.forward(n, x))),
    "raises on a small batch": calling(lambda n, x: raising() if len(x) < 3 else Net.forward(n, x)),
    "returns None": calling(
        lambda n, x: Net.forward(n, x) and None if x.numel() == 1 else (Net.forward(n, x), None)[1]
    ),
    "returns a dict": calling(lambda n, x: {"y": Net.forward(n, x), "z": None}),
    "returns text": calling(lambda n, x: (Net.forward(n, x), "text")[1]),
    "returns ints": calling(lambda n, x: Net.forward(n, x).int()),
    "returns a scalar": calling(lambda n, x: Net.forward(n, x).sum()),
    "returns its input": calling(lambda n, x: (Net.forward(n, x), x)[1]),
    "uses a block twice": calling(lambda n, x: n.head(n.blocks[1](n.blocks[0](n.blocks[0](x))))),
    "uses no second block": calling(lambda n, x: n.head(n.blocks[0](x))),
    "uses nothing": calling(lambda _, x: x),
    "in place on its input": calling(lambda n, x: Net.forward(n, x.mul_(2))),
    "in place between": calling(middle(lambda x: x.add_(1))),
    "by its values": calling(lambda n, x: Net.forward(n, x) if x.sum() > 0 else n.blocks[0](n.blocks[1](n.head(x)))),
    "by its size": calling(lambda n, x: Net.forward(n, x) if len(x) > 3 else n.head(x)),
    "nan between": calling(middle(lambda x: x * float("nan"))),
    "inf between": calling(middle(lambda x: x * 1e38 * 1e38)),
    "zeros between": calling(middle(torch.zeros_like)),
    "huge between": calling(middle(lambda x: x * 1e25)),
    "tiny between": calling(middle(lambda x: x * 1e-30)),
    "double between": calling(middle(Tensor.double)),
    "half between": calling(middle(Tensor.half)),
    "nothing between": calling(middle(lambda x: x[:0])),
    "flat between": calling(middle(lambda x: x.flatten())),
    "one row between": calling(middle(lambda x: x.mean(0))),
    "more axes between": calling(middle(lambda x: x[None, :, None])),
    "random between": calling(middle(lambda x: x + torch.randn_like(x))),
    "numpy between": calling(middle(lambda x: torch.from_numpy(x.detach().numpy()))),
    "F.linear": calling(lambda n, x: nn.functional.linear(Net.forward(n, x), n.head.weight)),
    "its weight only": calling(lambda n, x: nn.functional.linear(n.blocks[1](n.blocks[0](x)), n.head.weight)),
    "by keyword": calling(lambda n, x: n.head(input=n.blocks[1](n.blocks[0](x)))),
    "swallows errors": calling(swallowing),
    "in a thread": calling(in_thread),
    "inference mode": calling(under(torch.inference_mode)),
    "enable grad": calling(under(torch.enable_grad)),
    "autocast": calling(under(lambda: torch.autocast("cpu", torch.bfloat16))),
    "a device": calling(under(lambda: torch.device("meta"))),
    "calls itself": calling(deeper),
    "trains itself": calling(lambda n, x: Net.forward(n.train(), x)),
    "remembers": calling(remembering),
    "backward": calling(lambda n, x: (lambda y: (y.sum().backward(), y)[1])(Net.forward(n, x))),
    "checkpointed": calling(lambda n, x: torch.utils.checkpoint.checkpoint(Net.forward, n, x, use_reentrant=False)),
    "a raising hook": with_part(lambda n: n.blocks[1].register_forward_hook(raising)),
    "a changing hook": with_part(lambda n: n.blocks[1].register_forward_hook(lambda _, __, y: y * 2)),
    "a changing pre-hook": with_part(lambda n: n.head.register_forward_pre_hook(lambda _, x: (x[0] * 2,))),
    "a keyword hook": with_part(lambda n: n.head.register_forward_hook(lambda *_: None, with_kwargs=True)),
    "a hook on state": with_part(lambda n: n.register_state_dict_pre_hook(raising)),
    "a backward hook": with_part(lambda n: n.head.register_full_backward_hook(lambda *_: None)),
    "weight norm": with_part(lambda n: parametrizations.weight_norm(n.blocks[0].mlp[0])),
    "old weight norm": with_part(lambda n: nn.utils.weight_norm(n.head)),
    "spectral norm": with_part(lambda n: parametrizations.spectral_norm(n.blocks[1].mlp[2])),
    "orthogonal": with_part(lambda n: parametrizations.orthogonal(n.head)),
    "parametrized bias": with_part(lambda n: parametrize.register_parametrization(n.head, "bias", nn.Tanh())),
    "pruned": with_part(lambda n: nn.utils.prune.random_unstructured(n.head, "weight", amount=0.3)),
    "no outputs": with_part(set_layer(lambda: nn.Linear(WIDTH, 0))),
    "one output": with_part(set_layer(lambda: nn.Linear(WIDTH, 1))),
    "one wide": with_part(
        lambda n: nn.Sequential(nn.Linear(WIDTH, 1), nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 0))
    ),
    "no inputs": with_part(set_layer(lambda: nn.Sequential(nn.Linear(WIDTH, 0), nn.Linear(0, 2)))),
    "no bias": with_part(set_layer(lambda: nn.Linear(WIDTH, 3, bias=False))),
    "wrong width": with_part(set_layer(lambda: nn.Linear(WIDTH + 1, 3))),
    "lazy": with_part(set_layer(lambda: nn.LazyLinear(2))),
    "batch norm": with_part(set_layer(lambda: nn.BatchNorm1d(WIDTH))),
    "dropout": with_part(set_layer(lambda: nn.Dropout(0.5))),
    "recurrent": with_part(set_layer(lambda: nn.LSTM(WIDTH, 3))),
    "bilinear": with_part(set_layer(lambda: nn.Bilinear(WIDTH, WIDTH, 2))),
    "scripted": with_part(lambda n: torch.jit.script(n)),
    "traced": with_part(lambda n: torch.jit.trace(n, torch.zeros(3, WIDTH))),
    "scripted part": with_part(lambda n: n.set_submodule("blocks.1", torch.jit.script(n.blocks[1]))),
    "parallel": with_part(nn.DataParallel),
    "quantized": with_part(lambda n: torch.ao.quantization.quantize_dynamic(n, {nn.Linear})),
    "no copies": Undeepcopyable,
    "itself inside": with_part(lambda n: setattr(n, "me", [n])),
    "a generator inside": with_part(lambda n: setattr(n, "items", (x for x in "abc"))),
    "a lambda inside": with_part(lambda n: setattr(n, "scale", lambda x: x)),
    "an open file": with_part(lambda n: setattr(n, "file", Path(__file__).open(encoding="utf-8"))),
    "frozen": with_part(lambda n: n.requires_grad_(requires_grad=False)),
    "half": with_part(Net.half),
    "double": with_part(Net.double),
    "complex": with_part(lambda n: n.to(torch.complex64)),
    "meta": with_part(lambda n: n.to("meta")),
    "None buffer": with_part(lambda n: n.register_buffer("none", None)),
    "odd state": with_part(lambda n: n.register_buffer("0", torch.zeros(0))),
}


def modules(generator: np.random.Generator, folder: Path) -> Attempt:
    """Experts of a class whose forward, parts or hooks are odd; one of them, or all."""
    word = one_of(generator, list(ODD_NETWORKS))
    make = ODD_NETWORKS[word]
    experts = {"a": make(), "b": make() if generator.random() < 0.8 else Net()}
    if generator.random() < 0.3:
        experts = {"_pretrained_": make() if generator.random() < 0.7 else Net(), **experts}
    if generator.random() < 0.1:
        experts = dict(reversed(experts.items()))
    inputs = vectors()
    if generator.random() < 0.2:
        inputs = {task: rows.reshape(-1, 1, WIDTH).repeat(1, 3, 1) for task, rows in inputs.items()}
    return attempt_of(generator, f"{word} in {list(experts)}", experts, inputs)


MODULE_KINDS: dict[str, Kind] = {"modules": modules}
