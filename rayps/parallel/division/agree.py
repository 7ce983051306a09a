"""Where a replica of several workers goes on, when each has asked its own servers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rayps.comm.ring import Ring
from rayps.core.errors import LinkError


def agreed(least: int, most: int, rings: Iterable[Ring], *, exact: bool) -> int:
    """The earliest step that any worker of the replica has yet to push; all make it again.

    `least` and `most` are this worker's next step as its servers know it, which differs where a push reached some only.

    What only some have pushed their servers have already: it is not applied twice. But then others' servers step on
    without it, which `exact` forbids.

    Raises:
        LinkError: the servers of this replica's parts are at different steps, and `exact` does not allow that.
    """
    both = torch.tensor([-least, most])
    for ring in rings:
        ring.max(both)
    least, most = -int(both[0]), int(both[1])
    if exact and least != most:
        raise LinkError(f"a part of the model has had this replica's push {least}, and another part has not", peer="")
    return least
