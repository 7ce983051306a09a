"""Hold all workers between two rounds: none begins another round until the driver says more."""

from __future__ import annotations

from collections.abc import Sequence

from rayps_client.errors import ClusterError

from rayps.cluster.members import GroupMember

HOLD_SECONDS = 30.0  # seconds for a worker to answer that it holds


def hold_workers(workers: Sequence[GroupMember]) -> int | None:
    """Hold all workers. Return the largest number of rounds that one of them has begun.

    If a worker does not answer, it counts as dead, the others go on, and None is returned. So it is if a worker has no
    plan yet, which does not make it dead.
    """
    replies = [(worker, worker.handle.call("hold")) for worker in workers]
    begun: list[int] = []
    for worker, reply in replies:
        try:
            rounds: int | None = reply.result(HOLD_SECONDS)
            begun += [] if rounds is None else [rounds]
        except (ClusterError, TimeoutError) as error:
            worker.dead = worker.dead or f"it did not answer: {error}"
    if len(begun) == len(workers):
        return max(begun)
    for worker in workers:
        if not worker.dead:
            worker.await_reply(worker.handle.call("resume"))
    return None
