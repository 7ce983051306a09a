"""A group's half of mending: who keeps whose state, and what is left of it all after a death."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rayps.cluster.actor_host import START_SECONDS, ActorHost
from rayps.cluster.local import ActorHandle, ActorReply
from rayps.core.errors import ClusterError
from rayps.core.grid import Grid
from rayps.recovery.backup_assignment import Bond, HeldRounds, Mending, keepers, mending

HALT_SECONDS = 30.0  # for a worker to end its generation: a step of the user's cannot be cut short


class BackedWorker(Protocol):
    """A worker's actor, as far as its backup goes."""

    handle: ActorHandle
    place: ActorHost | None
    dead: str | None  # why it counts as dead


def tied(grid: Grid, workers: Sequence[BackedWorker], line: int, mended: Mending | None) -> list[Bond | None]:
    """What ties each worker to its neighbours in a generation that begins; a worker that does not say counts as dead.

    `mended`: the generation goes on from kept states, else it begins the line from a snapshot.
    """
    doors = _answers(workers, [worker.handle.call("door") for worker in workers], START_SECONDS)
    if any(worker.dead for worker in workers) or not all(doors.values()):
        return [None] * len(workers)
    hosts = [worker.place.host if worker.place else "" for worker in workers]
    addresses = tuple(str(doors[rank]) for rank in range(len(workers)))
    return [
        None
        if keeper is None
        else Bond(
            line,
            addresses,
            keeper,
            grid.data > 1,
            mended is not None,
            None if mended is None else mended.sources.get(rank),
        )
        for rank, keeper in enumerate(keepers(grid, hosts))
    ]


def halted(grid: Grid, workers: Sequence[BackedWorker], line: int) -> Mending | None:
    """End the generation where it stands; from which round the next one can go on without a snapshot, if any."""
    living = [(rank, worker) for rank, worker in enumerate(workers) if not worker.dead]
    replies = [worker.handle.call("halt", line) for _, worker in living]
    answers = _answers([worker for _, worker in living], replies, HALT_SECONDS)
    holdings: dict[int, dict[int, HeldRounds]] = {living[at][0]: held for at, held in answers.items()}
    return mending(grid, holdings)


def _answers(workers: Sequence[BackedWorker], replies: list[ActorReply], timeout: float) -> dict[int, Any]:
    found = {}
    for at, (worker, reply) in enumerate(zip(workers, replies, strict=True)):
        try:
            found[at] = reply.result(timeout)
        except ClusterError as error:
            worker.dead = str(error.data.get("reason", error))
        except TimeoutError:
            worker.dead = f"it did not answer within {timeout:g} s"
    return found
