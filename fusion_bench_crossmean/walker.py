"""Walks many networks through their layers at once: every forward pauses in front of each layer group.

A forward runs in a greenlet of its own; a pre-hook on the first layer of every group switches back to the walker
with the layer's input, and the walker resumes it once the group is solved. Whatever lies before a group is final when
the group is measured, so one pass per network and batch replaces one pass per layer. No algebra, no method here.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusion_bench_crossmean.activation_store import ActivationStore, StoredInputs
from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.course import Course, observe
from fusion_bench_crossmean.coverage import LayerGroup
from fusion_bench_crossmean.forwards import Arguments, Forward, Pause, WalkError, input_of
from fusion_bench_crossmean.memory import return_free_memory
from fusion_bench_crossmean.recorder import storages_of
from fusion_bench_crossmean.schedule import Schedule

#: What a layer group receives from one calibration batch: path point -> inputs of shape (tokens, in).
Inputs = dict[float, Tensor]


class NetworkSource(Protocol):
    """What the walker needs to know of the networks."""

    path_points: tuple[float, ...]

    def network(self, task: str, path_point: float) -> nn.Module:
        """The module that runs for one task at one path point, in eval mode."""
        ...

    def load(self, task: str, path_point: float, names: Collection[str] | None = None) -> None:
        """Called before a stretch of its forward: gives it the tensors called `names`, None: all of them."""
        ...


class Walker:
    """Iterates over ``(group, inputs)`` in depth order; ``inputs[task]`` gives one `Inputs` per batch, one at a time.

    While the loop body runs, every forward waits in front of `group`, or of the block around it; what the body does
    to the group's weights is what the forwards go on with. After the last group they are dropped where they are. Use
    it as a context manager: leaving ends every unfinished forward and removes every hook.

    Args:
        networks: the modules to walk.
        calibration: task -> batches, shared by all networks.
        layers: names of the layers to stop at.
        choose: the schedule for the course that was observed.

    Raises:
        WalkError: a layer that no forward reaches, or that one forward reaches twice; a forward that changes its
            course from batch to batch, or that pauses inside a thread-wide context other than grad mode and autocast;
            blocks that cannot be replayed.
    """

    def __init__(
        self,
        networks: NetworkSource,
        calibration: Mapping[str, Sequence[Batch]],
        layers: Sequence[str],
        choose: Callable[[Course], Schedule] = lambda _: Schedule(),
    ) -> None:
        self.networks = networks
        self.calibration = calibration
        self.layers = layers
        self.choose = choose
        self.schedule = Schedule()
        #: Seconds spent in forwards so far: by the walk itself, and while a loop body read its inputs.
        self.seconds, self.replay_seconds = 0.0, 0.0
        self._waiting: dict[tuple[str, int, float], Waiting] = {}
        self._replays: list[Forward] = []
        self._stack = contextlib.ExitStack()
        self._owner = object()  # tells this walker's forwards from another's on the same modules

    def __enter__(self) -> Walker:
        task, batches = next(iter(self.calibration.items()))
        point = self.networks.path_points[0]
        self.networks.load(task, point)
        self.course = observe(self.networks.network(task, point), batches[0], self.layers)
        self.schedule = self.choose(self.course)
        if self.schedule.kind == "replay" and self.course.obstacle:
            raise WalkError(f"The blocks cannot be replayed: {self.course.obstacle}. Use schedule=paused.")
        with contextlib.ExitStack() as stack:  # if something does not begin, what has begun ends
            store = stack.enter_context(ActivationStore(self.schedule.store))
            paused = self.schedule.kind == "paused"
            stops = self.course.group_stops if paused else self.course.block_stops
            modules: dict[int, nn.Module] = {}
            for task, batches in self.calibration.items():
                for point in self.networks.path_points:
                    module = self.networks.network(task, point)
                    modules[id(module)] = module
                    for index, batch in enumerate(batches):
                        forward = Forward(functools.partial(batch.run, module), stops, self._owner)
                        stack.callback(forward.cancel)
                        self._waiting[task, index, point] = Waiting(forward, store)
            for name in dict.fromkeys((*stops, *self.course.group_stops)):
                for module in dict.fromkeys(m.get_submodule(name) for m in modules.values()):  # some share a layer
                    pause = Pause(name, self._owner)
                    stack.callback(module.register_forward_pre_hook(pause, with_kwargs=True).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end_replays()
        finally:
            try:
                self._stack.close()  # the hooks, then every forward, whatever goes wrong with one of them
            finally:
                self._waiting.clear()

    def __len__(self) -> int:
        return len(self.course.groups)

    def __iter__(self) -> Iterator[tuple[LayerGroup, Mapping[str, BatchInputs]]]:
        at: str | None = None
        for group, block in zip(self.course.groups, self.course.blocks, strict=True):
            stop = group.names[0] if self.schedule.kind == "paused" or block is None else block
            if stop != at:
                self._advance(at, stop)
                at = stop
            yield group, {task: BatchInputs(self, task, group.names[0], stop) for task in self.calibration}

    def _advance(self, start: str | None, stop: str) -> None:
        """Every forward runs on from one stop to another."""
        began = time.perf_counter()
        stores = self.schedule.store != "device"
        used, own = self.course.used_between(start, stop), self.course.own_arguments(stop) if stores else frozenset()
        for task, batches in self.calibration.items():
            for point in self.networks.path_points:
                self.networks.load(task, point, used)
                module = self.networks.network(task, point)
                for index, batch in enumerate(batches):
                    # Not to be put away, if anything is.
                    shared = (*module.parameters(), *module.buffers(), *batch.tensors()) if stores else ()
                    self._waiting[task, index, point].advance(stop, own, shared)
                if self.schedule.returns_memory:
                    return_free_memory()
        self.seconds += time.perf_counter() - began

    def inputs_at(self, task: str, layer: str, stop: str) -> Iterator[Inputs]:
        """What `layer` receives, batch by batch, from forwards that wait at `stop`."""
        points = self.networks.path_points
        used = None if stop == layer else self.course.used_between(stop, layer)
        for index, batch in enumerate(self.calibration[task]):
            waiting = {point: self._waiting[task, index, point] for point in points}
            with contextlib.ExitStack() as stack:
                for point in points:  # also while the inputs are used: a layer may receive its block's own input
                    stack.enter_context(waiting[point].at_hand())
                stack.callback(self._end_replays)
                reached = {point: waiting[point].arguments for point in points}
                if used is not None:
                    began = time.perf_counter()
                    reached = {
                        point: self._replay(waiting[point], task, index, point, used, stop, layer) for point in points
                    }
                    self.replay_seconds += time.perf_counter() - began
                yield {point: batch.rows(input_of(*arguments)) for point, arguments in reached.items()}

    def _replay(
        self, waiting: Waiting, task: str, index: int, point: float, used: Collection[str], block: str, layer: str
    ) -> Arguments:
        """Runs a block's beginning again, from the inputs that wait in front of it, up to `layer`."""
        self.networks.load(task, point, used)
        module = self.networks.network(task, point).get_submodule(block)
        args, kwargs = waiting.arguments
        # Not called as a module: its pre-hooks have already run.
        call = functools.partial(self.calibration[task][index].call, module.forward, *args, **kwargs)
        replay = Forward(call, (layer,), self._owner, waiting.forward.modes_there)
        self._replays.append(replay)
        return replay.advance(layer)

    def _end_replays(self) -> None:
        while self._replays:
            self._replays.pop().cancel()


