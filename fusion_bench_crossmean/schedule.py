"""How a walk trades memory for time: the schedules, what each needs, and the fastest one that fits."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import Literal

from fusion_bench_crossmean.activation_store import StoreKind
from fusion_bench_crossmean.course import Course
from fusion_bench_crossmean.linear_system import bytes_needed
from fusion_bench_crossmean.memory import GIB, MemoryUse
from fusion_bench_crossmean.weights import Weights

log = logging.getLogger(__name__)

#: What helps where memory is short.
ADVICE = "lower num_calibration_samples or batch_size, or set precision=mixed"

#: How much more than what is in use a heap may hold, for the holes in it (1.8 times was seen).
HOLES = 2.0


@dataclass(frozen=True)
class Schedule:
    """How a walk trades memory for time; the results are the same.

    Args:
        kind: `paused` keeps every forward at the layer group that is being solved. `replay` keeps it in front of the
            block around that group, and runs the block's beginning again for every group, batch by batch.
        store: where what `replay` keeps lies.
        returns_memory: whether freed memory goes back to the system after every network's stretch, see
            `return_free_memory`: it is needed again soon, which costs time, so only where memory is short.
    """

    kind: Literal["paused", "replay"] = "paused"
    store: StoreKind = "device"
    returns_memory: bool = False


@dataclass(frozen=True)
class Need:
    """What a walk needs beside what is in memory when it begins.

    Args:
        course: of one batch.
        num_batches: of all tasks, counted in batches of the observed size.
        num_points: path points, each of which has a forward per batch.
        other: bytes for the tensors of the largest stretch and for the largest linear system.
    """

    course: Course
    num_batches: float
    num_points: int
    other: int

    @classmethod
    def of(cls, course: Course, num_inputs: int, num_points: int, tensors: Weights) -> Need:
        """From the course of one batch, the number of inputs of all tasks, and the shapes of a network's tensors."""
        stretches = [sum(tensors[name].nbytes for name in stop.used if name in tensors) for stop in course.stops]
        systems = [bytes_needed(*group.weight_of(tensors).T.shape) for group in course.groups]
        other = max(stretches) * num_points + max(systems)
        return cls(course, num_inputs / course.batch_size, num_points, other)

    def bytes_for(self, schedule: Schedule, *, on_host: bool = False) -> int:
        """Bytes on the device at the worst moment of a walk; `on_host`: the device is the host."""
        course, forwards = self.course, self.num_batches * self.num_points
        if schedule.kind == "paused":
            return int(course.held_at(course.group_stops) * forwards) + course.peak + self.other
        # What the forwards' own frames keep besides the block's input (the first block's, as a rule) stays in place.
        stays = 1.0 if schedule.store == "device" or (on_host and schedule.store == "cpu") else 0.5
        replayed = course.held_at(course.group_stops) * self.num_points
        return int(stays * course.held_at(course.block_stops) * forwards) + replayed + course.peak + self.other


def choose_schedule(
    need: Need,
    memory: MemoryUse,
    *,
    kind: Literal["auto", "paused", "replay"],
    store: Literal["auto", "device", "cpu", "disk"],
    on_host: bool,
    is_budget: bool,
) -> Schedule:
    """The fastest schedule that fits among those that the settings allow.

    Args:
        need: of the walk.
        memory: of the device.
        kind, store: the settings. A store asks for replay; where blocks cannot be replayed, `auto` pauses.
        on_host: whether the device is the host, whose memory is no other place then.
        is_budget: whether the limit is the user's; a walk that would not keep it is refused, else it is tried.

    Raises:
        MemoryError: nothing fits the user's budget.
    """
    bytes_for = functools.partial(need.bytes_for, on_host=on_host)
    order = [Schedule("paused"), Schedule("replay"), Schedule("replay", "cpu"), Schedule("replay", "disk")]
    allowed = [
        schedule
        for schedule in order
        if kind in ("auto", schedule.kind)
        and (store == schedule.store or (store == "auto" and not (on_host and schedule.store == "cpu")))
        and not (schedule.kind == "replay" and kind == "auto" and need.course.obstacle)
    ]
    if not allowed:
        obstacle = need.course.obstacle
        log.warning("activation_store=%s has nothing to store: %s, so forwards are paused.", store, obstacle)
        allowed = [Schedule("paused")]
    fitting = [schedule for schedule in allowed if bytes_for(schedule) <= memory.free]
    advice = ADVICE if kind == store == "auto" else f"{ADVICE}, or leave schedule and activation_store at auto"
    if not fitting and is_budget:
        hint = f"Raise it, or {advice}" if memory.free > 0 else "That is more than the budget already: raise it"
        least = min(allowed, key=bytes_for)
        raise MemoryError(
            f"The merge needs about {(memory.used + bytes_for(least)) / GIB:.2f} GiB ({least.kind}, activations "
            f"on {least.store}), the budget max_memory_gib is {memory.limit / GIB:.2f}; {memory.used / GIB:.2f} GiB "
            f"are in use before it starts. {hint}."
        )
    chosen = fitting[0] if fitting else allowed[-1]
    chosen = replace(chosen, returns_memory=on_host and bytes_for(chosen) * HOLES > memory.free)
    log.info(
        "schedule=%s, activations on %s: about %.2f GiB beside the %.2f GiB in use, %.2f GiB are free.",
        chosen.kind,
        chosen.store,
        bytes_for(chosen) / GIB,
        memory.used / GIB,
        memory.free / GIB,
    )
    if not fitting:
        log.warning("The merge may run out of memory: %s.", advice)
    return chosen
