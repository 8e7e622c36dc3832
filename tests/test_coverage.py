"""Which layers merge, and what a group of layers on one input is called."""

from __future__ import annotations

import pytest
import torch
from oracles import clip_groups
from pico import PicoMLP, pico_clip
from torch import nn

from fusion_bench_crossmean.coverage import LayerGroup, covered_layers
from fusion_bench_crossmean.messages import shorten


@pytest.mark.parametrize("coverage", ["mlp", "full"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_covered_layers_of_clip_are_those_written_down_by_hand(coverage: str, num_layers: int) -> None:
    network = pico_clip(num_layers=num_layers)
    expected = {name for group in clip_groups(network, coverage) for name in group}
    assert len(expected) == num_layers * {"mlp": 2, "full": 6}[coverage]
    assert set(covered_layers(network, coverage)) == expected
    assert len(covered_layers(network, coverage)) == len(expected)


def test_mlp_is_a_whole_part_of_a_name_and_not_a_piece_of_one() -> None:
    network = nn.ModuleDict(
        {"mlp": nn.ModuleDict({"fc": nn.Linear(2, 2)}), "attn_mlpish": nn.ModuleDict({"q": nn.Linear(2, 2)})}
    )
    assert covered_layers(network, "mlp") == ["mlp.fc"]
    assert set(covered_layers(network, "full")) == {"mlp.fc", "attn_mlpish.q"}


def test_norms_convolutions_and_embeddings_are_not_covered() -> None:
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.LayerNorm(2), nn.Embedding(2, 2), nn.Linear(2, 2))
    assert covered_layers(network, "full") == ["3"]


def test_an_unknown_coverage_is_refused() -> None:
    with pytest.raises(ValueError, match="coverage must be one of mlp, full, not 'attn'"):
        covered_layers(PicoMLP(), "attn")  # type: ignore[arg-type]


def test_a_long_list_of_layers_is_shortened_in_a_message() -> None:
    network = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    with pytest.raises(ValueError, match="'6', '7' and 12 more"):
        covered_layers(network, "mlp")
    assert shorten(["a"]) == "'a'"
    assert shorten([]) == ""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("fc1",), "fc1"),
        (("layers.0.fc1",), "layers.0.fc1"),
        (("layers.0.attn.q", "layers.0.attn.k"), "layers.0.attn.{q,k}"),
        (("q", "k"), "{q,k}"),
        (("a.q", "b.k"), "a.q+b.k"),
    ],
)
def test_the_name_of_a_group_names_every_layer(names: tuple[str, ...], expected: str) -> None:
    assert LayerGroup(names).name == expected


def test_splitting_a_stacked_weight_is_the_inverse_of_stacking() -> None:
    network = nn.ModuleDict({"q": nn.Linear(4, 3), "k": nn.Linear(4, 5), "v": nn.Linear(4, 1)})
    tensors, group = dict(network.named_parameters()), LayerGroup(("v", "q", "k"))
    weight = group.weight_of(tensors)
    assert weight.shape == (9, 4)
    assert not weight.requires_grad
    parts = group.split(weight, tensors)
    assert list(parts) == ["v.weight", "q.weight", "k.weight"]
    assert all(torch.equal(part, tensors[name]) for name, part in parts.items())
