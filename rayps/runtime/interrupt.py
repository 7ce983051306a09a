"""Ctrl-C while a run goes on: the first asks it to stop in good order, the second ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rayps.core.job import Status
from rayps.runtime.driver import Driver


@contextlib.contextmanager
def stops(driver: Driver, say: Callable[[str], None]) -> Iterator[list[int]]:
    """Within it a SIGINT stops the driver; gives the list of those that came. Only in the main thread."""
    came: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1 or driver.status not in (Status.RUNNING, Status.RECOVERING):
            raise KeyboardInterrupt
        driver.stop()
        if driver.saves:
            say("a checkpoint is saved first; Ctrl-C again ends at once")

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGINT, hear)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