class Waiting:
    """A forward and the arguments of the module in front of which it waits."""

    def __init__(self, forward: Forward, store: ActivationStore) -> None:
        self.forward = forward
        self.arguments: Arguments = ((), {})
        self._store = store
        self._path = store.new_path()
        self._stored: StoredInputs | None = None

    def advance(self, stop: str, own: Collection[int], shared: Iterable[Tensor]) -> None:
        """Runs on to `stop` and puts away its `own` arguments there, see `Stop.own`, none of the `shared` tensors."""
        if self._stored is not None:
            self._stored.bring_back()
        self._stored, self.arguments = None, ((), {})  # the forward frees them as it goes on
        self.arguments = self.forward.advance(stop)
        args, kwargs = self.arguments
        leaves = [leaf for index, leaf in enumerate(tree_leaves((args, dict(kwargs)))) if index in own]
        # In another batch another tensor may be in an argument's place.
        kept = storages_of(shared)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not storages_of([leaf]) & kept]
        self._stored = self._store.hold(tensors, self._path)
        if self._stored is not None:
            self._stored.put_away()

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[None]:
        """The arguments' content is there inside the block."""
        if self._stored is not None:
            self._stored.bring_back()
        try:
            yield
        finally:
            if self._stored is not None:
                self._stored.put_away()


class BatchInputs:
    """What a layer group receives, one task's batches one after the other; each is valid until the next."""

    def __init__(self, walker: Walker, task: str, layer: str, stop: str) -> None:
        self._walker = walker
        self._task = task
        self._layer = layer
        self._stop = stop

    def __len__(self) -> int:
        return len(self._walker.calibration[self._task])

    def __iter__(self) -> Iterator[Inputs]:
        return self._walker.inputs_at(self._task, self._layer, self._stop)
