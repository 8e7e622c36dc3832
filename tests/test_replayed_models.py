"""Models that are not CLIP, replayed: what a block is given, layers outside any, and blocks that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from pico import PicoMLP, PicoText, draw_weights, experts_of, hooks_of, vectors
from test_schedules import STORES, WIDTH, N, Residual, blocks_of, check_replay, exit_code, run
from tolerances import SAME, state_error
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from fusion_bench_crossmean.forwards import WalkError


class Block(nn.Module):
    """Takes two more tensors and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.mlp(self.norm(x) * scale + shift), scale + 1


class Scripted(nn.Module):
    """Two blocks, a layer outside any, two parameters for the blocks, and a forward written by the test."""

    def __init__(self, seed: int, script: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        kinds: dict[Any, type[Block]] = {
            writes_into_its_input: Writing,
            counts_in_a_buffer: Counting,
            hands_on_a_memory: Remembering,
        }
        self.blocks = nn.ModuleList(kinds.get(script, Block)() for _ in range(2))
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))
        self.script = script

    def forward(self, x: Tensor) -> Any:
        return self.script(self, x)


def further_arguments(net: Scripted, x: Tensor) -> Tensor:
    scale, shift = 1 + x.square().mean(-1, keepdim=True), x.roll(1, -1) * net.shift
    for block in net.blocks:
        x, scale = block(x, scale, shift=shift)
    return net.mlp(x)


def views_as_arguments(net: Scripted, x: Tensor) -> Tensor:
    """Both lie in one tensor."""
    both = torch.cat([x * net.scale, x + net.shift], -1)
    for block in net.blocks:
        x, _ = block(x, both[..., :WIDTH], shift=both[..., WIDTH:])
    return net.mlp(x)


def the_input_as_argument(net: Scripted, x: Tensor) -> Tensor:
    given = x
    for block in net.blocks:
        x, _ = block(x, given, shift=given)
    return net.mlp(x)


def gradients_off(net: Scripted, x: Tensor) -> Tensor:
    with torch.no_grad():
        return further_arguments(net, x)


