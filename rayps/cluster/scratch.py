"""Temporary folders of one process or of several. A later process removes the folders whose owners were killed.

The owner of a folder holds a lock on a file in the folder. The operating system releases the lock when the owner ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from rayps_client.errors import DataError

PREFIX = "rayps-"
_LOCK = "owner.lock"


class Scratch:
    """A folder of one process, with a short path, in the system's temporary folder; `close` removes it."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or _short_temp()
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # the file is locked before it gets its final name, so that `sweep` never finds it unlocked
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


class SharedScratch:
    """A folder that all processes of a user on this host share under one key. The first process fills the folder.

    The folder exists while a process has it open. The last process that calls `close` removes the folder.
    """

    def __init__(
        self, key: str, fill: Callable[[Path], None], *, what: str, timeout: float = 600.0, parent: Path | None = None
    ) -> None:
        """Open the folder, and wait until this or another process has filled it by `fill(path)`.

        `what` describes `fill` in the error of a waiting process, e.g. "sorting rows".

        Raises:
            DataError: another process has not filled the folder within `timeout` seconds, or the folder belongs to
                another user.
        """
        parent = parent or _short_temp()
        sweep(parent)
        self.path = parent / f"{PREFIX}{key}"
        deadline = time.monotonic() + timeout
        self._lock = self._enter(deadline, what)
        try:
            self._await_filled(fill, deadline, what)
        except BaseException:
            self.close()
            raise
        _open_here.add(self)

    def _enter(self, deadline: float, what: str) -> int:
        """Create the folder if it does not exist, and take a shared lock on it; return the lock file's descriptor."""
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            if self.path.stat().st_uid != os.getuid() or self.path.is_symlink():
                raise DataError(
                    f"{self.path} belongs to another user: remove it, or set TMPDIR to another folder",
                    file=str(self.path),
                )
            with contextlib.suppress(FileNotFoundError):  # another process removed the folder after `mkdir`
                lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                with contextlib.suppress(BlockingIOError, FileNotFoundError):
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    if (self.path / _LOCK).stat().st_ino == os.fstat(lock).st_ino:
                        return lock
                os.close(lock)
            self._pause(deadline, what)

    def _await_filled(self, fill: Callable[[Path], None], deadline: float, what: str) -> None:
        full, turn = self.path / "full", self.path / "turn.lock"
        while not full.exists():
            with turn.open("a+") as mine:
                try:
                    fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._pause(deadline, what)
                    continue
                if not full.exists():
                    (self.path / "by").write_text(str(os.getpid()))
                    fill(self.path)
                    full.touch()

    def _pause(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            by = self.path / "by"
            who = f"process {by.read_text()}" if by.exists() else "another process"
            raise DataError(
                f"{self.path}: {who} is still {what}: end that process, or wait and start again", file=str(self.path)
            )
        time.sleep(0.02)

    def close(self) -> None:
        """Release the folder, and remove it if no other process has it open."""
        if self._lock >= 0:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


_open_here: weakref.WeakSet[SharedScratch] = weakref.WeakSet()  # the shared folders that this process uses


def close_shared() -> None:
    """Release all shared folders of this process, which is about to be killed. Files that are mapped stay readable."""
    for each in list(_open_here):
        each.close()


def kill_users(folder: Path, seconds: float = 5.0) -> None:
    """Kill the children of this process, and orphans, that name a folder in their command or have a file of it open.

    Wait at most `seconds` for their ends. Without /proc, kill none.
    """
    deadline = time.monotonic() + seconds
    while (found := _users(folder)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _users(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in (1, os.getpid()) and _uses(entry, folder):
                found.append(int(entry.name))
    return found


def _uses(process: Path, folder: Path) -> bool:
    if bytes(folder) in (process / "cmdline").read_bytes():
        return True
    return any(str(link.readlink()).startswith(f"{folder}/") for link in (process / "fd").iterdir())


def sweep(parent: Path) -> list[Path]:
    """Remove this user's folders in `parent` whose owners have ended; return the removed folders."""
    gone = []
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # the folder belongs to another user, or another process removed it
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
    # Ray creates unix sockets below its folder, and the path of a unix socket may have at most 107 bytes
    return Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= 20 else "/tmp")
