"""The part of a text classifier that is merged: its encoder, with the pooler if it has one. Heads stay with tasks."""

from __future__ import annotations

from typing import Any

from torch import nn


def encoder_of(model: nn.Module) -> nn.Module:
    """The encoder of a transformers model for sequence classification; any other model is returned as it is."""
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    return model.get_submodule(str(model.base_model_prefix)) if is_classifier else model


def without_heads(modelpool: Any) -> Any:
    """A pool whose models are encoders from now on: FusionBench's methods merge whole models, and heads differ."""
    load = modelpool.load_model
    modelpool.load_model = lambda *args, **options: encoder_of(load(*args, **options))
    return modelpool
