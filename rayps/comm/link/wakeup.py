"""A wakeup: a descriptor on which one thread sleeps until another thread or process wakes it (an eventfd).

The system gives the number of a closed descriptor to the next descriptor that it opens. A thread that still wrote to
the number would write into an unrelated connection. A wakeup therefore forgets its number when it is closed.
"""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """An eventfd that any thread may write, also while another thread closes it.

    Example::

        wakeup = Wakeup()
        poll.register(wakeup, select.POLLIN)
        poll.poll()  # sleeps until another thread calls wakeup.wake()
        wakeup.clear()
    """

    __slots__ = ("_descriptor", "_lock")

    def __init__(self, descriptor: int = -1) -> None:
        """Own `descriptor`, an eventfd of another process; create an eventfd if none is given."""
        self._lock = threading.Lock()  # held while the descriptor is used or closed
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if descriptor < 0 else descriptor

    def fileno(self) -> int:
        """Return the descriptor; -1 once the wakeup is closed."""
        return self._descriptor

    def wake(self) -> None:
        """Make the descriptor readable. A wakeup that is closed stays as it is."""
        with self._lock:
            if self._descriptor >= 0:
                try:  # noqa: SIM105  # called in every exchange, and `suppress` is slower
                    os.eventfd_write(self._descriptor, 1)
                except BlockingIOError:
                    pass  # 2**64 - 2 earlier calls: the descriptor is readable

    def clear(self) -> None:
        """Make the descriptor unreadable until the next `wake`."""
        with self._lock:
            if self._descriptor >= 0:
                try:  # noqa: SIM105  # called in every exchange, and `suppress` is slower
                    os.eventfd_read(self._descriptor)
                except BlockingIOError:
                    pass  # it was not readable

    def close(self) -> None:
        """Close the descriptor. Safe to call twice."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the system had no descriptor left when it was created
            self.close()
