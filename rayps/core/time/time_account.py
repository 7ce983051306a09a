"""The account of a process's time: each second is in exactly one part. Pure, with a clock that is given.

The parts of a worker or a server:

- `start`: from the start of the process until its first round: imports, the model, connections, the first data.
- `data`: waiting for the next batch.
- `compute`: forward, backward, the optimizer's step, and all other code of a round. Communication in the background
  while the worker computes is compute. On a server: serving requests.
- `communication`: copying, sending and receiving that nothing hides.
- `waiting`: for a peer, by name; for the real clients of a federation.
- `evaluation`, `checkpoint`: evaluating; copying, writing and handing over states.
- `recovery`: from a failure, or a change of the number of workers, until the first round after it.
- `again`: a round that was trained before a failure and is repeated.
- `idle`: finished, or without a plan or a request.

Precedence. A process is in one part at a time. A part of `CONTAINERS` contains whatever happens in it: a wait within an
evaluation is evaluation, and a repeated round is `again` as a whole. Of two nested containers, the outer one counts.
Inside a round the innermost part counts, and what was only measured as a total is taken from the round in the order
data, waiting, communication; the rest is compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

PARTS = (
    "compute",
    "data",
    "communication",
    "waiting",
    "evaluation",
    "checkpoint",
    "start",
    "recovery",
    "again",
    "idle",
)
CONTAINERS = frozenset({"start", "evaluation", "checkpoint", "recovery", "again"})
USEFUL = "compute"  # the part whose share of the time is the goodput
_KNOWN = frozenset(PARTS)
DIVIDED = ("data", "waiting", "communication")  # what is taken from a round, in this order

Place: TypeAlias = tuple[str, str]  # (a part, the name of the peer or "")
Seconds: TypeAlias = dict[Place, float]


class TimeAccount:
    """The seconds of one process by part and peer. Any thread may call its methods.

    The process is in the part of the last `enter`, or in that of a `span` around the current code. The sum over all
    parts is always the time since the account was made.
    """

    def __init__(self, part: str = "start", clock: Callable[[], float] = time.monotonic) -> None:
        """Begin in `part`. `clock` returns seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: Seconds = {}
        self._spans: list[Place] = [
            (_check_known(part), "")
        ]  # the entered part, then the spans from the outside inwards
        self._current: Place = self._spans[0]
        self._since = clock()
        self._undivided = 0.0  # seconds in the entered part itself since `enter`, which `divide` may still move
        self.newest_turn = 0  # the number of the turn whose calls count

    def enter(self, part: str, peer: str = "") -> None:
        """Leave the part of the last `enter`, and count the time from now on as `part`. Open spans stay open."""
        place = _check_known(part), peer
        with self._lock:
            self._pass()
            self._spans[0], self._undivided = place, 0.0
            if len(self._spans) == 1:
                self._current = place
            else:
                self._choose()

    @contextmanager
    def span(self, part: str, peer: str = "") -> Iterator[None]:
        """Count the time inside the block as `part`, by the precedence of this module."""
        place = _check_known(part), peer
        with self._lock:
            self._pass()
            self._spans.append(place)
            self._choose()
        try:
            yield
        finally:
            with self._lock:
                self._pass()
                at = len(self._spans) - 1 - self._spans[::-1].index(place)  # threads may close spans out of order
                del self._spans[at]
                self._choose()

    def divide(self, shares: Mapping[str, float], peer: str = "") -> None:
        """Move seconds of the part that was entered last to other parts: `shares` is a dict from a part to seconds.

        These are seconds since the last `enter` that were measured only as totals. They are taken in the order of
        `DIVIDED`, as far as the time suffices. Within a container nothing is moved.
        """
        with self._lock:
            self._pass()
            source, left, totals = self._spans[0], self._undivided, self._seconds
            if source[0] in CONTAINERS:
                return
            for part in DIVIDED:
                seconds = shares.get(part, 0.0)
                if seconds > left:
                    seconds = left
                if seconds > 0:
                    target = part, peer if part == "waiting" else ""
                    left -= seconds
                    totals[source] -= seconds
                    totals[target] = totals.get(target, 0.0) + seconds
            self._undivided = left

    def rename(self, old: str, new: str) -> None:
        """Count all seconds of the part `old` so far as `new`, whose reason was not known when they passed."""
        with self._lock:
            self._pass()
            for place in [place for place in self._seconds if place[0] == old]:
                target, seconds = (_check_known(new), place[1]), self._seconds.pop(place)
                self._seconds[target] = self._seconds.get(target, 0.0) + seconds
            self._undivided = 0.0

    def seconds(self) -> Seconds:
        """Return the seconds by (part, peer) until now."""
        with self._lock:
            self._pass()
            return dict(self._seconds)

    @property
    def part(self) -> str:
        """The part in which the process is now."""
        return self._current[0]

    def turn(self) -> AccountTurn:
        """Return the account as one generation writes it: nothing is written by it after the next call of `turn`."""
        with self._lock:
            self.newest_turn += 1
            return AccountTurn(self, self.newest_turn)

    def _pass(self) -> None:
        """Count the time since the last call to the current place."""
        now, place, seconds = self._clock(), self._current, self._seconds
        passed, self._since = now - self._since, now
        seconds[place] = seconds.get(place, 0.0) + passed
        if len(self._spans) == 1:
            self._undivided += passed

    def _choose(self) -> None:
        """Set the current place: the outermost container, else the innermost span."""
        spans = self._spans
        self._current = spans[0] if len(spans) == 1 else next((p for p in spans if p[0] in CONTAINERS), spans[-1])


