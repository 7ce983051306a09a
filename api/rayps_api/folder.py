"""A job's folder, read only, by byte offset: each look reads what is new and never the whole file.

The driver is the only writer. A last line without its end is not read yet.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rayps.service.store import StoredEvent
from rayps_api.schemas import finite

MOST_BYTES = 1_000_000
EVENT_SHIFT = 1 << 36  # an events cursor is (how many of the scheduler's) * 2^36 + (bytes of the driver's)


def lines(path: Path, cursor: int, limit: int) -> tuple[list[tuple[bytes, int]], int]:
    """Up to `limit` whole lines from a byte offset, each with the offset after it; and where to go on."""
    try:
        with path.open("rb") as file:
            if cursor >= os.fstat(file.fileno()).st_size:
                return [], cursor
            file.seek(cursor)
            block = file.read(MOST_BYTES)
    except FileNotFoundError:
        return [], cursor
    found: list[tuple[bytes, int]] = []
    begin = 0
    while len(found) < limit and (end := block.find(b"\n", begin)) >= 0:
        found.append((block[begin:end], cursor + end + 1))
        begin = end + 1
    if not found and len(block) == MOST_BYTES:  # a line longer than a look: skip what was read of it
        return [], cursor + len(block)
    return found, cursor + begin


def objects(path: Path, cursor: int, limit: int) -> tuple[list[dict[str, Any]], int]:
    """JSON lines from a byte offset; a torn one is left out."""
    found, after = lines(path, cursor, limit)
    parsed = [_object(line) for line, _ in found]
    return [value for value in parsed if value is not None], after


def log_lines(path: Path, cursor: int, limit: int) -> tuple[list[dict[str, str]], int]:
    """Log lines from a byte offset."""
    found, after = lines(path, cursor, limit)
    return [_log_line(line) for line, _ in found], after


def tail(path: Path, count: int) -> int:
    """The byte offset of the last `count` lines, at most a megabyte back."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MOST_BYTES))
            start, block = file.tell(), file.read(MOST_BYTES)
    except FileNotFoundError:
        return 0
    end = block.rfind(b"\n")
    for _ in range(count):
        end = block.rfind(b"\n", 0, end) if end > 0 else -1
    return start if end < 0 and start == 0 else start + end + 1


def events(path: Path, noted: list[StoredEvent], cursor: int, limit: int) -> tuple[list[dict[str, Any]], int]:
    """The driver's events merged by time with the scheduler's (`noted`: all those of the job), from a cursor.

    An event's `seq` grows in the order of delivery; it is the cursor just after it.
    """
    count, offset = divmod(cursor, EVENT_SHIFT)
    told, _ = lines(path, offset, limit)
    mine = [(event, 0, after) for line, after in told if (event := _object(line)) is not None]
    theirs = [({**event, "by": "scheduler"}, number + 1, 0) for number, event in enumerate(noted)][count:]
    merged: list[dict[str, Any]] = []
    while (mine or theirs) and len(merged) < limit:
        first = mine if not theirs or (mine and mine[0][0].get("time", 0) < theirs[0][0]["time"]) else theirs
        event, number, after = first.pop(0)
        count, offset = max(count, number), max(offset, after)
        merged.append({**event, "seq": count * EVENT_SHIFT + offset})
    return merged, count * EVENT_SHIFT + offset


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return finite(value) if isinstance(value, dict) else None


def _log_line(line: bytes) -> dict[str, str]:
    text = line.decode(errors="replace").rstrip("\r")
    at, _, rest = text.partition(" ")
    source, _, said = rest.partition(" ")
    if len(at) >= 20 and at[4:5] == "-" and at.endswith("Z"):
        return {"time": at, "source": source, "text": said}
    return {"time": "", "source": "", "text": text}
