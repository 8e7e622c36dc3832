"""What the package should compute, the slow and plain way: whole forwards, stacked inputs, LU instead of Cholesky.

Nothing here imports the package. All in the dtype of the networks given (float64 in the tests).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


def clip_groups(network: nn.Module, coverage: str) -> list[list[str]]:
    """The layers of a CLIP vision tower in depth order, written down by hand; layers on one input together."""
    prefix = "vision_model." if hasattr(network, "vision_model") else ""
    tower = network.get_submodule("vision_model") if prefix else network
    groups = []
    for block in range(len(tower.encoder.layers)):
        layer = f"{prefix}encoder.layers.{block}"
        if coverage == "full":
            groups.append([f"{layer}.self_attn.{x}_proj" for x in "qkv"])
            groups.append([f"{layer}.self_attn.out_proj"])
        groups.append([f"{layer}.mlp.fc1"])
        groups.append([f"{layer}.mlp.fc2"])
    return groups


def average(experts: Mapping[str, nn.Module]) -> State:
    """The plain mean of all floating-point tensors."""
    states = [expert.state_dict() for expert in experts.values()]
    return {
        key: torch.stack([state[key] for state in states]).mean(0) if tensor.is_floating_point() else tensor.clone()
        for key, tensor in states[0].items()
    }


def mixed(merged: State, expert: State, point: float) -> State:
    """``(1 - s) merged + s expert``."""
    return {k: (1 - point) * m + point * expert[k] if m.is_floating_point() else m for k, m in merged.items()}


@torch.no_grad()
def layer_inputs(network: nn.Module, state: State, layer: str, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The rows (tokens, in) that `layer` receives in a whole forward of `network` with the weights `state`.

    Inputs are its only argument, or keyword arguments; tokens that an `attention_mask` among these leaves out do not
    count.
    """
    scratch = copy.deepcopy(network).eval()
    scratch.load_state_dict(state)
    seen: list[Tensor] = []
    parent = scratch.get_submodule(layer.rpartition(".")[0])
    if not isinstance(parent, nn.MultiheadAttention):
        scratch.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    elif layer.endswith("out_proj"):  # never called: what comes out of an identity is what it receives
        parent.out_proj.weight.copy_(torch.eye(parent.embed_dim))
        if parent.out_proj.bias is not None:
            parent.out_proj.bias.zero_()
        parent.register_forward_hook(lambda _, __, result: seen.append(result[0]))
    else:
        parent.register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0]), with_kwargs=True)
    if not isinstance(inputs, Mapping):
        scratch(inputs)
        (tensor,) = seen
        return tensor.flatten(0, -2)
    scratch(**inputs)
    (tensor,) = seen
    if tensor.ndim == 2 or "attention_mask" not in inputs:
        return tensor.flatten(0, -2)
    return tensor[inputs["attention_mask"].bool()]


def solve(lhs: Tensor, rhs: Tensor, ridge: float) -> Tensor:
    """``W`` of ``W' = (A + ridge mean(diag A) I)^-1 B`` by LU."""
    shift = ridge * lhs.diagonal().mean() * torch.eye(len(lhs), dtype=lhs.dtype)
    return torch.linalg.solve(lhs + shift, rhs).T


def reduced(matrix: Tensor, ratio: float) -> Tensor:
    """Off-diagonal entries times `ratio`."""
    return ratio * matrix + (1 - ratio) * torch.diag(matrix.diagonal())


def whole_network(
    experts: Mapping[str, nn.Module],
    inputs: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    *,
    path_points: Sequence[float],
    left_point: float = 0.0,
    ratio: float = 0.9,
    ridge: float = 1e-4,
    weights: Mapping[str, float] | None = None,
    swapped: bool = False,
    symmetric: float = 0.0,
    shrinkage: float = 0.0,
) -> State:
    """Merges layer by layer; every statistic comes from whole forwards of networks that are rebuilt for it.

    Args:
        experts, inputs: task -> expert, task -> one batch.
        groups: layer names in depth order.
        path_points: S, over which the right-hand inputs are averaged.
        left_point: 0 measures the Gram matrix on the merged prefix, 1 on the expert.
        ratio, ridge: of the stabilisation.
        weights: task -> factor.
        swapped: the classic mistake, C for C'.
        symmetric, shrinkage: the two ablations.
    """
    network = next(iter(experts.values()))
    merged = average(experts)
    for group in groups:
        lhs: Tensor | float = 0.0
        rhs: Tensor | float = 0.0
        for task, expert in experts.items():
            state = expert.state_dict()

            def seen(point: float, task: str = task, state: State = state, layer: str = group[0]) -> Tensor:
                return layer_inputs(network, mixed(merged, state, point), layer, inputs[task])

            left, right = seen(left_point), torch.stack([seen(point) for point in path_points]).mean(0)
            gram, cross = left.T @ left, left.T @ right
            cross = cross.T if swapped else cross
            cross = (1 - symmetric) * cross + symmetric * (cross + cross.T) / 2
            cross = (1 - shrinkage) * cross + shrinkage * gram
            weight = torch.cat([state[weight_of(name)] for name in group])
            factor = (weights or {}).get(task, 1.0)
            lhs = lhs + factor * reduced(gram, ratio)
            rhs = rhs + factor * reduced(cross, ratio) @ weight.T
        solved = solve(lhs, rhs, ridge)
        start = 0
        for name in group:
            rows = merged[weight_of(name)].shape[0]
            merged[weight_of(name)] = solved[start : start + rows]
            start += rows
    return merged


