"""Limit the log messages that a peer can cause: a few per minute of each kind. The others are only counted."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

LIMITED = ("asyncio", "uvicorn.error", "rayps_api.guard", "rayps_api.connections")
"""Loggers whose messages a peer can cause."""
_MOST_KINDS = 256


@dataclass(slots=True)
class _Kind:
    begun: float
    passed: int = 0
    omitted: int = 0


class LogLimit(logging.Filter):
    """A log filter that passes `most` messages of each kind in a period of `seconds`.

    The first message of a kind after a period says how many were omitted in the period. Two messages are of one kind if
    they have the same logger, level and format string. (The texts may differ, because they contain addresses.) Messages
    of loggers that are not in `LIMITED` always pass.
    """

    def __init__(self, most: int = 5, seconds: float = 60.0) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._kinds: OrderedDict[tuple[str, int, str], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written."""
        if not any(record.name == name or record.name.startswith(f"{name}.") for name in LIMITED):
            return True
        omitted = self.count_message((record.name, record.levelno, str(record.msg)[:200]), time.monotonic())
        if omitted is None:
            return False
        if omitted:
            record.msg = f"{record.getMessage()} ({omitted} more of this kind were not logged)"
            record.args = None
        return True

    def count_message(self, kind: tuple[str, int, str], now: float) -> int | None:
        """Count a message. Return None to omit it, else how many of its kind were omitted in the last period."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Kind(now)
            while len(self._kinds) > _MOST_KINDS:
                self._kinds.popitem(last=False)
        omitted = 0
        if now - found.begun >= self._seconds:
            omitted = found.omitted
            found.begun, found.passed, found.omitted = now, 0, 0
        if found.passed >= self._most:
            found.omitted += 1
            return None
        found.passed += 1
        return omitted
