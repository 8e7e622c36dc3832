"""OpenCLIP: opened attentions, encoders and their checkpoints, and the same tower as Hugging Face's."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fusion_bench.modelpool
import fusion_bench.models.open_clip
import numpy as np
import open_clip
import oracles
import pytest
import torch
from families import PICO, pico_architectures
from open_clip.factory import _MODEL_CONFIG_PATHS, _rescan_model_configs
from pico import TASKS, draw_weights, experts_of, pico_calibration, pico_clip, pico_images, vectors
from PIL import Image
from tolerances import SAME, state_error
from torch import Tensor, nn

from fusion_bench_crossmean import CrossMeanAlgorithm, compat
from fusion_bench_crossmean.attention import OpenAttention, open_attentions
from fusion_bench_crossmean.calibration import source_for
from fusion_bench_crossmean.expert_checks import activation_of

compat.apply_cures(openclip=True)

from fusion_bench.modelpool import OpenCLIPVisionModelPool  # noqa: E402
from fusion_bench.models.open_clip import ImageEncoder  # noqa: E402

from fusion_bench_crossmean.openclip import (  # noqa: E402
    architecture_of,
    encoder_from_pickle,
    encoder_from_state_dict,
    preprocessing_of,
)

#: Stands for the few names that FusionBench's encoder takes.
MODELS = ("pico",)
BLOCKS = "model.visual.transformer.resblocks"
N = 24


@pytest.fixture(scope="module", autouse=True)
def _architectures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pico_architectures(tmp_path_factory.mktemp("architectures")):
        yield


def encoder(seed: int, name: str = "pico__init__") -> nn.Module:
    network = ImageEncoder(name).to(torch.get_default_dtype())
    network.load_state_dict(draw_weights(network, seed))
    return network


def merge(experts: Mapping[str, nn.Module], inputs: Any, **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    algorithm = CrossMeanAlgorithm(**{"num_calibration_samples": N, "batch_size": 7} | settings)
    return algorithm.run(dict(experts), inputs), algorithm.report


# Opened attentions


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", ["", "tokens", "additive", "per head", "padding", "both"])
@pytest.mark.parametrize("weights", [None, "mean", "per head"])
def test_an_opened_attention_computes_the_same(batch_first: bool, bias: bool, masked: str, weights: str | None) -> None:
    attention = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first).eval()
    attention.load_state_dict(draw_weights(attention, 0))
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [2]])
    masks = {
        "": {},
        "tokens": {"attn_mask": causal},
        "additive": {"attn_mask": torch.randn(5, 5)},
        "per head": {"attn_mask": torch.randn(6, 5, 5)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
    }[masked]
    options = masks | {"need_weights": weights is not None, "average_attn_weights": weights == "mean"}
    expected, expected_weights = attention(x, x, x, **options)
    names = list(attention.state_dict())
    open_attentions(attention)
    assert type(attention) is OpenAttention
    assert list(attention.state_dict()) == names
    found, found_weights = attention(x, x, x, **options)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    assert (found_weights is None) == (expected_weights is None)
    if expected_weights is not None:
        assert torch.allclose(found_weights, expected_weights, rtol=0, atol=1e-13)


@pytest.mark.parametrize("weights", [True, False])
def test_an_opened_attention_takes_one_input_without_a_batch(weights: bool) -> None:
    attention = nn.MultiheadAttention(8, 2).eval()
    x = torch.randn(5, 8)
    expected = attention(x, x, x, need_weights=weights)
    open_attentions(attention)
    found = attention(x, x, x, need_weights=weights)
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-13)
    assert found[0].shape == (5, 8)
    if weights:
        assert torch.allclose(found[1], expected[1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("settings", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 4}], ids=str)
def test_attention_of_another_kind_stays_fused(settings: dict[str, Any]) -> None:
    attention = nn.MultiheadAttention(8, 2, **settings).eval()
    query, key = torch.randn(3, 2, 8), torch.randn(4, 2, settings.get("kdim", 8))
    value = torch.randn(4, 2, settings.get("vdim", 8))
    expected, _ = attention(query, key, value)
    open_attentions(attention)
    assert torch.equal(attention(query, key, value)[0], expected)


# Merging


class FusedBlocks(nn.Module):
    """Two blocks with PyTorch's own attention, on inputs of shape (batch, tokens * width)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True) for _ in range(2)
        )
        self.load_state_dict(draw_weights(self, seed))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_pytorchs_own_encoder_layers_merge_under_full_coverage() -> None:
    experts = experts_of(FusedBlocks, 2)
    inputs = {task: data.reshape(N, -1, 8) for task, data in vectors(experts, width=24).items()}
    merged, report = merge(experts, inputs, coverage="full")
    expected = [
        [f"blocks.{i}.{n}"]
        for i in range(2)
        for n in ("self_attn.fused_in_proj", "self_attn.out_proj", "linear1", "linear2")
    ]
    assert [layer["layers"] for layer in report["layers"]] == expected
    assert (
        state_error(merged.state_dict(), oracles.whole_network(experts, inputs, expected, path_points=(0, 0.5, 1)))
        < SAME
    )


