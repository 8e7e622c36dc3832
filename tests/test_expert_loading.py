"""Experts from memory, from their checkpoints and from copies on disk give the same merge, bit for bit."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench.modelpool import BaseModelPool
from pico import PicoMLP, PicoPool, experts_of, pico_clip, pico_experts, pico_images, vectors
from torch import nn
from transformers import CLIPVisionModel

import fusion_bench_crossmean.method.calibrated as calibrated
from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.expert_loading import Experts, load_experts
from fusion_bench_crossmean.weights import StoredWeights, size_of, tensors_of

TASKS = ("digits", "letters", "textures")


class LazyPool(BaseModelPool):
    """Makes every model when it is asked for, and counts those that are alive at once."""

    def __init__(self, makers: dict[str, Callable[[], nn.Module]]) -> None:
        super().__init__(dict.fromkeys(makers, "made on demand"))  # type: ignore[arg-type]
        self.makers = makers
        self.asked: list[str] = []

    def load_model(self, model_name_or_config: Any, *_: Any, **__: Any) -> nn.Module:
        self.asked.append(model_name_or_config)
        return self.makers[model_name_or_config]()


def mlp(seed: int, dtype: torch.dtype = torch.float64) -> Callable[[], nn.Module]:
    return lambda: experts_of(lambda s: PicoMLP(seed=seed + s), 1)["digits"].to(dtype)


def lazy(tasks: tuple[str, ...] = TASKS, **others: Callable[[], nn.Module]) -> LazyPool:
    return LazyPool({task: mlp(index) for index, task in enumerate(tasks)} | others)


def load(pool: BaseModelPool, folder: Path, *, fits: bool = True) -> Experts:
    numbers = itertools.count()
    return load_experts(pool, lambda _: fits, lambda: folder / f"{next(numbers)}.safetensors")


def merge(pool: Any, inputs: Any = None, **settings: Any) -> dict[str, torch.Tensor]:
    method = CrossMeanAlgorithm(**{"num_calibration_samples": 24, "batch_size": 10} | settings)
    return method.run(pool, inputs).state_dict()


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


# Where they lie


def test_experts_that_fit_stay_in_memory_and_others_go_to_disk(tmp_path: Path) -> None:
    in_memory = load(lazy(), tmp_path)
    assert not any(isinstance(weights, StoredWeights) for weights in in_memory.weights.values())
    assert not list(tmp_path.iterdir())
    on_disk = load(lazy(), tmp_path, fits=False)
    assert all(isinstance(weights, StoredWeights) for weights in on_disk.weights.values())
    assert len(list(tmp_path.iterdir())) == len(TASKS)
    for task in TASKS:
        assert same(dict(in_memory.weights[task]), dict(on_disk.weights[task]))


def test_whether_they_fit_is_asked_once_about_all_of_them(tmp_path: Path) -> None:
    asked: list[int] = []
    load_experts(lazy(), lambda size: not asked.append(size), lambda _: tmp_path / "never")  # type: ignore[func-returns-value]
    assert asked == [len(TASKS) * size_of(tensors_of(mlp(0)()))]


def test_every_model_is_loaded_once_and_the_pretrained_one_last(tmp_path: Path) -> None:
    pool = lazy(_pretrained_=mlp(9))
    load(pool, tmp_path, fits=False)
    assert pool.asked == [*TASKS, "_pretrained_"]


def test_what_the_pool_holds_itself_is_used_as_it_is(tmp_path: Path) -> None:
    experts = experts_of(lambda seed: PicoMLP(seed=seed))
    loaded = load(BaseModelPool(dict(experts)), tmp_path, fits=False)
    for task, expert in experts.items():
        weight = loaded.weights[task]["mlp.0.weight"]
        assert weight.data_ptr() == expert.mlp[0].weight.data_ptr()  # type: ignore[index, union-attr]
        assert not weight.requires_grad


def test_the_template_has_structure_and_no_values(tmp_path: Path) -> None:
    """Whose it is shows in what is trainable: nothing of this pretrained model."""
    frozen = lambda: mlp(9)().requires_grad_(requires_grad=False)  # noqa: E731
    for pool, is_pretrained in ((lazy(), False), (lazy(_pretrained_=frozen), True)):
        loaded = load(pool, tmp_path)
        assert any(p.requires_grad for p in loaded.template.parameters()) is not is_pretrained
        assert all(tensor.is_meta for tensor in tensors_of(loaded.template).values())
        assert isinstance(loaded.template, PicoMLP)


# The same merge


@pytest.mark.parametrize("schedule", ["paused", "replay"])
def test_experts_on_disk_merge_like_those_in_memory(
    schedule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = merge(lazy(_pretrained_=mlp(9)), vectors(), schedule=schedule)
    written: list[Path] = []
    write = StoredWeights.write

    def watched(path: Path, tensors: Any) -> StoredWeights:
        written.append(path)
        return write(path, tensors)

    monkeypatch.setattr(StoredWeights, "write", watched)
    monkeypatch.setattr(CrossMeanAlgorithm, "_experts_fit", lambda *_: False)
    assert same(merge(lazy(_pretrained_=mlp(9)), vectors(), schedule=schedule), expected)
    assert len(set(written)) == len(TASKS)
    assert not list(tmp_path.iterdir())


def test_temporary_copies_are_gone_after_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(CrossMeanAlgorithm, "_experts_fit", lambda *_: False)

    def fail(*_: Any, **__: Any) -> None:
        assert len(list(tmp_path.glob("*/*.safetensors"))) == len(TASKS)
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrated, "load_calibration", fail)
    with pytest.raises(KeyboardInterrupt):
        merge(lazy(), vectors())
    assert not list(tmp_path.iterdir())


def checkpoints(folder: Path, **settings: Any) -> dict[str, str]:
    """Pool entries of experts on disk."""
    for task, expert in pico_experts().items():
        expert.float().save_pretrained(folder / task, **settings)  # type: ignore[operator]
    return {task: str(folder / task) for task in TASKS}


@pytest.mark.float32
@pytest.mark.parametrize("schedule", ["paused", "replay"])
@pytest.mark.parametrize("settings", [{}, {"max_shard_size": "8KB"}], ids=str)
def test_checkpoints_merge_like_the_models_that_they_hold(
    settings: dict[str, str], schedule: str, tmp_path: Path
) -> None:
    paths = checkpoints(tmp_path, **settings)
    models = {task: CLIPVisionModel.from_pretrained(path) for task, path in paths.items()}
    loaded = load(PicoPool(paths, None), tmp_path, fits=False)
    assert all(isinstance(weights, StoredWeights) for weights in loaded.weights.values())
    assert not list(tmp_path.glob("*.safetensors"))
    expected = merge(PicoPool(models, pico_images()), schedule=schedule, coverage="full")
    for store in ("device", "disk") if schedule == "replay" else ("auto",):
        pool = PicoPool(paths, pico_images())
        assert same(merge(pool, schedule=schedule, activation_store=store, coverage="full"), expected)


@pytest.mark.float32
def test_a_model_that_was_changed_since_it_was_loaded_is_not_read_from_its_checkpoint(tmp_path: Path) -> None:
    paths = checkpoints(tmp_path)

    def changed(task: str) -> nn.Module:
        network = CLIPVisionModel.from_pretrained(paths[task])
        if task == "letters":
            with torch.no_grad():
                next(iter(network.parameters())).mul_(1.5)
        return network

    pool = LazyPool({task: lambda task=task: changed(task) for task in TASKS})
    loaded = load(pool, tmp_path)
    kinds = {task: isinstance(weights, StoredWeights) for task, weights in loaded.weights.items()}
    assert kinds == {"digits": True, "letters": False, "textures": True}
    name = next(iter(tensors_of(changed("letters"))))
    assert torch.equal(loaded.weights["letters"][name], tensors_of(changed("letters"))[name])


def test_names_of_tasks_are_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CrossMeanAlgorithm, "_experts_fit", lambda *_: False)
    tasks = ("a/b", "../up", "a.b.c", "with space", "", "ünicode", "C:\\x")
    expected = merge({task: mlp(index)() for index, task in enumerate(tasks)}, vectors(tasks))
    assert same(merge(lazy(tasks), vectors(tasks)), expected)
    assert same(merge(lazy(tasks), vectors(tasks), schedule="replay"), expected)


# Dtypes


@pytest.mark.parametrize(
    ("experts", "pretrained", "dtype", "template_dtype"),
    [
        ((torch.float64, torch.float64), None, torch.float64, torch.float64),
        ((torch.bfloat16, torch.bfloat16), None, torch.bfloat16, torch.bfloat16),
        ((torch.float64, torch.float32), None, None, None),
        ((torch.float64, torch.float64), torch.float32, torch.float64, torch.float32),
        ((torch.float64, torch.float32), torch.float16, None, torch.float16),
    ],
)
def test_common_dtypes_are_found(
    experts: Any, pretrained: Any, dtype: Any, template_dtype: Any, tmp_path: Path
) -> None:
    makers = {task: mlp(index, kind) for index, (task, kind) in enumerate(zip("ab", experts, strict=True))}
    others = {} if pretrained is None else {"_pretrained_": mlp(9, pretrained)}
    loaded = load(LazyPool(makers | others), tmp_path)
    assert (loaded.dtype, loaded.template_dtype) == (dtype, template_dtype)
    merged = merge(LazyPool(makers | others), vectors("ab"))
    assert {tensor.dtype for tensor in merged.values()} == {template_dtype or torch.float32}


def test_a_pretrained_model_of_two_dtypes_has_no_common_one(tmp_path: Path) -> None:
    def both() -> nn.Module:
        network: Any = mlp(9)()
        network.mlp[1].float()
        return network

    loaded = load(lazy(_pretrained_=both), tmp_path)
    assert (loaded.dtype, loaded.template_dtype) == (torch.float64, None)


def test_a_pretrained_model_without_values_to_trust_still_gives_its_flags() -> None:
    pretrained: Any = pico_clip(seed=9)
    for parameter in pretrained.parameters():
        parameter.requires_grad_(False)
    pool = PicoPool(pico_experts() | {"_pretrained_": pretrained}, pico_images())
    merged = CrossMeanAlgorithm(num_calibration_samples=24).run(pool)
    assert not any(parameter.requires_grad for parameter in merged.parameters())
