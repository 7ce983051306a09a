"""Choose the request that a server serves next, so that the spaces get equal shares of its time. Pure.

Each space has a queue, and a clock: the seconds of service that the space has had. The queue with the lowest clock is
served next. When a request enters an empty queue, the queue's clock is raised to that of the queue that was served
last. So a space gains no advantage from a time without requests. This is start-time fair queueing: Goyal, Vin and
Cheng, SIGCOMM 1996. A token bucket may limit the operations per second of a space. Requests beyond the limit wait, and
none is dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

QUEUE_BYTES = 64 << 20  # queued bytes of a space above which its connections are not read
_ROUNDING = 1e-6  # share of an operation that is ignored, because the bucket's level is rounded
BURST_SECONDS = 0.25  # a bucket holds as many operations as fit into this time, and at least one


class Bucket:
    """A token bucket: it allows `rate` operations per second, and saves unused ones for BURST_SECONDS."""

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

    def use_operation(self, now: float) -> bool:
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

    urgent: deque[tuple[T, int]] = field(default_factory=deque)  # request, bytes; from other servers, served first
    items: deque[tuple[T, int, bool]] = field(default_factory=deque)  # request, bytes, whether the bucket counts it
    bytes: int = 0
    clock: float = 0.0  # seconds of service
    bucket: Bucket | None = None
    blocked: bool = False  # the server does not know the space yet
    waits: bool = False  # whether the first item has been counted as throttled
    throttled: int = 0


class FairQueue(Generic[T]):
    """The queues of all spaces, and the choice of the next request. `T` is the type of the requests."""

    def __init__(self, limit: int = QUEUE_BYTES) -> None:
        self.limit = limit
        self._queues: dict[int, _SpaceQueue[T]] = {}
        self._busy: dict[int, _SpaceQueue[T]] = {}  # the queues that are not empty
        self._now = 0.0  # the clock of the queue that was served last

    def __len__(self) -> int:
        return sum(len(queue.urgent) + len(queue.items) for queue in self._busy.values())

    def put(self, space: int, item: T, size: int, *, counts: bool = True, urgent: bool = False) -> None:
        """Queue a request of `size` bytes.

        `counts`: the request counts as an operation of the space's quota. `urgent`: serve it before the space's others.
        """
        queue = self._queue(space)
        if space not in self._busy:
            self._busy[space] = queue
            queue.clock = max(queue.clock, self._now)
        queue.bytes += size
        if urgent:
            queue.urgent.append((item, size))
        else:
            queue.items.append((item, size, counts))

    def may_skip(self, space: int) -> bool:
        """Return whether a request of this space need not be queued: no request waits, and the space has no limit."""
        queue = self._queues.get(space)
        return not self._busy and (queue is None or (queue.bucket is None and not queue.blocked))

    def has_room(self, space: int) -> bool:
        """Return whether more requests of this space may be read."""
        queue = self._busy.get(space)
        return queue is None or queue.bytes < self.limit

    def next(self, now: float) -> tuple[int, T] | None:
        """Return the next space and its request, or None if there is no request or all must wait."""
        best, number = None, -1
        for space, queue in self._busy.items():
            if not queue.blocked and (best is None or queue.clock < best.clock) and self._is_ready(queue, now):
                best, number = queue, space
        if best is None:
            return None
        self._now = best.clock
        if best.urgent:
            item, size = best.urgent.popleft()
        else:
            item, size, counts = best.items.popleft()
            if counts and best.bucket is not None:
                best.bucket.use_operation(now)
            best.waits = False
        best.bytes -= size
        if not best.urgent and not best.items:
            del self._busy[number]
        return number, item

    def spent(self, space: int, seconds: float) -> None:
        """Record the seconds of service that a request of the space took."""
        self._queue(space).clock += seconds

    def wake_at(self, now: float) -> float | None:
        """Return when the next request that waits for its quota may be served, or None if none waits for its quota."""
        times = [
            queue.bucket.ready_at()
            for queue in self._busy.values()
            if queue.bucket is not None and not queue.blocked and not self._is_ready(queue, now)
        ]
        return min(times, default=None)

    def limit_rate(self, space: int, rate: float | None, now: float) -> None:
        """Limit a space to `rate` operations per second on this server; None means no limit."""
        queue = self._queue(space)
        if rate is None:
            queue.bucket = None
        elif queue.bucket is None:
            queue.bucket = Bucket(rate, now)
        else:
            queue.bucket.set(rate, now)

    def block(self, space: int, blocked: bool) -> None:
        """Stop serving a space, or serve it again if `blocked` is False."""
        self._queue(space).blocked = blocked

    def throttled(self, space: int) -> int:
        """Return the number of the space's requests so far that had to wait for the quota."""
        queue = self._queues.get(space)
        return 0 if queue is None else queue.throttled

    def queued(self, space: int) -> int:
        """Return the bytes of the space's waiting requests."""
        queue = self._queues.get(space)
        return 0 if queue is None else queue.bytes

    def drop(self, space: int) -> list[T]:
        """Remove a space; return its waiting requests."""
        queue = self._queues.pop(space, None)
        self._busy.pop(space, None)
        if queue is None:
            return []
        return [item for item, _ in queue.urgent] + [item for item, _, _ in queue.items]

    def _queue(self, space: int) -> _SpaceQueue[T]:
        queue = self._queues.get(space)
        if queue is None:
            queue = self._queues[space] = _SpaceQueue(clock=self._now)
        return queue

    @staticmethod
    def _is_ready(queue: _SpaceQueue[T], now: float) -> bool:
        if queue.bucket is None or queue.urgent or not queue.items[0][2]:
            return True
        if queue.bucket.ready(now):
            return True
        if not queue.waits:
            queue.waits = True
            queue.throttled += 1
        return False
