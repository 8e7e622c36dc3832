"""Cures for defects of the released FusionBench (0.2.33). Each is applied only where the defect is present."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def alias_clip_vision_transformer() -> None:
    """FusionBench imports `CLIPVisionTransformer`, which transformers 5 has merged into `CLIPVisionModel`.

    Without the alias the stock `CLIPVisionModelTaskPool` fails to import. It can go once FusionBench's release
    imports without it (its main branch does).
    """
    from transformers.models.clip import modeling_clip

    if not hasattr(modeling_clip, "CLIPVisionTransformer"):
        modeling_clip.CLIPVisionTransformer = modeling_clip.CLIPVisionModel  # type: ignore[attr-defined]


def make_regmean_plusplus_mapping_bidirectional() -> None:
    """FusionBench's RegMean++ for CLIP declares its `_config_mapping` as a plain dict without its parent's entries.

    Setting any attribute then fails with "'dict' object has no attribute 'inverse'". It can go once FusionBench's
    release declares a bidict there (its main branch does).
    """
    from bidict import bidict
    from fusion_bench.method import RegMeanAlgorithmForCLIPPlusPlus as RegMeanPlusPlus

    own = RegMeanPlusPlus._config_mapping
    if not isinstance(own, bidict):
        RegMeanPlusPlus._config_mapping = bidict(super(RegMeanPlusPlus, RegMeanPlusPlus)._config_mapping | own)


def let_regmean_plusplus_run_on_flat_towers() -> None:
    """FusionBench's RegMean++ reaches into ``model.vision_model`` and takes the first item of what a layer returns.

    In transformers 5 a `CLIPVisionModel` is the tower itself, and its layers return tensors. Nothing else changes. It
    can go once FusionBench's release runs RegMean++ there (its main branch does).
    """
    from fusion_bench.method import RegMeanAlgorithmForCLIPPlusPlus as RegMeanPlusPlus
    from transformers import CLIPVisionModel

    stock = RegMeanPlusPlus.run
    if "vision_model" in inspect.getsource(CLIPVisionModel.__init__) or hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def run(self: RegMeanPlusPlus, modelpool: Any, **kwargs: Any) -> Any:
        view = copy.copy(modelpool)
        view.load_model = lambda *args, **options: nested(modelpool.load_model(*args, **options))
        return stock(self, view, **kwargs).vision_model

    def layer_batches_forward(self: RegMeanPlusPlus, layer: nn.Module, batches_input: list[Tensor]) -> list[Tensor]:
        device = next(layer.parameters()).device
        return [layer(batch.to(device), attention_mask=None).detach().cpu() for batch in batches_input]

    RegMeanPlusPlus.run = run
    RegMeanPlusPlus.layer_batches_forward = layer_batches_forward  # type: ignore[method-assign]


def nested(tower: nn.Module) -> nn.Module:
    """A module with `tower` as its `vision_model`, the way transformers 4 builds a `CLIPVisionModel`."""
    outer = nn.Module()
    outer.vision_model = tower
    return outer


def provide_typing_override() -> None:
    """FusionBench's OpenCLIP pool imports `typing.override`, which Python has from 3.12 on.

    It can go once FusionBench imports it from typing_extensions, or we no longer support Python 3.11.
    """
    if not hasattr(typing, "override"):
        from typing_extensions import override

        typing.override = override  # type: ignore[attr-defined]


def build_openclip_encoders_right() -> None:
    """FusionBench's `ImageEncoder` knows three names, refuses every suffix that it documents, and builds OpenAI's
    weights with GELU under open_clip 3, whose models were trained with QuickGELU.

    It can go once FusionBench's release takes any name of open_clip and forces QuickGELU for OpenAI's weights.
    """
    from fusion_bench.models.open_clip import ImageEncoder

    from fusion_bench_crossmean.openclip import build_encoder

    stock = inspect.getsource(ImageEncoder.__init__)
    if "in MODELS" in stock or "quick_gelu" not in stock:
        ImageEncoder.__init__ = build_encoder  # type: ignore[method-assign]


def load_pickled_encoders_safely() -> None:
    """FusionBench's OpenCLIP pool reads whole pickled encoders with `weights_only=True`, which always fails.

    State dicts are read here too: open_clip's own names are taken, and what does not fit is said with the file. It can
    go once FusionBench's release reads the checkpoints that its own OpenCLIP pools name.
    """
    from fusion_bench.modelpool import OpenCLIPVisionModelPool as Pool
    from omegaconf import DictConfig, OmegaConf

    from fusion_bench_crossmean.openclip import encoder_from_pickle, encoder_from_state_dict

    stock = Pool.load_model
    if hasattr(stock, "__wrapped__") or 'if "weights_only" in kwargs else True' not in inspect.getsource(stock):
        return

    @functools.wraps(stock)
    def load_model(self: Pool, model_name_or_config: Any, *args: Any, **kwargs: Any) -> Any:
        entry = model_name_or_config
        if isinstance(entry, str) and entry in self._models:
            entry = self._models[entry]
        if isinstance(entry, DictConfig):
            entry = OmegaConf.to_container(entry, resolve=True)
        if isinstance(entry, str):
            encoder = encoder_from_pickle(entry)
        elif isinstance(entry, dict) and set(entry) == {"model_name", "pickle_path"}:
            encoder = encoder_from_pickle(entry["pickle_path"], entry["model_name"])
        elif isinstance(entry, dict) and set(entry) == {"model_name", "state_dict_path"}:
            encoder = encoder_from_state_dict(entry["state_dict_path"], entry["model_name"])
        else:
            return stock(self, model_name_or_config, *args, **kwargs)
        self._train_processor = self._train_processor or encoder.train_preprocess
        self._test_processor = self._test_processor or encoder.val_preprocess
        return encoder

    Pool.load_model = load_model


#: Applied in this order; every one is idempotent and does nothing where its defect is absent.
CURES: tuple[Callable[[], None], ...] = (
    provide_typing_override,
    alias_clip_vision_transformer,
    make_regmean_plusplus_mapping_bidirectional,
    let_regmean_plusplus_run_on_flat_towers,
)
#: Those that import open_clip, which takes seconds.
OPENCLIP_CURES: tuple[Callable[[], None], ...] = (build_openclip_encoders_right, load_pickled_encoders_safely)


def apply_cures(*, openclip: bool = False) -> None:
    """Applies every cure that this environment needs; those for OpenCLIP if asked to, or if it is in use."""
    for cure in CURES:
        cure()
    if openclip or "fusion_bench.models.open_clip.modeling" in sys.modules:
        for cure in OPENCLIP_CURES:
            cure()
