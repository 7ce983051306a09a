"""What a worker of a run is doing, for the error of a worker that has waited for it in vain."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import NamedTuple

from rayps_client.machine.file_owner import is_ours, is_users_code, place_in
from rayps_client.machine.loading import without_collection

_LOOKING = threading.Lock()


class Activity(NamedTuple):
    """Where a worker's function is, and since when it has taken no step."""

    where: str  # of the innermost line of user code: "validate() at train.py:12"
    waits: bool  # whether that line has called rayps, which has not returned
    seconds: float  # since its last optimizer step, or its start


def activity_of(thread: int | None, seconds: float) -> Activity | None:
    """Return what the thread with this ident is doing; None if no user code is running in it."""
    frame = None if thread is None else _frame_of(thread)
    inner = list[str]()  # the files of the frames that the user's line has called
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_ours(file) and is_users_code(file):
            place = place_in(file, frame.f_lineno)
            return Activity(f"{frame.f_code.co_name}() at {place}", any(map(is_ours, inner)), seconds)
        inner.append(file)
        frame = frame.f_back
    return None


def _frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread, or None if it has ended.

    Before Python 3.12 `sys._current_frames` can start a garbage collection while it holds the interpreter's lock of the
    list of threads. If an object that is collected lets go of the GIL, all threads of the process wait for ever
    (python/cpython#106883). So the collector is off, and one thread looks at a time.
    """
    with _LOOKING, without_collection():
        return sys._current_frames().get(thread)
