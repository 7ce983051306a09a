"""Calls to a slow other side, in order and in a thread of their own, so that training does not wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

Send: TypeAlias = Callable[[], None]
MOST_WAITING = 10_000  # calls that wait at most; further ones are dropped


class Background:
    """Carries out calls one after another in a thread. A call that fails is dropped, and its error is kept."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._waiting: queue.Queue[Send | None] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, send: Send) -> None:
        """Add a call. Raises the error of an earlier call that failed since the last `add`, or queue.Full."""
        self._waiting.put_nowait(send)
        self._raise()

    def close(self, timeout: float) -> None:
        """Carry out what waits, and end the thread.

        Raises:
            TimeoutError: calls still wait after `timeout` seconds. They may be lost.
            Exception: the error of a call that failed.
        """
        try:
            self._waiting.put(None, timeout=timeout)
        except queue.Full:
            raise TimeoutError(f"{self._waiting.qsize()} entries were not sent within {timeout:g} s") from None
        self._thread.join(timeout)
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(f"{self._waiting.qsize()} entries were not sent within {timeout:g} s")

    def _raise(self) -> None:
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (send := self._waiting.get()) is not None:
            try:
                send()
            except Exception as error:  # the next `add` raises it in the caller's thread
                with self._lock:
                    self._error = self._error or error  # the first one is the cause
