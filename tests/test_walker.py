"""Pausing forwards safely: order, modes of the thread, foreign greenlets and threads, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import greenlet
import pytest
import torch
from pico import PicoMLP, experts_of, hooks_of, pico_calibration, pico_clip, pico_experts, vectors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_bench_crossmean import CrossMeanAlgorithm, RegMeanAlgorithm
from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.course import observe
from fusion_bench_crossmean.forwards import WalkError
from fusion_bench_crossmean.linear_system import SingularSystemError
from fusion_bench_crossmean.walker import Walker

WIDTH = 4


@dataclass
class Source:
    """One network for all tasks, or one per path point."""

    module: nn.Module
    path_points: tuple[float, ...] = (1.0,)
    others: Mapping[float, nn.Module] = field(default_factory=dict)

    def network(self, task: str, path_point: float) -> nn.Module:
        return self.others.get(path_point, self.module)

    def load(self, task: str, path_point: float, names: Collection[str] | None = None) -> None:
        """Everything is there."""


class Scripted(nn.Module):
    """Linear layers `a`, `b`, `c` and a forward written by the test."""

    def __init__(self, script: Callable[[Scripted, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.script = script

    def forward(self, x: Tensor) -> Any:
        return self.script(self, x)


def batches(count: int = 2) -> dict[str, list[Batch]]:
    return {"digits": [Batch(args=(torch.full((2, WIDTH), float(i + 1)),)) for i in range(count)]}


def walker_on(module: nn.Module, layers: str = "abc", count: int = 2) -> Walker:
    return Walker(Source(module), batches(count), list(layers))


def chain(net: Scripted, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x).tanh()).tanh())


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """The cyclic collector is off: what dies inside the block died by its reference count."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Order and groups


def groups_of(script: Callable[[Scripted, Tensor], Any], layers: str = "abc") -> list[tuple[str, ...]]:
    module = Scripted(script)
    groups = [group.names for group in observe(module, batches()["digits"][0], list(layers)).groups]
    assert not list(hooks_of(module))
    return groups


def test_layers_come_in_the_order_in_which_the_forward_reaches_them() -> None:
    assert groups_of(lambda net, x: net.b(net.c(net.a(x)))) == [("a",), ("c",), ("b",)]


def test_layers_that_receive_one_tensor_form_a_group_in_the_order_of_their_calls() -> None:
    assert groups_of(lambda net, x: net.a(net.c(x) + net.b(x))) == [("c", "b"), ("a",)]


def test_layers_that_receive_equal_copies_form_no_group() -> None:
    assert groups_of(lambda net, x: net.c(net.a(x.clone()) + net.b(x.clone()))) == [("a",), ("b",), ("c",)]


def test_a_tensor_that_dies_between_two_layers_is_not_taken_for_its_successor() -> None:
    """Without a reference held, the second temporary would get the identity of the first."""

    def script(net: Scripted, x: Tensor) -> None:
        net.a(x + 1), net.b(x + 2), net.c(x + 3)

    assert groups_of(script) == [("a",), ("b",), ("c",)]


def test_a_tensor_that_is_changed_in_place_between_two_layers_is_another_input() -> None:
    def script(net: Scripted, x: Tensor) -> Tensor:
        x = x.clone()
        a = net.a(x)
        return net.c(x.add_(a.detach())) + net.b(x)

    with torch.no_grad():
        assert groups_of(script) == [("a",), ("c", "b")]


def test_a_forward_that_writes_into_its_own_input_is_refused() -> None:
    module = Scripted(lambda net, x: chain(net, x.mul_(2)))
    with pytest.raises(WalkError, match="writes into its own input"):
        walker_on(module).__enter__()
    assert not list(hooks_of(module))


def test_a_module_that_two_networks_share_is_paused_once() -> None:
    shared, other = Scripted(chain), Scripted(chain)
    other.b = shared.b
    source = Source(shared, (0.0, 1.0), {0.0: other})
    with Walker(source, batches(), list("abc")) as walker:
        assert len(list(hooks_of(shared))) == len(list(hooks_of(other))) == 3
        assert [group.name for group, _ in walker] == ["a", "b", "c"]
    assert not list(hooks_of(shared))


