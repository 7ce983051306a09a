"""Which log files of Ray's ended processes can be removed: Ray writes some for each process, and removes none. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

KEPT_FILES = 200  # the newest files of ended processes that stay
KEPT_SECONDS = 600.0  # seconds for which a file stays after its last change
_OF_WORKER = re.compile(
    r"(?:worker-[0-9a-f]+-[0-9a-f]+-|python-core-(?:worker|driver)-[0-9a-f]+_|events/event_CORE_WORKER_"
    r"|export_events/event_EXPORT_TASK_)(\d+)\.(?:out|err|log)"
)
FOLDERS = ("", "events", "export_events")  # of files of single processes, in Ray's folder of logs


class LogFile(NamedTuple):
    """A file of Ray's folder of logs."""

    name: str  # relative to the folder
    changed: float  # seconds since the epoch


def list_removable(files: Iterable[LogFile], alive: set[int], now: float) -> list[str]:
    """Return the names of the files that can be removed, oldest first. `alive`: ids of processes that still write.

    Only files of single workers and drivers are returned, never those of Ray's own processes.
    """
    ended = []
    for file in files:
        match = _OF_WORKER.fullmatch(file.name)
        if match is not None and int(match[1]) not in alive:
            ended.append(file)
    ended.sort(key=lambda file: file.changed)
    return [file.name for file in ended[: max(0, len(ended) - KEPT_FILES)] if now - file.changed > KEPT_SECONDS]
