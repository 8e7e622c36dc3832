"""What goes wrong for people who merge and calibrate networks: each symptom reduced to its smallest input.

Named after the symptoms, each with the right behaviour; elsewhere in the tests are their kinds in full.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
import pico
import pytest
import torch
from fusion_bench.modelpool import BaseModelPool
from pico import TASKS, PicoMLP, PicoText, experts_of, hooks_of, pico_calibration, pico_clip, vectors
from safetensors.torch import load_file, save_file
from tolerances import FLOAT32, SAME, relative_error, state_error
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPVisionModel, LlamaConfig, LlamaForCausalLM
from transformers.activations import QuickGELUActivation

from fusion_bench_crossmean import CrossMeanAlgorithm, ProgressiveRegMeanAlgorithm, RegMeanAlgorithm
from fusion_bench_crossmean.forwards import WalkError
from fusion_bench_crossmean.linear_system import LinearSystem, SingularSystemError

N = 24
LARGE = 2**60  # rounded by a mean in float32 or float64
S = (0, 0.5, 1)
METHODS = (CrossMeanAlgorithm, ProgressiveRegMeanAlgorithm, RegMeanAlgorithm)


def merge(
    experts: Any, inputs: Any = None, method: type = CrossMeanAlgorithm, **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    algorithm = method(**{"num_calibration_samples": N} | settings)
    merged = algorithm.run(experts, vectors() if inputs is None else inputs)
    assert all(tensor.isfinite().all() for tensor in merged.state_dict().values() if tensor.is_floating_point())
    return merged, algorithm.report


def mlps(num_tasks: int = 3, **settings: Any) -> dict[str, nn.Module]:
    return experts_of(lambda seed: PicoMLP(seed=seed, **settings), num_tasks)


# 1. Experts whose weights fit and whose functions do not.
def configured(activation: str) -> nn.Module:
    expert = pico_clip("gelu")
    expert.config.hidden_act = activation
    return expert


def activated(activation: nn.Module) -> nn.Module:
    expert = PicoMLP()
    expert.mlp.append(activation)
    return expert


@pytest.mark.parametrize(
    ("make", "first", "second", "message"),
    [
        (pico_clip, "gelu", "quick_gelu", "'gelu' in 'digits' and 'quick_gelu' in 'letters' .*activations"),
        (pico_clip, "gelu", "relu", "'gelu' in 'digits' and 'relu' in 'letters' .*activations"),
        (configured, "gelu", "quick_gelu", "'gelu' in 'digits' and 'quick_gelu' in 'letters' .*activations"),
        (activated, nn.GELU(), QuickGELUActivation(), r"GELU\(.* in 'digits' and QuickGELUActivation\(.* in 'letters'"),
        (activated, nn.GELU(), nn.GELU("tanh"), "'none'.* in 'digits' and .*'tanh'.* in 'letters'"),
        (activated, nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), r"slope=0\.1.* in 'digits' and .*slope=0\.2.* in 'letters'"),
    ],
)
def test_experts_that_differ_only_in_their_activation_are_refused_before_any_forward(
    make: Callable[[Any], nn.Module], first: Any, second: Any, message: str, forwards: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        merge({"digits": make(first), "letters": make(second)}, pico_calibration())
    assert forwards.count == 0


def test_the_report_says_which_activation_ran() -> None:
    assert "quick_gelu" in merge(pico.pico_experts(hidden_act="quick_gelu"), pico_calibration())[1]["activation"]


# 2. A fused attention, whose projections no hook on a linear layer ever sees.
class Attentive(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Crossed(Attentive):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x, 2 * x, 2 * x, need_weights=False)[0])


def sequences() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {task: torch.randn(N, 5, 8, generator=generator) for task in ("digits", "letters")}


def test_projections_of_a_fused_attention_are_solved_not_averaged() -> None:
    experts = experts_of(Attentive, 2)
    merged, report = merge(experts, sequences(), coverage="full")
    groups = [["attn.fused_in_proj"], ["attn.out_proj"], ["mlp.0"], ["mlp.2"]]
    assert [layer["layers"] for layer in report["layers"]] == groups
    assert state_error(merged.state_dict(), oracles.whole_network(experts, sequences(), groups, path_points=S)) < SAME


def test_a_layer_that_was_asked_for_and_not_measured_is_an_error_that_names_it() -> None:
    experts = experts_of(Attentive, 2)
    for expert in experts.values():
        expert.unused = nn.Linear(8, 8)
    with pytest.raises(WalkError, match=r"1 of 5 covered layers were never reached.*'unused'"):
        merge(experts, sequences(), coverage="full")
    with pytest.raises(WalkError, match=r"2 of 4 covered layers.*'attn\.fused_in_proj', 'attn\.out_proj'"):
        merge(experts_of(Crossed, 2), sequences(), coverage="full")


# 3. A block that needs an argument which only the model itself can give.
class Block(PicoMLP):
    def forward(self, x: Tensor, *, position_embeddings: Tensor) -> Tensor:
        return super().forward(x * position_embeddings)


class Positioned(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(depth=2, seed=10 * seed + i) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, position_embeddings=torch.linspace(0.5, 1.5, 6))
        return x


@pytest.mark.parametrize("schedule", ["paused", "replay"])
def test_blocks_get_the_keyword_arguments_that_their_model_gives_them(schedule: str) -> None:
    experts = experts_of(Positioned)
    merged, _ = merge(experts, schedule=schedule)
    groups = [[f"layers.{block}.mlp.{layer}"] for block in range(2) for layer in range(2)]
    assert state_error(merged.state_dict(), oracles.whole_network(experts, vectors(), groups, path_points=S)) < SAME


# 4. Names of tensors with and without the prefix that versions of transformers add or drop.
def test_flat_and_nested_checkpoints_give_the_same_merge(tmp_path: Path) -> None:
    merges = []
    for prefix in (None, "vision_model."):  # None: as the installed transformers writes them
        folders = {task: str(tmp_path / f"{prefix}{task}") for task in TASKS[:3]}
        for task, expert in pico.pico_experts().items():
            expert.save_pretrained(folders[task])
            file = Path(folders[task]) / "model.safetensors"
            if prefix is not None:
                renamed = {
                    prefix + key.removeprefix("vision_model."): tensor for key, tensor in load_file(file).items()
                }
                save_file(renamed, file, metadata={"format": "pt"})
        merged, _ = merge(pico.PicoPool(folders, None), pico_calibration(), dtype="float64")
        experts = {task: CLIPVisionModel.from_pretrained(folders[task], dtype=torch.float64) for task in folders}
        groups = oracles.clip_groups(merged, "mlp")
        expected = oracles.whole_network(experts, pico_calibration(), groups, path_points=S)
        assert state_error(merged.state_dict(), expected) < SAME
        merges.append(merged.state_dict())
    assert all(torch.equal(tensor, merges[1][name]) for name, tensor in merges[0].items())


# 5. Fewer tokens than features.
@pytest.mark.parametrize("method", METHODS)
def test_three_tokens_for_sixteen_features_give_a_warning(method: type, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        layer = merge(mlps(width=16), vectors(width=16), method, num_calibration_samples=1)[1]["layers"][0]
    assert (layer["tokens"], layer["rank"], layer["features"]) == (3, 3, 16)
    assert layer["ridge"] > 0
    assert layer["relative_residual"] < 1e-9
    assert "Layer 'mlp.0': 3 calibration tokens for 16 input features (rank 3)" in caplog.text


# 6. A dead input feature.
@pytest.mark.parametrize("method", METHODS)
def test_the_column_of_a_feature_that_is_always_zero_is_the_experts_mean(method: type) -> None:
    experts, inputs = mlps(depth=1), vectors()
    for rows in inputs.values():
        rows[:, 2] = 0
    inputs["digits"][:, 4] = 0  # others tell what this one does not
    merged, report = merge(experts, inputs, method)
    mean = torch.stack([expert.mlp[0].weight for expert in experts.values()]).mean(0)
    assert relative_error(merged.mlp[0].weight[:, 2], mean[:, 2]) < SAME
    assert relative_error(merged.mlp[0].weight[:, 1], mean[:, 1]) > 1e-3
    assert report["layers"][0]["dead_features"] == [2]


# 7. A system that nothing makes regular.
@pytest.mark.parametrize("share", [1.0, 0.1, 0.3, 0.7, 1.3, 3.1, 7.7])
def test_two_identical_features_without_reduction_are_a_clear_error_or_a_reported_ridge(share: float) -> None:
    inputs = vectors()
    for rows in inputs.values():
        rows[:, 3] = share * rows[:, 1]  # rounding may hide it from a factorisation
    with pytest.raises(SingularSystemError, match=r"Layer 'mlp\.0': .*not positive definite at relative_ridge=0\."):
        merge(mlps(depth=1), inputs, reduce_non_diagonal_ratio=1.0, relative_ridge=0.0)
    layer = merge(mlps(depth=1), inputs, reduce_non_diagonal_ratio=1.0, relative_ridge=1e-30)[1]["layers"][0]
    assert layer["relative_ridge"] > 1e-30
    assert layer["rank"] == 5
    assert any("not positive definite" in text for text in layer["warnings"])


# 8. Products that overflow.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_activations_around_300_do_not_overflow_in_the_products(dtype: torch.dtype) -> None:
    inputs = {task: (300 + rows).to(dtype) for task, rows in vectors(num_samples=1000).items()}
    experts = {task: expert.to(dtype) for task, expert in mlps(depth=1).items()}
    merged, _ = merge(experts, inputs, num_calibration_samples=1000)
    exact = {task: copy.deepcopy(expert).double() for task, expert in experts.items()}
    expected, _ = merge(exact, {task: x.double() for task, x in inputs.items()}, num_calibration_samples=1000)
    assert state_error(merged.state_dict(), expected.state_dict()) < torch.finfo(dtype).eps


# 9. Padding.
@pytest.mark.parametrize("method", METHODS)
def test_sentences_that_are_padded_further_give_the_same_merge(method: type) -> None:
    experts, merges = experts_of(lambda _: PicoText(), 2), []
    for sides in ((0, 0), (0, 5), (5, 0)):
        generator, padded = torch.Generator().manual_seed(0), {}
        for task in experts:
            ids = nn.functional.pad(torch.randint(1, 20, (N, 6), generator=generator), sides, value=7)
            lengths = torch.randint(2, 7, (N, 1), generator=generator)
            mask = nn.functional.pad((torch.arange(6) < lengths).long(), sides)
            padded[task] = {"input_ids": ids, "attention_mask": mask}
        merges.append(merge(experts, padded, method, coverage="full")[0].state_dict())
    assert all(state_error(further, merges[0]) < SAME for further in merges[1:])


# 10. Buffers that are counted, not learnt.
class Counting(PicoMLP):
    def __init__(self, seed: int, *, persistent: bool = True) -> None:
        super().__init__(seed=seed)
        self.register_buffer("position_ids", LARGE + torch.arange(6), persistent=persistent)
        self.register_buffer("is_used", torch.tensor([True, False]))


@pytest.mark.parametrize("stored_by", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_integer_and_boolean_buffers_are_copied_and_one_that_is_not_stored_is_no_error(stored_by: Any) -> None:
    merged, _ = merge({task: Counting(i, persistent=i in stored_by) for i, task in enumerate(TASKS[:3])})
    assert torch.equal(merged.position_ids, LARGE + torch.arange(6))
    assert torch.equal(merged.is_used, torch.tensor([True, False]))


# 11. Tensors missing and tensors too many, at once.
def test_missing_and_unexpected_tensors_are_both_listed(forwards: Any) -> None:
    experts = mlps()
    experts["letters"].mlp[1].register_parameter("bias", None)
    experts["letters"].extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"'letters' lacks 'mlp\.1\.bias' and has in addition 'extra'"):
        merge(experts)
    assert forwards.count == 0


# 12. A vocabulary that has grown.
@pytest.mark.parametrize("odd", ["letters", "_pretrained_"])
def test_embeddings_of_other_sizes_are_refused_with_both_shapes_and_the_way_out(odd: str, forwards: Any) -> None:
    experts = {"digits": PicoText(vocabulary=10), odd: PicoText(vocabulary=12)}
    words = {"input_ids": torch.ones(N, 3).long(), "attention_mask": torch.ones(N, 3).long()}
    message = rf"'embedding\.weight' is \(10, 8\) in 'digits' and \(12, 8\) in '{odd}'.*Take the model out of"
    with pytest.raises(ValueError, match=message):
        merge(experts, dict.fromkeys(experts, words))
    assert forwards.count == 0
    merge({"digits": experts["digits"]}, {"digits": words})


# 13. A pool that loads what is no expert.
@pytest.mark.parametrize("odd", ["letters", "_pretrained_"])
@pytest.mark.parametrize(
    ("loaded", "kind"),
    [(None, "NoneType"), ({"w": torch.zeros(1)}, "dict"), ("path", "str"), (7, "int"), (PicoMLP, "type")],
)
def test_a_pool_that_loads_something_else_than_a_module_names_the_expert(loaded: Any, kind: str, odd: str) -> None:
    class Pool(BaseModelPool):
        def load_model(self, model_name_or_config: Any, *_: Any, **__: Any) -> Any:
            return loaded if model_name_or_config == odd else PicoMLP()

    with pytest.raises(TypeError, match=f"Loading expert '{odd}' gave a {kind}, not a torch module"):
        merge(Pool(dict.fromkeys(["_pretrained_", "digits", "letters"], "lazy")))


# 14. Experts of several dtypes.
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("high", [torch.float32, torch.float64])
@pytest.mark.parametrize("pretrained", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize("asked", [None, "float64"])
def test_experts_of_two_dtypes_are_computed_in_float32_and_saved_in_the_pretrained_ones(
    low: torch.dtype, high: torch.dtype, pretrained: torch.dtype | None, asked: str | None
) -> None:
    models: dict[str, nn.Module] = mlps(2)
    models["digits"].to(low)
    models["letters"].to(high)
    exact = {task: copy.deepcopy(expert).to(torch.float64) for task, expert in models.items()}
    if pretrained is not None:
        models["_pretrained_"] = PicoMLP(seed=9).to(pretrained)
    merged, _ = merge(models, dtype=asked)
    expected = getattr(torch, asked) if asked else pretrained or torch.float32
    assert {parameter.dtype for parameter in merged.parameters()} == {expected}
    oracle = oracles.whole_network(exact, vectors(exact), [["mlp.0"], ["mlp.1"], ["mlp.2"]], path_points=S)
    assert state_error(merged.state_dict(), oracle) < (1e-2 if expected == torch.bfloat16 else 10 * FLOAT32)


# 15. Counts of calibration inputs.
@pytest.mark.parametrize("batch_size", [1, 4, 7, 10, 32])
def test_ten_inputs_asked_for_are_ten_inputs_used(batch_size: int) -> None:
    _, report = merge(mlps(), num_calibration_samples=10, batch_size=batch_size)
    assert set(report["num_inputs_used"].values()) == {10}
    assert {layer["tokens"] for layer in report["layers"]} == {3 * 10}
    assert all(len(set(indices)) == 10 for indices in report["calibration_indices"].values())


@pytest.mark.parametrize("given", [lambda rows: rows, list, lambda rows: DataLoader(TensorDataset(rows), batch_size=4)])
def test_too_few_inputs_are_an_error_that_says_how_many_there_are(given: Callable[[Tensor], Any]) -> None:
    inputs = vectors() | {"letters": given(vectors()["letters"][:7])}
    with pytest.raises(ValueError, match="task 'letters' has 7 calibration inputs, 10 were asked for"):
        merge(mlps(), inputs, num_calibration_samples=10)


# 16. Memory.
def test_no_more_than_one_expert_of_a_lazy_pool_is_alive_at_once_and_activations_do_not_pile_up_with_depth() -> None:
    tasks = [f"task{index}" for index in range(8)]
    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def most_activations(depth: int) -> int:
        loading, solving, activations = [], [], []

        class Pool(BaseModelPool):
            def load_model(self, *_: Any, **__: Any) -> nn.Module:
                loading.append(len(alive))
                expert = PicoMLP(depth=depth, seed=len(loading))
                alive.add(expert)
                return expert

        class Watched(CrossMeanAlgorithm):
            def linear_system(self, **options: Any) -> LinearSystem:
                solving.append(len(alive))
                activations.append(sum(type(o) is Tensor and o.shape == (N, 6) for o in gc.get_objects()))
                return super().linear_system(**options)

        merge(Pool(dict.fromkeys(tasks, "lazy")), vectors(tasks), Watched)
        assert max(loading) <= 1
        assert (len(loading), len(solving), max(solving)) == (8, depth, 0)
        return max(activations)

    assert most_activations(2) == most_activations(8) > 0


# 17. Tied weights.
def test_a_merged_model_with_tied_weights_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    words = {"input_ids": torch.randint(20, (N, 5))}
    merged, _ = merge(experts_of(lambda _: LlamaForCausalLM(config).double(), 2), dict.fromkeys(TASKS[:2], words))
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    merged.save_pretrained(tmp_path)  # safetensors, which refuse shared memory
    torch.save(merged.state_dict(), tmp_path / "merged.pt")
    state = LlamaForCausalLM(config).double().eval()
    state.load_state_dict(torch.load(tmp_path / "merged.pt", weights_only=True))
    for loaded in (state, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(loaded(**words).logits, merged(**words).logits)


# 18. Plain things in, a model out.
@pytest.mark.parametrize(
    "given",
    [
        lambda rows: rows,
        lambda rows: rows.numpy(),
        lambda rows: {"x": rows},
        lambda rows: list(rows),
        lambda rows: [{"x": row, "label": 0} for row in rows],
        lambda rows: TensorDataset(rows, torch.zeros(len(rows))),
        lambda rows: DataLoader(TensorDataset(rows, torch.zeros(len(rows))), batch_size=5),
        lambda rows: DataLoader([{"x": row, "label": 0} for row in rows], batch_size=5),
    ],
)
def test_a_dict_of_modules_and_plain_data_are_enough(given: Callable[[Tensor], Any]) -> None:
    merged, _ = merge(mlps(), {task: given(rows) for task, rows in vectors().items()})
    assert state_error(merged.state_dict(), merge(mlps())[0].state_dict()) < SAME


# 19. A merge that ends in the middle.
def failing(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise RuntimeError("in the middle")
        return function(*args, **kwargs)

    return fails


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (LinearSystem, "solve", 2),
        (LinearSystem, "add_task", 5),
        (nn.Linear, "forward", 25),  # a few calls after the first layer is solved
        (PicoMLP, "hook", 12),
        (TensorDataset, "__getitem__", 40),
    ],
)
def test_after_an_error_in_the_middle_hooks_are_gone_and_experts_are_as_before(
    owner: type, name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, kept, networks = mlps(), [], CrossMeanAlgorithm.networks
    experts["digits"].train()
    experts["letters"].eval()
    if name == "hook":
        experts["digits"].mlp[1].register_forward_hook(failing(lambda *_: None, at))
    else:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name), at))
    before = {task: copy.deepcopy(expert.state_dict()) for task, expert in experts.items()}
    hooks = {task: list(hooks_of(expert)) for task, expert in experts.items()}
    monkeypatch.setattr(CrossMeanAlgorithm, "networks", lambda *a: kept.append(networks(*a)) or kept[-1])
    with pytest.raises((RuntimeError, ValueError), match="in the middle"):
        merge(experts, {task: TensorDataset(rows) for task, rows in vectors().items()})
    assert all(list(hooks_of(made.runner)) == hooks["digits"] for made in kept)
    assert len(kept) == (owner is not TensorDataset)
    assert (experts["digits"].training, experts["letters"].training) == (True, False)
    for task, expert in experts.items():
        assert list(hooks_of(expert)) == hooks[task]
        assert all(torch.equal(tensor, before[task][key]) for key, tensor in expert.state_dict().items())


# 20. Repetition.
@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bits_and_another_order_of_tasks_the_same_numbers(method: type) -> None:
    def states(order: list[str], seed: int = 0) -> dict[str, Tensor]:
        pool = pico.pico_pool({task: pico.pico_experts()[task] for task in order})
        return method(num_calibration_samples=10, seed=seed).run(pool).state_dict()

    tasks = list(TASKS[:3])
    first, again, turned, other = states(tasks), states(tasks), states(tasks[::-1]), states(tasks, seed=1)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert state_error(turned, first) < SAME
    assert state_error(other, first) > 1e-6
