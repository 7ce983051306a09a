"""A private temporary folder of one process, which a later process removes when the owner was killed.

The owner holds a lock on a file in it, which the system lets go of with the owner, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "rayps-"
_LOCK = "owner.lock"


class Scratch:
    """A folder below the system's temporary one, whose path is short; `close` removes it."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or _short_temp()
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # locked before it has its name: a sweep never finds it open
        part = self.path / f"{_LOCK}.part"
        self._lock = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        part.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Remove the folders in `parent` whose owners, processes of this user, are gone; gives those that were."""
    gone = []
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile, or its owner lives
            if lock.parent.stat().st_uid == os.getuid() and _free(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)
                gone.append(lock.parent)
    return gone


def _free(lock: Path) -> bool:
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _short_temp() -> Path:
    # Ray puts unix sockets below its folder, and their paths may have 107 bytes at most
    return Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= 20 else "/tmp")
