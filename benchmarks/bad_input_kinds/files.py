"""Damaged files: checkpoints, kept statistics and the experts' own."""

from __future__ import annotations

import functools
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from bad_input_kinds.networks import NUM_INPUTS, Attempt, Kind, Net, networks, one_of, vectors
from fusion_bench_crossmean import CrossMeanAlgorithm, LOTAlgorithm, ProgressiveRegMeanAlgorithm, RegMeanAlgorithm

#: Values in a JSON file's place of another.
JSON_VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, "", "text", [], [1], {}, {"a": 1}, [[]], "1", 2**70, float("nan"), [None], "a\0b"),
    *(["a", "b", "c"], {"kind": "replay"}, "cpu", "../../x", 3),
]
#: What a JSON file may hold instead of what belongs there.
CONTENTS: list[bytes] = [
    *(b"", b" ", b"{", b"}", b"null", b"[]", b"{}", b"7", b'"text"', b"NaN", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}"),
    *(b"\x00" * 100, b"\x80\x81", b"not json", b"{'a': 1}", b"[" * 100_000, b'{"a":' * 5000, b"1e999", b"9" * 5000),
    *(b'{"identity": {}}', b'{"identity": null, "course": null}', b'{"identity": [], "tasks": 3, "groups": "abc"}'),
]


def damage_json(generator: np.random.Generator, path: Path) -> str:
    """Other content, or another value somewhere within."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if generator.random() < 0.3:
        odd = one_of(generator, CONTENTS)
        path.write_bytes(odd)
        return f"{odd[:20]!r}"
    place, keys = content, []
    while True:
        key = one_of(generator, list(place) if isinstance(place, dict) else list(range(len(place))))
        keys.append(key)
        if not isinstance(place[key], (dict, list)) or not place[key] or generator.random() < 0.3:
            break
        place = place[key]
    if generator.random() < 0.25:
        del place[key]
        odd = "gone"
    else:
        place[key] = odd = one_of(generator, JSON_VALUES)
    path.write_text(json.dumps(content))
    return f"{keys} is {odd!r}"


def damage_header(generator: np.random.Generator, path: Path) -> str:
    """A safetensors file whose header says something else."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = one_of(generator, [key for key in header if key != "__metadata__"])
    notes = header.get("__metadata__") or {}
    way = one_of(
        generator, ["dtype", "shape", "offsets", "name", "notes", "note", "note", "gone", "length", "not json"]
    )
    if way == "dtype":
        header[name]["dtype"] = one_of(generator, ["F64", "F16", "BF16", "I32", "U32", "BOOL", "X", "", "C64", 7, None])
    elif way == "shape":
        header[name]["shape"] = one_of(generator, [[], [1], [-1], [2**62, 4], "x", [0], header[name]["shape"][::-1]])
    elif way == "offsets":
        header[name]["data_offsets"] = one_of(generator, [[0, 0], [0, 2**63], [8, 4], [-8, 0], [0], None, [0, 8, 16]])
    elif way == "name":
        header[one_of(generator, ["other", "", "ä", "x" * 9999, "__metadata__"])] = header.pop(name)
    elif way == "notes":
        header["__metadata__"] = one_of(generator, [None, {}, [], {"a": "b"}, {"a": 1}, "text", 7])
    elif way == "note" and notes:
        key = one_of(generator, list(notes))
        notes[key] = one_of(
            generator, ["", "null", "{}", "[]", "nan", "-1", "1e400", "text", "7", "{" * 999, "[" * 99999]
        )
    elif way == "gone":
        del header[name]
    text = json.dumps(header).encode()
    if way == "not json":
        text = one_of(generator, CONTENTS)
    size = len(text)
    if way == "length":
        size = one_of(generator, [0, 1, 2**63, 2**64 - 1, 2**40, 10**8 + 1, size - 1, size + 1, 99 * size])
    path.write_bytes(struct.pack("<Q", size) + text + body)
    return f"header: {way} of {name}"


