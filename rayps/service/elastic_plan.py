"""Decide how many workers each elastic job may have: a pure function from facts to numbers. No clock, no I/O, no state.

A job starts as soon as its least number of workers can run. Then, in this order:

1. A job has at most the number that the user requested (`rayps scale`). Without a request, it has at most the number
   that its driver wants: a driver whose next worker would not pay wants no more.
2. If the oldest waiting job could start when elastic jobs give up workers, they give up as many as it lacks, one at a
   time: each time the job with the most workers above its least number, the newest of them if there are several. No job
   goes below its least number. If the waiting job could not start even then, none gives up any.
3. If no waiting job can be served this way, jobs grow into what is free, one worker at a time: each time the job with
   the fewest workers, the oldest of them. A job whose number has changed less than `cooldown` seconds ago does not
   grow. Shrinking does not wait: at most one growth in `cooldown` seconds can be in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayps.cluster.local import Bundle

_ROUNDING = 1e-9  # Ray counts in units of 1e-4


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """The facts of an elastic job that has started."""

    id: str
    name: str
    least: int
    most: int
    each: Bundle  # what one worker reserves
    members: int  # its workers now, also those that start or leave
    allowed: int  # the number that it may have; it takes them as it can
    requested: int | None = None  # the most workers that the user wants now; None: `most`
    wanted: int | None = None  # the most workers that its driver wants now; None: not known
    settled: float = float("inf")  # seconds since `allowed` has changed
    cooldown: float = 30.0
    grows: bool = True  # whether it may get more now: it trains, and nothing stops it
    gives: bool = True  # whether it may be told to have fewer

    @property
    def limit(self) -> int:
        """The most workers that the job may get, whatever is free."""
        asked = self.wanted if self.requested is None else self.requested
        return max(self.least, self.most if asked is None else min(self.most, asked))


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """The oldest job that waits for resources."""

    id: str
    name: str
    needs: Bundle


@dataclass(frozen=True, slots=True)
class Allow:
    """The decision that a job may have this number of workers now."""

    job: str
    workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class Allotment:
    """The changes, and what the waiting job gets from them."""

    changes: list[Allow] = field(default_factory=list)  # of jobs whose number changes, in the order of the jobs
    givers: tuple[str, ...] = ()  # names of the jobs whose workers must leave before the waiting job can start


def add_up_reserved(least: Bundle, each: Bundle, more: int) -> Bundle:
    """Return the resources of a job that reserves `least` for its least number, and `more` workers of `each`."""
    return {kind: least.get(kind, 0.0) + more * each.get(kind, 0.0) for kind in {**least, **each}}


def allot(
    jobs: Sequence[ElasticJob], room: Bundle, waiting: WaitingJob | None = None, ending: Bundle | None = None
) -> Allotment:
    """Decide which jobs may have more or fewer workers; see the top of this file.

    `jobs`: the elastic jobs that have started, oldest first. `room`: what is free, beside what every job may still
    take. `waiting`: the oldest job that waits for resources. `ending`: what jobs that were asked to stop will free.
    """
    target = {job.id: min(job.allowed, job.limit) if job.gives else job.allowed for job in jobs}
    reason = {job.id: _explain_less(job) for job in jobs if target[job.id] < job.allowed}
    served = waiting is not None and _shrink_for(waiting, jobs, target, room, ending or {})
    givers: tuple[str, ...] = ()
    if waiting is not None and served:
        for job in jobs:
            if target[job.id] < min(job.allowed, job.limit):
                reason[job.id] = f"job {waiting.name} ({waiting.id}) waits for these resources"
        givers = tuple(job.name for job in jobs if target[job.id] < max(job.members, job.allowed))
    else:
        for job_id in _grow(jobs, target, room):
            reason[job_id] = "resources are free that no waiting job could use"
    changes = [Allow(job.id, target[job.id], reason[job.id]) for job in jobs if target[job.id] != job.allowed]
    return Allotment(changes, givers)


def _explain_less(job: ElasticJob) -> str:
    if job.requested is not None:
        return f"at most {job.requested} {'worker was' if job.requested == 1 else 'workers were'} requested"
    return "its driver wants no more workers"


def _shrink_for(
    waiting: WaitingJob, jobs: Sequence[ElasticJob], target: dict[str, int], room: Bundle, ending: Bundle
) -> bool:
    """Lower `target` until the waiting job has room, and return True; change nothing and return False if it never has.

    What jobs release later counts as room: the job waits until it is free.
    """
    tried = dict(target)
    while True:
        lacking = _find_lacking(waiting.needs, _estimate_room_later(jobs, tried, room, ending))
        if not lacking:
            target.update(tried)
            return True
        able = [
            job
            for job in jobs
            if job.gives and tried[job.id] > job.least and any(job.each.get(kind, 0.0) > 0 for kind in lacking)
        ]
        if not able:
            return False
        giver = max(able, key=lambda job: (tried[job.id] - job.least, job.id))
        tried[giver.id] -= 1


def _estimate_room_later(jobs: Sequence[ElasticJob], target: dict[str, int], room: Bundle, ending: Bundle) -> Bundle:
    """Return the room when every job has given up the workers above its target."""
    later = {kind: room.get(kind, 0.0) + ending.get(kind, 0.0) for kind in {**room, **ending}}
    for job in jobs:
        more = max(job.members, job.allowed) - target[job.id]
        later = add_up_reserved(later, job.each, more)
    return later


def _find_lacking(needs: Bundle, room: Bundle) -> list[str]:
    return [kind for kind, amount in needs.items() if amount > room.get(kind, 0.0) + _ROUNDING]


def _grow(jobs: Sequence[ElasticJob], target: dict[str, int], room: Bundle) -> list[str]:
    """Raise `target` of jobs that may grow while there is room; return the ids of those that grow."""
    left, grown = dict(room), dict[str, None]()
    able = [job for job in jobs if job.grows and target[job.id] == job.allowed and job.settled >= job.cooldown]
    while True:
        fitting = [
            job
            for job in able
            if target[job.id] < job.limit and (target[job.id] < job.members or not _find_lacking(job.each, left))
        ]
        if not fitting:
            return list(grown)
        taker = min(fitting, key=lambda job: (target[job.id], job.id))
        target[taker.id] += 1
        grown[taker.id] = None
        if target[taker.id] > taker.members:  # a member that was to leave takes no more room when it stays
            left = add_up_reserved(left, taker.each, -1)
