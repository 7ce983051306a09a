"""Capture what a worker process and its children write, and its log records, until the driver fetches the lines.

The descriptors 1 and 2 are taken, not only `sys.stdout`: subprocesses and C code write there. Both lead to one file, so
that the order of their lines is kept. A file, unlike a pipe, never blocks its writer: code in C that prints while it
holds Python's lock would wait forever for a thread of this process that reads the pipe. It also outlives the process:
what a killed worker wrote last can be read from it. On Ray it is Ray's own file of the process; elsewhere, and if Ray
rotates its files (RAY_ROTATION_MAX_BYTES), a temporary file, whose content is copied to the original descriptor when it
is read.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import logging
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MAX_LINES = 10_000  # most lines that wait to be fetched
MOST_BYTES = 100_000  # of a line; the rest of a longer one is the next line
_LOOK_SECONDS = 0.05  # between two looks at the file while a caller waits for a line
_BLOCK = 1 << 20
_PUNCH_HOLE = 3  # fallocate: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class LogBuffer:
    """A buffer of lines with their times, in order. When the buffer is full, the oldest lines are dropped."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=MAX_LINES)
        self._lock = threading.Lock()
        self._dropped = 0
        self._filled = threading.Event()
        self._output: _Output | None = None

    def drain(self) -> list[tuple[float, str]]:
        """Remove the lines since the last call and return them, as (UNIX time in seconds, line)."""
        self._filled.clear()
        self._read()
        with self._lock:
            self._filled.clear()
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._dropped = 0
        return [(time.time(), f"[{dropped} lines dropped]"), *lines] if dropped else lines

    def wait(self, seconds: float) -> None:
        """Block until there is a line, `release` or `wake` is called, or `seconds` have passed."""
        until = time.monotonic() + seconds
        while not self._filled.is_set() and (left := until - time.monotonic()) > 0:
            self._read()
            self._filled.wait(min(left, _LOOK_SECONDS))

    def wake(self) -> None:
        """End a `wait`. Text after the last newline is not added, because its line may still grow."""
        self._filled.set()

    def release(self) -> None:
        """Add the text after the last newline as a line, and end a `wait`."""
        self._read(last=True)
        self._filled.set()

    def capture(self) -> None:
        """Capture what this process and its children write from now on. Only for a process that does a job's work.

        Ray's file, or the original stdout, gets all of it too. Log records of level INFO and above are written to
        stderr unless the user's code configures logging.
        """
        self._output = _Output()
        logging.lastResort = _Handler()
        logging.getLogger().setLevel(logging.INFO)

    def _read(self, *, last: bool = False) -> None:
        with self._lock:
            if self._output is None:
                return
            for text in self._output.new_lines(last=last):
                self._dropped += len(self._lines) == MAX_LINES
                self._lines.append((time.time(), text))
            if self._lines:
                self._filled.set()


class _Output:
    """The file to which the process's stdout and stderr lead, and how far it was read."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        own = Path("/proc/self/fd/1")
        self._through: int | None = None
        if own.readlink().name.endswith(f"-{os.getpid()}.out"):  # Ray's file, which no other process has
            self._file = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
        else:
            self._through = os.dup(1)
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
            fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)
            os.dup2(self._file, 1)
        os.dup2(1, 2)
        sys.stdout, sys.stderr = _open_stream(1, "strict"), _open_stream(2, "backslashreplace")
        self._at, self._rest = os.fstat(self._file).st_size, b""

    def new_lines(self, *, last: bool) -> Iterator[str]:
        """Yield the lines since the last call; with `last`, also the text after the last newline."""
        size = os.fstat(self._file).st_size
        self._at = self._at if self._at <= size else 0  # a command such as `> /dev/stdout` has truncated the file
        while self._at < size and (block := os.pread(self._file, min(_BLOCK, size - self._at), self._at)):
            self._copy(block)
            self._at += len(block)
            *lines, rest = (self._rest + block).split(b"\n")
            # what a progress bar has overwritten is dropped at once, because its line may have no end for hours
            self._rest = rest[max(0, rest.rfind(b"\r", 0, len(rest) - 1)) :]
            while len(self._rest) > MOST_BYTES:
                lines.append(self._rest[:MOST_BYTES])
                self._rest = self._rest[MOST_BYTES:]
            for line in lines:
                yield from _cut_texts(line)
        if last and self._rest:
            rest, self._rest = self._rest, b""
            yield from _cut_texts(rest)

    def _copy(self, block: bytes) -> None:
        """Write what was read to the original stdout, and free its disk space."""
        if self._through is None:
            return
        left = memoryview(block)
        with suppress(OSError):  # nobody reads there, or the disk is full: the job goes on
            while left:
                left = left[os.write(self._through, left) :]
        place, length = ctypes.c_longlong(self._at), ctypes.c_longlong(len(block))
        ctypes.CDLL(None).fallocate(self._file, _PUNCH_HOLE, place, length)


def _open_stream(descriptor: int, errors: str) -> io.TextIOWrapper:
    """Return a text stream without a buffer, as `python -u` has it: its text is in the file before other text."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)


def _cut_texts(line: bytes) -> Iterator[str]:
    """Yield a line as text, in parts if it is too long. Of what carriage returns overwrite, the last text is left."""
    for at in range(0, max(1, len(line)), MOST_BYTES):
        text = line[at : at + MOST_BYTES].decode("utf-8", "replace")
        yield next((part for part in reversed(text.split("\r")) if part), "")


class _Handler(logging.Handler):
    """What logging uses as long as the user's code has configured no handler."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # such as arguments that do not fit the message: logging reports it
            self.handleError(record)
