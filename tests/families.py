"""Model families as their users have them: experts saved to disk, in a pool of FusionBench's own class.

A family joins the common suite (`test_families`) by an entry in `FAMILIES`. What the pool loads is cast to the default
dtype, so that results can be compared in float64.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import open_clip
import torch
from fusion_bench.modelpool import SequenceClassificationModelPool
from open_clip.factory import _MODEL_CONFIG_PATHS, _rescan_model_configs
from pico import SIDE, PicoPool, draw_weights, pico_clip, pico_images
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, DistilBertConfig, RobertaConfig

from fusion_bench_crossmean.calibration import source_for
from fusion_bench_crossmean.compat import apply_cures
from fusion_bench_crossmean.text.encoders import encoder_of

apply_cures(openclip=True)

from fusion_bench.modelpool import OpenCLIPVisionModelPool  # noqa: E402
from fusion_bench.models.open_clip import ImageEncoder  # noqa: E402

#: Task -> classes of its head, where a family has heads.
TASKS = {"mood": 2, "colour": 3}
NUM_ROWS = 30


class InMemory:
    """A pool whose training data are at hand, and whose models are in the default dtype."""

    def load_train_dataset(self, dataset_name: str, *_: Any, **__: Any) -> Any:
        return self._train_datasets[dataset_name]  # type: ignore[attr-defined]

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_model(*args, **kwargs).to(torch.get_default_dtype())  # type: ignore[misc]


@dataclass(frozen=True)
class Family:
    """One family.

    Args:
        pool: folder to save experts in -> a pool of the tasks; for the same folder the same.
        groups: coverage -> the layers in depth order, written down by hand; those on one input together.
        reload: (pool, merged model, folder) -> the merged model, saved by the pool and loaded again.
    """

    pool: Callable[[Path], Any]
    groups: Callable[[str], list[list[str]]]
    reload: Callable[[Any, nn.Module, Path], nn.Module]


def experts_of(pool: Any) -> dict[str, nn.Module]:
    """Task -> the part of its model that is merged."""
    return {task: encoder_of(pool.load_model(task)) for task in pool.model_names}


def drawn(pool: Any, report: Mapping[str, Any]) -> dict[str, Any]:
    """Task -> the inputs that a merge used, as one batch: what the oracles take."""
    source = source_for(pool, None)
    inputs = {}
    for task, indices in report["calibration_indices"].items():
        data = source.dataset(task)
        batch = source.collate([data[i] for i in indices]).to(torch.device("cpu"), torch.get_default_dtype())
        inputs[task] = batch.args[0] if batch.args else dict(batch.kwargs)
    return inputs


def halfway(network: nn.Module, seed: int) -> nn.Module:
    """Weights between a common start and some of the seed's own."""
    start, own = draw_weights(network, 99), draw_weights(network, seed)
    network.load_state_dict({k: torch.lerp(start[k], t, 0.5) if t.is_floating_point() else t for k, t in own.items()})
    return network


# CLIP


class CLIPPool(InMemory, PicoPool):
    """Models as paths; images go through a processor of the pico CLIP's size."""


def clip_pool(folder: Path) -> CLIPPool:
    for seed, task in enumerate(TASKS):
        halfway(pico_clip("quick_gelu"), seed).save_pretrained(folder / task)
    return CLIPPool({task: str(folder / task) for task in TASKS}, pico_images(TASKS, NUM_ROWS))


def clip_groups(coverage: str) -> list[list[str]]:
    prefix = "vision_model." if hasattr(pico_clip(), "vision_model") else ""
    block = [[f"self_attn.{x}_proj" for x in "qkv"], ["self_attn.out_proj"], ["mlp.fc1"], ["mlp.fc2"]]
    names = block if coverage == "full" else block[2:]
    return [[f"{prefix}encoder.layers.{i}.{name}" for name in group] for i in range(2) for group in names]


def reload_clip(pool: Any, merged: nn.Module, folder: Path) -> nn.Module:
    pool.save_model(merged, str(folder))
    return CLIPPool({"merged": str(folder)}, None).load_model("merged")


# OpenCLIP

#: The pico CLIP's vision tower, as open_clip describes it.
PICO: dict[str, Any] = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": SIDE, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "mlp_ratio": 2.0},
    "text_cfg": {"context_length": 4, "vocab_size": 10, "width": 8, "heads": 1, "layers": 1},
}


@contextmanager
def pico_architectures(folder: Path) -> Iterator[None]:
    """Inside the block open_clip knows `pico`, `pico-quickgelu` and `pico-oneheads`, whose shapes are the same."""
    for name, quick, width in (("pico", False, 8), ("pico-quickgelu", True, 8), ("pico-oneheads", False, 16)):
        vision = PICO["vision_cfg"] | {"head_width": width}
        (folder / f"{name}.json").write_text(json.dumps(PICO | {"quick_gelu": quick, "vision_cfg": vision}))
    open_clip.add_model_config(folder)
    yield
    _MODEL_CONFIG_PATHS.remove(folder)
    _rescan_model_configs()


class OpenCLIPPool(InMemory, OpenCLIPVisionModelPool):
    pass


def openclip_encoder(seed: int, name: str = "pico__init__") -> nn.Module:
    return halfway(ImageEncoder(name).to(torch.get_default_dtype()), seed)


