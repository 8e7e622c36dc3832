"""The networks of a merge: the averaged and then merged one, the experts, and those on the paths between.

The only code that writes a weight. One module, the runner, computes for all of them: before a stretch of a forward,
from one pause to the next, it is given just the tensors which that stretch uses. So the merged model is the only whole
network here; experts are read and never run, and the user's own modules stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fusion_bench_crossmean.attention import open_attentions
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.messages import shorten
from fusion_bench_crossmean.weights import Weights, hollow, is_finite, parameter_dtypes, placeholder, tensors_of

#: Entries of a transformers config that make a forward keep something: recorded outputs (by patching `forward`, which
#: mixes up interleaved forwards) and a cache of keys and values (which a block that runs twice fills twice).
RECORDING_CONFIG = ("output_hidden_states", "output_attentions", "use_cache")


class Networks:
    """Experts with a merged network and path networks of ``(1 - s) merged + s expert``.

    At first the merged network is the plain mean of the experts: parameters that are equal in all of them are
    copied, integer buffers are copied. Use it as a context manager: leaving restores what running needs switched.

    Args:
        experts: task -> its tensors, all of one architecture; see `check_expert`. They are only read.
        path_points: s of the networks that run, each in [0, 1]; 0 is the merged network, 1 the expert.
        template: gives the merged network its structure, modes and integer buffers; its floating-point values are
            not used.
        device: where everything runs.
        dtype: of the merged network.
        forward_dtype: in which networks run; None is `dtype`.
    """

    def __init__(
        self,
        experts: Mapping[str, Weights],
        path_points: Sequence[float],
        template: nn.Module,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        forward_dtype: torch.dtype | None = None,
    ) -> None:
        self.experts = experts
        self.path_points = tuple(path_points)
        self.device = torch.device(device)
        self.dtype = dtype
        self.forward_dtype = forward_dtype or dtype
        self._requires_grad = {name: p.requires_grad for name, p in template.named_parameters()}
        self.merged = hollow(template, lambda t: torch.empty_like(t, device=self.device, dtype=self._dtype_of(t)))
        move_buffers(self.merged, self.device, parameter_dtypes(template), self.dtype)
        # Autocast would cache casts of parameters that need gradients, and these change under its feet.
        self.merged.eval().requires_grad_(requires_grad=False)
        average_into(tensors_of(self.merged), list(experts.values()))
        self._merged = tensors_of(self.merged)
        self.runner = hollow(self.merged, lambda t: placeholder(t, self.device, self._dtype_of(t, forward=True)))
        move_buffers(self.runner, self.device, {self.dtype}, self.forward_dtype)
        self.runner.eval()
        open_attentions(self.runner)
        self._slots = {name: slot for name, slot in tensors_of(self.runner).items() if slot.is_floating_point()}
        self._loaded: dict[str, Tensor] = {}
        self._cache: dict[tuple[str, float], dict[str, Tensor]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Networks:
        self._stack.enter_context(ready_to_run(self.runner))
        self._stack.enter_context(ready_to_run(self.merged))
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()
        self._stack.close()

    def network(self, task: str, path_point: float) -> nn.Module:
        """The module that runs for one task at one path point: always the runner; see `load`."""
        return self.runner

    @torch.no_grad()
    def load(self, task: str, path_point: float, names: Collection[str] | None = None) -> None:
        """Gives the runner the tensors called `names` (None: all) of one task's network at one path point.

        What is made for it (interpolated, cast, moved to the device) is kept until another task or other names are
        loaded at the same path point; the rest of the runner holds NaN.
        """
        key = ("", 0.0) if path_point == 0 else (task, path_point)
        for other in [k for k in self._cache if k[0] not in ("", task)]:
            del self._cache[other]
        kept = self._cache.get(key, {})
        wanted = self._slots if names is None else [name for name in names if name in self._slots]
        self._cache[key] = made = {
            name: kept[name] if name in kept else self._tensor(name, task, path_point) for name in wanted
        }
        self._empty(self._loaded.keys() - made.keys())
        for name, tensor in made.items():
            if self._loaded.get(name) is not tensor:
                self._slots[name].data = tensor
        self._loaded = dict(made)

    def unload(self) -> None:
        """The runner holds NaN everywhere, and nothing made for it is kept."""
        self._empty(self._loaded)
        self._loaded = {}
        self._cache.clear()

    def expert_weight(self, task: str, group: LayerGroup) -> Tensor:
        """An expert's stacked weight of a group, shape (out, in), on the device in the merged network's dtype."""
        return group.weight_of(self.experts[task]).to(self.device, self.dtype)

    def merged_weight(self, group: LayerGroup) -> Tensor:
        """The merged network's stacked weight of a group as it stands, shape (out, in)."""
        return group.weight_of(self._merged)

    @torch.no_grad()
    def write(self, group: LayerGroup, weight: Tensor) -> None:
        """Stores a solved weight, shape (out, in), in the merged network; later loads interpolate from it.

        Raises:
            ArithmeticError: it does not fit the networks' dtype.
        """
        for name, rows in group.split(weight, self._merged).items():
            self.store(name, rows)

    @torch.no_grad()
    def store(self, name: str, values: Tensor) -> None:
        """Stores the values of one parameter in the merged network; see `write`."""
        stored = self._merged[name]
        stored.copy_(values)
        if not is_finite(stored):
            raise ArithmeticError(
                f"The merged weight of layer {name.rpartition('.')[0]!r} overflows {self.dtype} (largest entry "
                f"{float(values.abs().max()):.3g}). Use dtype=float32."
            )
        for made in self._cache.values():
            made.pop(name, None)

    def finish(self, dtype: torch.dtype) -> nn.Module:
        """The merged network in `dtype`, its parameters as trainable as the template's.

        Raises:
            ArithmeticError: a value overflows `dtype`.
        """
        self.unload()
        merged = self.merged
        for tensor in tensors_of(merged).values():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        move_buffers(merged, self.device, {self.dtype}, dtype)
        bad = [k for k, t in merged.state_dict().items() if t.is_floating_point() and not is_finite(t)]
        if bad:
            raise ArithmeticError(f"The merged model overflows {dtype} in {shorten(bad)}. Use dtype=float32.")
        for name, parameter in merged.named_parameters():
            parameter.requires_grad_(self._requires_grad[name])
        return merged

    def _empty(self, names: Collection[str]) -> None:
        for name in names:
            self._slots[name].data = placeholder(self._merged[name], self.device, self._slots[name].dtype)

    def _tensor(self, name: str, task: str, path_point: float) -> Tensor:
        """One tensor of a network, a new one unless it can be used as it is stored."""
        merged, dtype = self._merged[name], self._dtype_of(self._merged[name], forward=True)
        if path_point == 0:
            tensor = merged
        elif path_point == 1:
            tensor = self.experts[task][name].detach().to(self.device)
        else:
            tensor = torch.lerp(merged, self.experts[task][name].detach().to(merged), path_point)
        tensor = tensor.to(dtype)
        is_buffer = not isinstance(merged, nn.Parameter)
        return tensor.clone() if is_buffer else tensor.detach()  # a forward may write into a buffer

    def _dtype_of(self, tensor: Tensor, *, forward: bool = False) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return self.forward_dtype if forward else self.dtype


