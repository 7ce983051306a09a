"""Who may end a ring: the thread that is inside it, or any thread when nobody is."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RingLock:
    """Held by the thread that is inside a ring, which may enter again from within.

    Links and bells must not be closed under a thread that uses them. So a thread that wants the ring ended says so
    (`due` is true from then on) and asks to `settle`; when another thread is inside, that one ends it as it leaves.
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
        if not within and self._due():  # looked at after the release: whoever asked before it did not get in
            self.settle()

    def settle(self) -> bool:
        """End what is due, unless another thread is inside: False then."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._due():
                self._end()
            return True
        finally:
            self._lock.release()
