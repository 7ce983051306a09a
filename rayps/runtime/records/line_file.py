"""A file to which complete lines are appended, and which survives a full disk.

Lines that the disk does not take are kept in memory, in order, and written before the next ones when there is room
again. If more than `MOST_KEPT` bytes wait, further lines are dropped and counted.
"""

from __future__ import annotations

import os
from pathlib import Path

from rayps.core.full_disk import reports_full_disk

MOST_KEPT = 16_000_000  # bytes


class LineFile:
    """A file that one process appends to. A reader sees every complete line once, and no line in two parts."""

    def __init__(self, path: Path) -> None:
        """Open the file, and create it if needed. An incomplete last line, left by a killed writer, is ended."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._waiting = bytearray()  # what the disk has not taken; its beginning may be the rest of a line
        self.dropped = 0  # lines that were not kept
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self.append([""])

    @property
    def full(self) -> bool:
        """Whether lines wait because the disk is full."""
        return bool(self._waiting)

    def append(self, lines: list[str]) -> None:
        """Append lines, which contain no line end.

        Raises:
            OSError: the lines cannot be written for another reason than a full disk.
        """
        if lines:
            data = "".join(f"{line}\n" for line in lines).encode()
            if self._waiting and len(self._waiting) + len(data) > MOST_KEPT:
                self.dropped += len(lines)
            else:
                self._waiting += data
        self.write_waiting()

    def write_waiting(self) -> None:
        """Write the lines that wait, as far as the disk takes them. Raises OSError as `append` does."""
        try:
            while self._waiting:
                written = os.write(self._descriptor, self._waiting)
                del self._waiting[:written]
        except OSError as error:
            if not reports_full_disk(error):
                raise

    def sync(self) -> None:
        """Write the lines that wait, and let the system write the file to disk. Raises OSError as `append` does."""
        self.write_waiting()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if not reports_full_disk(error):
                raise

    def close(self) -> None:
        """Write the lines that wait, and close the file."""
        if self._descriptor >= 0:
            try:
                self.write_waiting()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1
