"""An offline stand-in for the Hugging Face hub: tiny random CLIPs and small data sets, under the real names.

FusionBench's own pools name models and data sets by repository. `write_hub` fills a folder so that, with `HF_HOME`
set to it and `HF_HUB_OFFLINE=1`, these names are found there and nothing is downloaded. The weights are random, so
accuracies mean nothing; what is tested is that commands run and what they leave behind.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel

from fusion_bench_crossmean.mini.clip_files import write_tokenizer_and_processor


@dataclass(frozen=True)
class FakeData:
    """One data set: where it lives, and how many classes it has."""

    repository: str
    config: str
    num_classes: int


#: FusionBench's eight tasks.
TA8 = {
    "sun397": FakeData("tanganke/sun397", "default", 397),
    "stanford-cars": FakeData("tanganke/stanford_cars", "default", 196),
    "resisc45": FakeData("tanganke/resisc45", "default", 45),
    "eurosat": FakeData("tanganke/eurosat", "default", 10),
    "svhn": FakeData("svhn", "cropped_digits", 10),
    "gtsrb": FakeData("tanganke/gtsrb", "default", 43),
    "mnist": FakeData("mnist", "mnist", 10),
    "dtd": FakeData("tanganke/dtd", "default", 47),
}
#: Prompts are bytes here (no merges), so the text tower needs room for long class names.
MAX_PROMPT_BYTES = 256
VISION = {"image_size": 28, "patch_size": 14, "num_hidden_layers": 2}
TEXT = {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513, "num_hidden_layers": 1}
WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "projection_dim": 16}


def hashed(text: str) -> str:
    """What stands where the hub has a commit."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def model_folder(home: Path, repository: str) -> Path:
    """The folder where the hub's cache keeps the files of a model repository."""
    root = home / "hub" / ("models--" + repository.replace("/", "--"))
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(hashed(repository))
    folder = root / "snapshots" / hashed(repository)
    folder.mkdir(parents=True)
    return folder


def write_weights(folder: Path, config: dict, architecture: str, weights: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    # A copy of each: safetensors refuses tensors that share memory.
    save_file(
        {name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def write_models(home: Path, suffix: str, tasks: Iterable[str], seed: int = 0) -> None:
    """``openai/clip-vit-<suffix>`` and, for each task, ``tanganke/clip-vit-<suffix>_<task>``: itself and some noise."""
    torch.manual_seed(seed)
    config = CLIPConfig(
        vision_config=VISION | WIDTHS,
        text_config=TEXT | WIDTHS | {"max_position_embeddings": MAX_PROMPT_BYTES},
        projection_dim=WIDTHS["projection_dim"],
    )
    whole = {name: tensor for name, tensor in CLIPModel(config).state_dict().items() if "position_ids" not in name}
    # float32 whatever the default is when the fixture first runs
    whole = {name: tensor.float() for name, tensor in whole.items()}
    base = model_folder(home, f"openai/clip-vit-{suffix}")
    write_weights(base, config.to_dict(), "CLIPModel", whole)
    write_tokenizer_and_processor(base)
    tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": MAX_PROMPT_BYTES}))
    # The names in files carry the prefix `vision_model.` under every version of transformers.
    vision = {name: tensor for name, tensor in whole.items() if name.startswith("vision_model.")}
    for task in tasks:
        expert = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in vision.items()}
        folder = model_folder(home, f"tanganke/clip-vit-{suffix}_{task}")
        write_weights(folder, config.vision_config.to_dict(), "CLIPVisionModel", expert)


def make_split(task: str, data: FakeData, rows: int, seed: int) -> datasets.Dataset:
    """Noisy colours, one per class, as a data set with the columns `image` and `label`."""
    generator = np.random.default_rng([seed, zlib.crc32(task.encode())])
    colours = generator.integers(0, 256, (data.num_classes, 1, 1, 3))
    labels = generator.integers(0, data.num_classes, rows)
    images = (colours[labels] + generator.normal(0, 40, (rows, 28, 28, 3))).clip(0, 255).astype(np.uint8)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(data.num_classes)})
    return datasets.Dataset.from_dict({"image": list(images), "label": labels}, features=features)


def write_splits(home: Path, repository: str, config: str, splits: Mapping[str, datasets.Dataset]) -> None:
    """The Arrow files that ``datasets.load_dataset(repository, config)`` leaves behind and reads again offline."""
    short = repository.split("/")[-1]
    folder = home / "datasets" / repository.replace("/", "___") / config / "0.0.0" / hashed(repository)
    folder.mkdir(parents=True)
    recorded, features = datasets.SplitDict(dataset_name=short), None
    for split, rows in splits.items():
        features = rows.features
        path = folder / f"{short}-{split}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, features.arrow_schema) as stream:
            stream.write_table(rows.data.table.cast(features.arrow_schema))
        recorded.add(datasets.SplitInfo(split, path.stat().st_size, len(rows), dataset_name=short))
    info = datasets.DatasetInfo(features=features, splits=recorded, version="0.0.0")
    info.builder_name, info.dataset_name, info.config_name = "parquet", short, config
    info.write_to_directory(str(folder))


def write_hub(
    home: Path, *, tasks: Iterable[str] = tuple(TA8), suffix: str = "base-patch32", train: int = 256, test: int = 16
) -> Path:
    """Fills `home`, a folder that does not exist yet, and returns it.

    Args:
        home: becomes `HF_HOME`.
        tasks: of `TA8`.
        suffix: which backbone's names the models get; they are equally small.
        train: training images per task. The methods' default is to draw 256.
        test: test images per task.
    """
    tasks = tuple(tasks)
    write_models(home, suffix, tasks)
    for task in tasks:
        data = TA8[task]
        splits = {"train": make_split(task, data, train, seed=0), "test": make_split(task, data, test, seed=1)}
        write_splits(home, data.repository, data.config, splits)
    return home