def damage_bytes(generator: np.random.Generator, path: Path) -> str:
    """A file that is cut short, longer, empty, or has other bytes here and there."""
    content = bytearray(path.read_bytes())
    way = one_of(generator, ["cut", "cut in the header", "longer", "empty", "flips", "flips in the header", "zeros"])
    if way == "cut":
        content = content[: int(generator.integers(len(content)))]
    elif way == "cut in the header":
        content = content[: int(generator.integers(min(40, len(content))))]
    elif way == "longer":
        content += generator.bytes(int(generator.integers(1, 100)))
    elif way == "empty":
        content = bytearray()
    elif way == "zeros":
        content = bytearray(len(content))
    else:
        end = len(content) if way == "flips" else min(300, len(content))
        for _ in range(int(generator.integers(1, 6))):
            content[int(generator.integers(end))] ^= 1 << int(generator.integers(8))
    path.write_bytes(content)
    return f"bytes: {way}"


def damage_place(generator: np.random.Generator, path: Path) -> str:
    """Something else where a file was."""
    way = one_of(
        generator, ["gone", "folder", "full folder", "dangling", "round", "swapped", "copied", "other tensors"]
    )
    others = sorted(other for other in path.parent.iterdir() if other != path and other.suffix == path.suffix)
    if way == "swapped" and others:
        other, kept = one_of(generator, others), path.read_bytes()
        if other.is_file():
            path.write_bytes(other.read_bytes())
            other.write_bytes(kept)
        return f"swapped with {other.name}"
    if way == "copied" and others and (other := one_of(generator, others)).is_file():
        path.write_bytes(other.read_bytes())
        return f"a copy of {other.name}"
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "full folder":
        (path / "below").mkdir(parents=True)
    elif way == "dangling":
        path.symlink_to("nowhere")
    elif way == "round":
        path.symlink_to(path.name)
    elif way == "other tensors":
        name = one_of(generator, ["weight", "gram", "other"])
        tensor = one_of(
            generator, [torch.zeros(()), torch.zeros(0), torch.ones(4, 4), torch.full((4, 4), float("nan"))]
        )
        save_file({name: tensor}, path, metadata=one_of(generator, [None, {"hash": "x"}, {"record": "{}"}]))
    return way


def damage(generator: np.random.Generator, folder: Path) -> str:
    """Damages one to three files of a folder, or adds what should not matter; in words, what was done."""
    done = []
    if generator.random() < 0.1:
        (folder / "notes.txt").write_text("mine")
        (folder / ".hidden.json").write_text("{")
        return "files of the user's"
    for _ in range(one_of(generator, [1, 1, 2, 3])):
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "lock")
        if not files:
            break
        path = one_of(generator, files)
        ways: list[Callable[[np.random.Generator, Path], str]] = [damage_bytes, damage_place]
        ways += [damage_json] * 3 if path.suffix == ".json" else [damage_header, damage_header]
        try:
            done.append(f"{path.name}: {one_of(generator, ways)(generator, path)}")
        except (ValueError, struct.error, AttributeError, KeyError, IndexError, TypeError, RecursionError):
            break  # it is so damaged that nothing more can be made of it
    return "; ".join(done)


def damage_folder(generator: np.random.Generator, path: Path) -> str:
    """Something else where a folder of files was."""
    shutil.rmtree(path)
    way = one_of(generator, ["file", "empty", "dangling", "round", "other files", "a file in the lock's place", "gone"])
    if way == "file":
        path.write_text("in the way")
    elif way in ("dangling", "round"):
        path.symlink_to("nowhere" if way == "dangling" else path.name)
    elif way == "other files":
        path.mkdir()
        save_file({"weight": torch.zeros(2)}, path / one_of(generator, ["group-0000.safetensors", "x.safetensors"]))
    elif way != "gone":
        path.mkdir()
    if way.startswith("a file"):
        (path / "lock").mkdir()
    return f"folder: {way}"


