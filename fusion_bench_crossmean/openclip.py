"""OpenCLIP's image encoders as FusionBench wraps them: which network a name means, and safe loading of pickled ones."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch
from fusion_bench.models.open_clip import ImageEncoder
from fusion_bench.models.open_clip.variables_and_paths import CACHEDIR, OPENCLIP_CACHEDIR
from torch import Tensor, nn

from fusion_bench_crossmean.pickled import read_pickled_module

log = logging.getLogger(__name__)

#: What open_clip knows of published weights -> the option that says the same.
PREPROCESSING = {
    "mean": "image_mean",
    "std": "image_std",
    "interpolation": "image_interpolation",
    "resize_mode": "image_resize_mode",
}
#: Parts of open_clip's models that only text goes through.
TEXT_PARTS = ("transformer", "text", "text_decoder")
TEXT_PREFIXES = tuple(f"model.{part}." for part in TEXT_PARTS)
#: Towers that a pickled encoder without a name is compared with.
ARCHITECTURES = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336", "ViT-H-14")


def build_encoder(
    encoder: ImageEncoder,
    model_name: str,
    keep_lang: bool = False,  # noqa: FBT001, FBT002  (the signature is FusionBench's)
) -> None:
    """`ImageEncoder.__init__` for every name that open_clip knows, with the activation that its weights were made for.

    Args:
        encoder: to be initialised.
        model_name: an architecture, alone for OpenAI's weights, with ``__pretrained__<tag>`` for others and with
            ``__init__`` for random ones (which are to be overwritten); then ``<architecture>-quickgelu`` is the one
            with QuickGELU.
        keep_lang: keeps the text tower.

    Raises:
        ValueError: no such architecture.
    """
    name, tag = model_name, "openai"
    if "__pretrained__" in model_name:
        name, tag = model_name.split("__pretrained__")
    elif "__init__" in model_name:
        name, tag = model_name.split("__init__")[0], None
    if open_clip.get_model_config(name) is None:
        raise ValueError(f"open_clip has no architecture {name!r}; it has {', '.join(open_clip.list_models())}.")
    nn.Module.__init__(encoder)
    # The models that were trained with QuickGELU are built with GELU, and a warning, unless told.
    encoder.model, encoder.train_preprocess, encoder.val_preprocess = open_clip.create_model_and_transforms(
        name,
        pretrained=tag,
        cache_dir=OPENCLIP_CACHEDIR,
        force_quick_gelu=tag == "openai",
        **({} if tag else preprocessing_of(name)),
    )
    encoder.cache_dir = CACHEDIR
    for part in TEXT_PARTS:
        if not keep_lang and isinstance(getattr(encoder.model, part, None), nn.Module):
            delattr(encoder.model, part)


def preprocessing_of(name: str) -> dict[str, Any]:
    """How an architecture's published weights want their images prepared, as open_clip's own options.

    Weights that are yet to come were made from some of them. Empty where these disagree: open_clip's defaults stay.
    """
    tags = open_clip.list_pretrained_tags_by_model(name)
    configs = [open_clip.get_pretrained_cfg(name, tag) for tag in tags]
    found = [{option: config.get(key) for key, option in PREPROCESSING.items()} for config in configs]
    if not found or any(options != found[0] for options in found):
        return {}
    return {option: value for option, value in found[0].items() if value is not None}


def warn_of_unknowns(model_name: str) -> None:
    """A state dict does not say for which activation and which images it was made; an architecture may not either."""
    name, _, tag = model_name.partition("__")
    if tag != "init__":
        return
    if not preprocessing_of(name):
        log.warning(
            "Published weights of %s differ in how images are prepared; open_clip's default is taken. Name the weights "
            "that yours were made from (%s__pretrained__<tag>) if it is not theirs.",
            name,
            name,
        )
    if not name.endswith("-quickgelu") and open_clip.get_model_config(f"{name}-quickgelu"):
        log.warning(
            "%s is built with GELU. If its weights come from OpenAI's or others made for QuickGELU, name it "
            "%s-quickgelu__init__.",
            model_name,
            name,
        )


def encoder_from_pickle(path: str | Path, model_name: str | None = None) -> ImageEncoder:
    """The encoder that was saved whole at `path`, built anew around its weights.

    Args:
        path: of the file.
        model_name: its architecture; None: told by the shapes of its weights.

    Raises:
        ValueError: the file cannot be read safely, is none of an image encoder, or fits no known architecture.
    """
    pickled = read_pickled_module(path)
    weights = {name: t for name, t in pickled.state_dict.items() if not name.startswith(TEXT_PREFIXES)}
    name = (model_name or architecture_of(weights, path)).split("__")[0].removesuffix("-quickgelu")
    encoder = ImageEncoder(f"{name}__init__")
    if any(each.endswith(".QuickGELU") for each in pickled.classes):
        use_quick_gelu(encoder)
    check_weights(encoder, weights, path, name)
    for key, module in encoder.named_modules():
        for setting in ("num_heads", "eps"):
            there = pickled.settings.get(f"{key}.{setting}")
            if there is not None and there != getattr(module, setting, there):
                raise ValueError(
                    f"{path} is no {name}: {setting} of {key!r} is {there}, not {getattr(module, setting)}. Check "
                    "model_name."
                )
    encoder.load_state_dict(weights)
    return encoder


def encoder_from_state_dict(path: str | Path, model_name: str) -> ImageEncoder:
    """The encoder of an architecture with the weights stored at `path`.

    Args:
        path: of a state dict, of FusionBench's encoder (``model.visual...``) or of open_clip's whole model
            (``visual...``), whose text tower is left out.
        model_name: see `build_encoder`.

    Raises:
        ValueError: the file holds something else, or weights that do not fit.
    """
    warn_of_unknowns(model_name)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than a state dict: give a whole pickled encoder as pickle_path."
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a state dict.")
    prefix = "" if any(name.startswith("model.") for name in content) else "model."
    weights = {prefix + name: t for name, t in content.items() if not (prefix + name).startswith(TEXT_PREFIXES)}
    encoder = ImageEncoder(model_name)
    check_weights(encoder, weights, path, model_name)
    encoder.load_state_dict(weights)
    return encoder


def check_weights(encoder: ImageEncoder, weights: Mapping[str, Any], path: str | Path, name: str) -> None:
    """Raises `ValueError` unless the weights stored at `path` are just those of `encoder`, which is called `name`."""
    own = encoder.state_dict()
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [key for key in own.keys() & weights.keys() if own[key].shape != getattr(weights[key], "shape", None)]
    if missing or unexpected or shapes:
        raise ValueError(
            f"{path} is no {name}: it lacks {len(missing)} tensors {missing[:3]}, has {len(unexpected)} others "
            f"{unexpected[:3]} and {len(shapes)} of another shape {shapes[:3]}. Check model_name."
        )


def use_quick_gelu(encoder: nn.Module) -> None:
    """Replaces every GELU: not every architecture has a name of its own with QuickGELU."""
    for module in list(encoder.modules()):
        for name, child in module.named_children():
            if type(child) is nn.GELU:
                setattr(module, name, open_clip.model.QuickGELU())


def architecture_of(weights: Mapping[str, Tensor], path: str | Path) -> str:
    """The one of `ARCHITECTURES` whose vision tower has these shapes.

    Raises:
        ValueError: there is none.
    """
    blocks = {key.split(".")[4] for key in weights if key.startswith("model.visual.transformer.resblocks.")}
    found = ("model.visual.conv1.weight" in weights) and {
        "width": weights["model.visual.conv1.weight"].shape[0],
        "patch_size": weights["model.visual.conv1.weight"].shape[-1],
        "layers": len(blocks),
        "tokens": len(weights.get("model.visual.positional_embedding", ())),
    }
    for name in ARCHITECTURES:
        config: Any = open_clip.get_model_config(name)
        vision: dict[str, Any] = config["vision_cfg"]
        tokens = (vision["image_size"] // vision["patch_size"]) ** 2 + 1
        if found == {key: vision[key] for key in ("width", "patch_size", "layers")} | {"tokens": tokens}:
            return name
    raise ValueError(
        f"{path} holds none of {', '.join(ARCHITECTURES)}. Name its architecture: models.<task>.model_name beside "
        "models.<task>.pickle_path."
    )
