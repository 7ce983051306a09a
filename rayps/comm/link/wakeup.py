"""A wakeup: a descriptor on which one thread sleeps until another thread or process wakes it (an eventfd).

After a descriptor is closed, the system uses its number for the next descriptor that is opened. A thread that still
wrote to the number would write into an unrelated connection. A closed wakeup therefore no longer has a number.
"""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """An eventfd that any thread may write to, even while another thread closes it.

    Example::

        wakeup = Wakeup()
        poll.register(wakeup, select.POLLIN)
        poll.poll()  # sleeps until another thread calls wakeup.wake()
        wakeup.clear()
    """

    __slots__ = ("_descriptor", "_lock")

    def __init__(self, descriptor: int = -1) -> None:
        """Use and later close `descriptor`, an eventfd of another process. If it is -1, create an eventfd."""
        self._lock = threading.Lock()  # held while the descriptor is used or closed
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if descriptor < 0 else descriptor

    def fileno(self) -> int:
        """Return the descriptor, or -1 once the wakeup is closed."""
        return self._descriptor

    def wake(self) -> None:
        """Make the descriptor readable. Do nothing if the wakeup is closed."""
        with self._lock:
            if self._descriptor >= 0:
                try:  # noqa: SIM105  # called in every exchange, and `suppress` is slower
                    os.eventfd_write(self._descriptor, 1)
                except BlockingIOError:
                    pass  # the counter has its largest value, so the descriptor is readable already

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
        with contextlib.suppress(AttributeError):  # `__init__` failed because the system had no descriptor left
            self.close()
