"""SIGTERM ends a client as Ctrl-C does: the client leaves its job, stores what it has, and exits."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 143  # of a client that SIGTERM has ended: 128 + 15, as of a process without a handler
MESSAGE = "ended by SIGTERM: the job goes on without this client; run the command again to continue"


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let the first SIGTERM raise `Terminated` in the block. Later ones are ignored, so that the client can leave.

    Only the main thread can do this; in another one the block is unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