def test_attentions_are_opened_for_the_merge_only() -> None:
    experts, inputs = experts_of(encoder, 2), pico_calibration(TASKS[:2])
    merged, _ = merge(experts, inputs, coverage="full")
    attentions = [m for e in (merged, *experts.values()) for m in e.modules() if isinstance(m, nn.MultiheadAttention)]
    assert len(attentions) == 6
    assert {type(attention) for attention in attentions} == {nn.MultiheadAttention}
    assert merged.state_dict().keys() == experts["digits"].state_dict().keys()


# The same tower


def as_openclip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Hugging Face CLIP vision tower's tensors under OpenCLIP's names."""
    plain = {key.removeprefix("vision_model."): value for key, value in state.items()}
    tower = {
        "class_embedding": plain["embeddings.class_embedding"],
        "positional_embedding": plain["embeddings.position_embedding.weight"],
        "conv1.weight": plain["embeddings.patch_embedding.weight"],
    }
    for theirs, ours in (("ln_pre", "pre_layrnorm"), ("ln_post", "post_layernorm")):
        tower |= {f"{theirs}.{kind}": plain[f"{ours}.{kind}"] for kind in ("weight", "bias")}
    for i, kind in itertools.product(range(2), ("weight", "bias")):
        block, layer = f"transformer.resblocks.{i}", f"encoder.layers.{i}"
        stacked = [plain[f"{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
        tower[f"{block}.attn.in_proj_{kind}"] = torch.cat(stacked)
        names = {"attn.out_proj": "self_attn.out_proj", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
        names |= {"ln_1": "layer_norm1", "ln_2": "layer_norm2"}
        tower |= {f"{block}.{theirs}.{kind}": plain[f"{layer}.{ours}.{kind}"] for theirs, ours in names.items()}
    return {f"model.visual.{key}": value for key, value in tower.items()}


@pytest.mark.parametrize(("hidden_act", "name"), [("gelu", "pico__init__"), ("quick_gelu", "pico-quickgelu__init__")])
@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_one_tower_merges_alike_as_a_hugging_face_and_as_an_openclip_model(
    hidden_act: str, name: str, coverage: str
) -> None:
    theirs, inputs = experts_of(lambda seed: pico_clip(hidden_act, seed), 2), pico_calibration(TASKS[:2])
    ours = {}
    for task, expert in theirs.items():
        ours[task] = encoder(7, name)
        missing, unexpected = ours[task].load_state_dict(as_openclip(expert.state_dict()), strict=False)
        assert not unexpected
        assert all("visual.proj" in key or ".visual." not in key for key in missing)
        outputs = theirs[task].eval()(inputs[task]).pooler_output @ ours[task].model.visual.proj
        assert torch.allclose(ours[task].eval()(inputs[task]), outputs, rtol=0, atol=1e-12)
    merged, _ = merge(ours, inputs, coverage=coverage)
    expected, _ = merge(theirs, inputs, coverage=coverage)
    tower = as_openclip(expected.state_dict())
    assert state_error({key: merged.state_dict()[key] for key in tower}, tower) < 1e-10


# Encoders and their checkpoints


@pytest.mark.parametrize(("name", "activation"), [("pico__init__", "GELU"), ("pico-quickgelu__init__", "QuickGELU")])
def test_a_name_gives_the_activation_it_says(name: str, activation: str) -> None:
    assert activation_of(ImageEncoder(name)) == activation


def test_openais_weights_are_built_with_quick_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """open_clip 3 builds them with GELU, and only warns."""
    calls = []

    def create(name: str, **options: Any) -> Any:
        calls.append((name, options["pretrained"], options["force_quick_gelu"]))
        return nn.Module(), None, None

    monkeypatch.setattr(open_clip, "create_model_and_transforms", create)
    for name in ("ViT-H-14", "ViT-B-32__pretrained__laion2b_s34b_b79k", "ViT-B-32__init__"):
        ImageEncoder(name)
    assert calls == [
        ("ViT-H-14", "openai", True),
        ("ViT-B-32", "laion2b_s34b_b79k", False),
        ("ViT-B-32", None, False),
    ]


def test_a_name_that_open_clip_does_not_know_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"open_clip has no architecture 'ViT-B-33'; it has .*ViT-B-32"):
        ImageEncoder("ViT-B-33")


def test_experts_of_two_activations_are_refused() -> None:
    experts = {"digits": encoder(1), "letters": encoder(2, "pico-quickgelu__init__")}
    with pytest.raises(ValueError, match=r"is GELU.* in 'digits' and QuickGELU.* in 'letters'"):
        merge(experts, pico_calibration(TASKS[:2]))


class MendedEncoder(nn.Module):
    """A release of `ImageEncoder` that needs no cure."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = open_clip.create_model_and_transforms(name, force_quick_gelu="openai" in name)


