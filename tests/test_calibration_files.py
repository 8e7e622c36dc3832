"""Calibration inputs from a user's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import WORDS, text_pool
from pico import SIDE, pico_calibration, pico_experts, pico_pool
from PIL import Image

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.calibration import source_for

N = 8


def write_images(folder: Path, count: int = N) -> Path:
    generator = np.random.default_rng(0)
    for index in range(count):
        path = folder / ("below" if index % 2 else "") / f"{index}.{('png', 'PNG', 'bmp')[index % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(path, "png")
    (folder / "notes.md").write_text("no image")
    return folder


def run(pool: Any, files: dict[str, Path], **settings: Any) -> dict[str, Any]:
    algorithm = CrossMeanAlgorithm(
        num_calibration_samples=N, calibration_data={task: str(path) for task, path in files.items()}, **settings
    )
    algorithm.run(pool)
    return algorithm.report


def test_a_folder_of_images_stands_in_for_a_tasks_data(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    pool = pico_pool(pico_experts())
    report = run(pool, {"digits": folder})
    assert sorted(report["calibration_indices"]["digits"]) == list(range(N)), "all that there are"
    assert report["settings"]["calibration_data"] == {"digits": str(folder)}
    source = source_for(pool, None, {"digits": str(folder)})
    first = source.collate([source.dataset("digits")[0]]).kwargs["pixel_values"][0]
    expected = Image.open(min(folder.rglob("*.[pPb][nNm][gGp]"))).convert("RGB")
    assert torch.equal(first, pool.load_processor()(expected))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_file_of_texts_stands_in_for_a_tasks_data(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"texts.{kind}"
    lines = [" ".join(WORDS[i : i + 3]) for i in range(N)]
    if kind == "jsonl":
        lines = [f'{{"sentence1": "{line}", "sentence2": "cat", "other": 1}}' for line in lines]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    pool = text_pool("bert", tmp_path / "models")
    report = run(pool, {"mood": path})
    assert sorted(report["calibration_indices"]["mood"]) == list(range(N))
    row = source_for(pool, None, {"mood": str(path)}).dataset("mood")[0]
    assert row == {"text": "the a cat", "text_b": "cat" if kind == "jsonl" else ""}


def test_rows_may_have_a_second_text_or_not(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a cat"}\n{"text": "a dog", "text_b": "the cat"}\n')
    rows = source_for(text_pool("bert", tmp_path / "models"), None, {"mood": str(path)}).dataset("mood")
    assert [rows[i] for i in (0, 1)] == [{"text": "a cat", "text_b": None}, {"text": "a dog", "text_b": "the cat"}]


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    damaged = folder / "0.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    algorithm = CrossMeanAlgorithm(num_calibration_samples=N, calibration_data={"digits": str(folder)})
    with pytest.raises(ValueError, match=rf"of task 'digits': .*{damaged.name} cannot be read as an image"):
        algorithm.run(pico_pool(pico_experts(), num_samples=N))


def test_files_are_given_by_task(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"calibration_data must be task -> path, .* not 'photos'"):
        CrossMeanAlgorithm(calibration_data="photos")  # type: ignore[arg-type]


def test_files_and_inputs_at_once_are_refused(tmp_path: Path) -> None:
    algorithm = CrossMeanAlgorithm(calibration_data={"digits": str(tmp_path)})
    with pytest.raises(ValueError, match="Calibration inputs are given twice"):
        algorithm.run(pico_experts(), pico_calibration())
    with pytest.raises(ValueError, match="how to read the files of calibration_data is not known for it either"):
        algorithm.run(pico_experts())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("texts.jsonl", '{"text": "a"}\n{"text": 1}', r"whose columns do not have one type each"),
        ("latin.txt", b"caf\xe9", r"calibration_data\.mood is .*latin\.txt, which is not UTF-8 .* Convert it"),
        ("gone", None, r"calibration_data\.mood is .*gone, which does not exist"),
        ("empty", "folder", r"calibration_data\.mood is .*empty, a folder without images"),
        ("texts.csv", "a,b", r"must be a folder of images, a text file \(\.txt\) or a JSON-lines file \(\.jsonl"),
        ("texts.jsonl", '{"text": "a"}\nb', r"its line 2 is no JSON"),
        ("texts.jsonl", '{"text": "a"}\n[1]', r"its line 2 is no object but list"),
        ("texts.jsonl", '{"body": "a"}', r"The calibration data of task 'mood' has the columns \['body'\]"),
        ("texts.txt", "a\nb", r"task 'mood' has 2 calibration inputs, 8 were asked for"),
    ],
)
def test_files_that_cannot_be_used_are_errors(
    name: str, content: str | bytes | None, message: str, tmp_path: Path
) -> None:
    pool, path = text_pool("bert", tmp_path / "models"), tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message):
        run(pool, {"mood": path})


def test_files_of_the_wrong_kind_are_errors(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a cat\n" * N)
    with pytest.raises(ValueError, match="of task 'digits' are texts, but this pool's models read images"):
        run(pico_pool(pico_experts()), {"digits": tmp_path / "texts.txt"})
    with pytest.raises(ValueError, match="of task 'mood' are no texts; this pool's models read texts"):
        run(text_pool("bert", tmp_path / "models"), {"mood": write_images(tmp_path / "images")})


def test_files_of_a_task_that_the_pool_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"calibration_data names \['moood'\], the pool has \['mood', 'colour'\]"):
        run(text_pool("bert", tmp_path), {"moood": tmp_path})
