"""The queue of jobs: first in, first out, at a cost per decision that does not grow with the number of jobs.

Jobs with the same resources and the same server group have the same shape. Whether the cluster is large enough, and
whether the group is ready, is decided once for each shape. Only the oldest job of each shape that could start is
examined. This job starts, or it becomes the head of the queue, and every later job waits behind it. The reason why a
job waits is computed on request.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rayps.cluster.local import Bundle
from rayps.core.job.job_status import Status
from rayps.service.plan import EndJob, OpenJob, Start

CORE = "core"  # beside CPUs and GPUs: a core of the machine on which rayps runs a Ray of more logical CPUs
Shape = tuple[tuple[tuple[str, float], ...], str | None]  # a job's resources and its server group


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A QUEUED job. `group`: the name of its server group, or None if it uses none."""

    id: str
    name: str
    needs: Bundle
    attempt: int = 0
    group: str | None = None
    stopping: bool = False

    @property
    def shape(self) -> Shape:
        """The job's resources and server group. Together with its age, they decide whether the job can start."""
        return tuple(sorted(self.needs.items())), self.group


@dataclass(frozen=True, slots=True)
class GroupReasons:
    """Two functions from a server group's name to a reason why jobs cannot use the group."""

    wait_reason: Callable[[str], str | None] = lambda _: None  # why a job must wait for the group
    end_reason: Callable[[str], str | None] = lambda _: None  # why a job can never use the group


class JobQueue:
    """The queued jobs, and the last decision about each."""

    def __init__(self) -> None:
        self.examined = 0  # number of jobs and shapes that all decisions so far have examined
        self._jobs: dict[str, QueuedJob] = {}
        self._oldest: dict[Shape, list[str]] = {}  # heaps of ids; removed ids are dropped when they reach the top
        self._counts: dict[Shape, int] = {}
        self._stopping: set[str] = set()
        self._blocked: dict[Shape, str] = {}
        self._head: QueuedJob | None = None
        self._shortage: str | None = None  # the resources for which the head waits, as text
        self._left: Bundle = {}  # what was free after the starts of the last decision
        self._none_reason: str | None = "Ray is starting"  # why no job can start

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def put(self, job: QueuedJob) -> None:
        """Add a job, or replace it."""
        self.drop(job.id)
        self._jobs[job.id] = job
        if job.stopping:
            self._stopping.add(job.id)
            return
        heapq.heappush(self._oldest.setdefault(job.shape, []), job.id)
        self._counts[job.shape] = self._counts.get(job.shape, 0) + 1

    def drop(self, job_id: str) -> None:
        """Remove a job; do nothing if it is not in the queue."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        if job_id in self._stopping:
            self._stopping.remove(job_id)
            return
        self._counts[job.shape] -= 1
        if not self._counts[job.shape]:
            del self._counts[job.shape], self._oldest[job.shape]

    @property
    def head(self) -> QueuedJob | None:
        """The oldest job that waited for resources at the last decision, or None if no job did."""
        return self._head

    @property
    def left(self) -> Bundle:
        """What was free after the starts of the last decision."""
        return dict(self._left)

    def expect(self, givers: Sequence[str]) -> None:
        """Add to the head's reason the names of the elastic jobs whose workers leave so that the head can start."""
        if givers and self._shortage is not None:
            more = f" and {len(givers) - 2} more" if len(givers) > 2 else ""
            self._shortage += f"; waits until workers of {', '.join(givers[:2])}{more} have left"

    def clear(self) -> None:
        """Remove all jobs."""
        for job_id in list(self._jobs):
            self.drop(job_id)

    def stopped(self) -> list[EndJob]:
        """Return the actions that end the queued jobs whose stop was requested. They need no answer of Ray."""
        return [EndJob(job_id, Status.STOPPED, "stopped before it started") for job_id in sorted(self._stopping)]

    def decide(self, room: Bundle | None, total: Bundle | None, groups: GroupReasons, why: str) -> list[Start | EndJob]:
        """Decide which jobs start now, and which end because their server group was stopped.

        `room`: the part of the resources `total` that new jobs may reserve; None if Ray does not answer, for the reason
        `why`.
        """
        names = {group for _, group in self._counts if group is not None}
        ended = {name: text for name in names if (text := groups.end_reason(name)) is not None}
        ends = [
            EndJob(job_id, Status.FAILED, ended[shape[1]])
            for shape in self._counts
            if shape[1] in ended
            for job_id in self._list_jobs(shape)
        ]
        self.examined += len(names) + len(ends)
        self._head, self._shortage, self._blocked, self._left = None, None, {}, {}
        self._none_reason = why if room is None or total is None else None
        if room is None or total is None:
            return [*ends]
        not_ready = {name: text for name in names - set(ended) if (text := groups.wait_reason(name)) is not None}
        for shape in self._counts:
            self.examined += 1
            blocked = (
                _explain_too_large(dict(shape[0]), total) or not_ready.get(shape[1] or "") or ended.get(shape[1] or "")
            )
            if blocked is not None:
                self._blocked[shape] = blocked
        return [*ends, *self._starts(room)]

    def reason(self, job_id: str) -> str | None:
        """Return why a job waited at the last decision, or None if the decision started it or did not include it."""
        job = self._jobs.get(job_id)
        if job is None or job.stopping:
            return None
        if self._none_reason is not None:
            return self._none_reason
        if (blocked := self._blocked.get(job.shape)) is not None:
            return blocked
        if self._head is None or job_id < self._head.id:
            return None
        if job_id == self._head.id:
            return self._shortage
        return f"waits behind {self._head.name} ({self._head.id}), which was submitted before"

    def _starts(self, room: Bundle) -> list[Start]:
        left, starts, taken = dict(room), list[Start](), list[QueuedJob]()
        queue = [
            (first, shape)
            for shape in self._counts
            if shape not in self._blocked and (first := self._find_first(shape)) is not None
        ]
        heapq.heapify(queue)
        while queue and self._head is None:
            job_id, shape = heapq.heappop(queue)
            job = self._jobs[job_id]
            self.examined += 1
            self._shortage = _explain_shortage(job.needs, left)
            if self._shortage is not None:
                self._head = job
                break
            starts.append(Start(job_id, job.attempt + 1))
            left = {kind: amount - job.needs.get(kind, 0.0) for kind, amount in left.items()}
            taken.append(job)
            heapq.heappop(self._oldest[shape])
            if (following := self._find_first(shape)) is not None:
                heapq.heappush(queue, (following, shape))
        self._left = left
        for job in taken:  # these jobs stay in the queue until the store says that they have started
            heapq.heappush(self._oldest[job.shape], job.id)
        return starts

    def _find_first(self, shape: Shape) -> str | None:
        heap = self._oldest[shape]
        while heap:
            job = self._jobs.get(heap[0])
            duplicate = len(heap) > 1 and heap[0] in heap[1:3]  # the job was replaced, and so pushed twice
            if job is not None and not job.stopping and job.shape == shape and not duplicate:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _list_jobs(self, shape: Shape) -> list[str]:
        return sorted(
            {
                job_id
                for job_id in self._oldest[shape]
                if (job := self._jobs.get(job_id)) is not None and job.shape == shape and not job.stopping
            }
        )


