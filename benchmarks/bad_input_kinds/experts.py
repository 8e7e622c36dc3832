"""Bad pools, and bad tensors in an expert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fusion_bench.modelpool import BaseModelPool
from torch import Tensor, nn

from bad_input_kinds.networks import (
    WIDTH,
    Attempt,
    Kind,
    Net,
    TextNet,
    attempt_of,
    networks,
    one_of,
    vectors,
)


class Careless(BaseModelPool):
    """A pool whose `load_model` returns whatever it was given."""

    def load_model(self, model_name_or_config: Any, *_: Any, **__: Any) -> Any:
        return self._models[model_name_or_config]


def pools(generator: np.random.Generator, folder: Path) -> Attempt:
    """A pool with no, odd or odd-named models, or no pool at all."""
    net, tasks = Net(), ["a", "b"]
    names: list[Any] = [
        *("", " ", "ä☃", "a/b", "/a", "..", ".", "a\nb", "a\0b", "x" * 3000, "_pretrained_ ", "_x_", "{}", "%s", "a.b"),
        *("__", "_", "_test_", "_template_", "\ud800", 0, 1.5, None, True, ("a", "b"), b"a", float("nan")),
    ]
    models: list[Any] = [
        *(None, 1, "no/such/model", "", b"x", [], {}, net.state_dict(), Net, lambda: net, nn.Module(), nn.Identity()),
        *(nn.Linear(WIDTH, WIDTH), Net(width=5), Net(depth=1), Net(depth=3), TextNet(), nn.Sequential(), [net], (net,)),
        *(
            nn.ModuleDict({"a": net}),
            nn.Sequential(net),
            torch.ones(3),
            {"_target_": "os.getcwd"},
            net.half(),
            object(),
        ),
        *(nn.DataParallel(Net()), torch.jit.script(Net()), nn.ParameterDict(), nn.Parameter(torch.ones(2)), Path("x")),
        {"_target_": "no.such.thing"},
    ]
    way = one_of(generator, ["name", "name", "model", "model", "careless", "whole", "copies"])
    if way == "name":
        tasks = [one_of(generator, names), *(["b"] if generator.random() < 0.7 else [])]
        experts: Any = networks(tasks=tasks)
        return attempt_of(generator, f"tasks {tasks!r:.100}", experts, vectors(tasks))
    if way in ("model", "careless"):
        odd, place = one_of(generator, models), one_of(generator, ["a", "b", "c", "_pretrained_"])
        experts = networks() | {place: odd}
        attempt = attempt_of(generator, f"{way} {place} {odd!r:.100}", experts, vectors(["a", "b", "c"]))
        if way == "model":
            return attempt
        like = experts.get("_pretrained_", experts["a"])
        pool = Careless(experts)
        careless = attempt_of(generator, attempt.about, pool, vectors(["a", "b", "c"]))
        return Attempt(careless.about, careless.run, like if isinstance(like, nn.Module) else None)
    if way == "copies":
        tasks = [f"t{number}" for number in range(int(generator.integers(1, 12)))]
        return attempt_of(generator, f"{len(tasks)} times one model", dict.fromkeys(tasks, Net()), vectors(tasks))
    whole: list[Any] = [
        *({}, None, [], (), 7, "pool", net, net.state_dict(), [net, net], {"_pretrained_": net}, set(), lambda: net),
        *(BaseModelPool({}), BaseModelPool, object(), np.zeros(3), torch.ones(2), nn.ModuleDict(networks())),
        *(BaseModelPool([net]), BaseModelPool({"_pretrained_": net}), iter([net]), {"a": net}.items()),
    ]
    odd = one_of(generator, whole)
    return attempt_of(generator, f"as a pool {odd!r:.100}", odd, one_of(generator, [vectors(), {}, None]))


def changed(network: nn.Module, name: str, change: Callable[[Tensor], Any]) -> None:
    """Replaces one parameter by what `change` makes of its values."""
    owner, _, key = name.rpartition(".")
    module, tensor = network.get_submodule(owner), network.get_parameter(name).detach().clone()
    try:
        value = change(tensor)
    except RuntimeError:  # it cannot be made of what an earlier change has left
        return
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=value.is_floating_point() and not value.is_meta)
    module._parameters[key] = value


def poked(value: float, count: int = 1) -> Callable[[Tensor], Tensor]:
    """What sets the first entries of a tensor to `value`."""

    def poke(tensor: Tensor) -> Tensor:
        tensor.view(-1)[:count] = value
        return tensor

    return poke


#: In words -> what becomes of a tensor.
TENSOR_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "missing": lambda _: None,
    "nan": poked(float("nan")),
    "inf": poked(float("inf")),
    "one huge": poked(3e38),
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "1e30": lambda t: t * 1e30,
    "1e-30": lambda t: t * 1e-30,
    "1e-44": lambda t: t * 1e-44,
    "one row": lambda t: t[:1],
    "no rows": lambda t: t[:0],
    "twice as many rows": lambda t: torch.cat([t, t]),
    "a scalar": lambda t: t.sum(),
    "another axis": lambda t: t.unsqueeze(0),
    "transposed": lambda t: t.T.contiguous() if t.ndim == 2 else t,
    "transposed view": lambda t: t.T.contiguous().T if t.ndim == 2 else t,
    "expanded": lambda t: t[:1].expand_as(t),
    "part of a larger one": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
    "every second": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "flipped": lambda t: t.flip(0),
    "int": lambda t: t.mul(10).int(),
    "bool": lambda t: t > 0,
    "uint8": lambda t: t.abs().to(torch.uint8),
    "half": Tensor.half,
    "bfloat16": Tensor.bfloat16,
    "double": Tensor.double,
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "complex": lambda t: t.to(torch.complex64),
    "sparse": Tensor.to_sparse,
    "sparse rows": lambda t: t.to_sparse_csr() if t.ndim == 2 else t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "frozen": lambda t: nn.Parameter(t, requires_grad=False),
    "uninitialized": lambda _: nn.parameter.UninitializedParameter(),
    "mkldnn": Tensor.to_mkldnn,
}


def tensors(generator: np.random.Generator, folder: Path) -> Attempt:
    """Some tensors of an expert, of all experts or of the pretrained model are odd."""
    experts = networks()
    if generator.random() < 0.4:
        experts = {"_pretrained_": Net(), **experts}
    victims = one_of(generator, [["a"], ["b"], ["a", "b"], list(experts), [next(iter(experts))]])
    names = [name for name, _ in experts["a"].named_parameters()]
    done = []
    for _ in range(one_of(generator, [1, 1, 1, 2])):
        word, name = one_of(generator, list(TENSOR_CHANGES)), one_of(generator, names)
        every = generator.random() < 0.15
        for task in victims:
            for key in names if every else [name]:
                if experts[task].get_submodule(key.rpartition(".")[0])._parameters[key.rpartition(".")[2]] is not None:
                    changed(experts[task], key, TENSOR_CHANGES[word])
        done.append(f"{word} {'everywhere' if every else name} in {victims}")
        if word in ("int", "uint8", "quantized", "sparse", "sparse rows", "mkldnn", "float8", "uninitialized"):
            break  # most changes cannot be made of these
    extra = one_of(generator, ["", "", "", "", "buffer", "parameter", "tied", "shared", "int buffer", "nan buffer"])
    network = experts[victims[0]]
    if extra == "buffer":
        network.register_buffer("extra", torch.ones(2), persistent=bool(generator.integers(2)))
    elif extra == "int buffer":
        network.register_buffer("extra", torch.tensor(3))
    elif extra == "nan buffer":
        for expert in experts.values():
            expert.register_buffer("extra", torch.tensor(float("nan")), persistent=bool(generator.integers(2)))
    elif extra == "parameter":
        network.register_parameter("extra", nn.Parameter(torch.ones(2)))
    elif extra == "tied":
        network.blocks[1] = network.blocks[0]
    elif extra == "shared":
        experts["b"].head = experts["a"].head
    about = "; ".join([*done, extra])
    return attempt_of(generator, about, experts, vectors())


EXPERT_KINDS: dict[str, Kind] = {"pools": pools, "tensors": tensors}
