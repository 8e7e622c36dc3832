"""The networks of a merge: the experts, the averaged and then merged one, and those on the paths between.

The only code that writes a weight. Experts are checked against each other before anything is computed, are run as
they are, and are given back as they came: weights, modes, devices and configs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fusion_bench_crossmean.coverage import LayerGroup, layer_weight, shorten

#: Entries that make a transformers model record outputs by patching `forward`, which mixes up interleaved forwards.
RECORDING_CONFIG = ("output_hidden_states", "output_attentions")


class Networks:
    """Experts with a merged network and path networks of ``(1 - s) merged + s expert``.

    At first the merged network is the plain mean of the experts: parameters that are equal in all of them are
    copied, integer buffers are copied.

    Args:
        experts: task -> expert, all of one architecture; see `check_experts`.
        path_points: s of the networks that run, each in [0, 1]; 0 is the merged network, 1 the expert.
        template: whose copy becomes the merged network (usually the pretrained model).
        device: where everything runs.
        dtype: floating-point type in which everything runs; None is the experts' common one, else float32.
    """

    def __init__(
        self,
        experts: Mapping[str, nn.Module],
        path_points: Sequence[float],
        template: nn.Module,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.path_points = tuple(path_points)
        self.dtype = dtype or common_dtype(experts.values()) or torch.float32
        self.device = torch.device(device)
        self._stack = contextlib.ExitStack()
        self.experts = {task: self._placed(expert) for task, expert in experts.items()}
        self._requires_grad = {name: p.requires_grad for name, p in template.named_parameters()}
        # Autocast caches casts of parameters that require gradients; the merged ones change under its feet.
        self.merged = copy.deepcopy(template).to(self.device, self.dtype).eval().requires_grad_(requires_grad=False)
        average_into(self.merged, list(self.experts.values()))
        self.paths: dict[tuple[str, float], nn.Module] = {}
        for task, expert in self.experts.items():
            for point in self.path_points:
                if 0 < point < 1:
                    self.paths[task, point] = interpolate(self.merged, expert, point)

    def _placed(self, expert: nn.Module) -> nn.Module:
        """The expert itself where it already has the device and dtype, else a copy that does: it is not ours."""
        tensors = [*expert.parameters(), *expert.buffers()]
        fits = all(t.device == self.device and (t.dtype == self.dtype or not t.is_floating_point()) for t in tensors)
        return expert if fits else copy.deepcopy(expert).to(self.device, self.dtype)

    def __enter__(self) -> Networks:
        for network in (self.merged, *self.experts.values(), *self.paths.values()):
            self._stack.enter_context(ready_to_run(network))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def network(self, task: str, path_point: float) -> nn.Module:
        """The network of one task at one path point."""
        if path_point == 0:
            return self.merged
        return self.experts[task] if path_point == 1 else self.paths[task, path_point]

    @torch.no_grad()
    def write(self, group: LayerGroup, weight: Tensor) -> None:
        """Stores a solved weight, shape (out, in), in the merged network and on the paths.

        Raises:
            ArithmeticError: it does not fit the networks' dtype.
        """
        for name, rows in group.split(weight, self.merged).items():
            stored = layer_weight(self.merged, name)
            stored.copy_(rows)
            if not stored.isfinite().all():
                raise ArithmeticError(
                    f"The merged weight of layer {name!r} overflows {self.dtype} (largest entry "
                    f"{float(rows.abs().max()):.3g}). Use dtype=float32."
                )
            for (task, point), path in self.paths.items():
                expert = layer_weight(self.experts[task], name)
                layer_weight(path, name).copy_(torch.lerp(stored, expert, point))

    def finish(self, dtype: torch.dtype) -> nn.Module:
        """The merged network in `dtype`, its parameters as trainable as the template's.

        Raises:
            ArithmeticError: a value overflows `dtype`.
        """
        merged = self.merged.to(dtype)
        bad = [k for k, t in merged.state_dict().items() if t.is_floating_point() and not t.isfinite().all()]
        if bad:
            raise ArithmeticError(f"The merged model overflows {dtype} in {shorten(bad)}. Use dtype=float32.")
        for name, parameter in merged.named_parameters():
            parameter.requires_grad_(self._requires_grad[name])
        return merged


def common_dtype(networks: Iterable[nn.Module]) -> torch.dtype | None:
    """The one floating-point dtype of all parameters of all networks, or None."""
    dtypes = {p.dtype for network in networks for p in network.parameters() if p.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


@torch.no_grad()
def average_into(target: nn.Module, experts: Sequence[nn.Module]) -> None:
    """Sets every parameter and floating-point buffer of `target` to the mean over the experts.

    What is equal in all experts is copied bit for bit, and so are integer and boolean buffers.
    """
    states = [expert.state_dict() for expert in experts]
    for name, tensor in target.state_dict().items():
        values = [state[name] for state in states if name in state]
        if not values:
            continue  # an integer buffer that no expert stores; check_experts refused anything else
        if all(torch.equal(values[0], value) for value in values[1:]):
            tensor.copy_(values[0])
        else:
            accurate = torch.promote_types(tensor.dtype, torch.float32)
            tensor.copy_(sum(value.to(accurate) for value in values) / len(values))


@torch.no_grad()
def interpolate(merged: nn.Module, expert: nn.Module, point: float) -> nn.Module:
    """A copy of `merged` with the parameters and floating-point buffers ``(1 - point) merged + point expert``."""
    path = copy.deepcopy(merged)
    state = expert.state_dict()
    for name, tensor in path.state_dict().items():
        if name in state and tensor.is_floating_point():
            tensor.lerp_(state[name], point)
    return path


@contextlib.contextmanager
def ready_to_run(network: nn.Module) -> Iterator[None]:
    """Eval mode and no recording of intermediate outputs inside the block; afterwards as before, also after errors."""
    modes = {module: module.training for module in network.modules()}
    configs = {id(config): config for module in modes if (config := getattr(module, "config", None)) is not None}
    recorded = [
        (config, key, value)
        for config in configs.values()
        for key in RECORDING_CONFIG
        if (value := getattr(config, key, False))
    ]
    network.eval()
    for config, key, _ in recorded:
        setattr(config, key, False)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for config, key, value in recorded:
            setattr(config, key, value)