def move_buffers(
    network: nn.Module, device: torch.device, followed: Collection[torch.dtype], dtype: torch.dtype
) -> None:
    """Brings what is no floating-point part of the state dict to `device`: integer buffers, and those outside of it.

    Of the latter, those in one of the `followed` dtypes, the parameters' own, are cast to `dtype`. Others have theirs
    for a reason, such as the float32 frequencies of rotary embeddings in a bfloat16 model.
    """
    network.to(device)
    own = {id(tensor) for tensor in tensors_of(network).values()}
    for module in network.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in own and buffer.dtype in followed:
                module._buffers[key] = buffer.to(dtype)


@torch.no_grad()
def average_into(target: Mapping[str, Tensor], experts: Sequence[Weights]) -> None:
    """Sets every parameter and floating-point buffer of `target` to the mean over the experts.

    What is equal in all experts is copied bit for bit, and so are integer and boolean buffers. One expert's tensor is
    read at a time.
    """
    for name, tensor in target.items():
        values = (expert[name].detach().to(tensor.device) for expert in experts if name in expert)
        first = next(values, None)
        if first is None:
            continue  # an integer buffer that no expert stores; check_expert refused anything else
        mean, count, is_equal = first.to(torch.promote_types(first.dtype, torch.float32), copy=True), 1, True
        for value in values:
            is_equal = is_equal and value.dtype == first.dtype and torch.equal(first, value)
            mean = mean.to(torch.promote_types(mean.dtype, value.dtype)).add_(value)
            count += 1
        tensor.copy_(first if is_equal else mean.div_(count))


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
