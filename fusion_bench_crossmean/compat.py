"""Cures for defects of the released FusionBench (0.2.33). Each is applied only where the defect is present."""

from __future__ import annotations

from collections.abc import Callable


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


#: Applied in this order; every one is idempotent and does nothing where its defect is absent.
CURES: tuple[Callable[[], None], ...] = (
    alias_clip_vision_transformer,
    make_regmean_plusplus_mapping_bidirectional,
)


def apply_cures() -> None:
    """Applies every cure that this environment needs."""
    for cure in CURES:
        cure()
