"""Find the step from which a replica of several workers continues, whose workers asked different servers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rayps.comm.ring import Ring
from rayps.core.errors import LinkError


def agreed(least: int, most: int, rings: Iterable[Ring], *, exact: bool) -> int:
    """Return the earliest next step of any worker of the replica; all its workers repeat from this step.

    `least` and `most` are the bounds of this worker's next step that its servers report; they differ if a push reached
    only some servers. A repeated push is not applied twice. But the other servers then step without it, which `exact`
    forbids.

    Raises:
        LinkError: the servers of this replica's parts are at different steps, and `exact` does not allow that.
    """
    both = torch.tensor([-least, most])
    for ring in rings:
        ring.max(both)
    least, most = -int(both[0]), int(both[1])
    if exact and least != most:
        raise LinkError(
            f"the servers of one part of the model have this replica's push {least}, those of another part do not",
            peer="",
        )
    return least
