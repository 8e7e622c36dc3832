"""Whether a merged network does what it should on a few inputs: finite, and nearer to the experts than averaging."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusion_bench_crossmean.calibration import Batch
from fusion_bench_crossmean.linear_system import DoubtfulSystemError
from fusion_bench_crossmean.networks import Networks
from fusion_bench_crossmean.report import mean

log = logging.getLogger(__name__)


def features(networks: Networks, task: str, path_point: float, batch: Batch) -> Tensor:
    """The first tensor that a network puts out, as float32 rows; tokens that do not count are left out.

    Empty where it puts out none.
    """
    networks.load(task, path_point)
    with torch.no_grad():
        leaves = tree_leaves(batch.run(networks.network(task, path_point)))
    found = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim), None)
    if found is None:
        return torch.zeros(0)
    try:
        return batch.rows(found).float()
    except ValueError:  # its tokens are not those of the inputs
        return found.float()


class SelfCheck:
    """Compares a network before and after its merge with the experts.

    Args:
        networks: at this moment averaged, and ready to run.
        probes: task -> a few inputs.
    """

    def __init__(self, networks: Networks, probes: Mapping[str, Batch]) -> None:
        self.networks = networks
        self.probes = {task: batch.to(networks.device, networks.forward_dtype) for task, batch in probes.items()}
        self.expected = {task: features(networks, task, 1.0, batch) for task, batch in self.probes.items()}
        self.averaged = self.alignment()

    def alignment(self) -> dict[str, float]:
        """Task -> cosine between the features of the merged network, as it stands, and of the task's expert.

        NaN where one of them has no feature, or only zeros.

        Raises:
            ArithmeticError: the features are not finite.
        """
        found = {}
        for task, batch in self.probes.items():
            own, expected = features(self.networks, task, 0.0, batch), self.expected[task]
            if not own.isfinite().all():
                raise ArithmeticError(
                    f"The merged model puts out NaN or infinity on inputs of task {task!r}. Check the experts, or use "
                    "dtype=float32 and precision=full."
                )
            norm = float(own.norm() * expected.norm())
            found[task] = float((own * expected).sum()) / norm if norm else math.nan
        return found

    def finish(self, *, strict: bool = False) -> tuple[dict[str, dict[str, float]], list[str]]:
        """(for the report, complaints), once the network is merged.

        Raises:
            DoubtfulSystemError: there is something to complain of, and `strict` makes errors of that.
        """
        merged = self.alignment()
        before, after = (mean(list(values.values())) for values in (self.averaged, merged))
        complaints = []
        if after < before:
            complaint = (
                f"On a few inputs the merged model's features are farther from the experts' (cosine {after:.4f}) than "
                f"those of plain averaging ({before:.4f}). More calibration inputs or a larger relative_ridge may help."
            )
            if strict:
                raise DoubtfulSystemError(f"{complaint} (An error because of strict=true.)")
            log.warning(complaint)
            complaints.append(complaint)
        return {"averaged": self.averaged, "merged": merged}, complaints