def with_cores(needs: Bundle, cores: float | None) -> Bundle:
    """Return what jobs reserve, with the cores of the machine that their workers occupy: one for each CPU, at most all.

    Logical CPUs may outnumber the machine's `cores`. Jobs then run side by side only while their CPUs fit into the
    cores, and a job of more workers than cores runs alone. `cores` is None if all CPUs may be reserved at once.

    Example:
        with_cores({"cpu": 4.0}, 2)     # {"cpu": 4.0, "core": 2.0}: no other job fits beside it
    """
    return needs if cores is None else needs | {CORE: min(needs.get("cpu", 0.0), cores)}


def find_room_for_new_jobs(running: Iterable[OpenJob], free: Bundle, total: Bundle) -> Bundle:
    """Return the resources that new jobs may reserve.

    These are the free resources less those that started jobs will still reserve. They are at most the total less the
    needs of all started jobs, because a recovering job reserves its resources again.
    """
    room, jobs = {}, list(running)
    for kind, amount in total.items():
        held = sum(job.needs.get(kind, 0.0) for job in jobs)
        coming = sum((job.needs if job.status is Status.STARTING else job.coming).get(kind, 0.0) for job in jobs)
        room[kind] = max(0.0, min(amount - held, free.get(kind, 0.0) - coming))
    return room


def _explain_too_large(needs: Bundle, total: Bundle) -> str | None:
    for kind, amount in needs.items():
        if amount > total.get(kind, 0.0):
            return f"needs {_format_amount(amount, kind)}, the whole cluster has {total.get(kind, 0.0):g}"
    return None


def _explain_shortage(needs: Bundle, room: Bundle) -> str | None:
    for kind, amount in needs.items():
        if amount > room.get(kind, 0.0):
            if kind == CORE:
                return (
                    f"waits until its workers fit beside the other jobs: needs {amount:g} of this machine's cores, "
                    f"{room.get(kind, 0.0):g} free (`rayps serve --cpus` sets how many workers run at once)"
                )
            return f"needs {_format_amount(amount, kind)}, {room.get(kind, 0.0):g} free"
    return None


def _format_amount(amount: float, kind: str) -> str:
    return f"{amount:g} {kind.upper()}{'' if amount == 1 else 's'}"
