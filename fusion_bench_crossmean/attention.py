"""Fused attentions taken apart: `nn.MultiheadAttention` whose two projections are called like layers.

PyTorch's own computes both projections inside one function, where no hook sees what they receive.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: What the stacked projection of q, k and v is called as a layer, and what its attention calls the weight.
INPUT_PROJECTION, INPUT_WEIGHT = "fused_in_proj", "in_proj_weight"


class Projection(nn.Module):
    """A linear layer that is handed its weight, which the attention owns."""

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(inputs, weight, bias)


class OpenAttention(nn.MultiheadAttention):
    """What `nn.MultiheadAttention` computes in eval mode, its tensors under the same names; see `open_attentions`.

    Only self-attention is opened: q, k and v that come from different inputs have no single projection.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002  (the signature is PyTorch's)
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002
        is_causal: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[Tensor, Tensor | None]:
        if not self._is_plain(query, key, value) or (is_causal and attn_mask is None):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        projection = self.get_submodule(INPUT_PROJECTION)
        stacked = self._by_batch(projection(query, self.in_proj_weight, self.in_proj_bias))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in stacked.chunk(3, -1))
        mask = self._mask(attn_mask, key_padding_mask, q)
        weights = None
        if need_weights:
            scores = q @ k.mT * self.head_dim**-0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if query.ndim == 3 else weights.squeeze(0)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out_proj(self._by_batch(mixed.transpose(1, 2).flatten(2), back=True, like=query)), weights

    def _is_plain(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        extra_keys = self.bias_k is not None or self.bias_v is not None or self.add_zero_attn
        return query is key and key is value and self._qkv_same_embed_dim and not extra_keys

    def _by_batch(self, tokens: Tensor, *, back: bool = False, like: Tensor | None = None) -> Tensor:
        """Shape (batch, tokens, features) from the attention's own layout; `back`: to that of `like`."""
        if (tokens if like is None else like).ndim == 2:
            return tokens.squeeze(0) if back else tokens.unsqueeze(0)
        return tokens if self.batch_first else tokens.transpose(0, 1)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """What is added to the scores of shape (batch, heads, tokens, tokens); None: nothing."""
        masks = []
        if attn_mask is not None:  # (tokens, tokens), or one per batch and head
            masks.append(attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (len(q), self.num_heads)))
        if key_padding_mask is not None:
            masks.append(key_padding_mask.reshape(len(q), 1, 1, -1))
        added = [
            torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
            if mask.dtype == torch.bool
            else mask.to(q.dtype)
            for mask in masks
        ]
        return sum(added[1:], start=added[0]) if added else None


def open_attentions(network: nn.Module) -> None:
    """Turns every `nn.MultiheadAttention` of `network` into an `OpenAttention`, in place; tensors keep their names."""
    for module in list(network.modules()):
        if type(module) is nn.MultiheadAttention:
            module.__class__ = OpenAttention
            module.add_module(INPUT_PROJECTION, Projection())
