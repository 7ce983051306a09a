"""The jobs that wait for their start, first in, first out, decided at a cost that does not grow with their number.

Jobs that need the same and name the same server group are one shape: whether the cluster could ever hold them, and
whether their group hinders them, is one question. Of the shapes that could start, only the oldest job is looked at: it
starts, or it is the head, and every later one waits behind it. Why a job waits is worked out when it is asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rayps.cluster.local import Bundle
from rayps.core.job import Status
from rayps.service.plan import Seal, Start

Shape = tuple[tuple[tuple[str, float], ...], str | None]  # what a job needs, and its server group


@dataclass(frozen=True, slots=True)
class Waiting:
    """A QUEUED job. `group`: the server group that it names."""

    id: str
    name: str
    needs: Bundle
    attempt: int = 0
    group: str | None = None
    stopping: bool = False

    @property
    def shape(self) -> Shape:
        """What decides whether it may start, beside its age."""
        return tuple(sorted(self.needs.items())), self.group


@dataclass(frozen=True, slots=True)
class GroupQuestions:
    """Two questions to the server groups, by the name of one."""

    hinders: Callable[[str], str | None] = lambda _: None  # why it cannot serve a job yet
    ended: Callable[[str], str | None] = lambda _: None  # why it never will


class WaitingJobs:
    """The jobs that wait, and the last decision about them."""

    def __init__(self) -> None:
        self.looked_at = 0  # jobs and shapes that decisions have looked at, since the beginning
        self._jobs: dict[str, Waiting] = {}
        self._oldest: dict[Shape, list[str]] = {}  # heaps of ids; an id that is gone is dropped when it comes up
        self._counts: dict[Shape, int] = {}
        self._stopping: set[str] = set()
        self._barred: dict[Shape, str] = {}
        self._head: Waiting | None = None
        self._lacks: str | None = None  # of the head
        self._all: str | None = "Ray is starting"  # why none can start

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def put(self, job: Waiting) -> None:
        """Take in a job, or what changed of it."""
        self.drop(job.id)
        self._jobs[job.id] = job
        if job.stopping:
            self._stopping.add(job.id)
            return
        heapq.heappush(self._oldest.setdefault(job.shape, []), job.id)
        self._counts[job.shape] = self._counts.get(job.shape, 0) + 1

    def drop(self, job_id: str) -> None:
        """Forget a job, which need not be there."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        if job_id in self._stopping:
            self._stopping.remove(job_id)
            return
        self._counts[job.shape] -= 1
        if not self._counts[job.shape]:
            del self._counts[job.shape], self._oldest[job.shape]

    def clear(self) -> None:
        """Forget all."""
        for job_id in list(self._jobs):
            self.drop(job_id)

    def stopped(self) -> list[Seal]:
        """The ends of those that are to stop: nothing of the cluster needs to be known for that."""
        return [Seal(job_id, Status.STOPPED, "stopped before it started") for job_id in sorted(self._stopping)]

    def decide(self, room: Bundle | None, total: Bundle | None, groups: GroupQuestions, why: str) -> list[Start | Seal]:
        """Which jobs start now, and which end because their server group was ended under them.

        `room` is what new jobs may take of `total`; None: the cluster is not seen, and `why` says what is in the way.
        """
        names = {group for _, group in self._counts if group is not None}
        ended = {name: text for name in names if (text := groups.ended(name)) is not None}
        over = [
            Seal(job_id, Status.FAILED, ended[shape[1]])
            for shape in self._counts
            if shape[1] in ended
            for job_id in self._of(shape)
        ]
        self.looked_at += len(names) + len(over)
        self._head, self._lacks, self._barred = None, None, {}
        self._all = why if room is None or total is None else None
        if room is None or total is None:
            return [*over]
        hindered = {name: text for name in names - set(ended) if (text := groups.hinders(name)) is not None}
        for shape in self._counts:
            self.looked_at += 1
            barred = _too_large(dict(shape[0]), total) or hindered.get(shape[1] or "") or ended.get(shape[1] or "")
            if barred is not None:
                self._barred[shape] = barred
        return [*over, *self._starts(room)]

    def reason(self, job_id: str) -> str | None:
        """Why a job waited at the last decision; None when it was to start, or has not been seen by one."""
        job = self._jobs.get(job_id)
        if job is None or job.stopping:
            return None
        if self._all is not None:
            return self._all
        if (barred := self._barred.get(job.shape)) is not None:
            return barred
        if self._head is None or job_id < self._head.id:
            return None
        if job_id == self._head.id:
            return self._lacks
        return f"waits behind {self._head.name} ({self._head.id}), which was submitted before"

    def _starts(self, room: Bundle) -> list[Start]:
        left, starts, taken = dict(room), list[Start](), list[Waiting]()
        queue = [
            (first, shape)
            for shape in self._counts
            if shape not in self._barred and (first := self._first(shape)) is not None
        ]
        heapq.heapify(queue)
        while queue and self._head is None:
            job_id, shape = heapq.heappop(queue)
            job = self._jobs[job_id]
            self.looked_at += 1
            self._lacks = _lacks(job.needs, left)
            if self._lacks is not None:
                self._head = job
                break
            starts.append(Start(job_id, job.attempt + 1))
            left = {kind: amount - job.needs.get(kind, 0.0) for kind, amount in left.items()}
            taken.append(job)
            heapq.heappop(self._oldest[shape])
            if (following := self._first(shape)) is not None:
                heapq.heappush(queue, (following, shape))
        for job in taken:  # they wait until they have started
            heapq.heappush(self._oldest[job.shape], job.id)
        return starts

    def _first(self, shape: Shape) -> str | None:
        heap = self._oldest[shape]
        while heap:
            job = self._jobs.get(heap[0])
            following = len(heap) > 1 and heap[0] in heap[1:3]  # put twice: it changed
            if job is not None and not job.stopping and job.shape == shape and not following:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _of(self, shape: Shape) -> list[str]:
        return sorted(
            {
                job_id
                for job_id in self._oldest[shape]
                if (job := self._jobs.get(job_id)) is not None and job.shape == shape and not job.stopping
            }
        )


def room_beside(running: Mapping[str, tuple[Status, Bundle]], free: Bundle, total: Bundle) -> Bundle:
    """What new jobs may take beside those that were started.

    It is what is free now, less what drivers that are starting have yet to take; and never more than the total less
    what all of them may come to hold, since a recovering one takes again.
    """
    room = {}
    for kind, amount in total.items():
        held = sum(needs.get(kind, 0.0) for _, needs in running.values())
        coming = sum(needs.get(kind, 0.0) for status, needs in running.values() if status is Status.STARTING)
        room[kind] = max(0.0, min(amount - held, free.get(kind, 0.0) - coming))
    return room


def _too_large(needs: Bundle, total: Bundle) -> str | None:
    for kind, amount in needs.items():
        if amount > total.get(kind, 0.0):
            return f"needs {_many(amount, kind)}, the whole cluster has {total.get(kind, 0.0):g}"
    return None


def _lacks(needs: Bundle, room: Bundle) -> str | None:
    for kind, amount in needs.items():
        if amount > room.get(kind, 0.0):
            return f"needs {_many(amount, kind)}, {room.get(kind, 0.0):g} free"
    return None


def _many(amount: float, kind: str) -> str:
    return f"{amount:g} {kind.upper()}{'' if amount == 1 else 's'}"