def test_q_k_v_of_clip_form_one_group() -> None:
    network = pico_clip().eval()
    prefix = "vision_model." if hasattr(network, "vision_model") else ""
    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    groups = observe(network, Batch(args=(pico_calibration()["digits"][:2],)), layers).groups
    first = f"{prefix}encoder.layers.0"
    assert [group.name for group in groups[:4]] == [
        f"{first}.self_attn.{{q_proj,k_proj,v_proj}}",
        f"{first}.self_attn.out_proj",
        f"{first}.mlp.fc1",
        f"{first}.mlp.fc2",
    ] or {*groups[0].names} == {f"{first}.self_attn.{x}_proj" for x in "qkv"}
    assert len(groups) == 8


def test_layers_that_are_never_reached_are_named_before_anything_is_solved() -> None:
    calls = []

    def script(net: Scripted, x: Tensor) -> Tensor:
        calls.append(1)
        return net.b(x)

    module = Scripted(script)
    with pytest.raises(WalkError, match=r"2 of 3 covered layers were never reached.*'a', 'c'"):
        walker_on(module).__enter__()
    assert len(calls) == 1
    assert not list(hooks_of(module))


def test_a_layer_that_is_reached_twice_is_named_before_anything_is_solved() -> None:
    module = Scripted(lambda net, x: net.a(net.c(net.b(net.a(x)))))
    with pytest.raises(WalkError, match=r"1 covered layers are called more than once.*'a'"):
        walker_on(module).__enter__()
    assert not list(hooks_of(module))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda net, x: net.c(net.a(x)), "reached layer 'c' where 'b'"),
        (lambda net, x: net.b(net.a(x)), "ended before it reached layer 'c'"),
        (lambda net, x: net.b(net.a(net.a(x))), "reached layer 'a' where 'b'"),
    ],
)
def test_a_forward_that_changes_its_course_from_batch_to_batch_is_refused(script: Any, message: str) -> None:
    module = Scripted(lambda net, x: chain(net, x) if x[0, 0] < 2 else script(net, x))
    with pytest.raises(WalkError, match=message), walker_on(module) as walker:
        for _ in walker:
            pass
    assert not list(hooks_of(module))


def test_an_exception_of_the_probe_leaves_no_hook() -> None:
    module = Scripted(lambda net, x: net.a(x) @ x)
    with pytest.raises(RuntimeError, match="shapes"):
        walker_on(module).__enter__()
    assert not list(hooks_of(module))


def test_every_forward_waits_while_the_loop_body_runs_and_goes_on_with_what_it_wrote() -> None:
    module = Scripted(chain).eval()
    inputs = {}
    with torch.no_grad(), walker_on(module) as walker:
        assert len(walker) == 3
        for group, rows in walker:
            inputs[group.name] = [batch[1.0] for batch in rows["digits"]]
            module.get_submodule(group.name).weight.mul_(2)
        for index, batch in enumerate(batches()["digits"]):
            x = batch.args[0]
            for name in "abc":  # the weights are doubled by now
                assert torch.equal(inputs[name][index], x)
                x = getattr(module, name)(x).tanh()


def test_each_network_runs_once_per_batch_and_once_for_the_probe_and_not_beyond_the_last_layer() -> None:
    begun, ended = [], []

    def script(net: Scripted, x: Tensor) -> Tensor:
        begun.append(1)
        x = chain(net, x)
        ended.append(1)
        return x

    with walker_on(Scripted(script), count=5) as walker:
        assert [group.name for group, _ in walker] == ["a", "b", "c"]
    assert len(begun) == 6
    assert len(ended) == 1


# Modes of the thread


def half_precision() -> torch.autocast:
    return torch.autocast("cpu", torch.float16)


def bfloat16_precision() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
    )


def modes_seen(context: Callable[[], Any], outer: Callable[[], Any] = contextlib.nullcontext) -> list[Any]:
    """Walks a model whose forward has `context` around layer b; returns what loop body and forwards see."""

    def plain(x: Tensor) -> Tensor:
        return x.detach().to(torch.get_default_dtype())

    seen: dict[str, list[Any]] = {"before": [], "inside": [], "after": [], "loop": []}

    def script(net: Scripted, x: Tensor) -> Tensor:
        seen["before"].append(modes())
        x = net.a(x).tanh()
        with context():
            x = net.b(plain(x)).tanh()
            seen["inside"].append(modes())
        x = plain(x)
        seen["after"].append(modes())  # before c: a walk ends in front of its last layer
        return net.c(x)

    module = Scripted(script)
    with outer():
        expected = modes()
        with context():
            inside = modes()
        with walker_on(module, count=3) as walker:
            for _ in walker:
                seen["loop"].append(modes())
            assert modes() == expected
        assert modes() == expected
    assert inside != expected
    assert seen["before"] == seen["after"] == [expected] * 4
    assert seen["inside"] == [inside] * 4
    assert seen["loop"] == [expected] * 3
    return seen["loop"]


