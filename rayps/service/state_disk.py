"""Detect a full disk below the state directory, from write errors and from the free space."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from rayps.core.full_disk import reports_full_disk

log = logging.getLogger(__name__)

LEAST_FREE = 4 << 20  # bytes; with less free space the disk counts as full
_REMEMBERED = 10.0  # seconds for which a disk counts as full after a failed write, because a quota may be exceeded
_LOG_SECONDS = 60.0  # seconds between two messages in the log
_SQLITE_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports a full disk or an exceeded disk quota."""
    while error is not None:
        if reports_full_disk(error):
            return True
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) in _SQLITE_FULL:
            return True
        error = getattr(error, "orig", None) or error.__cause__
    return False


class StateDisk:
    """Track whether the disk below one folder can be written."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._failed: float | None = None
        self._logged: float | None = None

    def record_failure(self) -> None:
        """Record that a write failed because the disk is full; log the failure at most once a minute."""
        now = self._clock()
        if self._logged is None or now - self._logged > _LOG_SECONDS:
            self._logged = now
            log.error("%s", self.full_message())
        self._failed = now

    def record_success(self) -> None:
        """Record that a write succeeded."""
        self._failed = None

    @property
    def error(self) -> str | None:
        """Why nothing can be written now, and what to do; None if the disk can be written."""
        try:
            found = os.statvfs(self._folder)
        except OSError as error:
            return f"the state directory {self._folder} cannot be read: {error.strerror or error}"
        free = found.f_bavail * found.f_frsize
        failed = self._failed is not None and self._clock() - self._failed < _REMEMBERED
        return self.full_message(free) if failed or free < LEAST_FREE else None

    def full_message(self, free: int | None = None) -> str:
        """Return the message for a full disk; `free`: the number of free bytes."""
        left = "" if free is None else f" ({free / (1 << 20):.1f} MiB free)"
        return (
            f"the disk of the state directory {self._folder} is full{left}: free space there, or delete ended jobs "
            "(`rayps delete ID`)"
        )
