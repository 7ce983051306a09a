"""The checkpoint before a run leaves its process: no worker trains beyond the round that it has, so that none is lost.

The driver lets no worker begin another round, and learns how many rounds each has begun. It chooses the next round of
the fastest worker, requests the state after it, and lets every worker train up to this round and no further. If workers
are far apart, which only asynchronous strategies allow, those that are ahead stay where they are, and the next round of
the slowest worker is chosen: what servers got from the others by then is in the state too. If a server was asked too
late, the next round is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rayps_client.errors import ClusterError

from rayps.worker.plan import WorkerFacts

if TYPE_CHECKING:
    from rayps.runtime.driver.worker_group import WorkerGroup

MOST_LEAD = 16  # the most rounds between the workers, for which the slowest one is awaited
HOLD_SECONDS = 5.0  # seconds for a worker to answer
ASK_SECONDS = 0.25  # seconds for servers to get the request, which they get by the driver's polls
MISS_SECONDS = 1.0  # seconds after which a state counts as missed, when all workers have reached its round


def choose_last_rounds(begun: Mapping[int, int]) -> tuple[int, dict[int, int]]:
    """Return the round of the state, and after which round each rank stops. Pure.

    `begun`: from a rank to the number of rounds that it has begun.
    """
    slowest, fastest = min(begun.values()), max(begun.values())
    if fastest - slowest <= MOST_LEAD:
        return fastest + 1, dict.fromkeys(begun, fastest + 1)
    return slowest + 1, {rank: max(own, slowest + 1) for rank, own in begun.items()}


class LastCheckpoint:
    """A checkpoint that was requested before the run ends or moves."""

    def __init__(self, group: WorkerGroup, saved: int, end: int, seconds: float) -> None:
        """Hold the workers and request the state. `saved` is the round of the newest state now.

        `end` is the last round of the generation, or that after which its workers pause, and `seconds` the time until
        the run ends without the state.
        """
        self._saved, self._end, self._deadline = saved, end, time.monotonic() + seconds
        self._round, self._limits = 0, dict[int, int]()
        self._asked_at, self._released, self._reached_at = 0.0, False, 0.0
        begun = None if group.slots is not None else _hold(group)
        if begun is None:
            # a worker does not answer, or workers that wait for rows reach no further round: the next state is taken
            group.snapshot_soon()
        else:
            self._ask(group, *choose_last_rounds(begun))

    def look(self, group: WorkerGroup, saved: int) -> bool:
        """Return whether the state has arrived, or the time is over. Call it after each poll.

        `saved` is the round of the newest state now.
        """
        now = time.monotonic()
        if now > self._deadline:
            return True
        if not self._limits:
            return saved != self._saved
        # when a worker's position is known, the points of its rounds have arrived, too
        facts = [group.workers[rank].facts for rank in self._limits]
        reached = all(isinstance(f, WorkerFacts) and f.position >= self._round for f in facts)
        if reached and saved >= self._round:
            return True
        if not self._released:
            if now - self._asked_at >= ASK_SECONDS:
                self._released, self._reached_at = True, 0.0
                for rank, limit in self._limits.items():
                    group.workers[rank].handle.call("train_until", limit, self._round)
            return False
        if reached:
            self._reached_at = self._reached_at or now
            if now - self._reached_at >= MISS_SECONDS:
                following = self._round + 1
                self._ask(group, following, {rank: max(own, following) for rank, own in self._limits.items()})
        return False

    def _ask(self, group: WorkerGroup, at: int, limits: dict[int, int]) -> None:
        """Request the state after round `at`. The workers go on when the servers have had time to get the request."""
        self._round, self._limits = min(at, self._end), limits
        group.take_at(self._round)
        self._asked_at, self._released = time.monotonic(), False


def _hold(group: WorkerGroup) -> dict[int, int] | None:
    """Let no worker begin another round. Return how many each has begun.

    Return None if a worker has not answered, or has no plan yet, because its generation only begins.
    """
    replies = [(rank, each.handle.call("hold")) for rank, each in enumerate(group.workers) if not each.dead]
    found: dict[int, int] = {}
    end = time.monotonic() + HOLD_SECONDS
    for rank, reply in replies:
        try:
            begun: int | None = reply.result(max(0.0, end - time.monotonic()))
        except (ClusterError, TimeoutError):
            begun = None
        if begun is not None:
            found[rank] = begun
        else:
            for other, _ in replies:
                group.workers[other].handle.call("resume")
            return None
    return found or None


def count_repeated_rounds(facts: Sequence[object], positions: Sequence[int], saved: int) -> int:
    """Return how many rounds are computed again by the worker that loses most of them.

    `facts`: those of the workers. `positions`: how many rounds of each worker the saved state has; `saved` counts
    for a worker that it does not list.
    """
    lost = 0
    for each in facts:
        if isinstance(each, WorkerFacts):
            lost = max(lost, each.position - (positions[each.rank] if each.rank < len(positions) else saved))
    return lost
