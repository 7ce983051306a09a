"""A write that runs in a thread of the lowest priority while training goes on.

Linux preempts a thread of the policy SCHED_IDLE at once when another thread wakes. A thread of niceness 19 may continue
for its time slice, milliseconds, and a step of workers on one host has a hundred barriers at which a worker wakes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

from rayps_client.errors import PlaceError

_NICENESS = 19  # the lowest
PATIENCE = 20.0  # seconds after which a write has the ordinary priority, so that it ends on a busy host too
THREAD = "rayps-checkpoint"  # the thread's name
_Result = TypeVar("_Result")


class BackgroundWrite(Generic[_Result]):
    """One write in a thread of its own, which on Linux runs only if no other thread wants the processor (SCHED_IDLE).

    On a host whose processors other programs keep busy, such a thread hardly runs. After `PATIENCE` seconds the write
    therefore continues with the ordinary priority, if the system permits this change (CAP_SYS_NICE, as in containers
    of root). If it does not, the thread has niceness 19 from the start, and gets a small share of a busy processor.
    Elsewhere it is an ordinary thread.

    Hashing and writing of large blocks release the GIL. The requests to a remote place run in the event loop of
    fsspec, a thread of ordinary priority.
    """

    def __init__(self, write: Callable[[Callable[[], bool]], _Result], what: str = "the checkpoint") -> None:
        """Prepare. `write(stopped)` returns the result; `stopped` is what `write_part` asks. `what` is for errors."""
        self._write: Callable[[Callable[[], bool]], _Result] | None = write
        self._what = what
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._value: _Result
        self._error: BaseException | None = None
        # a daemon: the process may end during a write, and the checkpoint is then absent
        self._thread = threading.Thread(target=self._run, daemon=True, name=THREAD)
        self._began = 0.0
        self._idle: int | None = None  # the thread's number in the system while it has the policy SCHED_IDLE

    def start(self) -> BackgroundWrite[_Result]:
        """Start the thread; return this object."""
        self._began = time.monotonic()
        self._thread.start()
        return self

    @property
    def seconds(self) -> float:
        """Seconds since the start of the write."""
        return time.monotonic() - self._began

    def done(self) -> bool:
        """Return whether the write has ended: with a result, with an error, or cancelled."""
        if self._idle is not None and self.seconds > PATIENCE:
            self._hurry()
        return self._ended.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the write has ended, with or without an error. Return whether it has."""
        if self._ended.wait(min(timeout, PATIENCE)):
            return True
        self._hurry()
        return self._ended.wait(max(0.0, timeout - PATIENCE))

    def result(self, timeout: float) -> _Result:
        """Return the result of the write. Wait for it at most `timeout` seconds.

        Raises:
            PlaceError: the write has not ended after `timeout` seconds. It goes on.
            CancelledError: the write was cancelled.
            CheckpointError, TrainingError: the error of the write.
        """
        if not self.wait(timeout):
            raise PlaceError(
                f"{self._what} was not written after {timeout:g} s: use a faster place, save less often "
                "(checkpoint_every), or give a larger timeout",
                seconds=timeout,
            )
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self, timeout: float = 10.0) -> bool:
        """Stop the write before its next block; its file is removed. Return whether it has ended in `timeout` s."""
        self._stopped.set()
        return self._ended.wait(timeout) if self._thread.ident is not None else True

    def _hurry(self) -> None:
        """Let the write continue with the ordinary priority."""
        number, self._idle = self._idle, None
        if number is not None and sys.platform == "linux":
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                os.sched_setscheduler(number, os.SCHED_OTHER, os.sched_param(0))

    def _lower(self) -> None:
        """Lower the priority of the calling thread."""
        if sys.platform != "linux":  # elsewhere this would lower the priority of the whole process
            return
        with contextlib.suppress(OSError):
            if _may_return():
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: the calling thread
                self._idle = threading.get_native_id()
            else:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

    def _run(self) -> None:
        try:
            self._lower()
            if self._stopped.is_set():
                raise CancelledError(f"{self._what} was cancelled")
            assert self._write is not None, "a write is started once"
            self._value = self._write(self._stopped.is_set)
        except BaseException as error:
            self._error = error
        finally:
            self._idle = self._write = None  # the tensors that were written are free
            self._ended.set()


@functools.cache
def _may_return() -> bool:
    """Return whether a thread of this process can leave the policy SCHED_IDLE again. A thread of its own tries it."""
    found: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            found.append(True)

    thread = threading.Thread(target=attempt, daemon=True, name=THREAD)
    thread.start()
    thread.join(PATIENCE)
    return bool(found)