def openclip_pool(folder: Path) -> OpenCLIPPool:
    """One expert pickled whole, the other one's state dict."""
    folder.mkdir(exist_ok=True)
    pickled, state = folder / "whole.pt", folder / "state.pt"
    torch.save(openclip_encoder(0), pickled)
    torch.save(openclip_encoder(1).state_dict(), state)
    models = {
        "mood": {"model_name": "pico", "pickle_path": str(pickled)},
        "colour": {"model_name": "pico__init__", "state_dict_path": str(state)},
    }
    return OpenCLIPPool(models, train_datasets=pico_images(TASKS, NUM_ROWS))


def openclip_groups(coverage: str) -> list[list[str]]:
    names = ("attn.fused_in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")[0 if coverage == "full" else 2 :]
    return [[f"model.visual.transformer.resblocks.{i}.{name}"] for i, name in itertools.product(range(2), names)]


def reload_openclip(pool: Any, merged: nn.Module, folder: Path) -> nn.Module:
    path = f"{folder}.pt"
    pool.save_model(merged, path)
    return OpenCLIPPool({"merged": {"model_name": "pico__init__", "state_dict_path": path}}).load_model("merged")


# Text

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "mat", "red", "blue", "very", "not", "good", "bad")
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
SIZES = {"vocab_size": len(VOCABULARY), "pad_token_id": 0, "max_position_embeddings": 64}
WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CONFIGS: dict[str, Callable[..., Any]] = {
    "bert": lambda **options: BertConfig(**SIZES, **WIDE, **options),
    "roberta": lambda **options: RobertaConfig(**SIZES, **WIDE, type_vocab_size=2, **options),
    "distilbert": lambda **options: DistilBertConfig(**SIZES, dim=16, hidden_dim=24, n_layers=2, n_heads=2, **options),
}
ATTENTION = "attention.self."
BERT_BLOCK = [
    [ATTENTION + "query", ATTENTION + "key", ATTENTION + "value"],
    ["attention.output.dense"],
    ["intermediate.dense"],
    ["output.dense"],
]
#: Kind -> the layers of a block in depth order, those on one input together; then those behind the blocks.
TEXT_LAYERS: dict[str, tuple[str, list[list[str]], list[list[str]]]] = {
    "bert": ("encoder.layer.{}.", BERT_BLOCK, [["pooler.dense"]]),
    "roberta": ("encoder.layer.{}.", BERT_BLOCK, []),
    "distilbert": (
        "transformer.layer.{}.",
        [["attention.q_lin", "attention.k_lin", "attention.v_lin"], ["attention.out_lin"], ["ffn.lin1"], ["ffn.lin2"]],
        [],
    ),
}


def write_tokenizer(folder: Path, vocabulary: Sequence[str] = VOCABULARY, **options: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | options))


def sentences(seed: int, count: int = NUM_ROWS, *, pairs: bool = False) -> datasets.Dataset:
    """Labelled rows of nonsense, of one to eight words."""
    generator = torch.Generator().manual_seed(seed)

    def sentence() -> str:
        length = int(torch.randint(1, 9, (), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))

    labels = torch.randint(2, (count,), generator=generator).tolist()
    second = [sentence() if pairs else "" for _ in range(count)]
    return datasets.Dataset.from_dict({"text": [sentence() for _ in range(count)], "text_b": second, "label": labels})


class TextPool(InMemory, SequenceClassificationModelPool):
    pass


def text_pool(kind: str, folder: Path, *, pretrained: bool = False) -> TextPool:
    """Classifiers with heads of different sizes, named as FusionBench's configs name them."""
    models = {}
    for seed, (task, labels) in enumerate((("_pretrained_", 2), *TASKS.items())):
        if task == "_pretrained_" and not pretrained:
            continue
        network = AutoModelForSequenceClassification.from_config(CONFIGS[kind](num_labels=labels))
        halfway(network.to(torch.get_default_dtype()), seed).save_pretrained(folder / task)
        models[task] = {
            "_target_": "transformers.AutoModelForSequenceClassification.from_pretrained",
            "pretrained_model_name_or_path": str(folder / task),
            "torch_dtype": torch.get_default_dtype(),
        }
    names = ["input_ids", "attention_mask"]  # of DistilBERT, as its own tokenizer says
    write_tokenizer(folder / "tokenizer", **({"model_input_names": names} if kind == "distilbert" else {}))
    tokenizer = {
        "_target_": "transformers.AutoTokenizer.from_pretrained",
        "pretrained_model_name_or_path": str(folder / "tokenizer"),
    }
    rows = {task: sentences(seed, pairs=seed == 1) for seed, task in enumerate(TASKS)}
    return TextPool(models, tokenizer=tokenizer, train_datasets=rows)


def text_groups(kind: str, coverage: str) -> list[list[str]]:
    prefix, block, behind = TEXT_LAYERS[kind]
    names = block if coverage == "full" else block[2:]
    inside = [[prefix.format(i) + name for name in group] for i in range(2) for group in names]
    return inside + (behind if coverage == "full" else [])


def reload_text(kind: str, pool: Any, merged: nn.Module, folder: Path) -> nn.Module:
    pool.save_model(merged, str(folder))
    pooler = {"add_pooling_layer": False} if kind == "roberta" else {}  # whose classifier has none
    return type(merged).from_pretrained(folder, **pooler).to(torch.get_default_dtype())


def text_family(kind: str) -> Family:
    return Family(
        lambda folder: text_pool(kind, folder),
        lambda coverage: text_groups(kind, coverage),
        lambda pool, merged, folder: reload_text(kind, pool, merged, folder),
    )


FAMILIES = {
    "clip": Family(clip_pool, clip_groups, reload_clip),
    "openclip": Family(openclip_pool, openclip_groups, reload_openclip),
} | {kind: text_family(kind) for kind in CONFIGS}
