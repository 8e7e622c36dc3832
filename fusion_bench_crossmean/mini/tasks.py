"""The image tasks of the mini benchmark: their names, class names, prompts and data.

The data are real and small; `data/NOTICE.md` says where each file comes from and under which terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import datasets
import numpy as np
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory
from PIL import Image

DATA_DIR = Path(__file__).parent / "data"

#: Task -> the prompt that turns a class name into the text of its zero-shot classifier.
PROMPTS = {
    "mnist": "the handwritten digit {}",
    "fashion": "a piece of clothing, {}",
    "animal": "a drawing of a {}",
    "pendigits": "the pen digit {}",
    "satimage": "a satellite image of {}",
    "textures": "a texture of {}",
    "letters": "the letter {}",
    "cyrillic": "the cyrillic letter {}",
    "optdigits": "the scanned digit {}",
    "fontdigits": "the printed digit {}",
    "greek": "the greek letter {}",
    "fontfamily": "text in the font {}",
    "fontweight": "text in a {} font",
    "icons": "an icon with the overlay {}",
}

#: Set of tasks -> its tasks, as in the names of the pools.
TASK_SETS = {"TA8": list(PROMPTS)[:8], "TALL14": list(PROMPTS)}

#: Side of the images that the mini CLIP reads, in pixels.
IMAGE_SIDE = 28

#: FusionBench keys its class names by one global task name (and has an 'mnist' of its own), hence the prefix.
PREFIX = "mini-"


@dataclass(frozen=True)
class ImageSplit:
    """Images and labels of one split of one task, as stored.

    Args:
        images: uint8, shape (n, height, width) or (n, height, width, 3).
        labels: int64, shape (n,), indices into `class_names`.
        class_names: one name per class.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: list[str]

    def square_images(self) -> np.ndarray:
        """All images as RGB of the model's input size: uint8, shape (n, 28, 28, 3).

        Resized here and not by the image processor: its slow and fast versions resize differently, and the
        slow one takes a 3 x 3 picture's rows for colour channels.
        """
        size = (IMAGE_SIDE, IMAGE_SIDE)
        return np.stack([np.asarray(Image.fromarray(image).convert("RGB").resize(size)) for image in self.images])


def read_split(task: str, split: Literal["train", "test"]) -> ImageSplit:
    """Reads one split of `task` (a key of `PROMPTS`) from the package.

    Raises:
        ValueError: no such task or split.
    """
    if task not in PROMPTS:
        raise ValueError(f"The mini benchmark has no task {task!r}; it has {', '.join(PROMPTS)}.")
    if split not in ("train", "test"):
        raise ValueError(f"The mini benchmark has the splits 'train' and 'test', not {split!r}.")
    with np.load(DATA_DIR / f"{task}.npz", allow_pickle=False) as arrays:
        names = [str(name).replace("_", " ") for name in arrays["names"]]
        return ImageSplit(arrays[f"x_{split}"], arrays[f"y_{split}"].astype(np.int64), names)


def load_split(task: str, split: Literal["train", "test"]) -> datasets.Dataset:
    """The same split as a Hugging Face dataset with the columns `image` (PIL) and `label`, for FusionBench's pools.

    Args:
        task: with or without the prefix `mini-`.
        split: `train` (1,500 rows, `icons` 888) or `test` (500 rows, `icons` 296).
    """
    rows = read_split(task.removeprefix(PREFIX), split)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=rows.class_names)})
    return datasets.Dataset.from_dict({"image": list(rows.square_images()), "label": rows.labels}, features=features)


def fill_prompt(task: str, class_name: str) -> str:
    """The text of one class, e.g. ``the letter A``."""
    return PROMPTS[task].format(class_name)


def register_tasks() -> None:
    """Tells FusionBench the class names and prompts of every mini task (idempotent)."""
    for task in PROMPTS:
        name = PREFIX + task
        if name in CLIPTemplateFactory.get_available_datasets():
            continue
        class_names, templates = read_split(task, "train").class_names, [partial(fill_prompt, task)]
        CLIPTemplateFactory.register_dataset(
            name,
            # All three: with two, FusionBench 0.2.33 stores the templates under a misspelt key.
            dataset_info={"classnames": class_names, "templates": templates},
            classnames=class_names,
            templates=templates,
        )
