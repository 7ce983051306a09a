"""Check during a run that a parameter which is not split has the same gradient on all workers of a tensor group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rayps_client.errors import WorkloadError
from torch import Tensor

from rayps.comm.ring import Ring

# relative to the norm. Correct gradients are equal bit for bit; wrong ones, which lack slices, differ by far more
_TOLERANCE = 1e-3


def agree(named: Iterable[tuple[str, Tensor]], ring: Ring) -> None:
    """Compare the gradients of unsplit parameters, given with their names, between the workers of a tensor group.

    The workers exchange two numbers per parameter. The gradients differ if a layer with parameters works on slices,
    between a layer split by `out` and one split by `in`: each worker's gradient then lacks the other workers' slices.
    All workers must call this function together. One call after the first backward pass is enough.

    Raises:
        WorkloadError: a gradient differs; all workers raise it.
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
                "its layer works on slices, between a layer split by 'out' and one split by 'in': keep these two "
                "layers whole (plan 'none'), or move the layer with this parameter before or after them",
                parameter=name,
            )
