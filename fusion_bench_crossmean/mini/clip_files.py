"""The files of a mini CLIP's checkpoint, such that every version of transformers reads them alike."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from transformers import CLIPModel, CLIPVisionModel

from fusion_bench_crossmean.mini.tasks import IMAGE_SIDE

CONTEXT_LENGTH = 64  # bytes of a prompt, with both end marks


def write_tokenizer_and_processor(folder: Path) -> None:
    """A byte-level CLIP tokenizer (514 entries, no merges) and the image processor, as files that any version reads."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_to_char = {b: chr(b) for b in printable}
    for b in range(256):  # the other bytes get characters of their own, as in GPT-2's and CLIP's vocabularies
        byte_to_char.setdefault(b, chr(256 + len(byte_to_char) - len(printable)))
    characters = list(byte_to_char.values())
    words = characters + [c + "</w>" for c in characters] + ["<|startoftext|>", "<|endoftext|>"]
    special = {"bos_token": "<|startoftext|>"}
    special |= dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    mean_and_std = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    files = {
        "vocab.json": {word: index for index, word in enumerate(words)},
        "special_tokens_map.json": special,
        "tokenizer_config.json": special
        | {"tokenizer_class": "CLIPTokenizer", "model_max_length": CONTEXT_LENGTH, "do_lower_case": True},
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": IMAGE_SIDE},
            "do_center_crop": True,
            "crop_size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE},
            "resample": 3,
            "do_normalize": True,
        }
        | mean_and_std,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")


def save_half(model: CLIPModel | CLIPVisionModel, folder: Path) -> None:
    """Stores float16 weights whose three configs say float32, so that every transformers version loads float32."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("vision_config"), config.get("text_config")):
        if part is not None:
            part["dtype"] = "float32"  # the key of transformers 5
            part["torch_dtype"] = "float32"  # the key of transformers 4
            part.pop("transformers_version", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    # Checkpoints of a vision tower carry this prefix; a tower made by transformers 5 does not have it in memory.
    prefix = "" if isinstance(model, CLIPModel) or hasattr(model, "vision_model") else "vision_model."
    tensors = {prefix + name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
