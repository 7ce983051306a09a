"""A folder for the parts of a run's state, if the run has no folder for checkpoints.

A process holds a lock on each folder that it has made. A folder without a lock is left from a process that was killed:
the next run on the host removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_PREFIX, _LOCK, _NEW = "rayps-state-", ".lock", ".new"


class StateFolder:
    """A new temporary folder, which is removed when no object refers to it any more, or when the process ends."""

    def __init__(self) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(self.path / _NEW, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (self.path / _NEW).rename(self.path / _LOCK)  # others see the lock only once it is held
        weakref.finalize(self, _remove, self.path, lock)


def remove_abandoned() -> list[Path]:
    """Remove the folders of processes that have ended without removing them. Return their paths."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's folder, one without a lock yet, or one in use
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                found.append(path)
            finally:
                os.close(lock)
    return found


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