class RefusingEncoder(MendedEncoder):
    """One that still knows few names only."""

    def __init__(self, name: str) -> None:
        assert name in MODELS
        super().__init__(name)
        self.quick_gelu = True


class GeluEncoder(MendedEncoder):
    """One that still builds OpenAI's weights with GELU."""

    def __init__(self, name: str) -> None:
        super().__init__(name)


@pytest.mark.parametrize(("release", "cured"), [(MendedEncoder, False), (RefusingEncoder, True), (GeluEncoder, True)])
def test_encoders_are_cured_only_where_they_need_it(
    release: type[MendedEncoder], cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = release.__init__
    monkeypatch.setattr(release, "__init__", own)  # put back afterwards
    monkeypatch.setattr(fusion_bench.models.open_clip, "ImageEncoder", release)
    compat.build_openclip_encoders_right()
    assert (release.__init__ is not own) == cured


class MendedPool:
    """A release of the pool that reads whole pickled encoders."""

    def load_model(self, path: str) -> Any:
        return torch.load(path, weights_only=False)


class FailingPool(MendedPool):
    """One that tries to, but in the way that always fails."""

    def load_model(self, path: str, **kwargs: Any) -> Any:
        return torch.load(path, weights_only=kwargs["weights_only"] if "weights_only" in kwargs else True)


@pytest.mark.parametrize(("release", "cured"), [(MendedPool, False), (FailingPool, True)])
def test_the_pool_is_cured_only_where_it_needs_it(
    release: type[Any], cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = release.load_model
    monkeypatch.setattr(release, "load_model", own)
    monkeypatch.setattr(fusion_bench.modelpool, "OpenCLIPVisionModelPool", release)
    compat.load_pickled_encoders_safely()
    assert (release.load_model is not own) == cured
    compat.load_pickled_encoders_safely()
    assert getattr(release.load_model, "__wrapped__", own) is own, "a second application changes nothing"


def saved_whole(folder: Path, seed: int, name: str = "pico__init__") -> tuple[Path, nn.Module]:
    network = encoder(seed, name)
    path = folder / f"{seed}.pt"
    torch.save(network, path)
    return path, network


@pytest.mark.parametrize("name", ["pico__init__", "pico-quickgelu__init__"])
def test_a_pickled_encoder_is_read_without_running_it(name: str, tmp_path: Path) -> None:
    path, network = saved_whole(tmp_path, 1, name)
    read = encoder_from_pickle(path, "pico")
    assert state_error(read.state_dict(), network.state_dict()) == 0
    assert activation_of(read) == activation_of(network)


@pytest.mark.parametrize("name", ["pico-oneheads__init__", "pico__init__"])
def test_a_pickled_encoder_of_another_number_of_heads_is_refused(name: str, tmp_path: Path) -> None:
    """Its shapes do not tell."""
    path, _ = saved_whole(tmp_path, 1, name)
    other = "pico" if "oneheads" in name else "pico-oneheads"
    with pytest.raises(ValueError, match=rf"is no {other}: num_heads of 'model\.visual.*' is \d, not \d"):
        encoder_from_pickle(path, other)


def test_experts_of_different_numbers_of_heads_are_refused() -> None:
    experts = {"digits": encoder(1), "letters": encoder(2, "pico-oneheads__init__")}
    with pytest.raises(ValueError, match=r"num_heads=2.* in 'digits' and .*num_heads=1.* in 'letters'"):
        merge(experts, pico_calibration(TASKS[:2]))


def test_a_truncated_pickle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path, _ = saved_whole(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"1\.pt cannot be read safely"):
        encoder_from_pickle(path, "pico")
    with pytest.raises(FileNotFoundError):
        encoder_from_pickle(tmp_path / "gone.pt", "pico")


def test_a_whole_encoder_given_as_a_state_dict_is_an_error_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, network = saved_whole(tmp_path, 1)
    entry = {"model_name": "pico__init__", "state_dict_path": str(path)}
    with pytest.raises(ValueError, match=r"1\.pt holds more than a state dict: give .* as pickle_path"):
        OpenCLIPVisionModelPool({"digits": entry}).load_model("digits")
    assert "pico__init__ is built with GELU" in caplog.text
    torch.save(network.state_dict(), path)
    caplog.clear()
    entry["model_name"] = "pico-quickgelu__init__"
    OpenCLIPVisionModelPool({"digits": entry}).load_model("digits")
    assert "is built with GELU" not in caplog.text


@pytest.mark.parametrize("form", ["encoder", "open_clip"])
def test_a_state_dict_may_be_the_encoders_or_open_clips(form: str, tmp_path: Path) -> None:
    network, path = encoder(1).float(), tmp_path / "one.pt"
    state = network.state_dict()
    if form == "open_clip":
        whole = open_clip.create_model("pico").state_dict()
        state = whole | {key.removeprefix("model."): tensor for key, tensor in state.items()}
        assert len(state) > len(network.state_dict()), "with a text tower"
    torch.save(state, path)
    read = encoder_from_state_dict(path, "pico__init__")
    assert state_error(read.state_dict(), network.state_dict()) == 0


def test_a_state_dict_that_does_not_fit_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path, state = tmp_path / "one.pt", encoder(1).state_dict()
    torch.save({key: tensor for key, tensor in state.items() if "resblocks.1" not in key}, path)
    with pytest.raises(ValueError, match=r"one\.pt is no pico__init__: it lacks 12 tensors \['model\.visual"):
        encoder_from_state_dict(path, "pico__init__")
    torch.save([1], path)
    with pytest.raises(ValueError, match=r"one\.pt holds a list, not a state dict"):
        encoder_from_state_dict(path, "pico__init__")


def test_images_are_prepared_as_an_architectures_weights_want_them() -> None:
    assert preprocessing_of("ViT-B-16-SigLIP")["image_mean"] == (0.5, 0.5, 0.5)
    assert preprocessing_of("ViT-L-14-CLIPA")["image_resize_mode"] == "squash"
    assert preprocessing_of("ViT-H-14") == {}, "its weights disagree"
    assert preprocessing_of("pico") == {}, "it has none"


def test_no_text_tower_stays_whatever_it_is_called(tmp_path: Path) -> None:
    config = PICO | {"custom_text": True}
    (tmp_path / "pico-custom.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    try:
        network = ImageEncoder("pico-custom__init__")
    finally:
        _MODEL_CONFIG_PATHS.remove(tmp_path)
        _rescan_model_configs()
    assert not [name for name, _ in network.named_parameters() if "text" in name]
    experts = {task: encoder_like(network, seed) for seed, task in enumerate(TASKS[:2])}
    _, report = merge(experts, pico_calibration(TASKS[:2]), coverage="full")
    assert len(report["layers"]) == 8


def encoder_like(network: nn.Module, seed: int) -> nn.Module:
    made = copy.deepcopy(network).to(torch.get_default_dtype())
    made.load_state_dict(draw_weights(made, seed))
    return made


def harm() -> None:
    Path("harm").touch()


class Harmful:
    def __reduce__(self) -> Any:
        return harm, ()


def test_nothing_in_a_pickled_encoder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    network = encoder(1)
    network.harmful = Harmful()
    torch.save(network, tmp_path / "encoder.pt")
    encoder_from_pickle(tmp_path / "encoder.pt", "pico")
    assert not (tmp_path / "harm").exists()
    torch.load(tmp_path / "encoder.pt", weights_only=False)
    assert (tmp_path / "harm").exists(), "the file would have done harm"


def test_files_that_hold_no_encoder_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    torch.save(encoder(1).state_dict(), tmp_path / "state.pt")
    with pytest.raises(ValueError, match=r"state\.pt holds a .*Dict, not a whole module: give it as state_dict_path"):
        encoder_from_pickle(tmp_path / "state.pt", "pico")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"cannot be read safely .*torch.save.model.state_dict"):
        encoder_from_pickle(tmp_path / "old.pt", "pico")
    path, _ = saved_whole(tmp_path, 1)
    with pytest.raises(ValueError, match=r"is no ViT-S-32: it lacks \d+ tensors .* Check model_name"):
        encoder_from_pickle(path, "ViT-S-32")
    with pytest.raises(ValueError, match=r"holds none of ViT-B-32, .* Name its architecture"):
        encoder_from_pickle(path)
    with pytest.raises(FileNotFoundError):
        encoder_from_pickle(tmp_path / "none.pt", "pico")


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336", "ViT-H-14"])
def test_architectures_are_told_by_their_shapes(name: str) -> None:
    with torch.device("meta"):
        visual = open_clip.create_model(name, pretrained=None, device="meta").visual
    shapes = {f"model.visual.{key}": tensor for key, tensor in visual.state_dict().items()}
    assert architecture_of(shapes, "x") == name


# The pool


@pytest.fixture
def pool(tmp_path: Path) -> OpenCLIPVisionModelPool:
    """One expert in each of the forms that a pool may name, the pretrained one too."""
    entries: dict[str, Any] = {}
    for seed, task in enumerate(("_pretrained_", *TASKS[:2])):
        path, network = saved_whole(tmp_path, seed)
        entries[task] = {"model_name": "pico", "pickle_path": str(path)}
        if task == "letters":
            torch.save(network.state_dict(), tmp_path / "state.pt")
            entries[task] = {"model_name": "pico__init__", "state_dict_path": str(tmp_path / "state.pt")}
    return OpenCLIPVisionModelPool(entries, train_datasets=pico_images(TASKS[:2], N))


@pytest.fixture(autouse=True)
def _datasets_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenCLIPVisionModelPool, "load_train_dataset", lambda self, name: self._train_datasets[name])


@pytest.mark.float32
def test_a_merge_of_a_pool_is_saved_in_the_checkpoints_own_format(
    pool: OpenCLIPVisionModelPool, tmp_path: Path
) -> None:
    algorithm = CrossMeanAlgorithm(num_calibration_samples=N, coverage="full")
    merged = algorithm.run(pool)
    assert algorithm.report["activation"] == "GELU"
    pool.save_model(merged, str(tmp_path / "merged.pt"))
    again = OpenCLIPVisionModelPool(
        {"m": {"model_name": "pico__init__", "state_dict_path": str(tmp_path / "merged.pt")}}
    )
    loaded = again.load_model("m")
    assert state_error(loaded.state_dict(), merged.state_dict()) == 0
    image = torch.rand(2, 3, 16, 16)
    assert torch.equal(loaded.eval()(image), merged.eval()(image))


@pytest.mark.float32
def test_calibration_images_are_not_cropped_at_random(pool: OpenCLIPVisionModelPool) -> None:
    pool.load_model("digits")
    source = source_for(pool, None)
    image = Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3))
    pool._train_datasets["digits"][0] = {"image": image, "label": 0}
    batch = source.collate([source.dataset("digits")[0]])
    assert torch.equal(batch.args[0][0], pool.test_processor(image))
    assert torch.equal(batch.args[0], source.collate([source.dataset("digits")[0]]).args[0])