def gradients_on(net: Scripted, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return further_arguments(net, x)


def bfloat16(net: Scripted, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return further_arguments(net, x)


def parameters_as_arguments(net: Scripted, x: Tensor) -> Tensor:
    for block in net.blocks:
        x, _ = block(x, net.scale, shift=net.shift)
    return net.mlp(x)


def parts_of_parameters_as_arguments(net: Scripted, x: Tensor) -> Tensor:
    for block in net.blocks:
        x, _ = block(x, net.scale[:], shift=net.shift.unsqueeze(0))
    return net.mlp(x)


def kept_between_forwards_as_argument(net: Scripted, x: Tensor) -> Tensor:
    """Made by the first forward, used by all of them."""
    if not hasattr(net, "kept"):
        net.kept = torch.linspace(0.5, 1.5, WIDTH)
    for block in net.blocks:
        x, _ = block(x, net.kept, shift=net.kept)
    return net.mlp(x)


def scripted(script: Callable[[Any, Tensor], Any], num_tasks: int = 2) -> dict[str, nn.Module]:
    return experts_of(lambda seed: Scripted(seed, script), num_tasks)


@pytest.mark.parametrize("coverage", ["mlp", "full"])
@pytest.mark.parametrize(
    "script", [further_arguments, views_as_arguments, the_input_as_argument, gradients_off, gradients_on]
)
def test_replay_gives_a_block_its_arguments_and_modes(script: Any, coverage: str) -> None:
    experts = scripted(script)
    inputs = vectors(experts)
    layers = [["blocks.0.mlp.0"], ["blocks.0.mlp.2"], ["blocks.1.mlp.0"], ["blocks.1.mlp.2"], ["mlp"]]
    layers = layers[:4] if coverage == "mlp" else layers

    def check() -> None:
        ours = check_replay(experts, inputs, coverage=coverage, batch_size=7)
        assert state_error(ours, oracles.whole_network(experts, inputs, layers, path_points=(0, 0.5, 1))) < SAME

    assert exit_code(check) == 0


@pytest.mark.float32
def test_replay_runs_a_block_in_the_autocast_of_the_model() -> None:
    ours = check_replay(scripted(bfloat16), vectors(("digits", "letters")))
    plain, _ = run(scripted(further_arguments), vectors(("digits", "letters")))
    assert state_error(ours, plain) > 1e-4


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    "script", [parameters_as_arguments, parts_of_parameters_as_arguments, kept_between_forwards_as_argument]
)
def test_replay_gives_a_block_what_is_not_of_its_forward_alone(script: Any, store: str) -> None:
    experts = scripted(script)
    assert exit_code(lambda: check_replay(experts, vectors(experts), stores=(store,), batch_size=7)) == 0


@pytest.mark.parametrize("store", STORES)
def test_replay_leaves_layers_outside_any_block_where_they_are(store: str) -> None:
    experts = experts_of(lambda seed: PicoMLP(seed=seed), 2)
    inputs = vectors(experts)
    assert blocks_of(experts["digits"], inputs["digits"]) == [None] * 3
    assert exit_code(lambda: check_replay(experts, inputs, stores=(store,))) == 0


@pytest.mark.parametrize("store", STORES)
def test_replay_does_without_padding(store: str) -> None:
    """Nothing of this text encoder is a block, and its pooler receives an activation of its own."""
    experts = experts_of(lambda seed: text_encoder(seed), 2)
    inputs = {task: texts(index) for index, task in enumerate(experts)}
    whole = {task: data | {"attention_mask": torch.ones(N, 5, dtype=torch.long)} for task, data in inputs.items()}

    def check() -> None:
        masked = check_replay(experts, inputs, stores=(store,), coverage="full", batch_size=7)
        unmasked, _ = run(experts, whole, coverage="full")
        assert state_error(masked, unmasked) > 1e-3

    assert exit_code(check) == 0


def text_encoder(seed: int) -> PicoText:
    network = PicoText().to(torch.get_default_dtype())
    network.load_state_dict(draw_weights(network, seed))
    return network


def texts(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (N, 1), generator=generator)
    return {
        "input_ids": torch.randint(0, 20, (N, 5), generator=generator),
        "attention_mask": (torch.arange(5) < lengths).long(),
    }


class MaskedBlocks(nn.Module):
    """Blocks on tokens, which get the attention mask."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, scale = self.embedding(input_ids), attention_mask.unsqueeze(-1).to(torch.get_default_dtype())
        shift = (x * scale).sum(1, keepdim=True) / scale.sum(1, keepdim=True)
        for block in self.blocks:
            x, _ = block(x, scale, shift=shift)
        return x


def test_replay_leaves_padding_out_of_blocks() -> None:
    experts = experts_of(MaskedBlocks, 2)
    inputs = {task: texts(index) for index, task in enumerate(experts)}
    check_replay(experts, inputs, batch_size=7, token_dropout=0.2)


class Stacked(nn.Module):
    """Blocks in `nn.Sequential`, one nested in another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = nn.Sequential(Residual(), nn.Sequential(Residual(), nn.Tanh()), Residual())
        self.to(torch.get_default_dtype()).load_state_dict(draw_weights(self, seed))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_replay_finds_blocks_in_a_sequential() -> None:
    experts = experts_of(Stacked, 2)
    blocks = blocks_of(experts["digits"], vectors()["digits"], "full")
    assert blocks == ["net.0"] * 2 + ["net.1.0"] * 2 + ["net.2"] * 2
    check_replay(experts, vectors(experts), coverage="full")


class SometimesMasked(MaskedBlocks):
    """A batch without padding has no mask, so that its blocks' arguments lie elsewhere among the tensors."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.shared = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        mask = None if attention_mask.all() else attention_mask.unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask, self.shared)
        return x


class OptionalBlock(Block):
    def forward(self, x: Tensor, mask: Tensor | None, shared: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.mlp(self.norm(x) * (shared if mask is None else shared * mask))


def sometimes_masked(seed: int) -> SometimesMasked:
    network = SometimesMasked(seed)
    network.blocks = nn.ModuleList(OptionalBlock() for _ in range(2))
    network.to(torch.get_default_dtype()).load_state_dict(draw_weights(network, seed))
    return network


@pytest.mark.parametrize("store", STORES)
def test_replay_takes_away_only_what_is_a_forwards_own_whatever_the_batch(store: str) -> None:
    experts = experts_of(sometimes_masked, 2)
    inputs = {task: texts(index) for index, task in enumerate(experts)}
    for data in inputs.values():
        data["attention_mask"][7:14] = 1
    assert exit_code(lambda: check_replay(experts, inputs, stores=(store,), batch_size=7)) == 0


def llama(seed: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    network = LlamaModel(config).to(torch.get_default_dtype())
    network.load_state_dict(draw_weights(network, seed))
    return network


@pytest.mark.parametrize("coverage", ["mlp", "full"])
def test_replay_runs_decoders_without_their_cache_of_keys_and_values(coverage: str) -> None:
    experts = experts_of(llama, 2)
    inputs = {task: texts(index) for index, task in enumerate(experts)}
    assert all(expert.config.use_cache for expert in experts.values())
    check_replay(experts, inputs, batch_size=7, coverage=coverage)
    assert all(expert.config.use_cache for expert in experts.values())


# Blocks that cannot be replayed


def writes_into_its_input(net: Scripted, x: Tensor) -> Tensor:
    return further_arguments(net, x * 1)


class Writing(Block):
    """Changes its input once its layers have been reached."""

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        new, scale = super().forward(x, scale, shift=shift)
        return new + x.mul_(1.1), scale


def counts_in_a_buffer(net: Scripted, x: Tensor) -> Tensor:
    return further_arguments(net, x)


class Counting(Block):
    """Notes every call in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().forward(x, scale, shift=shift)


def called_twice(net: Scripted, x: Tensor) -> Tensor:
    first, second = net.blocks
    x, scale = first(x, x.square(), shift=x)
    forward, second.forward = second.forward, lambda x: x * 2
    x = second(x)
    second.forward = forward
    x, _ = second(x, scale, shift=x)
    return net.mlp(x)


def from_without(net: Scripted, x: Tensor) -> Tensor:
    first, second = net.blocks
    x, scale = first(x, x.square(), shift=x)
    return net.mlp(second.mlp(x * scale))


class Memory:
    """What a block may change without any tensor showing it."""

    calls = 0


def hands_on_a_memory(net: Scripted, x: Tensor) -> Tensor:
    memory = Memory()
    for block in net.blocks:
        x = block(x, memory, shift=net.shift)
    return net.mlp(x)


class Remembering(Block):
    """Counts its calls in its second argument."""

    def forward(self, x: Tensor, memory: Memory, *, shift: Tensor) -> Tensor:  # type: ignore[override]
        memory.calls += 1
        return x + self.mlp(self.norm(x) * memory.calls + shift)


OBSTACLES = {
    hands_on_a_memory: "blocks receive a Memory, which running one twice may change twice",
    writes_into_its_input: r"'blocks\.0', 'blocks\.1' writes into its own input",
    counts_in_a_buffer: r"'blocks\.0', 'blocks\.1' writes into its own input or into a buffer",
    called_twice: r"'blocks\.1' is called more than once",
    from_without: r"'blocks\.1\.mlp\.0', 'blocks\.1\.mlp\.2' is not reached from within its block",
}


@pytest.mark.parametrize("script", OBSTACLES)
def test_blocks_that_cannot_be_replayed_are_refused_with_the_reason(script: Any) -> None:
    experts = scripted(script)
    with pytest.raises(WalkError, match=f"cannot be replayed: {OBSTACLES[script]}.*schedule=paused"):
        run(experts, vectors(experts), schedule="replay")
    assert not [hook for expert in experts.values() for hook in hooks_of(expert)]


@pytest.mark.parametrize("settings", [{}, {"max_memory_gib": 1000}, {"activation_store": "device"}], ids=str)
@pytest.mark.parametrize("script", OBSTACLES)
def test_blocks_that_cannot_be_replayed_are_paused_by_default(script: Any, settings: dict[str, Any]) -> None:
    experts = scripted(script)
    merged, report = run(experts, vectors(experts), schedule="auto", **settings)
    assert report["schedule"]["kind"] == "paused"
    groups = [["blocks.0.mlp.0"], ["blocks.0.mlp.2"], ["blocks.1.mlp.0"], ["blocks.1.mlp.2"]]
    theirs = oracles.whole_network(experts, vectors(experts), groups, path_points=(0, 0.5, 1))
    assert state_error(merged, theirs) < SAME
