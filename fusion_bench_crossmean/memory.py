"""What a merge needs in memory, what there is, and the schedule that fits."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil
import torch

from fusion_bench_crossmean.course import Course
from fusion_bench_crossmean.linear_system import bytes_needed
from fusion_bench_crossmean.walker import Schedule
from fusion_bench_crossmean.weights import Weights

log = logging.getLogger(__name__)

GIB = 2**30
#: Part of the free memory that is planned with, where no budget is set: estimates err, and others need some too.
CAUTION = 0.8
#: How much more than what is in use a heap may hold, for the holes in it (1.8 times was seen).
HOLES = 2.0


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use on a device, and how many may be.

    Args:
        used: by this process.
        limit: how many it may use in all.
    """

    used: int
    limit: int

    @property
    def free(self) -> int:
        return self.limit - self.used


def memory_of(device: torch.device, max_memory_gib: float | None = None) -> MemoryUse:
    """Memory of this process on a device and its limit: the budget, or what is used and most of what is free."""
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used
    else:
        used = psutil.Process().memory_info().rss
        free = min(psutil.virtual_memory().available, free_in_group())
    limit = used + int(CAUTION * free) if max_memory_gib is None else int(max_memory_gib * GIB)
    return MemoryUse(used, limit)


def free_in_group(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that a container's limit (control group, version 2) leaves; without one, more than there can be."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return 2**63 - 1
    return limit - used + int(counts.get("inactive_file", 0))  # files read before make way


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

    def bytes_for(self, schedule: Schedule) -> int:
        """Bytes at the worst moment of a walk."""
        course, forwards = self.course, self.num_batches * self.num_points
        if schedule.kind == "paused":
            return int(course.held_at(course.group_stops) * forwards) + course.peak + self.other
        # What the forwards' own frames keep besides the block's input (the first block's, as a rule) stays in place.
        stays = 1.0 if schedule.store == "device" else 0.5
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
        kind, store: the settings.
        on_host: whether the device is the host: its memory is no other place to keep anything.
        is_budget: whether the limit is the user's; a walk that would not keep it is refused, else it is tried.

    Raises:
        MemoryError: nothing fits the user's budget.
    """
    order = [Schedule("paused"), Schedule("replay"), Schedule("replay", "cpu"), Schedule("replay", "disk")]
    allowed = [
        schedule
        for schedule in order
        if kind in ("auto", schedule.kind)
        and (store == schedule.store or (store == "auto" and not (on_host and schedule.store == "cpu")))
        and not (schedule.kind == "replay" and kind == "auto" and need.course.obstacle)
    ] or [Schedule("paused")]  # blocks that cannot be replayed have nothing to store
    fitting = [schedule for schedule in allowed if need.bytes_for(schedule) <= memory.free]
    if not fitting and is_budget:
        least = min(allowed, key=need.bytes_for)
        raise MemoryError(
            f"The merge needs about {(memory.used + need.bytes_for(least)) / GIB:.2f} GiB ({least.kind}, activations "
            f"on {least.store}), the budget max_memory_gib is {memory.limit / GIB:.2f}; {memory.used / GIB:.2f} GiB "
            "are in use before it starts. Raise it, or lower num_calibration_samples or batch_size."
        )
    chosen = fitting[0] if fitting else allowed[-1]
    chosen = replace(chosen, returns_memory=on_host and need.bytes_for(chosen) * HOLES > memory.free)
    log.info(
        "schedule=%s, activations on %s: about %.2f GiB beside the %.2f GiB in use, %.2f GiB are free.",
        chosen.kind,
        chosen.store,
        need.bytes_for(chosen) / GIB,
        memory.used / GIB,
        memory.free / GIB,
    )
    if not fitting:
        log.warning("The merge may run out of memory: lower num_calibration_samples or batch_size.")
    return chosen