@pytest.mark.float32
@pytest.mark.parametrize("outer", [contextlib.nullcontext, half_precision], ids=["plain", "autocast"])
@pytest.mark.parametrize("context", [torch.no_grad, bfloat16_precision], ids=["no_grad", "autocast"])
def test_grad_mode_and_autocast_of_a_forward_reach_neither_the_caller_nor_another_forward(
    context: Any, outer: Any
) -> None:
    modes_seen(context, outer)


@pytest.mark.float32
def test_autocast_switched_off_inside_a_forward_stays_inside() -> None:
    modes_seen(lambda: torch.autocast("cpu", enabled=False), bfloat16_precision)


def test_grad_switched_on_inside_a_forward_stays_inside() -> None:
    modes_seen(torch.enable_grad, torch.no_grad)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_what_the_loop_body_switches_does_not_reach_the_forwards(steps_before: int) -> None:
    """Neither those that wait nor those that have not begun."""
    seen = []

    def script(net: Scripted, x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        x = net.a(x).tanh()
        seen.append(torch.is_grad_enabled())
        x = net.b(x).tanh()
        seen.append(torch.is_grad_enabled())
        return net.c(x)

    with walker_on(Scripted(script), count=1) as walker:
        steps = iter(walker)
        for _ in range(steps_before):
            next(steps)
        with torch.no_grad():
            list(steps)
            assert not torch.is_grad_enabled()
    assert seen == [True] * 6


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (torch.inference_mode, r"torch\.inference_mode"),
        (lambda: torch.device("cpu"), r"torch\.device"),
        (Dispatch, "dispatch mode"),
    ],
    ids=["inference_mode", "device", "dispatch_mode"],
)
def test_other_modes_inside_a_forward_are_refused_by_name_and_do_not_leak(context: Any, name: str) -> None:
    def script(net: Scripted, x: Tensor) -> Tensor:
        x = net.a(x)
        with context():
            x = net.b(x)
        return net.c(x)

    module, before = Scripted(script), modes()

    def walk() -> None:
        with torch.no_grad(), walker_on(module) as walker:
            for group, _ in walker:
                assert group.name == "a"
                assert torch._C._len_torch_dispatch_stack() == 0

    with pytest.raises(WalkError, match=f"layer 'b' inside .*{name}"):
        walk()
    assert modes() == before
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not list(hooks_of(module))


def test_a_mode_that_the_caller_is_in_is_no_reason_to_refuse() -> None:
    with torch.inference_mode(), torch.device("cpu"), Dispatch(), walker_on(Scripted(chain)) as walker:
        assert len(list(walker)) == 3


