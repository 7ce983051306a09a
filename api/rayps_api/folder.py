"""Read a job's files from a byte offset, so that each call reads only the new lines.

The driver is the only writer of these files. An incomplete last line is left for the next call.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rayps.core.job.returned_rounds import select_counted
from rayps.service.store import StoredEvent
from rayps_api.schemas import finite

MOST_BYTES = 1_000_000
# an events cursor is (number of the scheduler's events) * EVENT_SHIFT + (byte offset in the driver's file)
EVENT_SHIFT = 1 << 36


def lines(path: Path, cursor: int, limit: int) -> tuple[list[tuple[bytes, int]], int]:
    """Read up to `limit` complete lines from byte offset `cursor` on.

    Return a list of (line, byte offset after the line), and the next cursor.
    """
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
    if not found and len(block) == MOST_BYTES:  # the line is longer than a block: skip this part of the line
        return [], cursor + len(block)
    return found, cursor + begin


def objects(path: Path, cursor: int, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Read up to `limit` lines from byte offset `cursor` on; return the valid JSON objects, and the next cursor."""
    found, after = lines(path, cursor, limit)
    parsed = [_object(line) for line, _ in found]
    return [value for value in parsed if value is not None], after


def points(path: Path, cursor: int, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Read up to `limit` lines of metric points from byte offset `cursor` on; return those that count, and the cursor.

    A point of the kind "returned" says that rounds which were read before, from its round on, do not count.
    """
    found, after = objects(path, cursor, limit)
    return select_counted(found, tell=True), after


def log_lines(path: Path, cursor: int, limit: int) -> tuple[list[dict[str, str]], int]:
    """Read up to `limit` log lines from byte offset `cursor` on.

    Return a list of {"time", "source", "text"}, and the next cursor.
    """
    found, after = lines(path, cursor, limit)
    return [_log_line(line) for line, _ in found], after


def tail(path: Path, count: int) -> int:
    """Return the byte offset at which the last `count` lines begin, but at most a megabyte before the end."""
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


def events(
    path: Path, scheduler_events: list[StoredEvent], cursor: int, limit: int
) -> tuple[list[dict[str, Any]], int]:
    """Return up to `limit` events of a job from a cursor on, in the order of time, and the next cursor.

    The driver's events are read from `path`. `scheduler_events`: all events of the job that the scheduler has written.
    Each event gets a `seq`, which is the cursor after this event and grows from event to event.
    """
    count, offset = divmod(cursor, EVENT_SHIFT)
    written, _ = lines(path, offset, limit)
    from_driver = [(event, 0, after) for line, after in written if (event := _object(line)) is not None]
    from_scheduler = [({**event, "by": "scheduler"}, number + 1, 0) for number, event in enumerate(scheduler_events)][
        count:
    ]
    merged: list[dict[str, Any]] = []
    while (from_driver or from_scheduler) and len(merged) < limit:
        first = (
            from_driver
            if not from_scheduler or (from_driver and from_driver[0][0].get("time", 0) < from_scheduler[0][0]["time"])
            else from_scheduler
        )
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
    source, _, message = rest.partition(" ")
    if len(at) >= 20 and at[4:5] == "-" and at.endswith("Z"):
        return {"time": at, "source": source, "text": message}
    return {"time": "", "source": "", "text": text}