@functools.cache
def experts() -> dict[str, nn.Module]:
    """The same in every case."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {"_pretrained_": Net(), **networks()}


@functools.cache
def inputs() -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return vectors()


def merge(method: type, **settings: Any) -> nn.Module:
    options = {"num_calibration_samples": NUM_INPUTS, "batch_size": 3, "coverage": "full"}
    return method(**options | settings).run(experts(), inputs())


@functools.cache
def written(method: type, setting: str) -> tuple[tempfile.TemporaryDirectory[str], Mapping[str, Tensor]]:
    """A folder that a merge has written, and the tensors of its model."""
    tempfile.tempdir, before = None, tempfile.tempdir  # it outlives the case
    folder = tempfile.TemporaryDirectory(prefix="bad-inputs-")
    tempfile.tempdir = before
    return folder, merge(method, **{setting: folder.name}).state_dict()


def checkpoints(generator: np.random.Generator, folder: Path) -> Attempt:
    """A merge goes on from a checkpoint, or beside kept statistics, that are damaged: to the same model."""
    method = one_of(generator, [CrossMeanAlgorithm, RegMeanAlgorithm, ProgressiveRegMeanAlgorithm, LOTAlgorithm])
    setting = one_of(generator, ["checkpoint_dir", "checkpoint_dir", "save_statistics"])
    source, expected = written(method, setting)
    copy = folder / "kept"
    shutil.copytree(source.name, copy)
    rarely = generator.random() < 0.1
    about = damage_folder(generator, copy) if rarely else damage(generator, copy)
    run = functools.partial(merge, method, **{setting: str(copy)})
    return Attempt(f"{method.__name__}, {setting}, {about}", run, experts()["_pretrained_"], exactly=expected)


def statistics(generator: np.random.Generator, folder: Path) -> Attempt:
    """A merge from kept statistics that are damaged."""
    method = one_of(generator, [RegMeanAlgorithm, LOTAlgorithm])
    source, expected = written(method, "save_statistics")
    copy = folder / "kept"
    shutil.copytree(source.name, copy)
    rarely = generator.random() < 0.1
    about = damage_folder(generator, copy) if rarely else damage(generator, copy)
    run = functools.partial(merge, method, load_statistics=str(copy))
    # A damage that goes unnoticed may not change the model; single precision may, since sums are taken anew.
    return Attempt(
        f"{method.__name__}, {about}", run, experts()["_pretrained_"], exactly=merged_again(method, expected)
    )


@functools.cache
def again(method: type) -> Mapping[str, Tensor]:
    source, _ = written(method, "save_statistics")
    return merge(method, load_statistics=source.name).state_dict()


def merged_again(method: type, _: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return again(method)


@functools.cache
def saved_clips() -> tempfile.TemporaryDirectory[str]:
    """A folder with three CLIP vision towers of 16 features."""
    tempfile.tempdir, before = None, tempfile.tempdir
    folder = tempfile.TemporaryDirectory(prefix="bad-inputs-")
    tempfile.tempdir = before
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    with torch.random.fork_rng(devices=[]):
        for seed, name in enumerate(("pretrained", "a", "b")):
            torch.manual_seed(seed)
            CLIPVisionModel(config).save_pretrained(Path(folder.name) / name)
    return folder


def expert_files(generator: np.random.Generator, folder: Path) -> Attempt:
    """Experts that FusionBench loads from damaged checkpoints."""
    source = Path(saved_clips().name)
    shutil.copytree(source, folder / "models")
    names = one_of(generator, [["a", "b"], ["pretrained", "a", "b"]])
    victim = folder / "models" / one_of(generator, names)
    about = damage_folder(generator, victim) if generator.random() < 0.05 else damage(generator, victim)
    keys = {"pretrained": "_pretrained_"}
    paths = {keys.get(name, name): str(folder / "models" / name) for name in names}
    pool = CLIPVisionModelPool(OmegaConf.create(paths))
    like = CLIPVisionModel.from_pretrained(source / names[0])
    images = {task: torch.randn(NUM_INPUTS, 3, 16, 16) for task in ("a", "b")}
    method = one_of(generator, [CrossMeanAlgorithm, RegMeanAlgorithm])

    def run() -> Any:
        return method(num_calibration_samples=NUM_INPUTS, batch_size=NUM_INPUTS).run(pool, images)

    return Attempt(f"{method.__name__}, {victim.name}, {about}", run, like)


FILE_KINDS: dict[str, Kind] = {"checkpoints": checkpoints, "statistics": statistics, "expert files": expert_files}
