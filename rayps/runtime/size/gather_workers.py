"""Gather the workers with which the next generation of an elastic job begins. The decision is pure: `decide_begin`.

The dead are dropped, and the job goes on with the living, if at least the least number of workers lives. Otherwise
newcomers start wherever the cluster has room, and the generation begins when they are ready. No call here blocks: the
driver asks again, so that a stop ends the wait.

One recovery needs a worker in the place of each that has died: the rebuild of states from copies, whose ranks are those
of the old group. If the cluster has no room for these newcomers, the rebuild is given up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayps_client.errors import NoResources

from rayps.core.job.continuation import Continuation
from rayps.runtime.size.job_size import JobSize

if TYPE_CHECKING:
    from rayps.runtime.driver.worker_group import WorkerGroup

LEAST_SECONDS = 600.0  # seconds, or `timeout` if that is longer, for which a job waits for its least number of workers


@dataclass(frozen=True, slots=True)
class BeginFacts:
    """What is known when a generation is to begin."""

    living: int
    dead: int  # workers that have died and are still in the group
    wanted: int  # the least number of workers with which the generation begins
    ready: int = 0  # newcomers that are ready to join
    starting: int = 0  # newcomers that have been started and are not ready
    may_start: bool = True  # whether no newcomer has failed to start shortly before
    rebuilds: bool = False  # whether the states of the dead are rebuilt in newcomers, in their places
    exact: bool = False  # whether the generation has no more than the wanted number of workers
    stops: bool = False  # whether the run is to end


@dataclass(frozen=True, slots=True)
class BeginStep:
    """What to do. If neither `begin` nor `stop`, ask again soon.

    `drop`: remove the dead from the group. `keep`: so many of the living stay. `join`: so many newcomers join, in the
    places of the dead if these are not dropped. `start`: so many newcomers start.
    """

    begin: bool = False
    stop: bool = False
    drop: bool = False
    keep: int = 0
    join: int = 0
    start: int = 0


def decide_begin(facts: BeginFacts) -> BeginStep:
    """Return the step for these facts."""
    living, coming = facts.living, facts.ready + facts.starting
    if facts.rebuilds and facts.dead and living + facts.dead >= facts.wanted:
        if facts.ready >= facts.dead:
            return BeginStep(begin=True, keep=living, join=facts.dead)
        if not facts.stops and (facts.may_start or coming >= facts.dead):
            return BeginStep(keep=living, start=max(0, facts.dead - coming))
    missing = max(0, facts.wanted - living)
    keep = min(living, facts.wanted) if facts.exact else living
    if facts.ready >= missing:
        return BeginStep(begin=True, drop=True, keep=keep, join=missing)
    if facts.stops:  # the living save a last checkpoint; without any, the newest one stays
        return BeginStep(begin=living > 0, stop=living == 0, drop=True, keep=living)
    return BeginStep(drop=True, keep=living, start=max(0, missing - coming) if facts.may_start else 0)


class WorkersWait:
    """A wait of a job for workers that it lacks: its reason is reported once, and it has a deadline."""

    def __init__(self, size: JobSize, option: float, seconds: float) -> None:
        """Prepare. The wait may last `seconds`; `option` is the value of the job's `timeout`."""
        self._size, self._option, self._seconds = size, option, seconds
        self._since: float | None = None

    def end(self) -> None:
        """End the wait: the job has its workers, or goes on without them."""
        self._since = None

    def go_on(self, have: int, wanted: int, why: str) -> str:
        """Wait for `wanted` workers; the job has `have`. Return what it waits for. `why` it needs them is a clause.

        Raises:
            NoResources: the deadline has passed, and no newcomer is starting.
        """
        now = time.monotonic()
        room = self._size.room
        text = f"{why}, and the job has {have}: it waits for newcomers, and the free resources have room for {room}"
        if self._since is None:
            self._since = now
            self._size.report_wait(text)
        seconds, newcomers = now - self._since, self._size.newcomers
        if seconds < self._seconds or newcomers.starting:
            return text
        last = self._size.last_failure
        raise NoResources(
            f"{why}, and the job has {have} after a wait of {seconds:.0f} s: the free resources have room for {room} "
            f"more{f', and the last newcomer did not start: {last}' if last else ''}\n"
            f"free resources or add a host, and resume from the newest checkpoint; or raise timeout, which is "
            f"{self._option:g} s",
            needed=wanted - have,
            free=room,
        )