class LoopAccount:
    """The account of a loop that serves requests: one thread writes it, so that a change costs little and has no lock.

    The wait for the slowest workers has no name here: `name_waits` divides it. Another thread may read `seconds`, and
    then sees the state before or after a change.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin in the part `start`. `clock` returns seconds."""
        self._clock = clock
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._part, self._since = "start", clock()

    def enter(self, part: str) -> None:
        """Count the time from now on as `part`, one of `PARTS`."""
        now = self._clock()
        self._parts[self._part] += now - self._since
        self._part, self._since = part, now

    def seconds(self) -> Seconds:
        """Return the seconds by (part, "") until now."""
        part, since = self._part, self._since
        found = dict(self._parts)
        found[part] += max(0.0, self._clock() - since)
        return {(name, ""): value for name, value in found.items() if value}


class AccountTurn:
    """A time account as one generation writes it. Calls of an earlier generation's thread have no effect."""

    def __init__(self, account: TimeAccount, number: int) -> None:
        self._account, self._number = account, number

    def enter(self, part: str, peer: str = "") -> None:
        """Count the time from now on as `part`: see `TimeAccount.enter`."""
        account = self._account
        if account.newest_turn == self._number:
            account.enter(part, peer)

    @contextmanager
    def span(self, part: str, peer: str = "") -> Iterator[None]:
        """Count the time inside the block as `part`: see `TimeAccount.span`."""
        if self._account.newest_turn != self._number:
            yield
            return
        with self._account.span(part, peer):
            yield

    def divide(self, shares: Mapping[str, float], peer: str = "") -> None:
        """Move measured seconds of the current round to other parts: see `TimeAccount.divide`."""
        account = self._account
        if account.newest_turn == self._number:
            account.divide(shares, peer)


def _check_known(part: str) -> str:
    if part not in _KNOWN:
        raise ValueError(f"no part {part!r} of a time account: use one of {', '.join(PARTS)}")
    return part


def name_waits(seconds: Seconds, raw: Mapping[str, float]) -> Seconds:
    """Return `seconds` in which the waits without a name are divided among peers, as the totals `raw` are divided.

    `raw` is a dict from a peer's name to the seconds waited for it, which may include waits that compute hides. The
    sum does not change. If `raw` has no seconds, the waits stay without a name.
    """
    whole, unnamed = sum(raw.values()), seconds.get(("waiting", ""), 0.0)
    if whole <= 0 or unnamed <= 0:
        return dict(seconds)
    found = {place: value for place, value in seconds.items() if place != ("waiting", "")}
    for peer, value in raw.items():
        if value > 0:
            found["waiting", peer] = found.get(("waiting", peer), 0.0) + unnamed * value / whole
    return found
