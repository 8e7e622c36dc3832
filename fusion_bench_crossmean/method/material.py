"""What a run works on, once it is loaded and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusion_bench.modelpool import BaseModelPool
from torch import Tensor, nn

from fusion_bench_crossmean.calibration import Batch, Calibration
from fusion_bench_crossmean.course import Course
from fusion_bench_crossmean.expert_loading import Experts
from fusion_bench_crossmean.fingerprint import hash_batches, hash_tensors
from fusion_bench_crossmean.messages import is_writable
from fusion_bench_crossmean.preflight import bytes_of
from fusion_bench_crossmean.report import command
from fusion_bench_crossmean.schedule import Need
from fusion_bench_crossmean.text.encoders import check_token_ids
from fusion_bench_crossmean.weights import tensors_of

if TYPE_CHECKING:
    from fusion_bench_crossmean.method.publishing import Companions

#: What a method measures of each task before the walk: task -> name -> tensor.
Beside = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Material:
    """What a run works on.

    Args:
        experts: the experts' tensors, and the template of the merged model.
        layers: names of the covered layers.
        calibration: the drawn inputs.
        num_samples: how many inputs per task the run is about; more than are drawn before a preflight.
        probes: task -> a few of the inputs.
        companions: what is saved with the merged model; None: it is not saved.
        beside: what was measured before the walk whose statistics are merged again; None: nothing was measured yet.
    """

    experts: Experts
    layers: list[str]
    calibration: Calibration
    num_samples: int
    probes: dict[str, Batch]
    companions: Companions | None = None
    beside: Beside | None = None

    @classmethod
    def checked(
        cls,
        experts: Experts,
        layers: list[str],
        calibration: Calibration,
        num_samples: int,
        probes: dict[str, Batch],
        companions: Companions | None = None,
    ) -> Material:
        """Once it is sure that the experts can read the inputs.

        Raises:
            ValueError: they cannot; see `check_token_ids`.
        """
        for task, batches in calibration.batches.items():
            for batch in batches:
                check_token_ids(experts.template, batch.kwargs, f"The calibration inputs of task {task!r}")
        return cls(experts, layers, calibration, num_samples, probes, companions)

    @property
    def tasks(self) -> list[str]:
        """The experts' names."""
        return list(self.experts.weights)

    @property
    def num_inputs(self) -> int:
        """Of all tasks."""
        return self.num_samples * len(self.tasks)

    def need(self, course: Course, num_points: int) -> Need:
        """What a walk over all inputs needs, with so many path points."""
        return Need.of(course, self.num_inputs, num_points, tensors_of(self.experts.template))

    @property
    def missing_bytes(self) -> int:
        """What the inputs that are not drawn will take."""
        batches = [batch for drawn in self.calibration.batches.values() for batch in drawn]
        there = sum(batch.size for batch in batches)
        return int(bytes_of(batches) * (self.num_inputs - there) / there)


def as_pool(modelpool: BaseModelPool | Mapping[str, nn.Module]) -> BaseModelPool:
    """A pool from a pool or a dict of modules.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(modelpool, BaseModelPool):
        return modelpool
    if isinstance(modelpool, Mapping) and (
        odd := [name for name in modelpool if not (isinstance(name, str) and is_writable(name))]
    ):
        raise TypeError(f"Names of models must be text, not {', '.join(map(repr, odd))}.")
    if not isinstance(modelpool, Mapping):
        kind = type(modelpool).__name__
        raise TypeError(f"modelpool must be a FusionBench pool or a dict of task -> module, not a {kind}.")
    return BaseModelPool(dict(modelpool))


def hashes_of(
    material: Material, progress: Callable[[Iterable[str], str], Iterable[str]] = lambda items, _: items
) -> dict[str, dict[str, str]]:
    """Of the experts (the pretrained model too, where its weights are used) and of every task's inputs."""
    experts = dict(material.experts.weights)
    if material.experts.pretrained is not None:
        experts["_pretrained_"] = material.experts.pretrained
    workers = min(4, os.cpu_count() or 1)  # reading and hashing need no lock of Python's
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(hash_tensors, experts.values())
        hashes = {name: next(found) for name in progress(experts, "hashing experts")}
    return {
        "experts": hashes,
        "calibration": {task: hash_batches(drawn) for task, drawn in material.calibration.batches.items()},
    }


def closing(material: Material) -> dict[str, Any]:
    """How a report ends: with its longest part, and the command that repeats its run."""
    return {"calibration_indices": material.calibration.indices, "command": command()}
