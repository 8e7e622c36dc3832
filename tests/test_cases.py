"""What goes wrong for people who merge and calibrate networks: each symptom reduced to its smallest input.

Named after the symptoms, each with the right behaviour; elsewhere in the tests are their kinds in full.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from fusion_bench.modelpool import BaseModelPool
from pico import (
    PicoMLP,
    PicoText,
    experts_of,
    hooks_of,
    pico_calibration,
    pico_clip,
    pico_experts,
    pico_images,
    pico_pool,
    vectors,
)
from safetensors.torch import load_file, save_file
from tolerances import FLOAT32, SAME, relative_error, state_error
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPVisionModel

from fusion_bench_crossmean import CrossMeanAlgorithm, ProgressiveRegMeanAlgorithm, RegMeanAlgorithm
from fusion_bench_crossmean.forwards import WalkError
from fusion_bench_crossmean.linear_system import LinearSystem, SingularSystemError

N = 24
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


def test_experts_that_differ_only_in_their_activation_are_refused_before_any_forward(forwards: Any) -> None:
    for other in ("quick_gelu", "relu"):
        experts = {"digits": pico_clip("gelu"), "letters": pico_clip(other)}
        with pytest.raises(ValueError, match=rf"'gelu' in 'digits' and '{other}' in 'letters' .*activations"):
            merge(experts, pico_calibration())
    assert forwards.count == 0


def test_the_report_says_which_activation_ran() -> None:
    _, report = merge(pico_experts(hidden_act="quick_gelu"), pico_calibration())
    assert "quick_gelu" in report["activation"]


# 2. A fused attention, whose projections no hook on a linear layer ever sees.


class Attentive(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.unused: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


def sequences() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {task: torch.randn(N, 5, 8, generator=generator) for task in ("digits", "letters")}


def test_projections_of_a_fused_attention_are_solved_not_averaged() -> None:
    experts = experts_of(Attentive, 2)
    merged, report = merge(experts, sequences(), coverage="full")
    assert [layer["name"] for layer in report["layers"][:2]] == ["attn.fused_in_proj", "attn.out_proj"]
    average = oracles.average(experts)
    for name in ("attn.in_proj_weight", "attn.out_proj.weight"):
        assert relative_error(merged.state_dict()[name], average[name]) > 1e-3


def test_a_layer_that_was_asked_for_and_not_measured_is_an_error_that_names_it() -> None:
    experts = experts_of(Attentive, 2)
    for expert in experts.values():
        expert.unused = nn.Linear(8, 8)
    with pytest.raises(WalkError, match=r"1 of 5 covered layers were never reached.*'unused'"):
        merge(experts, sequences(), coverage="full")


# 3. A block that needs an argument which only the model itself can give.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))

    def forward(self, x: Tensor, *, position_embeddings: Tensor) -> Tensor:
        return x + self.mlp(x * position_embeddings)


class Positioned(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, position_embeddings=torch.linspace(0.5, 1.5, 6))
        return x


@pytest.mark.parametrize("schedule", ["paused", "replay"])
def test_blocks_get_the_keyword_arguments_that_their_model_gives_them(schedule: str) -> None:
    experts = experts_of(Positioned)
    merged, _ = merge(experts, schedule=schedule)
    groups = [[f"layers.{block}.mlp.{layer}"] for block in range(2) for layer in (0, 2)]
    assert state_error(merged.state_dict(), oracles.whole_network(experts, vectors(), groups, path_points=S)) < SAME


# 4. Names of tensors with and without the prefix that versions of transformers add or drop.


def test_flat_and_nested_checkpoints_give_the_same_merge(tmp_path: Path) -> None:
    merges = []
    for prefix in ("", "vision_model."):
        experts = {}
        for task, expert in pico_experts().items():
            folder = tmp_path / f"{prefix}{task}"
            expert.save_pretrained(folder)
            stored = load_file(folder / "model.safetensors")
            renamed = {prefix + name.removeprefix("vision_model."): tensor for name, tensor in stored.items()}
            save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
            experts[task] = CLIPVisionModel.from_pretrained(folder, dtype=torch.float64)
        merged, _ = merge(experts, pico_calibration())
        groups = oracles.clip_groups(merged, "mlp")
        expected = oracles.whole_network(experts, pico_calibration(), groups, path_points=S)
        assert state_error(merged.state_dict(), expected) < SAME
        merges.append(merged.state_dict())
    assert all(torch.equal(tensor, merges[1][name]) for name, tensor in merges[0].items())


# 5 to 8. Systems that no data determine, or that overflow.


def test_three_tokens_for_sixteen_features_give_finite_weights_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    system = LinearSystem(name="layers.0.fc1")
    for task, weight in (("a", torch.randn(4, 16)), ("b", torch.randn(4, 16))):
        rows = torch.randn(3, 16)
        system.add_task([(rows, rows)], weight, task=task)
    with caplog.at_level(logging.WARNING):
        solution = system.solve(torch.zeros(4, 16))
    assert solution.weight.isfinite().all()
    assert (solution.rank, solution.features) == (6, 16)
    assert solution.ridge > 0
    assert solution.relative_residual < 1e-9
    assert "Layer 'layers.0.fc1': 6 calibration tokens for 16 input features (rank 6)" in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_the_column_of_a_feature_that_is_always_zero_is_the_experts_mean(method: type) -> None:
    experts, inputs = mlps(depth=1), {task: rows.clone() for task, rows in vectors().items()}
    for rows in inputs.values():
        rows[:, 2] = 0
    merged, report = merge(experts, inputs, method)
    mean = torch.stack([expert.mlp[0].weight for expert in experts.values()]).mean(0)
    assert relative_error(merged.mlp[0].weight[:, 2], mean[:, 2]) < SAME
    assert relative_error(merged.mlp[0].weight[:, 1], mean[:, 1]) > 1e-3
    assert report["layers"][0]["dead_features"] == [2]


@pytest.mark.parametrize("share", [1.0, 0.1, 0.3, 0.7, 1.3, 3.1, 7.7])
def test_two_identical_features_without_reduction_or_ridge_are_a_clear_error_or_a_reported_ridge(
    share: float,
) -> None:
    inputs = {task: rows.clone() for task, rows in vectors().items()}
    for rows in inputs.values():
        rows[:, 3] = share * rows[:, 1]  # rounding may hide it from a factorisation
    plain = {"reduce_non_diagonal_ratio": 1.0}
    with pytest.raises(SingularSystemError, match=r"Layer 'mlp\.0': .*not positive definite at relative_ridge=0\."):
        merge(mlps(depth=1), inputs, **plain, relative_ridge=0.0)
    _, report = merge(mlps(depth=1), inputs, **plain, relative_ridge=1e-30)
    (layer,) = report["layers"]
    assert layer["relative_ridge"] > 1e-30
    assert layer["rank"] == 5
    assert any("not positive definite" in text for text in layer["warnings"])


def test_float16_activations_around_300_do_not_overflow_in_the_products() -> None:
    rows = (300 + torch.randn(1000, 8, dtype=torch.float32)).half()
    system = LinearSystem()
    system.add_task([(rows, rows)], torch.randn(4, 8))
    assert system.lhs is not None
    assert system.lhs.dtype == torch.float32
    assert relative_error(system.lhs, rows.double().T @ rows.double()) < FLOAT32
    assert system.solve(torch.zeros(4, 8)).weight.isfinite().all()


# 9. Padding.


@pytest.mark.parametrize("method", METHODS)
def test_sentences_that_are_padded_further_give_the_same_merge(method: type) -> None:
    def text(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return PicoText()

    experts, padded = experts_of(text, 2), {}
    for width in (6, 11):
        generator = torch.Generator().manual_seed(0)
        padded[width] = {}
        for task in experts:
            ids = torch.zeros(N, width, dtype=torch.long)
            ids[:, :6] = torch.randint(1, 20, (N, 6), generator=generator)
            lengths = torch.randint(2, 7, (N, 1), generator=generator)
            mask = (torch.arange(width) < lengths).long()
            padded[width][task] = {"input_ids": ids * mask, "attention_mask": mask}
    short, long = (merge(experts, inputs, method, coverage="full")[0].state_dict() for inputs in padded.values())
    assert state_error(short, long) < SAME


# 10. Buffers that are counted, not learnt.


#: A mean in float32 or float64 would round it.
LARGE = 2**60


class Counting(PicoMLP):
    def __init__(self, seed: int, *, persistent: bool = True) -> None:
        super().__init__(seed=seed)
        self.register_buffer("position_ids", LARGE + torch.arange(6), persistent=persistent)
        self.register_buffer("is_used", torch.tensor([True, False]))


def test_integer_and_boolean_buffers_are_copied_and_one_that_is_not_stored_is_no_error() -> None:
    experts = {"digits": Counting(0), "letters": Counting(1, persistent=False), "textures": Counting(2)}
    merged, _ = merge(experts)
    assert torch.equal(merged.position_ids, LARGE + torch.arange(6))
    assert merged.is_used.dtype == torch.bool


# 11 to 13. Experts that are not what they should be.


def test_missing_and_unexpected_tensors_are_both_listed(forwards: Any) -> None:
    experts = mlps()
    experts["letters"].mlp[1].register_parameter("bias", None)
    experts["letters"].extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"'letters' lacks 'mlp\.1\.bias' and has in addition 'extra'"):
        merge(experts)
    assert forwards.count == 0


def test_embeddings_of_other_sizes_are_refused_with_both_shapes_and_the_way_out(forwards: Any) -> None:
    experts = {"digits": PicoText(vocabulary=10), "letters": PicoText(vocabulary=12)}
    message = r"'embedding\.weight' is \(10, 8\) in 'digits' and \(12, 8\) in 'letters'.*Take the model out of"
    with pytest.raises(ValueError, match=message):
        merge(experts)
    assert forwards.count == 0


@pytest.mark.parametrize(
    ("loaded", "kind"), [(None, "NoneType"), ({"w": torch.zeros(1)}, "dict"), ("path", "str"), (7, "int")]
)
def test_a_pool_that_loads_something_else_than_a_module_names_the_expert(loaded: Any, kind: str) -> None:
    class Pool(BaseModelPool):
        def load_model(self, model_name_or_config: Any, *_: Any, **__: Any) -> Any:
            return loaded if model_name_or_config == "letters" else PicoMLP()

    with pytest.raises(TypeError, match=f"Loading expert 'letters' gave a {kind}, not a torch module"):
        merge(Pool(dict.fromkeys(["digits", "letters"], "lazy")))


# 14. Experts of several dtypes.


@pytest.mark.parametrize("pretrained", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize("asked", [None, "float64"])
def test_experts_of_two_dtypes_are_computed_in_float32_and_saved_in_the_pretrained_ones(
    pretrained: torch.dtype | None, asked: str | None
) -> None:
    models: dict[str, nn.Module] = mlps(2)
    models["digits"].to(torch.bfloat16)
    models["letters"].to(torch.float32)
    exact = {task: copy.deepcopy(expert).to(torch.float64) for task, expert in models.items()}
    if pretrained is not None:
        models["_pretrained_"] = PicoMLP(seed=9).to(pretrained)
    merged, _ = merge(models, dtype=asked)
    expected = getattr(torch, asked) if asked else pretrained or torch.float32
    assert {parameter.dtype for parameter in merged.parameters()} == {expected}
    oracle = oracles.whole_network(
        exact, {task: vectors()[task] for task in exact}, [[f"mlp.{i}"] for i in range(3)], path_points=S
    )
    assert state_error(merged.state_dict(), oracle) < (1e-2 if expected == torch.bfloat16 else 10 * FLOAT32)


# 15. Counts of calibration inputs.


@pytest.mark.parametrize("batch_size", [1, 4, 7, 10, 32])
def test_ten_inputs_asked_for_are_ten_inputs_used(batch_size: int) -> None:
    _, report = merge(mlps(), num_calibration_samples=10, batch_size=batch_size)
    assert set(report["num_inputs_used"].values()) == {10}
    assert {layer["tokens"] for layer in report["layers"]} == {3 * 10}
    assert all(len(set(indices)) == 10 for indices in report["calibration_indices"].values())


def test_too_few_inputs_are_an_error_that_says_how_many_there_are() -> None:
    inputs = vectors() | {"letters": vectors()["letters"][:7]}
    with pytest.raises(ValueError, match="task 'letters' has 7 calibration inputs, 10 were asked for"):
        merge(mlps(), inputs, num_calibration_samples=10)


# 16. Memory.


def test_no_more_than_one_expert_of_a_lazy_pool_is_alive_at_once() -> None:
    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    most = []

    class Pool(BaseModelPool):
        def load_model(self, model_name_or_config: Any, *_: Any, **__: Any) -> nn.Module:
            most.append(len(alive))
            expert = PicoMLP(seed=len(most))
            alive.add(expert)
            return expert

    tasks = [f"task{index}" for index in range(8)]
    merge(Pool(dict.fromkeys(tasks, "lazy")), vectors(tasks))
    assert max(most) <= 1
    assert len(alive) == 0


# 17. Tied weights.


class Tied(PicoMLP):
    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.encoder, self.decoder = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(super().forward(self.encoder(x)))


def test_a_merged_model_with_tied_weights_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    merged, _ = merge(experts_of(Tied))
    assert merged.decoder.weight is merged.encoder.weight
    torch.save(merged.state_dict(), tmp_path / "merged.pt")
    loaded = Tied(9).eval()
    loaded.load_state_dict(torch.load(tmp_path / "merged.pt", weights_only=True))
    assert torch.equal(loaded(vectors()["digits"]), merged(vectors()["digits"]))


# 18. Plain things in, a model out.


@pytest.mark.parametrize(
    "given",
    [
        lambda rows: rows,
        lambda rows: rows.numpy(),
        lambda rows: {"x": rows},
        lambda rows: list(rows),
        lambda rows: TensorDataset(rows, torch.zeros(len(rows))),
        lambda rows: DataLoader(TensorDataset(rows, torch.zeros(len(rows))), batch_size=5),
    ],
)
def test_a_dict_of_modules_and_plain_data_are_enough(given: Callable[[Tensor], Any]) -> None:
    merged, _ = merge(mlps(), {task: given(rows) for task, rows in vectors().items()})
    assert state_error(merged.state_dict(), merge(mlps())[0].state_dict()) < SAME


# 19. A merge that ends in the middle.


def test_after_an_error_in_the_middle_hooks_are_gone_and_experts_are_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = mlps()
    experts["digits"].train()
    experts["letters"].eval()
    before = copy.deepcopy({task: expert.state_dict() for task, expert in experts.items()})
    solve, calls, kept = LinearSystem.solve, [], []
    networks = CrossMeanAlgorithm.networks
    monkeypatch.setattr(CrossMeanAlgorithm, "networks", lambda *a: kept.append(networks(*a)) or kept[-1])

    def fail(self: LinearSystem, fallback: Tensor) -> Any:
        calls.append(self.name)
        if len(calls) == 2:
            raise SingularSystemError("in the middle")
        return solve(self, fallback)

    monkeypatch.setattr(LinearSystem, "solve", fail)
    with pytest.raises(SingularSystemError, match="in the middle"):
        merge(experts)
    assert not list(hooks_of(kept[0].runner))
    assert (experts["digits"].training, experts["letters"].training) == (True, False)
    for task, expert in experts.items():
        assert not list(hooks_of(expert))
        assert all(torch.equal(tensor, before[task][name]) for name, tensor in expert.state_dict().items())


# 20. Repetition.


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bits_and_another_order_of_tasks_the_same_numbers(method: type) -> None:
    def states(order: list[str], seed: int = 0) -> dict[str, Tensor]:
        experts = pico_experts()
        pool = pico_pool({task: experts[task] for task in order})
        return method(num_calibration_samples=10, seed=seed).run(pool).state_dict()

    tasks = list(pico_images())
    first, again, turned, other = states(tasks), states(tasks), states(tasks[::-1]), states(tasks, seed=1)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert state_error(turned, first) < SAME
    assert state_error(other, first) > 1e-6
