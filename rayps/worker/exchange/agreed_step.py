"""Find the step from which a restarted replica of several workers continues.

Each worker asks only the servers of its own part of the model, and the answers may differ.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rayps_client.errors import LinkError

from rayps.comm.ring import Ring


def agree_on_step(least: int, most: int, rings: Iterable[Ring], *, exact: bool) -> int:
    """Return the earliest next step of any worker of the replica; all its workers repeat their pushes from this step.

    `least` and `most` are the smallest and the largest next step that this worker's servers report. They differ if a
    push reached only some servers. A server that has applied a push ignores its repetition. The other servers apply the
    push later than the rest of the model, which is not allowed if `exact` (a synchronous strategy). `rings` connect the
    replica's workers.

    Raises:
        LinkError: `exact` is set, and the servers are not all at the same step.
    """
    both = torch.tensor([-least, most])
    for ring in rings:
        ring.max(both)
    least, most = -int(both[0]), int(both[1])
    if exact and least != most:
        raise LinkError(
            f"some servers have applied this replica's push of step {most - 1}, others only the pushes before step "
            f"{least}: a synchronous strategy cannot continue from different steps",
            peer="",
        )
    return least
