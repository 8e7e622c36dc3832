"""One calibration batch: what a network is called with, and which tokens count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_crossmean.forwards import WalkError


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward call.

    Args:
        args: positional arguments of the network.
        kwargs: keyword arguments of the network.
        token_mask: bool, shape (batch, tokens): True where a token counts. None: all count.
        token_dropout: fraction of the tokens left out of every statistic at random; the forward still sees them.
        dropout_seeds: one per input; the same seed drops the same tokens at every layer and in every network.
        task: whose inputs they are, for messages.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    token_mask: Tensor | None = None
    token_dropout: float = 0.0
    dropout_seeds: tuple[int, ...] = ()
    task: str = ""

    def run(self, network: nn.Module) -> Any:
        """Calls the network.

        Raises:
            WalkError: it cannot run on these arguments.
        """
        return self.call(network, *self.args, **self.kwargs)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a network, or a part of one, on behalf of this batch; for errors see `run`."""
        try:
            return function(*args, **kwargs)
        except (WalkError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model's own code may raise anything
            raise WalkError(
                f"The model cannot run on the calibration inputs of task {self.task!r}: {type(error).__name__}: {error}"
            ) from error

    def rows(self, inputs: Tensor) -> Tensor:
        """A layer's inputs of shape (batch, ..., in) as rows (tokens, in), without the tokens that do not count.

        Inputs of shape (batch, in), such as a pooler's, have no token axis and are returned whole.

        Raises:
            ValueError: the inputs have a token axis that the mask does not fit.
        """
        kept = self._kept_tokens(inputs)
        return inputs.reshape(inputs.shape[:-1].numel(), inputs.shape[-1]) if kept is None else inputs[kept]

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On `device`, floating-point arguments in `dtype`."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else None)

        return replace(
            self,
            args=tuple(move(value) for value in self.args),
            kwargs={key: move(value) for key, value in self.kwargs.items()},
            token_mask=None if self.token_mask is None else self.token_mask.to(device),
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    @property
    def size(self) -> int:
        """How many inputs there are."""
        return max((len(tensor) for tensor in self.tensors() if tensor.ndim), default=1)

    def _kept_tokens(self, inputs: Tensor) -> Tensor | None:
        if inputs.ndim < 3:
            return self._kept_flat_tokens(inputs)
        tokens = inputs.shape[:-1]
        if self.token_mask is not None and self.token_mask.shape != tokens:
            raise ValueError(
                f"A layer's inputs have the token axes {tuple(tokens)}, the attention mask has "
                f"{tuple(self.token_mask.shape)}: padding cannot be told from text there."
            )
        if not self.token_dropout:
            return self.token_mask
        if len(self.dropout_seeds) != tokens[0]:
            raise ValueError(
                f"A layer's inputs have the token axes {tuple(tokens)}, the batch has {len(self.dropout_seeds)} "
                "inputs: their tokens cannot be told apart there. Set token_dropout to 0."
            )
        draws = [
            torch.rand(tokens[1:], generator=torch.Generator().manual_seed(s), dtype=torch.float32, device="cpu")
            for s in self.dropout_seeds
        ]
        kept = (torch.stack(draws) >= self.token_dropout).to(inputs.device)
        return kept if self.token_mask is None else kept & self.token_mask

    def _kept_flat_tokens(self, inputs: Tensor) -> Tensor | None:
        """The same for inputs of shape (batch, in), or (batch * tokens, in) where a model flattens its tokens."""
        if self.token_mask is None and not self.token_dropout:
            return None
        count = len(self.dropout_seeds) if self.token_mask is None else len(self.token_mask)
        if len(inputs) == count:
            return None
        if self.token_mask is not None and len(inputs) != self.token_mask.numel():
            raise ValueError(
                f"A layer's inputs have {len(inputs)} rows, the attention mask has {tuple(self.token_mask.shape)}: "
                "padding cannot be told from text there."
            )
        if not count or len(inputs) % count:
            raise ValueError(
                f"A layer's inputs have {len(inputs)} rows, the batch has {count} inputs: their tokens cannot be told "
                "apart there. Set token_dropout to 0."
            )
        kept = self._kept_tokens(inputs.unflatten(0, (count, -1)))
        return None if kept is None else kept.flatten()
