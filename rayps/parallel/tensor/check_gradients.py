"""Check during a run that parameters which every worker holds whole have the same gradient everywhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.core.errors import WorkloadError

_TOLERANCE = (
    1e-3  # relative to the norm: equal sums in the same order have equal bits, a missing part differs by far more
)


def agree(named: Iterable[tuple[str, Tensor]], ring: Ring) -> None:
    """Compare the gradients of unsplit parameters over the tensor ring: one exchange of two numbers for each.

    The gradients differ if a layer with parameters works on slices, between a layer split by `out` and one split by
    `in`: its gradient then lacks the other workers' slices. All workers must call this function, once, after a first
    backward. Raises WorkloadError, on all workers.
    """
    known = list(named)
    zero = torch.zeros((), dtype=torch.float64)
    norms = [zero if p.grad is None else p.grad.detach().norm().double().cpu() for _, p in known]
    if ring.size == 1 or not norms:
        return
    largest = torch.stack([*norms, *(-norm for norm in norms)])
    ring.max(largest)
    high, low = largest[: len(norms)], -largest[len(norms) :]
    for (name, _), most, least in zip(known, high.tolist(), low.tolist(), strict=True):
        if most - least > _TOLERANCE * most:
            raise WorkloadError(
                f"the gradient of {name!r} is not the same on all tensor ranks (norms from {least:.3g} to {most:.3g}): "
                "its layer works on slices, between a layer split by 'out' and one by 'in'; leave these whole "
                "('none'), or move the layer outside",
                parameter=name,
            )
