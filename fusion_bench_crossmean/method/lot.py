"""LOT and its combinations: task vectors instead of weights, on the range of the statistics."""

from __future__ import annotations

from typing import Any

import torch
from bidict import bidict
from fusion_bench import auto_register_config
from torch import Tensor

from fusion_bench_crossmean.coverage import LayerGroup, norm_layers
from fusion_bench_crossmean.linear_system import LinearSystem
from fusion_bench_crossmean.messages import shorten
from fusion_bench_crossmean.method.base import LayerwiseMerge
from fusion_bench_crossmean.method.crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.method.material import Beside, Material
from fusion_bench_crossmean.method.progressive_regmean import ProgressiveRegMeanAlgorithm
from fusion_bench_crossmean.method.regmean import RegMeanAlgorithm
from fusion_bench_crossmean.method.settings import check_number
from fusion_bench_crossmean.networks import Networks
from fusion_bench_crossmean.norm_scales import merged_scales, normalised_energies
from fusion_bench_crossmean.pseudo_inverse import PseudoInverseSystem


@auto_register_config
class TaskVectorMerge(LayerwiseMerge):
    """``W = W_0 + (sum_t (W_t - W_0) B_t) (sum_t A_t)^+``; scales of norms are merged by energy, before the walk.

    Args:
        rcond: eigenvalues of the summed Gram matrix below this multiple of the largest are null, and there the
            pretrained weight stays; None: as many rounding errors as the statistics' dtype makes.
        reduce_non_diagonal_ratio: see `LayerwiseMerge`; LOT has none.
        relative_ridge: see `LayerwiseMerge`; LOT has none.
        kwargs: see `LayerwiseMerge`.

    References: LOT Merging, arXiv 2505.23859.
    """

    needs_pretrained = True
    system = PseudoInverseSystem
    rcond: float | None  # stored by `auto_register_config`

    def __init__(
        self,
        *,
        rcond: float | None = None,
        reduce_non_diagonal_ratio: float = 1.0,
        relative_ridge: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(reduce_non_diagonal_ratio=reduce_non_diagonal_ratio, relative_ridge=relative_ridge, **kwargs)
        if rcond is not None:
            check_number("rcond", rcond, 0, 1)

    def linear_system(self, **options: Any) -> LinearSystem:
        return super().linear_system(rcond=self.rcond, **options)

    def prepare(self, material: Material, networks: Networks) -> Beside:
        """Merges the scales of normalisation layers, from one pass of every expert; returns the energies.

        Raises:
            ValueError: statistics are merged again that were kept without energies.
        """
        norms = norm_layers(networks.merged)
        if not norms:
            return {}
        energies = material.beside
        if energies is None:
            energies = self._energies(material, networks, norms)
        elif missing := [task for task in material.tasks if set(norms) - set(energies.get(task, {}))]:
            raise ValueError(
                f"The statistics have no energies of normalisation layers for {shorten(missing)}: another method than "
                f"{self.method_name} has kept them. Make them by save_statistics of crossmean/lot."
            )
        energies = {task: energies[task] for task in material.tasks}
        scales = {
            task: {name: material.experts.weights[task][f"{name}.weight"] for name in norms} for task in material.tasks
        }
        for name, scale in merged_scales(energies, scales).items():
            networks.store(f"{name}.weight", scale)
        return energies

    def _energies(self, material: Material, networks: Networks, norms: list[str]) -> Beside:
        energies = {}
        batches = material.calibration.on(networks.device, networks.forward_dtype)
        with self.profile("norm scales"), networks:
            for task in self.progress(material.tasks, "norm scales"):
                networks.load(task, 1.0)
                energies[task] = normalised_energies(networks.runner, batches[task], norms)
        return energies

    def origin(self, material: Material, networks: Networks, group: LayerGroup) -> Tensor:
        """The pretrained weight, in float32 or better: task vectors are small differences."""
        assert material.experts.pretrained is not None  # `needs_pretrained`
        weight = group.weight_of(material.experts.pretrained)
        return weight.to(networks.device, torch.promote_types(weight.dtype, torch.float32))


class LOTAlgorithm(TaskVectorMerge, RegMeanAlgorithm):
    """LOT: ``A_t = B_t = X_t' X_t``, measured on the experts. See `TaskVectorMerge` for settings."""


class LOTProgressiveRegMeanAlgorithm(TaskVectorMerge, ProgressiveRegMeanAlgorithm):
    """LOT + Progressive RegMean: ``A_t = B_t = X~_t' X~_t``. See `TaskVectorMerge` for settings."""


class LOTCrossMeanAlgorithm(TaskVectorMerge, CrossMeanAlgorithm):
    """LOT + CrossMean: ``A_t = X~_t' X~_t``, ``B_t = Cbar_t'``. See `TaskVectorMerge` and `CrossMeanAlgorithm`.

    The pretrained layer acts on the merged inputs; the task vector's effect is carried over from the path.
    """

    _config_mapping = bidict(CrossMeanAlgorithm._config_mapping | TaskVectorMerge._config_mapping)
