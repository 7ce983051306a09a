"""Start workers in the background, so that they are ready before they join a running job."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from rayps_client.errors import ClusterError, NoResources, RaypsError

from rayps.cluster.members import GroupMember
from rayps.cluster.notices import Notice
from rayps.cluster.reservation import WorkerResources
from rayps.core.job.user_code import START_SECONDS

log = logging.getLogger(__name__)

RESERVE_SECONDS = 5.0  # seconds to wait for resources that were free when the newcomer was decided
BACKOFF_SECONDS = 10.0  # seconds after a failed start in which no other newcomer starts; doubled after each further one
LONGEST_BACKOFF = 160.0

StartOne = Callable[[int, WorkerResources], GroupMember]


class StartBackoff:
    """How long no newcomer starts after failed attempts to start some. Pure.

    An attempt is one call that starts newcomers: however many of them fail, the pause doubles once. A lack of resources
    does not double it, because it says nothing about the newcomers themselves.
    """

    def __init__(self) -> None:
        self._failed = 0  # attempts in a row that have failed
        self._attempt = -1  # the last one that has failed
        self._until = -math.inf

    def failed(self, attempt: int, now: float, *, lacked: bool) -> None:
        """Record at the time `now` that a newcomer of an attempt did not start. `lacked`: it lacked resources."""
        if not lacked and attempt != self._attempt:
            self._failed, self._attempt = self._failed + 1, attempt
        seconds = BACKOFF_SECONDS * 2.0 ** max(0, self._failed - 1)
        self._until = max(self._until, now + (BACKOFF_SECONDS if lacked else min(seconds, LONGEST_BACKOFF)))

    def started(self) -> None:
        """Record that a newcomer has started: the next pause is the shortest."""
        self._failed, self._attempt = 0, -1

    def over(self, now: float) -> bool:
        """Return whether newcomers may start at the time `now`."""
        return now >= self._until


class Newcomers:
    """Workers that are started while others train. The driver's thread calls the methods.

    Each newcomer has a thread: it reserves resources, starts the process, and lets it import the workload and build the
    model once.
    """

    def __init__(
        self,
        reserve: Callable[[float], WorkerResources],
        start: StartOne,
        end: Callable[[GroupMember], None],
        seconds: float = START_SECONDS,
        *,
        notices: Callable[[], tuple[Notice, ...]] = tuple,
    ) -> None:
        """Prepare. `seconds` is the longest time in which a process may start.

        `reserve(timeout)` reserves the resources of one worker, `start(number, resources)` starts its process, and
        `end(member)` ends it and releases its resources. `notices` returns the notices that hosts or processes end.
        """
        self._reserve, self._start, self._end, self._seconds = reserve, start, end, seconds
        self._notices = notices
        self._lock = threading.Lock()
        self._ready: list[GroupMember] = []
        self._starting = 0
        self._unwanted = 0  # newcomers to be ended as soon as they are ready
        self._closed = False
        self._backoff, self._attempts = StartBackoff(), 0
        self._failures: list[str] = []

    @property
    def ready(self) -> int:
        """The number of newcomers that are ready to join."""
        with self._lock:
            return len(self._ready)

    @property
    def starting(self) -> int:
        """The number of newcomers that are started and not yet ready."""
        with self._lock:
            return self._starting - self._unwanted

    @property
    def may_start(self) -> bool:
        """Whether no start has failed shortly before."""
        with self._lock:
            return self._backoff.over(time.monotonic())

    def start(self, count: int, number: int) -> None:
        """Start `count` newcomers, with the provisional ranks `number`, `number` + 1, ..."""
        self._attempts += 1
        for i in range(count):
            with self._lock:
                if self._unwanted:  # one that was dropped while it starts is wanted again
                    self._unwanted -= 1
                    continue
                self._starting += 1
            name = f"newcomer-{number + i}"
            threading.Thread(target=self._run, args=(number + i, self._attempts), daemon=True, name=name).start()

    def take(self, count: int) -> list[GroupMember]:
        """Return `count` newcomers that are ready; the caller owns them."""
        with self._lock:
            taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def drop(self, count: int) -> None:
        """End `count` newcomers: those that are ready first, then those that still start."""
        with self._lock:
            dropped, self._ready = self._ready[:count], self._ready[count:]
            self._unwanted += min(count - len(dropped), self._starting - self._unwanted)
        for member in dropped:
            self._end(member)

    def end_noticed(self) -> None:
        """End the newcomers that are ready and whose hosts or processes will end: they would leave at once."""
        notices = self._notices()
        with self._lock:
            found = [(member, _find_notice(member, notices)) for member in self._ready]
            self._ready = [member for member, notice in found if notice is None]
            gone = [(member, notice) for member, notice in found if notice is not None]
            self._failures += [_describe_notice(notice) for _, notice in gone]
        for member, _ in gone:
            self._end(member)

    def failures(self) -> list[str]:
        """Return and remove why newcomers have not started."""
        with self._lock:
            found, self._failures = self._failures, []
        return found

    def close(self) -> None:
        """End all newcomers. Those that still start are ended by their threads."""
        with self._lock:
            self._closed = True
        self.drop(self.ready)

    def _run(self, number: int, attempt: int) -> None:
        member: GroupMember | None = None
        failure: str | None = None
        lacked = False
        resources = WorkerResources()
        try:
            resources = self._reserve(RESERVE_SECONDS)
            member = self._start(number, resources)
            member.place = member.handle.call("place").result(self._seconds)
            if _find_notice(member, self._notices()) is None:  # otherwise it is not worth the time
                member.handle.call("prepare").result(self._seconds)
            notice = _find_notice(member, self._notices())
            failure, lacked = None if notice is None else _describe_notice(notice), notice is not None
        except (RaypsError, TimeoutError, OSError) as error:
            failure, lacked = _explain(error), isinstance(error, NoResources)
        except Exception as error:
            log.exception("a newcomer failed to start")
            failure = f"{type(error).__name__}: {error}"
        with self._lock:
            self._starting -= 1
            wanted = failure is None and not self._closed and not self._unwanted
            if failure is None and self._unwanted:
                self._unwanted -= 1
            if wanted and member is not None:
                self._ready.append(member)
                self._backoff.started()
                return
            if failure is not None:
                self._unwanted = min(self._unwanted, self._starting)
                self._failures.append(failure)
                self._backoff.failed(attempt, time.monotonic(), lacked=lacked)
        if member is not None:
            self._end(member)
        else:
            resources.release()


def _find_notice(member: GroupMember, notices: tuple[Notice, ...]) -> Notice | None:
    return None if member.place is None else member.place.notice(notices)


def _describe_notice(notice: Notice) -> str:
    return f"its host or process ends: {notice.reason}"


def _explain(error: Exception) -> str:
    if isinstance(error, NoResources):
        return "the resources of one more worker are not free on hosts without a notice"
    if isinstance(error, ClusterError):
        return str(error.data.get("reason", error))
    return str(error) or type(error).__name__
