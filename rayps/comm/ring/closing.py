"""Which thread may end a ring: the one inside it, or any thread when none is inside."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RingLock:
    """A lock held by the thread that is inside a ring; reentrant.

    Connections and file descriptors must not be closed while a thread uses them. A thread that wants the ring ended
    requests it (`due` is true from then on) and calls `settle`. If another thread is inside, that one ends the ring
    when it leaves.
    """

    def __init__(self, due: Callable[[], bool], end: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._due, self._end = due, end

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        within = self._depth > 0
        self._lock.release()
        if not within and self._due():  # checked after the release: a request made before it did not get the lock
            self.settle()

    def settle(self) -> bool:
        """End the ring if that is due; return False if another thread is inside."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._due():
                self._end()
            return True
        finally:
            self._lock.release()
