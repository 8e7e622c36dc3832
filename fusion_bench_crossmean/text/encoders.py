"""The part of a text classifier that is merged: its encoder, with the pooler if it has one. Heads stay with tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def encoder_of(model: nn.Module) -> nn.Module:
    """The encoder of a transformers model for sequence classification; any other model is returned as it is."""
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    return model.get_submodule(str(model.base_model_prefix)) if is_classifier else model


def without_heads(modelpool: Any) -> Any:
    """A pool whose models are encoders from now on: FusionBench's methods merge whole models, and heads differ."""
    load = modelpool.load_model
    modelpool.load_model = lambda *args, **options: encoder_of(load(*args, **options))
    return modelpool


def check_token_ids(network: nn.Module, inputs: Mapping[str, Any], source: str) -> None:
    """Whether a text encoder has an embedding for every token and for every position of some inputs.

    Args:
        network: the encoder; its values do not matter.
        inputs: what it is called with; without `input_ids` there is nothing to check.
        source: of the inputs, for messages.

    Raises:
        ValueError: it has not.
    """
    ids, find = inputs.get("input_ids"), getattr(network, "get_input_embeddings", None)
    table = find() if find else None
    if not isinstance(ids, Tensor) or not isinstance(table, nn.Embedding):
        return
    if (largest := int(ids.max())) >= table.num_embeddings:
        raise ValueError(
            f"{source} have the token {largest}, the model knows {table.num_embeddings} tokens: the tokenizer is "
            "another model's."
        )
    positions = next((m for k, m in network.named_modules() if k.rpartition(".")[2] == "position_embeddings"), None)
    if isinstance(positions, nn.Embedding):
        # RoBERTa counts positions from behind the one of padding.
        room = positions.num_embeddings - (0 if positions.padding_idx is None else positions.padding_idx + 1)
        if ids.shape[1] > room:
            raise ValueError(
                f"{source} have {ids.shape[1]} tokens in a row, the model reads {room}: give the tokenizer "
                f"model_max_length={room} or less, and longer texts are cut."
            )