def test_modes_are_as_before_after_a_forward_that_fails_inside_one() -> None:
    def script(net: Scripted, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return net.a(x) if x[0, 0] < 2 else fail("inside")

    def fail(text: str) -> Any:
        raise OSError(text)

    before = modes()
    with pytest.raises(WalkError, match="OSError: inside"), walker_on(Scripted(script), "a") as walker:
        list(walker)
    assert modes() == before


@pytest.mark.float32  # autocast leaves float64 alone
@pytest.mark.parametrize("surrounding", [torch.inference_mode, torch.no_grad, bfloat16_precision])
def test_a_merge_is_the_same_whatever_mode_it_is_started_in(surrounding: Any) -> None:
    experts, inputs = experts_of(lambda seed: PicoMLP(seed=seed)), vectors()
    expected = CrossMeanAlgorithm(num_calibration_samples=24).run(experts, inputs).state_dict()
    with surrounding():
        before = modes()
        merged = CrossMeanAlgorithm(num_calibration_samples=24).run(experts, inputs)
        assert modes() == before
    assert all(torch.equal(tensor, expected[key]) for key, tensor in merged.state_dict().items())
    assert not any(p.is_inference() for p in merged.parameters())
    merged(inputs["digits"]).sum().backward()  # the result can be trained on


@pytest.mark.float32
def test_statistics_are_summed_without_autocast_where_the_model_opens_it_itself() -> None:
    class Autocast(PicoMLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    experts, inputs = experts_of(lambda seed: Autocast(seed=seed)), vectors()
    seen = []

    class Watched(RegMeanAlgorithm):
        def input_pair(self, inputs: dict[float, Tensor]) -> tuple[Tensor, Tensor]:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().input_pair(inputs)

    Watched(num_calibration_samples=24).run(experts, inputs)
    assert seen
    assert not any(seen)


def test_products_are_full_float32_during_a_merge_and_as_the_caller_had_them_afterwards() -> None:
    seen = set()

    class Watched(RegMeanAlgorithm):
        def input_pair(self, inputs: dict[float, Tensor]) -> tuple[Tensor, Tensor]:
            seen.add(torch.get_float32_matmul_precision())
            return super().input_pair(inputs)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        Watched(num_calibration_samples=24).run(experts_of(lambda seed: PicoMLP(seed=seed)), vectors())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {"highest"}


# Greenlets and threads that are not ours


def test_a_call_from_the_loop_body_runs_straight_through() -> None:
    module = Scripted(chain)
    x = torch.ones(2, WIDTH)
    expected = module(x)
    with walker_on(module) as walker:
        for _ in walker:
            assert torch.equal(module(x), expected)


def test_a_call_from_another_thread_runs_straight_through() -> None:
    module = Scripted(chain)
    x = torch.ones(2, WIDTH)
    expected, results = module(x), []
    with walker_on(module) as walker:
        for _ in walker:
            thread = threading.Thread(target=lambda: results.append(module(x)))
            thread.start()
            thread.join(timeout=30)
            assert not thread.is_alive()
    assert len(results) == 3
    assert all(torch.equal(result, expected) for result in results)


def test_a_call_from_a_greenlet_of_the_user_runs_straight_through() -> None:
    module = Scripted(chain)
    x = torch.ones(2, WIDTH)
    expected = module(x)
    with walker_on(module) as walker:
        for _ in walker:
            user = greenlet.greenlet(lambda: module(x))
            assert torch.equal(user.switch(), expected)
            assert user.dead


def test_a_program_that_runs_in_greenlets_can_merge_in_one_of_them() -> None:
    """Two merges on the same experts take turns after every layer, each in a greenlet of the program's own."""
    experts, inputs = experts_of(lambda seed: PicoMLP(seed=seed)), vectors()
    expected = CrossMeanAlgorithm(num_calibration_samples=24).run(experts, inputs).state_dict()
    main, turns = greenlet.getcurrent(), []

    class Polite(CrossMeanAlgorithm):
        def linear_system(self, **options: Any) -> Any:
            turns.append((id(self), options["name"]))
            with torch.enable_grad():  # modes belong to the thread: whoever switches inside ours puts them right
                main.switch()
            return super().linear_system(**options)

    workers = [greenlet.greenlet(Polite(num_calibration_samples=24).run) for _ in range(2)]
    for worker in workers:
        worker.switch(experts, inputs)
    results: dict[int, Any] = {}
    while len(results) < 2:
        for index, worker in enumerate(workers):
            if not worker.dead:
                returned = worker.switch()
                if worker.dead:
                    results[index] = returned
    assert [layer for _, layer in turns] == [f"mlp.{i}" for i in range(3) for _ in range(2)]
    for merged in results.values():
        assert all(torch.equal(tensor, expected[key]) for key, tensor in merged.state_dict().items())


def test_two_walks_over_one_module_do_not_pause_each_other() -> None:
    module = Scripted(chain)
    with walker_on(module) as one, walker_on(module, "ac") as other:
        first, second = iter(one), iter(other)
        order = [next(walk)[0].name for walk in (first, second, second, first, first)]
        assert order == ["a", "a", "c", "b", "c"]
        assert next(second, None) is None
        assert next(first, None) is None


def test_a_walk_can_go_on_in_another_greenlet_than_it_began() -> None:
    module = Scripted(chain)
    with walker_on(module) as walker:
        steps = iter(walker)
        names = [next(steps)[0].name]
        names += greenlet.greenlet(lambda: [group.name for group, _ in steps]).switch()
    assert names == ["a", "b", "c"]


def results_beside_a_thread(run: Callable[[], Any], call: Callable[[], bool], at_least: int) -> list[Any]:
    """What `run` returns each time, while a thread keeps calling; every call must succeed and say True."""
    done, calls, errors, results = threading.Event(), [], [], []

    def work() -> None:
        try:
            with torch.no_grad():
                while not done.is_set():
                    calls.append(call())
        except BaseException as error:  # noqa: BLE001  (a thread's errors are lost otherwise)
            errors.append(error)

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        while len(results) < at_least or (len(calls) <= 10 and len(results) < 1000):
            results.append(run())
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join(timeout=60)
    assert not errors
    assert len(calls) > 10
    assert all(calls)
    return results


def test_a_thread_that_keeps_calling_the_experts_neither_disturbs_a_merge_nor_is_disturbed() -> None:
    """From before the probe to after the last hook is removed; the hooks come and go while the thread calls."""
    experts, inputs = experts_of(lambda seed: PicoMLP(seed=seed, depth=6)), vectors()
    method = CrossMeanAlgorithm(num_calibration_samples=24, batch_size=6)
    expected = method.run(experts, inputs).state_dict()
    expert, x = experts["digits"], inputs["digits"]
    with torch.no_grad():
        output = expert(x)
    merges = results_beside_a_thread(
        lambda: method.run(experts, inputs).state_dict(), lambda: torch.equal(expert(x), output), at_least=2
    )
    for merged in merges:
        assert all(torch.equal(merged[key], expected[key]) for key in expected)


def test_a_thread_that_keeps_calling_a_module_neither_disturbs_a_walk_over_it_nor_is_disturbed() -> None:
    """From before the probe to after the last hook is removed; the hooks come and go while the thread calls."""
    module, x = PicoMLP(depth=6).eval(), vectors()["digits"]
    layers = [f"mlp.{i}" for i in range(6)]

    def walk() -> list[Tensor]:
        with Walker(Source(module), {"digits": [Batch(args=(rows,)) for rows in x.split(6)]}, layers) as walker:
            return [torch.cat([batch[1.0] for batch in inputs["digits"]]) for _, inputs in walker]

    with torch.no_grad():
        output, expected = module(x), walk()
        walks = results_beside_a_thread(walk, lambda: torch.equal(module(x), output), at_least=5)
    assert not list(hooks_of(module))
    assert len(expected) == 6
    for inputs in walks:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(inputs, expected, strict=True))


def test_a_call_in_the_middle_of_a_registration_runs_straight_through() -> None:
    """Torch adds a hook first and marks it as one with keywords after that; a thread may call in between."""
    module, x = Scripted(chain), torch.ones(2, WIDTH)
    expected = module(x)
    with walker_on(module):
        for layer in (module.a, module.b, module.c):
            assert layer._forward_pre_hooks_with_kwargs
            layer._forward_pre_hooks_with_kwargs.clear()
        assert torch.equal(module(x), expected)


def test_the_probe_ignores_calls_from_elsewhere() -> None:
    x = torch.ones(2, WIDTH)

    def script(net: Scripted, y: Tensor) -> Tensor:
        if y[0, 0] == 1:  # the probe's batch, not x + 1
            thread = threading.Thread(target=net.a, args=(x + 1,))
            thread.start()
            thread.join(timeout=30)
            greenlet.greenlet(lambda: net.b(x + 1)).switch()
        return chain(net, y)

    assert groups_of(script) == [("a",), ("b",), ("c",)]


# Nothing left behind


class SharedList(list):
    """One list for a module and all its deep copies."""

    def __deepcopy__(self, memo: Any) -> SharedList:
        return self


class Holding(PicoMLP):
    """Every activation that is alive across a pause is watched by a weak reference, also those of copies."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.watched: list[weakref.ref] = SharedList()

    def reached(self, index: int) -> None:
        """Called in front of every layer."""

    def forward(self, x: Tensor) -> Tensor:
        activations = [x * 1]
        self.watched.append(weakref.ref(activations[0]))
        for index, layer in enumerate(self.mlp):
            self.reached(index)
            new = activations[-1] + layer(activations[-1]).tanh()
            self.watched.append(weakref.ref(new))
            activations.append(new)
        return activations[-1]

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.watched)


def holding_walk(module: Holding) -> Walker:
    calibration = {"digits": [Batch(args=(x,)) for x in vectors(["digits"])["digits"].split(8)]}
    return Walker(Source(module), calibration, [f"mlp.{i}" for i in range(len(module.mlp))])


def leave_by_break(module: Holding) -> None:
    with holding_walk(module) as walker:
        for index, _ in enumerate(walker):
            if index == 1:
                assert module.alive > 3
                break


def leave_by_exception(module: Holding) -> None:
    with contextlib.suppress(ZeroDivisionError), holding_walk(module) as walker:
        for index, _ in enumerate(walker):
            assert module.alive
            _ = 1 / (1 - index)


def leave_before_the_first_step(module: Holding) -> None:
    with holding_walk(module):
        pass


def leave_at_the_end(module: Holding) -> None:
    with holding_walk(module) as walker:
        for _ in walker:
            assert module.alive


def leave_by_failing_forward(module: Holding) -> None:
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:  # the probe, then the first batch, then the second
            raise OSError

    hook = module.mlp[1].register_forward_hook(fail)
    with contextlib.suppress(WalkError), holding_walk(module) as walker:
        for _ in walker:
            assert module.alive
    assert len(calls) == 3
    hook.remove()


def leave_by_interrupt(module: Holding) -> None:
    calls = []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = module.mlp[1].register_forward_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt), holding_walk(module) as walker:
        for _ in walker:
            assert module.alive
    assert len(calls) == 3
    hook.remove()


LEAVING = (
    leave_by_break,
    leave_by_exception,
    leave_before_the_first_step,
    leave_at_the_end,
    leave_by_failing_forward,
    leave_by_interrupt,
)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("leave", LEAVING)
def test_paused_activations_and_hooks_are_gone_however_a_walk_ends(leave: Callable[[Holding], None], grad: Any) -> None:
    module = Holding().eval()
    with without_gc(), grad():
        leave(module)
        assert module.watched
        assert module.alive == 0
        assert not list(hooks_of(module))


def test_inputs_of_a_solved_group_are_freed_while_the_forwards_go_on() -> None:
    """When the first forward resumes at layer 1, nothing but the forwards themselves holds what the loop was given."""
    module = PicoMLP(depth=4).eval()
    inputs: list[weakref.ref] = []
    alive: list[bool] = []
    hook = module.mlp[1].register_forward_hook(lambda *_: alive.append(bool(inputs) and inputs[0]() is not None))
    with without_gc(), torch.no_grad(), holding_walk(module) as walker:  # type: ignore[arg-type]
        for group, rows in walker:
            assert not any(reference() is not None for reference in inputs)
            if group.name == "mlp.1":
                inputs = [weakref.ref(batch[1.0]) for batch in rows["digits"]]
    hook.remove()
    assert alive == [False] * 4  # the probe, then three batches


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
@pytest.mark.parametrize("where", ["forward", "solve"])
def test_a_merge_that_fails_midway_frees_its_activations_and_hooks(where: str, error: type[BaseException]) -> None:
    calls, made = [], []

    class Broken(Holding):
        def reached(self, index: int) -> None:
            if index == 1 and where == "forward":
                calls.append(1)
                if len(calls) == 8:  # the probe, three networks of each of two tasks, the first of the third
                    raise error

    class Failing(CrossMeanAlgorithm):
        def networks(self, *args: Any) -> Any:
            made.append(super().networks(*args))
            return made[0]

        def linear_system(self, **options: Any) -> Any:
            assert made[0].runner.alive >= 9  # three networks of each of three tasks wait
            if options["name"] == "mlp.1":
                assert where == "solve"
                raise error
            return super().linear_system(**options)

    experts = experts_of(lambda seed: Broken(seed=seed))
    with without_gc():
        try:
            Failing(num_calibration_samples=24).run(experts, vectors())
            pytest.fail("the merge should have failed")
        except error:
            pass
        assert len(calls) == (8 if where == "forward" else 0)
        (networks,) = made
        assert networks.runner.watched
        for network in (networks.runner, networks.merged, *experts.values()):
            assert network.alive == 0
            assert not list(hooks_of(network))


def test_a_forward_that_swallows_what_ends_it_is_ended_at_its_next_pause() -> None:
    ended = []

    def script(net: Scripted, x: Tensor) -> Tensor:
        try:
            x = net.a(x)
        except BaseException:  # noqa: BLE001  (what the test is about)
            ended.append("caught")
        return net.c(net.b(x))

    module = Scripted(script)
    with walker_on(module) as walker:
        next(iter(walker))
        forwards = [waiting.forward for waiting in walker._waiting.values()]
        assert len(forwards) == 2
        assert not any(forward.dead for forward in forwards)
    assert ended == ["caught"] * 2
    assert all(forward.dead for forward in forwards)
    assert not walker._waiting
    assert not list(hooks_of(module))


def test_a_forward_that_fails_while_it_is_ended_does_not_keep_the_others_paused() -> None:
    ended = []

    def script(net: Scripted, x: Tensor) -> Tensor:
        try:
            return net.c(net.b(net.a(x)))
        finally:
            ended.append(float(x[0, 0]))
            if len(ended) == 2:  # the probe came first
                raise RuntimeError("clean-up failed")

    module = Scripted(script)
    with contextlib.suppress(RuntimeError), walker_on(module, count=3) as walker:
        next(iter(walker))
    assert sorted(ended) == [1.0, 1.0, 2.0, 3.0]
    assert not list(hooks_of(module))


def test_the_error_of_a_forward_is_not_hidden_by_the_end_of_the_others() -> None:
    def script(net: Scripted, x: Tensor) -> Tensor:
        if x[0, 0] > 2:
            raise OSError("the first reason")
        try:
            return net.c(net.b(net.a(x)))
        except greenlet.GreenletExit:
            raise RuntimeError("clean-up failed") from None

    with pytest.raises(WalkError, match="OSError: the first reason"), walker_on(Scripted(script), count=3) as walker:
        list(walker)


# Configs, experts and their surroundings


class Wrapped(nn.Module):
    """A user's module around a transformers model: no config of its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.tower = network

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x)[1]


