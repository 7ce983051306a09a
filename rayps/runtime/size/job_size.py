"""How many workers an elastic job has: carry out the decisions of `rayps.runtime.size.decide_size`, for every family.

`JobSize` knows what is allowed, which resources are free, which workers are under notice, and what the last growth has
brought. It starts newcomers in the background, and drops them. How workers join and leave is the family's own part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rayps.cluster.members import GroupMember
from rayps.cluster.notices import Notice
from rayps.cluster.room import RoomWatch
from rayps.core.job.records import ProgressRecord
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.runtime.records.journal import Journal
from rayps.runtime.size.decide_size import SizeDecision, SizeFacts, decide_size, gain_of
from rayps.runtime.size.newcomers import Newcomers
from rayps.runtime.size.noticed_workers import NoticedWorkers

MEASURED_SECONDS = 5.0  # least seconds of training after a growth before its gain is measured
LONGEST_COOLDOWN = 10.0  # a longer cooldown does not delay the measurement of a gain


class Allowance:
    """The number of workers that a job may have now. Any thread may set it."""

    def __init__(self, most: int) -> None:
        """Allow `most` workers."""
        self._lock = threading.Lock()
        self._workers, self._reason, self._set_at = most, "", 0

    def set(self, workers: int, reason: str) -> None:
        """Allow `workers` workers from now on. `reason` is written into the event of the change."""
        with self._lock:
            if (workers, reason) != (self._workers, self._reason):
                self._workers, self._reason = workers, reason
                self._set_at += 1

    @property
    def now(self) -> tuple[int, str, int]:
        """The number, the reason, and how often the number was set."""
        with self._lock:
            return self._workers, self._reason, self._set_at


class GrowthGain:
    """What the last growth has brought, and the number of workers beyond which growth has not paid. Pure."""

    def __init__(self, least: float) -> None:
        """Prepare; `least` is the gain from which the job grows further: see `decide_size.gain_of`."""
        self._least = least
        self.ceiling: int | None = None  # None if it is not known
        self._before: tuple[int, float] | None = None  # workers and speed before the last growth

    def allow(self, workers: int) -> None:
        """Forget the ceiling if more workers than that are allowed from outside: the job tries again."""
        if self.ceiling is not None and workers > self.ceiling:
            self.ceiling = None

    def changed(self, before: int, after: int, speed: float | None) -> None:
        """Record a change of the workers; `speed` is that before the change, None if it is not known."""
        self._before = (before, speed) if after > before and speed is not None else None

    def measure(self, workers: int, speed: float) -> str | None:
        """Compare the speed of so many workers with that before. Return a text if the growth has not paid."""
        before, self._before = self._before, None
        if before is None or workers <= before[0]:
            return None
        gain = gain_of(before, (workers, speed))
        if gain >= self._least:
            return None
        self.ceiling = workers
        return (
            f"more workers do not pay: {workers} workers train {speed:.4g} samples/s and {before[0]} trained "
            f"{before[1]:.4g}, so that each added worker brought {gain:.0%} of a worker's speed, and elastic.gain is "
            f"{self._least:.0%}: the job does not grow further"
        )

    @property
    def is_open(self) -> bool:
        """Whether a growth is still to be measured."""
        return self._before is not None


class JobSize:
    """Decides on the number of workers of one elastic job."""

    def __init__(self, elastic: ElasticWorkers, least: int, journal: Journal, allowance: Allowance) -> None:
        """Prepare. `begin` is called when the workers have started; `least` is the job's least number of them."""
        self.least = least
        self._elastic, self._journal, self._allowance = elastic, journal, allowance
        self._noticed = NoticedWorkers(journal)
        self._held: tuple[Newcomers, RoomWatch] | None = None
        self._gain = GrowthGain(elastic.gain)
        self._changed_at = time.monotonic() - elastic.cooldown
        self._allowed_at = 0
        self._announced = ""  # the newest event of newcomers that start
        self.last_failure = ""  # why the last newcomer that failed did not start; "" after a change of the workers

    def begin(self, newcomers: Newcomers, room: RoomWatch, notices: Callable[[], tuple[Notice, ...]]) -> None:
        """Set what starts newcomers, what knows the free resources, and what returns notices of ends."""
        self._held = newcomers, room
        self._noticed.begin(notices)
        room.start()

    def close(self) -> None:
        """End newcomers, and stop looking for room."""
        for each in self._held or ():
            each.close()

    @property
    def newcomers(self) -> Newcomers:
        """What starts newcomers."""
        assert self._held is not None, "begin comes first"
        return self._held[0]

    @property
    def room(self) -> int:
        """How many more workers fit into the free resources, as of the last look."""
        assert self._held is not None, "begin comes first"
        return self._held[1].room

    @property
    def wanted(self) -> int | None:
        """The most workers that the job wants, because more have not paid; None if this is not known."""
        return self._gain.ceiling

    def progress(self) -> ProgressRecord:
        """Return how many workers the job wants, if that is known."""
        return {} if self.wanted is None else {"wanted": self.wanted}

    def decide(
        self,
        workers: Sequence[GroupMember],
        *,
        most_more: int | None = None,
        useful: bool = True,
        speed: float | None = None,
    ) -> SizeDecision:
        """Decide on the number of workers, and start and drop newcomers. The caller lets workers join and leave.

        `workers` are those that stay, and the leavers of the decision are their indices. The job grows by no more than
        `most_more`, and starts no worker unless that is `useful`. `speed` is the samples per second of all workers;
        None if they are not known now.
        """
        assert self._held is not None, "begin comes first"
        newcomers, room = self._held
        self.check_newcomers()
        allowed, reason, number = self._allowance.now
        if number != self._allowed_at:  # a word from outside is also a new attempt to grow, at once
            self._allowed_at, self._changed_at = number, time.monotonic() - self._elastic.cooldown
            self._gain.allow(allowed)
        self._measure(len(workers), speed)
        free = room.room if newcomers.may_start else 0
        noticed = self._noticed.ranks(workers)
        decision = decide_size(
            SizeFacts(
                len(workers),
                self.least,
                self._elastic.most,
                allowed,
                reason,
                free if most_more is None else min(free, most_more),
                newcomers.starting,
                newcomers.ready,
                {at: noticed[worker.rank] for at, worker in enumerate(workers) if worker.rank in noticed},
                time.monotonic() - self._changed_at,
                self._elastic.cooldown,
                self._gain.ceiling,
            )
        )
        if decision.drop:
            newcomers.drop(decision.drop)
        if decision.start and not (useful and newcomers.may_start):
            return replace(decision, start=0)
        if decision.start:
            what = "worker starts" if decision.start == 1 else "workers start"
            text = f"{decision.start} more {what} while {len(workers)} train: {decision.reason}"
            if text != self._announced or not self.last_failure:  # another try after a failure is not announced again
                self._journal.event("growing", text)
            self._announced = text
            newcomers.start(decision.start, len(workers))
        return decision

    def check_newcomers(self) -> None:
        """End newcomers that are under notice, and report those that have not started: each reason once in a row."""
        self.newcomers.end_noticed()
        for why in self.newcomers.failures():
            if why != self.last_failure:
                self.last_failure = why
                self._journal.event("warning", f"a worker that was to join did not start: {why}; other tries follow")

    def report_wait(self, text: str) -> None:
        """Report that the job waits for newcomers, and why."""
        self._journal.event("warning", text)

    def noticed(self, workers: Sequence[GroupMember]) -> list[GroupMember]:
        """Return those of `workers` that are under notice."""
        ranks = self._noticed.ranks(workers)
        return [worker for worker in workers if worker.rank in ranks]

    def changed(self, before: int, after: int, speed: float | None = None) -> None:
        """Record that the number of workers has changed. `speed` is that before the change, None if it is not known."""
        self._changed_at, self.last_failure = time.monotonic(), ""
        self._gain.changed(before, after, speed)

    def settled(self) -> None:
        """Record that the new group trains: the cooldown begins now."""
        self._changed_at = time.monotonic()

    def _measure(self, workers: int, speed: float | None) -> None:
        wait = max(MEASURED_SECONDS, min(self._elastic.cooldown, LONGEST_COOLDOWN))
        if speed is None or not self._gain.is_open or time.monotonic() - self._changed_at < wait:
            return
        text = self._gain.measure(workers, speed)
        if text is not None and workers < self._elastic.most:
            self._journal.event("warning", text)
