"""Workers for the benchmarks of a server group: they push and pull until they are stopped, and record the times.

In each segment, every push adds 1 to one slot and the push's number to another slot. At the end, these slots show each
push that was lost or applied twice, even if one push was lost and another was applied twice.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayps.cluster.local import ActorHandle, Cluster
from rayps.ps.server_group import ServerGroup, SharedParameters

SEGMENTS = 32
KINDS = 2  # slots of a rank in a segment: one for the count of its pushes, one for the sum of the pushes' numbers
WAIT_SECONDS = 300.0


@dataclass(slots=True)
class Pushed:
    """One worker's acknowledged pushes: how many, and the wall-clock time after each push and pull."""

    rank: int
    pushes: int
    times: list[float] = field(default_factory=list)
    error: str = ""


class PushBench:
    """An actor: one worker that pushes and pulls in a thread until it is stopped."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._done = Pushed(rank, 0)

    def begin(self, group: ServerGroup, pause: float = 0.0) -> int:
        """Join the group, and push in a thread with pauses of `pause` seconds; return the step of the first push."""
        server = group.join(self._rank)
        first = server.step
        self._stop.clear()
        self._done = Pushed(self._rank, first)
        self._thread = threading.Thread(target=self._push, args=(server, group, pause), daemon=True)
        self._thread.start()
        return first

    def pushes(self) -> int:
        """Return the number of acknowledged pushes so far."""
        return self._done.pushes

    def end(self) -> Pushed:
        """Stop after the current push; return the worker's acknowledged pushes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)
        return self._done

    def _push(self, server: SharedParameters, group: ServerGroup, pause: float) -> None:
        done, size = self._done, group.layout.size
        grad, out = torch.zeros(size, dtype=torch.float64), torch.empty(size, dtype=torch.float64)
        places = find_slots(size, group.workers, self._rank)
        try:
            while not self._stop.is_set():
                step = server.step
                grad[places[0]] = -float(group.workers)  # the servers divide a push by the number of workers
                grad[places[1]] = -float(group.workers * make_number(self._rank, step))
                server.push_pull(grad, out=out)
                done.pushes = step + 1
                done.times.append(time.time())
                if pause:
                    time.sleep(pause)
        except Exception as error:  # reported by the bench
            done.error = f"{type(error).__name__}: {error}"
        finally:
            server.close()


def make_number(rank: int, step: int) -> int:
    """Return the number that a rank's push of a step adds to the second slot. It is below 2^20."""
    return (rank * 7919 + step * 104_729) % 1_048_573


def find_slots(size: int, workers: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the positions of a rank's two slots in each segment of a vector of `size` elements."""
    starts = torch.tensor([size * i // SEGMENTS for i in range(SEGMENTS)])
    return starts + KINDS * rank, starts + KINDS * rank + 1


def find_wrong_slots(values: Tensor, workers: int, done: Sequence[Pushed]) -> list[str]:
    """Return a text for each slot with a wrong value: [] if every acknowledged push was applied exactly once."""
    wrong = []
    for each in done:
        counts, sums = (values[places].tolist() for places in find_slots(len(values), workers, each.rank))
        total = sum(make_number(each.rank, step) for step in range(each.pushes))
        for segment, (count, added) in enumerate(zip(counts, sums, strict=True)):
            if abs(count - each.pushes) > 0.25 or abs(added - total) > 0.25:
                wrong.append(f"rank {each.rank} pushed {each.pushes}, segment {segment} has {count:g}")
    return wrong


class PushWorkers:
    """A group of `PushBench` workers that push until they are stopped."""

    def __init__(self, cluster: Cluster, workers: int) -> None:
        self._cluster = cluster
        self.actors: list[ActorHandle] = [
            cluster.spawn("benchmarks.changes.group_load:PushBench", rank) for rank in range(workers)
        ]

    def begin(self, group: ServerGroup, pause: float = 0.0) -> None:
        """Start all workers."""
        for reply in [actor.call("begin", group, pause) for actor in self.actors]:
            reply.result(WAIT_SECONDS)

    def end(self) -> list[Pushed]:
        """Stop all workers; return each worker's acknowledged pushes."""
        found: list[Pushed] = [reply.result(WAIT_SECONDS) for reply in [a.call("end") for a in self.actors]]
        return found

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors:
            self._cluster.kill(actor)


def measure_rate(done: Sequence[Pushed], since: float, until: float) -> float:
    """Return the pushes per second, of all workers together, between two wall-clock times."""
    count = sum(since <= t < until for each in done for t in each.times)
    return count / max(until - since, 1e-9)


def find_longest_gap(done: Sequence[Pushed], since: float, until: float) -> float:
    """Return the most seconds between two successive pushes of a worker that overlap `since` to `until`."""
    worst = 0.0
    for each in done:
        for before, after in zip(each.times, each.times[1:], strict=False):
            if after > since and before < until:
                worst = max(worst, after - before)
    return worst


def median(values: Sequence[float]) -> float:
    """Return the median, or 0 for an empty list."""
    return statistics.median(values) if values else 0.0