def configs_of(network: nn.Module) -> list[Any]:
    return [module.config for module in network.modules() if hasattr(module, "config")]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("fails", [False, True], ids=["merged", "failed"])
def test_recording_of_hidden_states_is_off_in_what_runs_during_a_merge_and_restored(wrapped: bool, fails: bool) -> None:
    """The experts do not run: theirs stays as it is."""
    wrap = Wrapped if wrapped else lambda network: network
    inputs = pico_calibration()
    method = CrossMeanAlgorithm(num_calibration_samples=24, batch_size=8)
    plain = {task: wrap(expert) for task, expert in pico_experts().items()}
    expected = method.run(plain, inputs).state_dict()
    recording = {task: wrap(expert) for task, expert in pico_experts().items()}
    for expert in recording.values():
        for config in configs_of(expert):
            config.output_hidden_states = True
    made, seen = [], []

    class Watched(CrossMeanAlgorithm):
        def networks(self, *args: Any) -> Any:
            made.append(super().networks(*args))
            return made[0]

        def linear_system(self, **options: Any) -> Any:
            seen.extend(config.output_hidden_states for config in configs_of(made[0].runner))
            assert all(config.output_hidden_states for e in recording.values() for config in configs_of(e))
            if fails:
                raise SingularSystemError("on purpose")
            return super().linear_system(**options)

    method = Watched(num_calibration_samples=24, batch_size=8)
    with pytest.raises(SingularSystemError) if fails else contextlib.nullcontext():
        merged = method.run(recording, inputs)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in merged.state_dict().items())
        assert all(config.output_hidden_states for config in configs_of(merged))
    assert seen
    assert not any(seen)
    for network in (made[0].merged, *recording.values()):
        assert all(config.output_hidden_states for config in configs_of(network))


def test_blocks_get_the_keyword_only_arguments_that_the_model_gives_them() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(6, 6))

        def forward(self, hidden: Tensor, *, position_embeddings: Tensor) -> Tensor:
            return hidden + self.mlp(hidden + position_embeddings).tanh()

    class Model(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.positions = nn.Parameter(torch.randn(6))
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, position_embeddings=self.positions)
            return x

    experts = experts_of(Model)
    merged = CrossMeanAlgorithm(num_calibration_samples=24).run(experts, vectors())
    assert not torch.equal(merged.layers[0].mlp[0].weight, experts["digits"].layers[0].mlp[0].weight)


def test_a_layer_called_with_keywords_is_paused_too() -> None:
    seen = []
    with walker_on(Scripted(lambda net, x: net.b(net.a(input=x))), "ab", 1) as walker:
        seen = [(group.name, *(batch[1.0].clone() for batch in inputs["digits"])) for group, inputs in walker]
    assert [name for name, _ in seen] == ["a", "b"]
    assert torch.equal(seen[0][1], torch.ones(2, WIDTH))
