"""Follows a server group for one job: its facts, the events that concern the job, and what its quota holds back."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rayps.core.errors import RaypsError
from rayps.ps.group import ManagerClient
from rayps.ps.protocol.space import Space

log = logging.getLogger(__name__)

Facts = dict[str, Any]

LOOK_SECONDS = 0.5
EVENTS = ("server_lost", "server_dead", "segment_lost", "resized", "server_leaving", "server_joined")
GROWTHS = 2  # looks in which more requests had to wait, before it is said: one burst is none
FOR_SECONDS = 10.0  # how long the last request that had to wait counts


class GroupWatch:
    """Looks at the group's facts in a thread, from `start` to `close`.

    `react` is given new facts and the facts of the job's spaces, see `spaces_of`; `spaces()` are those that are open.
    `lock` is held meanwhile; whoever changes the job's spaces must hold it too.
    """

    def __init__(
        self, group: ManagerClient, job: str, spaces: Callable[[], Sequence[Space]], react: Callable[[Facts], None]
    ) -> None:
        self.lock = threading.Lock()
        self.facts: Facts = {}
        self._group, self._job, self._spaces, self._react = group, job, spaces, react
        self._events: deque[Facts] = deque()
        self._since = time.time()
        self._throttled = Throttled()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=f"looker-{self._job}")
            self._thread.start()

    def close(self) -> None:
        """Look no more. `join` waits for the thread."""
        self._over.set()

    def join(self) -> None:
        """Wait for the thread to end, after `close`."""
        if self._thread is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        while True:
            self.look()
            if self._over.wait(LOOK_SECONDS):
                return

    def look(self) -> None:
        """Take in the group's facts, and react. Any thread; a failure is logged."""
        if self._over.is_set():
            return  # the job's own group is gone by now
        try:
            facts = self._group.facts()
            with self.lock:
                self.facts = facts
                self._take_events(facts)
                self._look_at_quota()
                if not self._over.is_set():
                    self._react(facts)
        except (RaypsError, TimeoutError) as error:  # a manager that restarts is asked again
            log.info("server group %r does not answer: %s", self._group.name, error)
        except Exception:
            log.exception("server group %r cannot be followed", self._group.name)

    def _take_events(self, facts: Facts) -> None:
        fresh = [event for event in facts["events"] if event["time"] > self._since]
        if fresh:
            self._since = fresh[-1]["time"]
        names = {None, self._job, *(space.name for space in self._spaces())}
        self._events += [event for event in fresh if event["kind"] in EVENTS and event.get("space") in names]

    def _look_at_quota(self) -> None:
        """Warn, once for each quota, that it holds the job back."""
        found = self._throttled.look(self.job(), time.monotonic())
        if found is not None:
            names = [space.name for space in self._spaces()]
            commands = [f"`rayps servers quota {self._group.name} {name} --operations N`" for name in names]
            verb = "changes it" if len(commands) == 1 else "change it"
            self.tell({"kind": "warning", "time": time.time(), "message": f"{found}: {' and '.join(commands)} {verb}"})

    def tell(self, event: Facts) -> None:
        """Add an event."""
        self._events.append(event)

    def events(self) -> list[Facts]:
        """The events since the last call: each has a kind, a message and a time."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def job(self) -> Facts:
        """The facts of the job's spaces in sum."""
        return in_sum(spaces_of(self.facts, self._spaces()))

    @property
    def throttled(self) -> str | None:
        """In words, whether the quota holds the job back now."""
        return self._throttled.now(time.monotonic())


def spaces_of(facts: Facts, spaces: Sequence[Space]) -> list[Facts]:
    """The facts of each of these spaces; empty where the group does not know it."""
    known = {found["number"]: found for found in facts.get("spaces", [])}
    return [known.get(space.number, {}) for space in spaces]


def in_sum(spaces: Sequence[Facts]) -> Facts:
    """The facts of several spaces as those of one. A quota that one of them lacks is none."""
    if len(spaces) < 2:
        return spaces[0] if spaces else {}
    counts = ("bytes", "rows", "operations_s", "rejected", "throttled")
    found: Facts = {key: sum(space.get(key) or 0 for space in spaces) for key in counts}
    quotas = [space.get("quota") or {} for space in spaces]
    found["quota"] = {
        key: None if any(quota.get(key) is None for quota in quotas) else sum(quota[key] for quota in quotas)
        for key in ("bytes", "operations")
    }
    found["version"] = max(space.get("version", 0) for space in spaces)
    found["branch_of"] = spaces[0].get("branch_of")
    found["segments"] = [segment for space in spaces for segment in space.get("segments", [])]
    return found


class Throttled:
    """Whether a job is held back by its quota of operations, from facts in sum; times are by one clock, in seconds."""

    def __init__(self) -> None:
        self._limit: float | None = None
        self._throttled = 0
        self._growths, self._grown_at = 0, float("-inf")
        self._said = False

    def look(self, space: dict[str, Any], now: float) -> str | None:
        """Take in a space's "quota" and "throttled"; what is to be told, once for each quota."""
        limit, throttled = (space.get("quota") or {}).get("operations"), int(space.get("throttled") or 0)
        if limit != self._limit:
            self._limit, self._growths, self._said = limit, 0, False
        elif throttled > self._throttled and limit is not None:
            self._growths = self._growths + 1 if now - self._grown_at < FOR_SECONDS else 1
            self._grown_at = now
        self._throttled = throttled
        if self._said or self.now(now) is None:
            return None
        self._said = True
        return self.now(now)

    def now(self, now: float) -> str | None:
        """How it stands: None where nothing holds it back."""
        if self._limit is None or self._growths < GROWTHS or now - self._grown_at >= FOR_SECONDS:
            return None
        return f"held back by its quota of {self._limit:g} operations a second"
