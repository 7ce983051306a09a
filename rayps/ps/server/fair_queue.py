"""Choose the request that a server serves next, so that the spaces get equal shares of its time. Pure.

Each space has a queue, and a clock: the seconds of service that the space has had. The queue with the lowest clock is
served next. When a request enters an empty queue, the queue's clock is raised to that of the queue that was served
last, so an idle space saves up no time. This is start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996. A token
bucket may limit the operations per second of a space: its further requests then wait, and none is dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

LINE_BYTES = 64 << 20  # queued bytes of a space above which its connections are not read
_ROUNDING = 1e-6  # share of an operation that is ignored, because the bucket's level is rounded
BURST_SECONDS = 0.25  # a bucket holds as many operations as fit into this time, and at least one


class Bucket:
    """A token bucket: allows `rate` operations per second, and saves up a few unused ones."""

    def __init__(self, rate: float, now: float) -> None:
        self._left, self._at = 0.0, now
        self.rate = rate
        self._left = self._size

    @property
    def _size(self) -> float:
        return max(1.0, self.rate * BURST_SECONDS)

    def set(self, rate: float, now: float) -> None:
        """Change the rate from now on."""
        if rate != self.rate:
            self.ready(now)
            self.rate = rate
            self._left = min(self._left, self._size)

    def take(self, now: float) -> bool:
        """Use one operation; return False if none is left."""
        if not self.ready(now):
            return False
        self._left -= 1.0
        return True

    def ready(self, now: float) -> bool:
        """Return whether an operation is left."""
        self._left = min(self._size, self._left + (now - self._at) * self.rate)
        self._at = now
        return self._left >= 1.0 - _ROUNDING

    def ready_at(self) -> float:
        """Return the time at which an operation will be left."""
        return self._at + max(0.0, 1.0 - self._left) / self.rate


@dataclass(slots=True)
class _SpaceQueue(Generic[T]):
    """The waiting requests of one space, and the service that the space has had."""

    urgent: deque[tuple[T, int]] = field(default_factory=deque)  # request, bytes: of other servers, served first
    items: deque[tuple[T, int, bool]] = field(default_factory=deque)  # request, bytes, whether the bucket counts it
    bytes: int = 0
    clock: float = 0.0  # seconds of service
    bucket: Bucket | None = None
    blocked: bool = False  # the server does not know the space yet
    waits: bool = False  # the first item has been counted as throttled
    throttled: int = 0


class FairQueue(Generic[T]):
    """The queues of all spaces, and the choice of the next request. `T` is the type of the requests."""

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self.limit = limit
        self._lines: dict[int, _SpaceQueue[T]] = {}
        self._busy: dict[int, _SpaceQueue[T]] = {}  # the queues that are not empty
        self._now = 0.0  # the clock of the queue that was served last

    def __len__(self) -> int:
        return sum(len(line.urgent) + len(line.items) for line in self._busy.values())

    def put(self, space: int, item: T, size: int, *, counts: bool = True, urgent: bool = False) -> None:
        """Queue a request of `size` bytes.

        `counts`: the request counts as an operation of the space's quota. `urgent`: serve it before the space's others.
        """
        line = self._line(space)
        if space not in self._busy:
            self._busy[space] = line
            line.clock = max(line.clock, self._now)
        line.bytes += size
        if urgent:
            line.urgent.append((item, size))
        else:
            line.items.append((item, size, counts))

    def free(self, space: int) -> bool:
        """Return whether a request of this space may be served at once: none waits, and the space has no limit."""
        line = self._lines.get(space)
        return not self._busy and (line is None or (line.bucket is None and not line.blocked))

    def room(self, space: int) -> bool:
        """Return whether more requests of this space may be read."""
        line = self._busy.get(space)
        return line is None or line.bytes < self.limit

    def next(self, now: float) -> tuple[int, T] | None:
        """Return the next space and its request; None if there is no request, or if all must wait."""
        best, number = None, -1
        for space, line in self._busy.items():
            if not line.blocked and (best is None or line.clock < best.clock) and self._ready(line, now):
                best, number = line, space
        if best is None:
            return None
        self._now = best.clock
        if best.urgent:
            item, size = best.urgent.popleft()
        else:
            item, size, counts = best.items.popleft()
            if counts and best.bucket is not None:
                best.bucket.take(now)
            best.waits = False
        best.bytes -= size
        if not best.urgent and not best.items:
            del self._busy[number]
        return number, item

    def spent(self, space: int, seconds: float) -> None:
        """Record the seconds of service that a request of the space took."""
        self._line(space).clock += seconds

    def wake_at(self, now: float) -> float | None:
        """Return when a request that waits for its quota may be served; None if no request waits for it."""
        times = [
            line.bucket.ready_at()
            for line in self._busy.values()
            if line.bucket is not None and not line.blocked and not self._ready(line, now)
        ]
        return min(times, default=None)

    def limit_rate(self, space: int, rate: float | None, now: float) -> None:
        """Limit a space to `rate` operations per second on this server; None = no limit."""
        line = self._line(space)
        if rate is None:
            line.bucket = None
        elif line.bucket is None:
            line.bucket = Bucket(rate, now)
        else:
            line.bucket.set(rate, now)

    def block(self, space: int, blocked: bool) -> None:
        """Stop serving a space; with `blocked` False, serve it again."""
        self._line(space).blocked = blocked

    def throttled(self, space: int) -> int:
        """Return the number of the space's requests so far that had to wait for the quota."""
        line = self._lines.get(space)
        return 0 if line is None else line.throttled

    def queued(self, space: int) -> int:
        """Return the bytes of the space's waiting requests."""
        line = self._lines.get(space)
        return 0 if line is None else line.bytes

    def drop(self, space: int) -> list[T]:
        """Remove a space; return its waiting requests."""
        line = self._lines.pop(space, None)
        self._busy.pop(space, None)
        if line is None:
            return []
        return [item for item, _ in line.urgent] + [item for item, _, _ in line.items]

    def _line(self, space: int) -> _SpaceQueue[T]:
        line = self._lines.get(space)
        if line is None:
            line = self._lines[space] = _SpaceQueue(clock=self._now)
        return line

    @staticmethod
    def _ready(line: _SpaceQueue[T], now: float) -> bool:
        if line.bucket is None or line.urgent or not line.items[0][2]:
            return True
        if line.bucket.ready(now):
            return True
        if not line.waits:
            line.waits = True
            line.throttled += 1
        return False
