"""SIGTERM in an actor's process is a notice: the process announces its end, and ends some seconds later.

Kubernetes, `ray stop` and an administrator send SIGTERM before they kill. Ray's own handler ends a worker process at
once. With this handler, the process continues for `RAYPS_TERM_GRACE` seconds (10 by default; 0 keeps Ray's handler), so
that its job can move what the process holds. A second SIGTERM ends the process at once.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

VARIABLE = "RAYPS_TERM_GRACE"
GRACE_SECONDS = 10.0
_EXIT_SECONDS = 5.0  # seconds for the earlier handler to end the process; then the process exits
REASON = "the process received SIGTERM"


def grace_seconds() -> float:
    """Return the seconds between SIGTERM and the end of the process: the variable's value, if it is a number >= 0."""
    text = os.environ.get(VARIABLE, "")
    try:
        found = float(text) if text else GRACE_SECONDS
    except ValueError:
        found = -1.0
    if not 0.0 <= found < float("inf"):
        log.warning("%s is %r: it must be a number of seconds, at least 0; %g is used", VARIABLE, text, GRACE_SECONDS)
        return GRACE_SECONDS
    return found


class TermHandler:
    """The handler of SIGTERM in this process."""

    def __init__(
        self, announce: Callable[[float], None], seconds: float, applies: Callable[[], bool] = lambda: True
    ) -> None:
        """Prepare; `install` sets the handler.

        `announce(seconds)` is called in a thread. If `applies()` is False at the signal, the process ends at once.
        """
        self._announce, self._seconds, self._applies = announce, seconds, applies
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may be called by a signal handler
        self._heard = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    def install(self) -> bool:
        """Set the handler; return False and do nothing outside of the main thread, or if the grace is 0 s."""
        if self._seconds == 0 or threading.current_thread() is not threading.main_thread():
            return False
        threading.Thread(target=self._await, daemon=True, name="rayps-term").start()
        self._before = signal.signal(signal.SIGTERM, self._handle)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._heard = not self._heard, True
        if first and self._applies():
            self._signals.put(None)
        elif callable(self._before):
            self._before(number, frame)  # Ray's handler ends the process with a reason
        else:
            os._exit(128 + number)

    def _await(self) -> None:
        self._signals.get()
        end = time.monotonic() + self._seconds
        try:
            self._announce(self._seconds)
        except Exception as error:  # the cluster does not answer: the process must end all the same
            log.warning("SIGTERM could not be announced: %s", error)
        time.sleep(max(0.0, end - time.monotonic()))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_EXIT_SECONDS)
        os._exit(128 + signal.SIGTERM)
