"""What a run does once its material is there: networks, the walk with its progress bar, its part of the report."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from fusion_bench.mixins import LightningFabricMixin, SimpleProfilerMixin
from lightning import Fabric
from tqdm.auto import tqdm

from fusion_bench_crossmean.course import Course
from fusion_bench_crossmean.expert_checks import activation_of
from fusion_bench_crossmean.memory import memory_of
from fusion_bench_crossmean.method.material import Material, closing
from fusion_bench_crossmean.method.verdict import verdict
from fusion_bench_crossmean.networks import Networks
from fusion_bench_crossmean.paired_statistics import float32_products
from fusion_bench_crossmean.report import environment, peak_memory, write_json
from fusion_bench_crossmean.schedule import Schedule, choose_schedule
from fusion_bench_crossmean.walker import Walker

log = logging.getLogger(__name__)


class Running(LightningFabricMixin, SimpleProfilerMixin):
    """The part of an algorithm that runs networks; `CalibratedAlgorithm` has the settings."""

    precision: Literal["full", "mixed"]
    schedule: Literal["auto", "paused", "replay"]
    activation_store: Literal["auto", "device", "cpu", "disk"]
    max_memory_gib: float | None
    preflight_only: bool
    report: dict[str, Any]

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Every setting with its value."""

    @abstractmethod
    def output_path(self) -> Path | None:
        """Where the report goes; None: nowhere."""

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """No gradients, no autocast, no inference mode, products of the set precision; all as before afterwards."""
        autocast_off = torch.autocast(self.device.type, enabled=False)
        products = float32_products("medium" if self.precision == "mixed" else "highest")
        with torch.inference_mode(mode=False), torch.no_grad(), autocast_off, products:
            yield

    def networks(self, material: Material, path_points: Sequence[float]) -> Networks:
        """The networks of a run, of which those at `path_points` are going to run."""
        experts, weights = material.experts, material.experts.weights
        if self.preflight_only:  # one expert is as good as any mean to run a batch with
            weights = dict(itertools.islice(weights.items(), 1))
        return Networks(
            weights,
            path_points,
            experts.template,
            self.device,
            dtype=experts.dtype or torch.float32,
            forward_dtype=torch.bfloat16 if self.precision == "mixed" else None,
        )

    @contextlib.contextmanager
    def walking(
        self,
        material: Material,
        networks: Networks,
        settle: Callable[[Callable[[], Schedule]], Schedule] = lambda choose: choose(),
    ) -> Iterator[Walker]:
        """A walker over `networks` with the schedule that the settings ask for and memory allows.

        `settle` has the last word: it is given how to choose, and returns the schedule to take.
        """
        calibration = material.calibration.on(self.device, networks.forward_dtype)

        def choose(course: Course) -> Schedule:
            fitting = functools.partial(
                choose_schedule,
                material.need(course, len(networks.path_points)),
                memory_of(self.device, self.max_memory_gib).with_more(material.missing_bytes),
                kind=self.schedule,
                store=self.activation_store,
                on_host=self.device.type == "cpu",
                is_budget=self.max_memory_gib is not None,
            )
            return settle(fitting)

        with networks, Walker(networks, calibration, material.layers, choose) as walker:
            yield walker

    @property
    def device(self) -> torch.device:
        """Where the run computes: Fabric's device."""
        if self._fabric_instance is None:  # plain Python, no FusionBench program around
            self._fabric_instance = Fabric(devices=1)
        return self._fabric_instance.device

    def progress(self, items: Any, stage: str) -> Any:
        """`items` with a progress bar, on rank zero only."""
        return tqdm(items, desc=stage, dynamic_ncols=True, leave=False, disable=not self._is_rank_zero())

    def walked(self, walker: Walker) -> Iterator[Any]:
        """The walk with its one progress bar, its forwards timed."""
        steps = iter(walker)
        with tqdm(total=len(walker), dynamic_ncols=True, disable=not self._is_rank_zero()) as bar:
            while True:
                bar.set_description(f"{type(self).__name__}: forwards")
                step = next(steps, None)
                if step is None:
                    return
                bar.set_description(f"{type(self).__name__}: {step[0].name}")
                yield step
                bar.update()

    def common_report(
        self, material: Material, walker: Walker | None = None, forwards_within: float = 0.0
    ) -> dict[str, Any]:
        """The part of a report that every algorithm shares.

        Args:
            material: what was worked on.
            walker: that has ended, if there was one.
            forwards_within: seconds of its forwards that lie within those profiled as `statistics`.
        """
        seconds: dict[str, float] = {stage: sum(times) for stage, times in self.profiler.recorded_durations.items()}
        seconds["statistics"] = seconds.get("statistics", 0.0) - forwards_within
        if walker is not None:
            seconds["forwards"] = walker.seconds + walker.replay_seconds
        schedule = None if walker is None else walker.schedule
        return {
            "method": type(self).__name__,
            "settings": self.settings(),
            "versions": environment(),
            "tasks": material.tasks,
            "experts": material.experts.origins,
            "activation": activation_of(material.experts.template),
            "num_covered_layers": len(material.layers),
            "num_inputs_used": {task: len(drawn) for task, drawn in material.calibration.indices.items()},
            "seconds": seconds,
            "schedule": None if schedule is None else {"kind": schedule.kind, "activation_store": schedule.store},
            "peak_memory": peak_memory(),
        }

    def preflight(
        self,
        material: Material,
        networks: Networks,
        walker: Walker,
        hashes: Mapping[str, Any],
        disk: Mapping[Path, int],
    ) -> None:
        """Says what the run would take, in the log and in `report`.

        Args:
            material: of the run.
            networks: all that a walk needs.
            walker: that has not begun to walk.
            hashes: see `hashes_of`.
            disk: folder -> bytes that the run is going to write there.
        """
        found = verdict(material, networks, walker, memory_of(self.device, self.max_memory_gib), hashes, disk)
        self.report = (
            self.common_report(material, walker, 0.0) | {"preflight": found, "hashes": hashes} | closing(material)
        )
        if self._is_rank_zero():
            log.info("Preflight of %s: all checks passed.", type(self).__name__)
            for line in found["in_words"]:
                log.info(line)
            for line in found["warnings"]:
                log.warning(line)
            with self.outliving_outputs():
                if (path := self.output_path()) is not None:
                    write_json(path, self.report)

    @contextlib.contextmanager
    def outliving_outputs(self) -> Iterator[None]:
        """What cannot be written inside the block, at the end of long work, is said; the result is not lost for it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (a processor of the user's own may raise anything)
            log.error("Not everything could be written: %s. The result is as it should be.", error)

    def _is_rank_zero(self) -> bool:
        return self._fabric_instance is None or self._fabric_instance.is_global_zero