@dataclass(frozen=True, slots=True)
class GatheredWorkers:
    """Whether a generation can begin with the workers that there are, and how it then continues.

    `waits`: what the job waits for; "" if the generation begins now. `ends`: the run ends, because a stop was requested
    and no worker lives. `lost`: the workers that were found dead now, and `reason` why. `size`: the number of workers
    before and after.
    """

    continues: Continuation | None = None
    waits: str = ""
    ends: bool = False
    lost: tuple[str, ...] = ()
    reason: str = ""
    size: tuple[int, int] = (0, 0)


class GatherWorkers:
    """Gathers the workers of one job in step, before each of its generations."""

    def __init__(self, size: JobSize, timeout: float) -> None:
        """Prepare. `timeout`: the job's option, in seconds."""
        self._size = size
        self._least_wait = WorkersWait(size, timeout, max(LEAST_SECONDS, timeout))
        self._replay_wait = WorkersWait(size, timeout, timeout)
        self._ended: set[int] = set()  # ranks of dead workers whose places are kept, and whose processes are ended

    def look(
        self, group: WorkerGroup, continues: Continuation | None, *, replay: tuple[int, int] | None, stops: bool
    ) -> GatheredWorkers:
        """Drop the dead and take newcomers. Call it again while the result waits.

        `continues`: how the generation continues; None if it starts from the newest snapshot.
        `replay`: a pair (round, workers) of a replay, with which a run begins; None if the least number is enough.
        `stops`: whether the run is to end.

        Raises:
            NoResources: too few workers live, and the cluster had no room for others before the deadline.
        """
        newcomers, before = self._size.newcomers, group.size
        self._size.check_newcomers()
        gone = {rank for rank, worker in enumerate(group.workers) if worker.dead}
        wanted = self._size.least if replay is None else replay[1]
        living = before - len(gone)
        coming = newcomers.ready, newcomers.starting, newcomers.may_start
        rebuilds = continues is not None and continues.keeps_places
        step = decide_begin(BeginFacts(living, len(gone), wanted, *coming, rebuilds, replay is not None, stops))
        new = gone - self._ended
        lost = [group.workers[rank] for rank in sorted(new)]
        group.end_workers(new)  # newcomers may need their resources
        self._ended = set() if step.drop or step.begin else gone
        if step.drop:
            stay = [rank for rank in range(before) if rank not in gone][: step.keep]
            order: list[int | None] = [*stay, *[None] * step.join]
            continues = None if continues is None else continues.among(order)
        else:
            order = [None if rank in gone and step.begin else rank for rank in range(before)]
        if order != [*range(before)]:
            group.change_workers(order, newcomers.take(step.join))
            self._size.changed(before, group.size)
        if step.start:
            newcomers.start(step.start, group.size)
        waits = ""
        if not (step.begin or step.stop):
            places = f"newcomers start in the places of {len(gone)} workers, to get their states from copies"
            waits = self._wait(living, wanted, replay) if step.drop else places
        reason = "; ".join(f"{worker.name} died ({worker.dead})" for worker in lost)
        names = tuple(worker.name for worker in lost)
        return GatheredWorkers(continues, waits, step.stop, names, reason, (before, group.size))

    def lacks(self, group: WorkerGroup, replay: tuple[int, int]) -> str:
        """Return what the workers wait for that have stopped at a pair (round, workers) of a replay.

        Raises:
            NoResources: the cluster had no room before the deadline.
        """
        return self._wait(group.size + self._size.newcomers.ready, replay[1], replay)

    def ready(self) -> None:
        """Record that no workers are awaited."""
        self._least_wait.end()
        self._replay_wait.end()

    def _wait(self, have: int, wanted: int, replay: tuple[int, int] | None) -> str:
        if replay is None:
            return self._least_wait.go_on(have, wanted, f"the least number of workers is {wanted}")
        return self._replay_wait.go_on(have, wanted, f"replay has {wanted} workers after round {replay[0]}")
