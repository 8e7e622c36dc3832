"""Every tolerance of the tests, as relative Frobenius errors; `torch.equal` where a claim is exact."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

#: Two routes to the same float64 numbers.
SAME = 1e-12
#: Normal equations against a least-squares solver at a condition number of at most 1e3.
LSTSQ = 1e-9
#: FusionBench's explicit inverse, float64.
PARITY = 1e-8
#: The properties at ridge 0: nothing damps the condition number (up to 1e5) of a layer's Gram matrix.
UNRIDGED = 1e-9
#: A float32 model against the same one in float64.
FLOAT32 = 1e-5
#: How far a wrong formula must be off for a test to count as able to fail.
FAR = 0.1


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """``||ours - theirs||_F / ||theirs||_F`` in float64."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    assert ours.shape == theirs.shape
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-300))


def state_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest relative error over all floating-point tensors of two state dicts with the same keys."""
    assert ours.keys() == theirs.keys()
    return max(relative_error(ours[k], theirs[k]) for k in ours if ours[k].is_floating_point())