def lot_norm_scales(experts: Mapping[str, nn.Module], inputs: Mapping[str, Tensor]) -> State:
    """Scale of every LayerNorm: experts' scales, weighted per feature by the energy of what they multiply.

    What an expert's layer normalised is told from its result, whose scale and shift are taken off again.
    """
    energies: dict[str, list[Tensor]] = {}
    scales: dict[str, list[Tensor]] = {}
    for task, expert in experts.items():
        scratch = copy.deepcopy(expert).eval()
        for name, norm in scratch.named_modules():
            if isinstance(norm, nn.LayerNorm):
                scales.setdefault(f"{name}.weight", []).append(norm.weight.detach())

                def note(norm: Any, _: Any, result: Tensor, name: str = name) -> None:
                    normalised = (result - norm.bias) / norm.weight
                    energies.setdefault(f"{name}.weight", []).append(normalised.flatten(0, -2).square().sum(0))

                norm.register_forward_hook(note)
        with torch.no_grad():
            scratch(inputs[task])
    return {
        name: sum(n * gamma for n, gamma in zip(energies[name], scales[name], strict=True)) / sum(energies[name])
        for name in scales
    }


def whole_network_lot(
    pretrained: nn.Module,
    experts: Mapping[str, nn.Module],
    inputs: Mapping[str, Tensor],
    groups: Sequence[Sequence[str]],
    *,
    path_points: Sequence[float],
    left_point: float = 0.0,
) -> State:
    """LOT and its combinations: least squares of least norm on the stacked rows (SVD), for task vectors."""
    origin, merged = pretrained.state_dict(), average(experts) | lot_norm_scales(experts, inputs)
    for group in groups:
        lefts, targets = [], []
        for task, expert in experts.items():
            state = expert.state_dict()
            names = [weight_of(name) for name in group]
            points = [
                layer_inputs(pretrained, mixed(merged, state, point), group[0], inputs[task])
                for point in (left_point, *path_points)
            ]
            vector = torch.cat([state[name] - origin[name] for name in names])
            lefts.append(points[0])
            targets.append(torch.stack(points[1:]).mean(0) @ vector.T)
        solved = torch.linalg.lstsq(torch.cat(lefts), torch.cat(targets), driver="gelsd").solution.T
        start = 0
        for name in group:
            rows = len(merged[weight_of(name)])
            merged[weight_of(name)] = origin[weight_of(name)] + solved[start : start + rows]
            start += rows
    return merged


def weight_of(layer: str) -> str:
    """The parameter of a layer; the stacked projection of a fused attention is a parameter of the attention."""
    return layer.replace("fused_in_proj", "in_proj_weight") if layer.endswith("fused_in_proj") else f"{layer}.weight"


def least_squares(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], weights: Sequence[Tensor], factors: Sequence[float] | None = None
) -> Tensor:
    """``argmin_W sum_t f_t ||L_t W' - R_t W_t'||^2`` by QR on the stacked rows, no normal equations."""
    roots = [factor**0.5 for factor in factors or [1.0] * len(lefts)]
    stacked = torch.cat([root * left for root, left in zip(roots, lefts, strict=True)])
    targets = torch.cat([root * r @ w.T for root, r, w in zip(roots, rights, weights, strict=True)])
    return torch.linalg.lstsq(stacked, targets, driver="gels").solution.T


def drifting_inputs(
    num_tasks: int, width: int, tokens: int, generator: torch.Generator, condition: float = 1e3, drift: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """(left, right) per task: left of at most this condition number, right = left times a linear map of the task."""
    lefts, rights = [], []
    scales = torch.logspace(0, -float(torch.log10(torch.tensor(condition))) / 2, width, dtype=torch.float64)
    for _ in range(num_tasks):
        basis = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
        rows = torch.linalg.qr(torch.randn(tokens, width, generator=generator, dtype=torch.float64)).Q
        left = rows * scales @ basis.T * tokens**0.5
        turn = torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5
        lefts.append(left)
        rights.append(left @ (torch.eye(width, dtype=torch.float64) + drift * turn))
    return lefts, rights


def alignment(left: Tensor, right: Tensor) -> float:
    """``<A, C> / (||A|| ||C||)`` entry by entry."""
    gram, cross = left.T @ left, left.T @ right
    return float(torch.sum(gram * cross) / (torch.sum(gram**2) * torch.sum(cross**2)).sqrt())
