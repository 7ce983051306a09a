"""Capture a worker process's stdout, stderr and log records, line by line, until the driver fetches the lines."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections import deque

MAX_LINES = 10_000  # most lines that wait to be fetched


class LogBuffer:
    """A buffer of lines with their times, in order. When the buffer is full, the oldest lines are dropped."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=MAX_LINES)
        self._lock = threading.Lock()
        self._dropped = 0
        self._filled = threading.Event()
        self._tees: list[_Tee] = []

    def add(self, text: str) -> None:
        """Append one line."""
        with self._lock:
            self._dropped += len(self._lines) == MAX_LINES
            self._lines.append((time.time(), text))
        self._filled.set()

    def drain(self) -> list[tuple[float, str]]:
        """Remove the lines since the last call and return them, as (UNIX time in seconds, line)."""
        with self._lock:
            self._filled.clear()
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._dropped = 0
        return [(time.time(), f"[{dropped} lines dropped]"), *lines] if dropped else lines

    def wait(self, seconds: float) -> None:
        """Block until there is a line, `release` or `wake` is called, or `seconds` have passed."""
        self._filled.wait(seconds)

    def wake(self) -> None:
        """End a `wait`. Text after the last newline is not added, because its line may still grow."""
        self._filled.set()

    def release(self) -> None:
        """Add the text after the last newline as a line, and end a `wait`."""
        for tee in self._tees:
            tee.end_line()
        self._filled.set()

    def capture(self, *, records: bool = True) -> None:
        """Capture this process's stdout, stderr and, with `records`, its log records from now on.

        Captured text is also written to the original stdout and stderr.
        """
        self._tees = [_Tee(sys.stdout, self), _Tee(sys.stderr, self)]
        sys.stdout, sys.stderr = self._tees
        if not records:
            return
        handler = _Handler(self)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)


class _Tee(io.TextIOBase):
    def __init__(self, through: object, buffer: LogBuffer) -> None:
        self._through = through
        self._buffer = buffer
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._buffer.add(line)
        self._through.write(text)  # type: ignore[attr-defined]
        return len(text)

    def end_line(self) -> None:
        """Add the text since the last end of line as a line."""
        with self._lock:
            rest, self._rest = self._rest, ""
        if rest:
            self._buffer.add(rest)

    def flush(self) -> None:
        self._through.flush()  # type: ignore[attr-defined]

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return int(self._through.fileno())  # type: ignore[attr-defined]


class _Handler(logging.Handler):
    def __init__(self, buffer: LogBuffer) -> None:
        super().__init__(logging.INFO)
        self._buffer = buffer

    def emit(self, record: logging.LogRecord) -> None:
        self._buffer.add(self.format(record))
