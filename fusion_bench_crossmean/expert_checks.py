"""Whether experts can be merged at all: checked against each other before anything is computed."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from fusion_bench_crossmean.coverage import tied_parameters
from fusion_bench_crossmean.messages import shorten
from fusion_bench_crossmean.weights import is_finite, unusual

#: Entries of a transformers config that change what the same weights compute.
FUNCTIONAL_CONFIG = ("hidden_act", "num_attention_heads", "layer_norm_eps")

#: Of their modules, unlike users' own, attributes are settings and nothing else, such as an attention's `num_heads`;
LIBRARIES = ("torch", "transformers", "open_clip", "timm")
#: except these: how it is trained, and where it came from.
UNIMPORTANT = re.compile(r"training|drop|checkpointing|name_or_path|loss|warnings|cache")

NO_EXPERTS = "The pool has no experts: there is nothing to merge. Add models to modelpool.models."


def check_expert(name: str, expert: nn.Module, reference: tuple[str, nn.Module] | None) -> None:
    """Refuses an expert that cannot be merged, by itself or beside `reference`.

    Args:
        name: of the model.
        expert: the model.
        reference: another's name and module, whose values do not matter; None for the first.

    Raises:
        TypeError: it is no module.
        ValueError: tensors missing in one or of another shape; another activation or architecture; NaN or infinity in
            a weight; integer buffers that disagree.
    """
    if not isinstance(expert, nn.Module):
        raise TypeError(
            f"Loading expert {name!r} gave a {type(expert).__name__}, not a torch module. "
            f"Check the entry modelpool.models.{name}."
        )
    tensors = expert.state_dict() | dict(expert.named_parameters()) | dict(expert.named_buffers())
    if odd := [f"{key!r} is {what}" for key, tensor in tensors.items() if (what := unusual(tensor))]:
        raise ValueError(
            f"Expert {name!r} has tensors that cannot be merged: {', '.join(odd[:4])} ({len(odd)} in all)."
        )
    if adapters := [key for key, module in expert.named_modules() if is_adapter(module)]:
        raise ValueError(
            f"Expert {name!r} has low-rank adapters in {len(adapters)} modules: {shorten(adapters)}. Fold them into "
            "the weights first, with merge_and_unload() of PEFT."
        )
    if reference is not None:
        check_tensors(*reference, name, expert)
        check_architecture(*reference, name, expert)
    bad = [key for key, t in expert.state_dict().items() if t.is_floating_point() and not is_finite(t)]
    if bad:
        raise ValueError(f"Expert {name!r} has NaN or infinity in {len(bad)} tensors: {shorten(bad)}.")


def check_tensors(reference: str, first: nn.Module, name: str, expert: nn.Module) -> None:
    """Both must have the same tensors of the same shapes; an integer buffer may be missing in one, not differ."""
    ours, theirs = first.state_dict(), expert.state_dict()
    missing = sorted(k for k in ours.keys() - theirs.keys() if ours[k].is_floating_point())
    unexpected = sorted(k for k in theirs.keys() - ours.keys() if theirs[k].is_floating_point())
    if missing or unexpected:
        raise ValueError(
            f"Experts must share one architecture: {name!r} lacks {shorten(missing) or 'nothing'} and has in addition "
            f"{shorten(unexpected) or 'nothing'}, compared with {reference!r}."
        )
    shared = [k for k in ours if k in theirs]
    if shapes := [k for k in shared if ours[k].shape != theirs[k].shape]:
        key = shapes[0]
        raise ValueError(
            f"Experts must share one architecture: {key!r} is {tuple(ours[key].shape)} in {reference!r} and "
            f"{tuple(theirs[key].shape)} in {name!r}; {len(shapes)} tensors differ in shape: {shorten(shapes)}. "
            "Take the model out of modelpool.models, or bring its tensors to the same shape."
        )
    if kinds := [k for k in shared if ours[k].is_floating_point() != theirs[k].is_floating_point()]:
        raise ValueError(
            f"{shorten(kinds)}: floating point in one of {reference!r} and {name!r}, integer in the other."
        )
    if tied := sorted(tied_parameters(first) ^ tied_parameters(expert)):
        groups = [" = ".join(names) for names in tied]
        raise ValueError(f"Tensors are tied in only one of {reference!r} and {name!r}: {shorten(groups)}.")
    hidden, theirs_hidden = ({k: b for k, b in m.named_buffers() if k not in ours} for m in (first, expert))
    if differing := [k for k, b in hidden.items() if k in theirs_hidden and not torch.equal(b, theirs_hidden[k].to(b))]:
        raise ValueError(
            f"Buffers outside the state dict differ between {reference!r} and {name!r}, and cannot be merged: "
            f"{shorten(differing)}."
        )
    if integers := [
        k for k in shared if not ours[k].is_floating_point() and not torch.equal(ours[k], theirs[k].to(ours[k]))
    ]:
        raise ValueError(
            f"Integer buffers are copied, and must agree: {shorten(integers)} differ between {reference!r} and "
            f"{name!r}."
        )


def check_architecture(reference: str, first: nn.Module, name: str, expert: nn.Module) -> None:
    """Both must compute the same function of their weights: the same module types and settings, the same config."""

    def describe(network: nn.Module) -> dict[str, str]:
        modules = {k: f"{type(m).__name__}({', '.join(described(m))})" for k, m in network.named_modules()}
        return {k: text for k, text in modules.items() if "Dropout" not in text}  # no effect outside training

    for key in FUNCTIONAL_CONFIG:
        a, b = (getattr(getattr(network, "config", None), key, None) for network in (first, expert))
        if a != b:
            hint = " (experts with different activations cannot be merged)" if is_activation(key) else ""
            raise ValueError(
                f"Experts must share one architecture: {key} is {a!r} in {reference!r} and {b!r} in {name!r}{hint}."
            )
    ours, theirs = describe(first), describe(expert)
    differing = [k for k in ours if theirs.get(k) != ours[k]]
    if differing:
        key = differing[0]
        hint = " (experts with different activations cannot be merged)" if is_activation(key) else ""
        raise ValueError(
            f"Experts must share one architecture: {key or 'the model'!r} is {ours[key]} in {reference!r} and "
            f"{theirs.get(key, 'missing')} in {name!r}{hint}; {len(differing)} modules differ: {shorten(differing)}."
        )


def described(module: nn.Module) -> list[str]:
    """What a module says of itself, and the numbers and words that a library's forward may depend on."""
    parts = [text] if (text := module.extra_repr()) else []
    if type(module).__module__.partition(".")[0] in LIBRARIES:
        parts += [
            f"{key}={value}"
            for key, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str)) and key[0] != "_" and not UNIMPORTANT.search(key)
        ]
    return parts


def is_adapter(module: nn.Module) -> bool:
    """Whether it adds a low-rank update to a layer (PEFT's LoRA and its like)."""
    return type(module).__module__.partition(".")[0] == "peft" or hasattr(module, "lora_A")


def is_activation(name: str) -> bool:
    """Whether a module's name says so: `act`, `activation_fn` (transformers), `gelu` (OpenCLIP)."""
    own = name.rpartition(".")[2]
    return "act" in own or "gelu" in own


def activation_of(network: nn.Module) -> str:
    """The activation a network runs with, for the report."""
    config: Any = getattr(network, "config", None)
    named = getattr(config, "hidden_act", None)
    classes = sorted({type(m).__name__ for k, m in network.named_modules() if is_activation(k)})
    return ", ".join(filter(None, [named, *classes])) or "unknown"
