"""Updates of clients that arrive in parts: a cut upload continues where it was.

A part is a file whose name has the client's number and the hash that the whole update must have. One request at a time
writes it (`rayps_api.upload_slots`).
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from rayps_client.errors import ConfigError, Conflict

_SPAN = re.compile(r"bytes (?:(\d{1,15})-(\d{1,15})|\*)/(\d{1,15})")
_BLOCK = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Which bytes of an update a request sends: from `begin` on, of `whole`. None: all of them, of unknown number."""

    begin: int = 0
    whole: int | None = None


def span_of(header: str | None) -> Span:
    """Return what a Content-Range header says: `bytes 100-499/500`, or `bytes */500` if nothing is left to be sent.

    Raises:
        ConfigError: the header has another form, or its numbers do not fit.
    """
    if header is None:
        return Span()
    found = _SPAN.fullmatch(header.strip())
    if found is None:
        raise ConfigError(f"Content-Range is {header!r}: give `bytes FIRST-LAST/SIZE`", field="Content-Range")
    whole = int(found[3])
    begin, last = (whole, whole - 1) if found[1] is None else (int(found[1]), int(found[2]))
    if begin > whole or last != whole - 1:
        raise ConfigError(
            f"Content-Range is {header!r}: send the rest of the update, up to its last byte", field="Content-Range"
        )
    return Span(begin, whole)


def begin_of_range(header: str | None, size: int) -> int:
    """Return from which byte a request with this Range header wants a file of `size` bytes; 0 for the whole file. Pure.

    Headers that ask for more than the rest of the file (`bytes=100-`) are ignored, as RFC 9110 allows.
    """
    found = re.fullmatch(r"bytes=(\d{1,15})-", (header or "").strip())
    return int(found[1]) if found is not None and 0 < int(found[1]) < size else 0


class PartWriter:
    """Writes one part. After `end`, which a newer request of the client calls, it writes nothing more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._ended = False

    @property
    def size(self) -> int:
        """The number of bytes that have arrived so far."""
        return part_size(self.path)

    def write(self, at: int, block: bytes) -> None:
        """Write a block at byte `at`. Raises Conflict if a newer request writes the part."""
        with self._lock:
            self._check()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, block, at)
            finally:
                os.close(descriptor)

    def seal(self, digest: str) -> bool:
        """Return whether the part has this SHA-256. Nothing is written into it afterwards.

        Raises Conflict if a newer request writes the part.
        """
        with self._lock:
            self._check()
            self._ended = True
            found = hashlib.sha256()
            with self.path.open("rb") as file:
                while block := file.read(_BLOCK):
                    found.update(block)
            return found.hexdigest() == digest

    def drop(self) -> None:
        """Delete what has arrived so far, unless a newer request writes the part."""
        with self._lock:
            if not self._ended:
                self.path.unlink(missing_ok=True)

    def end(self) -> None:
        """Write nothing more."""
        with self._lock:
            self._ended = True

    def _check(self) -> None:
        if self._ended:
            raise Conflict("a newer request sends this update: this one ends", status=409, code="superseded")


def part_size(path: Path) -> int:
    """Return the number of bytes in a part, 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
