"""Which inputs are used: exactly as many as asked for, each once; padding and dropped tokens count nowhere."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pico import PicoMLP, PicoText, experts_of, pico_calibration, pico_images, pico_pool, vectors
from tolerances import SAME, state_error
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fusion_bench_crossmean import CrossMeanAlgorithm, RegMeanAlgorithm
from fusion_bench_crossmean.calibration import (
    Batch,
    Calibration,
    draw_indices,
    load_calibration,
    open_datasets,
    source_for,
)
from fusion_bench_crossmean.calibration.plain import PlainSource

examples = settings(deadline=None, max_examples=50, derandomize=True)


def load(data: Any, num_samples: int = 10, batch_size: int = 4, offset: int = 0) -> Calibration:
    source = PlainSource(data)
    datasets = open_datasets(source, list(data), num_samples)
    return load_calibration(source, datasets, num_samples=num_samples, seed=0, batch_size=batch_size, offset=offset)


def stacked(batches: list[Batch]) -> Tensor:
    return torch.cat([batch.args[0] for batch in batches])


# The draw


@given(st.integers(0, 10**6), st.integers(0, 200), st.data())
@examples
def test_a_draw_has_exactly_as_many_different_inputs_as_asked_for(seed: int, size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, size))
    drawn = draw_indices("digits", size, count, seed)
    assert len(drawn) == len(set(drawn)) == count
    assert all(0 <= index < size for index in drawn)


@given(st.integers(0, 10**6), st.integers(1, 50), st.integers(1, 50), st.integers(0, 50))
@examples
def test_calibration_and_validation_draws_are_disjoint(seed: int, first: int, second: int, rest: int) -> None:
    size = first + second + rest
    calibration = draw_indices("digits", size, first, seed)
    validation = draw_indices("digits", size, second, seed, offset=first)
    assert len(validation) == second
    assert not set(calibration) & set(validation)


def test_a_smaller_draw_is_the_start_of_a_larger_one() -> None:
    assert draw_indices("digits", 100, 60, 3)[:20] == draw_indices("digits", 100, 20, 3)


def test_a_draw_depends_on_seed_and_task_and_nothing_else() -> None:
    np.random.seed(1)
    first = draw_indices("digits", 100, 20, 3)
    np.random.seed(2)
    assert draw_indices("digits", 100, 20, 3) == first
    assert draw_indices("digits", 100, 20, 4) != first
    assert draw_indices("letters", 100, 20, 3) != first
    assert first != sorted(first)


@pytest.mark.parametrize("offset", [0, 5])
def test_a_draw_larger_than_the_data_is_an_error_with_both_numbers(offset: int) -> None:
    with pytest.raises(ValueError, match=f"Task 'digits' has 7 inputs, {8 + offset} were asked for"):
        draw_indices("digits", 7, 8, 0, offset)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 99])
def test_exactly_the_inputs_asked_for_are_used_whatever_the_batch_size(batch_size: int) -> None:
    """10 examples at batch size 4 are 10, not 12."""
    images = pico_calibration(num_samples=30)
    drawn = load(images, 10, batch_size)
    for task, data in images.items():
        assert len(drawn.indices[task]) == len(set(drawn.indices[task])) == 10
        assert torch.equal(stacked(drawn.batches[task]), data[drawn.indices[task]])
        assert [len(batch.args[0]) for batch in drawn.batches[task][:-1]] == [batch_size] * ((10 - 1) // batch_size)


def test_the_draw_of_a_task_does_not_depend_on_the_other_tasks() -> None:
    images = pico_calibration(num_samples=30)
    assert load(images).indices["letters"] == load({"letters": images["letters"]}).indices["letters"]


def test_validation_inputs_share_no_image_with_calibration_inputs() -> None:
    images = pico_calibration(num_samples=30)
    first, second = load(images, 10), load(images, 20, offset=10)
    for task in images:
        assert sorted(first.indices[task] + second.indices[task]) == list(range(30))


def test_too_small_data_sets_are_all_named() -> None:
    data = {"digits": torch.zeros(7, 2), "letters": torch.zeros(9, 2), "textures": torch.zeros(20, 2)}
    with pytest.raises(ValueError, match=r"^task 'digits' has 7, task 'letters' has 9 calibration inputs, 10 were"):
        load(data)


@pytest.mark.parametrize("count", [5, 24])
def test_a_merge_uses_exactly_the_inputs_asked_for(count: int) -> None:
    experts, inputs = experts_of(lambda seed: PicoMLP(seed=seed)), vectors(num_samples=24)
    method = RegMeanAlgorithm(num_calibration_samples=count, batch_size=4)
    method.run(experts, inputs)
    assert {layer["tokens"] for layer in method.report["layers"]} == {3 * count}
    drawn = method.report["calibration_indices"]
    assert {len(set(indices)) for indices in drawn.values()} == {count}
    chosen = {task: inputs[task][indices] for task, indices in drawn.items()}
    expected = RegMeanAlgorithm(num_calibration_samples=count).run(experts, chosen).state_dict()
    assert state_error(method.run(experts, inputs).state_dict(), expected) < SAME


def test_inputs_that_were_not_drawn_do_not_matter() -> None:
    experts, inputs = experts_of(lambda seed: PicoMLP(seed=seed)), vectors(num_samples=24)
    method = CrossMeanAlgorithm(num_calibration_samples=10)
    expected = method.run(experts, inputs).state_dict()
    for task, indices in method.report["calibration_indices"].items():
        others = [index for index in range(24) if index not in indices]
        inputs[task][others] = 1e6
    merged = method.run(experts, inputs).state_dict()
    assert all(torch.equal(merged[key], expected[key]) for key in expected)


# Sources


class Pairs(Dataset):
    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], index % 3


class Dicts(Pairs):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.inputs[index], "label": index % 3}


FORMS = {
    "tensor": lambda x: x,
    "list": lambda x: list(x),
    "dict of tensors": lambda x: {"x": x},
    "dict of tensors with labels": lambda x: {"x": x, "labels": torch.zeros(len(x), dtype=torch.long)},
    "dataset of pairs": Pairs,
    "dataset of dicts": Dicts,
    "tensor dataset": lambda x: TensorDataset(x, torch.zeros(len(x))),
    "loader of pairs": lambda x: DataLoader(Pairs(x), batch_size=5),
    "loader of dicts": lambda x: DataLoader(Dicts(x), batch_size=5),
    "loader of tensors": lambda x: DataLoader(x, batch_size=5),  # type: ignore[arg-type]
    "generator of batches": lambda x: (part for part in x.split(7)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_calibration_data_gives_the_same_merge(form: str) -> None:
    experts, inputs = experts_of(lambda seed: PicoMLP(seed=seed)), vectors()
    method = CrossMeanAlgorithm(num_calibration_samples=10, batch_size=4)
    expected = method.run(experts, inputs).state_dict()
    merged = method.run(experts, {task: FORMS[form](x) for task, x in inputs.items()}).state_dict()
    assert all(torch.equal(merged[key], expected[key]) for key in expected)


def test_tensors_of_one_task_with_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("must have one length, not {'x': 3, 'y': 4}")):
        PlainSource({"digits": {"x": torch.zeros(3), "y": torch.zeros(4)}}).dataset("digits")


def test_a_clip_pool_gives_its_training_images_through_its_processor() -> None:
    pool = pico_pool(num_samples=24)
    source = source_for(pool, None)
    drawn = load_calibration(source, open_datasets(source, ["letters"], 10), num_samples=10, seed=1, batch_size=4)
    images, process = pico_images()["letters"], pool.load_processor()
    expected = torch.stack([process(images[index]["image"]) for index in drawn.indices["letters"]])
    assert torch.equal(torch.cat([batch.kwargs["pixel_values"] for batch in drawn.batches["letters"]]), expected)
    assert all(batch.kwargs.keys() == {"pixel_values"} and not batch.args for batch in drawn.batches["letters"])


def test_a_clip_pool_and_the_same_images_by_hand_give_the_same_merge() -> None:
    pool = pico_pool(num_samples=24)
    process = pool.load_processor()
    by_hand = {task: torch.stack([process(x["image"]) for x in data]) for task, data in pico_images().items()}
    method = CrossMeanAlgorithm(num_calibration_samples=20)
    ours = method.run(pool).state_dict()
    assert state_error(method.run(pool, by_hand).state_dict(), ours) < SAME


def test_given_data_come_before_those_of_the_pool() -> None:
    pool = pico_pool(with_training_data=False)
    CrossMeanAlgorithm(num_calibration_samples=24).run(pool, pico_calibration())


# Tokens that do not count


def sentences(length: int) -> dict[str, dict[str, Tensor]]:
    """24 sentences of 2 to 6 words per task, padded with word 0 to `length`."""
    data = {}
    for index, task in enumerate(("digits", "letters")):
        generator = np.random.default_rng(index)
        ids, mask = torch.zeros(24, length, dtype=torch.long), torch.zeros(24, length, dtype=torch.long)
        for row in range(24):
            words = int(generator.integers(2, 7))
            ids[row, :words] = torch.from_numpy(generator.integers(0, 20, words))
            mask[row, :words] = 1
        data[task] = {"input_ids": ids, "attention_mask": mask}
    return data


def texts() -> dict[str, nn.Module]:
    def make(seed: int) -> PicoText:
        torch.manual_seed(seed)
        return PicoText()

    return experts_of(make, 2)


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_the_same_sentences_padded_to_two_lengths_give_the_same_merge(coverage: str) -> None:
    method = CrossMeanAlgorithm(num_calibration_samples=24, coverage=coverage, batch_size=5)
    short = method.run(texts(), sentences(6)).state_dict()
    tokens = [layer["tokens"] for layer in method.report["layers"]]
    words = sum(int(x["attention_mask"].sum()) for x in sentences(6).values())
    assert tokens == [words, words] + [48] * (coverage == "full")
    long = method.run(texts(), sentences(11)).state_dict()
    assert state_error(long, short) < SAME
    unmasked = sentences(11)
    for data in unmasked.values():
        data["attention_mask"] = torch.ones_like(data["attention_mask"])
    assert state_error(method.run(texts(), unmasked).state_dict(), short) > 1e-3


def test_rows_are_the_unmasked_tokens_in_order() -> None:
    inputs = torch.arange(24.0).view(2, 3, 4)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert torch.equal(Batch(token_mask=mask).rows(inputs), torch.stack([inputs[0, 0], inputs[0, 1], inputs[1, 0]]))
    assert torch.equal(Batch().rows(inputs), inputs.view(6, 4))


def test_inputs_without_a_token_axis_are_used_whole() -> None:
    pooled = torch.randn(2, 4)
    batch = Batch(token_mask=torch.tensor([[True, False], [True, False]]), token_dropout=0.9, dropout_seeds=(1, 2))
    assert torch.equal(batch.rows(pooled), pooled)


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 3, 3, 5)])
def test_a_mask_that_does_not_fit_is_an_error_with_both_shapes(shape: tuple[int, ...]) -> None:
    batch = Batch(token_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=re.escape(f"{shape[:-1]}, the attention mask has (2, 3)")):
        batch.rows(torch.zeros(shape))


def test_dropped_tokens_are_the_same_at_every_layer_and_a_fraction_of_all() -> None:
    batch = Batch(token_dropout=0.3, dropout_seeds=tuple(range(200)))
    positions = torch.arange(2000.0).view(200, 10, 1)
    kept = batch.rows(positions)
    assert torch.equal(batch.rows(positions.repeat(1, 1, 7))[:, 3:4], kept)
    assert 0.65 < len(kept) / 2000 < 0.75
    other = Batch(token_dropout=0.3, dropout_seeds=tuple(range(1, 201))).rows(positions)
    assert not torch.equal(other, kept)


def test_dropped_tokens_and_padding_do_not_count_together() -> None:
    mask = torch.rand(50, 10) < 0.5
    positions = torch.arange(500.0).view(50, 10, 1)
    seeds = tuple(range(50))
    both = set(Batch(token_mask=mask, token_dropout=0.5, dropout_seeds=seeds).rows(positions).flatten().tolist())
    dropped = set(Batch(token_dropout=0.5, dropout_seeds=seeds).rows(positions).flatten().tolist())
    masked = set(Batch(token_mask=mask).rows(positions).flatten().tolist())
    assert both == dropped & masked


def test_token_dropout_in_a_layer_that_does_not_see_the_inputs_one_by_one_is_an_error() -> None:
    batch = Batch(token_dropout=0.5, dropout_seeds=(1, 2))
    with pytest.raises(ValueError, match=re.escape("have the token axes (8, 3), the batch has 2 inputs")):
        batch.rows(torch.zeros(8, 3, 5))


def test_token_dropout_reaches_layers_whose_tokens_are_flattened() -> None:
    seeds, positions = tuple(range(50)), torch.arange(500.0).view(50, 10, 1)
    batch = Batch(token_dropout=0.5, dropout_seeds=seeds)
    assert torch.equal(batch.rows(positions.flatten(0, 1)), batch.rows(positions))
    assert len(batch.rows(torch.zeros(50, 3))) == 50, "no token axis"
    masked = Batch(token_mask=torch.rand(50, 10) < 0.5, token_dropout=0.5, dropout_seeds=seeds)
    assert torch.equal(masked.rows(positions.flatten(0, 1)), masked.rows(positions))
    with pytest.raises(ValueError, match="have 501 rows, the batch has 50 inputs"):
        batch.rows(torch.zeros(501, 3))


def test_a_batch_moves_floating_point_arguments_to_the_dtype_and_no_others() -> None:
    batch = Batch(args=(torch.ones(1), 3), kwargs={"ids": torch.ones(1, dtype=torch.long), "flag": True})
    moved = batch.to(torch.device("cpu"), torch.float16)
    assert moved.args[0].dtype == torch.float16
    assert moved.kwargs["ids"].dtype == torch.long
    assert moved.args[1] == 3
    assert moved.kwargs["flag"] is True
    assert batch.args[0].dtype == torch.float64
