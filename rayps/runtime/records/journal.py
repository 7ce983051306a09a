"""The record of a run: events, metric points, log lines, progress, and at the end the outcome.

If the run has a folder, the driver writes everything there, and no other process does. Points and events are also
stored in memory, for `Result`. Only complete lines are appended to a file. The outcome is written once, by a rename.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from rayps.cluster.local import until
from rayps.core.full_disk import reports_full_disk
from rayps.core.job.records import Event, OutcomeRecord, Point, ProgressRecord
from rayps.core.job.returned_rounds import RETURNED, Returns
from rayps.runtime.records.line_file import LineFile
from rayps.runtime.results.cost_report import CostReport

PROGRESS_SECONDS = 0.5
OUTCOME_SECONDS = 60.0  # seconds for which a full disk may delay the outcome
# the beginning of a point, which `_encode` has written
_ROUND = re.compile(rb'"kind": "(round|%s)", "round": (\d+)' % RETURNED.encode())
Record: TypeAlias = Point | Event | ProgressRecord | OutcomeRecord


class Journal:
    """A run's record on disk and in memory.

    `on_progress` is called with new progress, usually at most twice a second. `on_event` is called with every event,
    and `on_lines` with new log lines (time, source, text).
    """

    def __init__(
        self,
        folder: Path | None = None,
        on_progress: Callable[[ProgressRecord], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_lines: Callable[[list[tuple[float, str, str]]], None] | None = None,
    ) -> None:
        self._on_lines = on_lines
        self.folder = folder
        # where `time.jsonl` is written once the folder exists; `train` has no other journal on disk
        self.time_folder, self.time_anew = folder, False
        self.shared_ledger: Path | None = None  # the folder of a ledger of private releases that several runs share
        self.points: list[Point] = []
        self.events: list[Event] = []
        self.cost_report: CostReport | None = None  # collects the costs of the current phase
        self.on_any_event: Callable[[Event], None] = lambda event: None  # receives every event, for the job's time
        self._on_progress, self._on_event = on_progress, on_event
        self._files: dict[str, LineFile] = {}
        self._full = False  # whether the last write found the disk full
        self._progress_at = 0.0
        self._seq = 0  # the number of the next event
        self._returns = Returns()
        # the last round that an earlier driver of this run evaluated, 0 if it evaluated none; None if there is no
        # earlier driver
        self.evaluated: int | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._seq = _count_lines(folder / "events.jsonl")
            if self._seq:
                self.evaluated = _find_last_evaluated(folder / "metrics.jsonl")
                self._returns = Returns(_find_newest_round(folder / "metrics.jsonl"))
            for name in ("events.jsonl", "metrics.jsonl", "log.txt"):
                self._files[name] = LineFile(folder / name)

    def earlier_points(self) -> list[Point]:
        """Return the points of the whole group that earlier drivers of this run have written, as they were written."""
        if self.evaluated is None or self.folder is None:
            return []
        with (self.folder / "metrics.jsonl").open("rb") as file:
            return [json.loads(line) for line in file if line.endswith(b"}\n")]

    def event(self, kind: str, message: str, **facts: Any) -> None:
        """Write an event: a fact that a user should know."""
        event = {"seq": self._seq, "time": time.time(), "kind": kind, "message": message, **facts}
        self._seq += 1
        self.events.append(event)
        self._append("events.jsonl", [_encode(event)])
        self.on_any_event(event)
        if self._on_event is not None:
            self._on_event(event)

    def add_reported_events(self, points: list[Point]) -> list[Point]:
        """Write as events what workers and strategies have reported as events; return the other points.

        These reports are the workers' choices with their reasons, and the strategies' own events.
        """
        for point in points:
            if point["kind"] == "choice":
                self.event(**point)
            elif point["kind"] == "event":
                self.event(**point["event"])
        others = [point for point in points if point["kind"] not in ("choice", "rings", "event")]
        for event in self.cost_report.add_points(others) if self.cost_report is not None else ():
            self.event(**event)
        return others

    def add_costs(self) -> None:
        """Write the costs of the current phase as an event if a worker has reported a step, and end the collection."""
        event = self.cost_report.event() if self.cost_report is not None else None
        if event is not None:
            self.event(**event)
        self.cost_report = None

    def add_points(self, points: list[Point]) -> None:
        """Write new metric points of the whole group; before rounds that are repeated, that the run has returned."""
        self.points += points
        lines = list[str]()
        for point in points:
            back = self._returns.of(point)
            if back is not None:
                lines.append(_encode({"kind": RETURNED, "round": back, "time": time.time()}))
            lines.append(_encode(point))
        self._append("metrics.jsonl", lines)

    def lines(self, lines: list[tuple[float, str, str]]) -> None:
        """Write new log lines (time, source, text)."""
        self._append("log.txt", [f"{_stamp(at)} {who} {text}" for at, who, text in lines])
        if self._on_lines is not None and lines:
            self._on_lines(lines)

    def progress(self, progress: ProgressRecord, *, now: bool = False) -> None:
        """Write the progress: at most twice a second, or at once if `now`."""
        if not now and time.monotonic() - self._progress_at < PROGRESS_SECONDS:
            return
        self._progress_at = time.monotonic()
        if self.folder is not None:
            self._report_disk(written=_replace(self.folder / "progress.json", progress))
        if self._on_progress is not None:
            self._on_progress(progress)

    def write_outcome(self, outcome: OutcomeRecord) -> None:
        """Write the outcome of the run, unless an outcome is written already.

        If the disk is full, wait for room, at most `OUTCOME_SECONDS`.

        Raises:
            OSError: the outcome cannot be written.
        """
        if self.folder is None:
            return
        path = self.folder / "outcome.json"
        if not path.exists() and not until(lambda: self.flush() and _replace(path, outcome), OUTCOME_SECONDS):
            raise OSError(errno.ENOSPC, f"no room for the outcome within {OUTCOME_SECONDS:g} s", str(path))

    def flush(self) -> bool:
        """Write all records to disk; return whether the disk took all of them."""
        for file in self._files.values():
            file.sync()
        return not any(file.full for file in self._files.values())

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _append(self, name: str, lines: list[str]) -> None:
        file = self._files.get(name)
        if file is not None and lines:
            file.append(lines)
            self._report_disk(written=not file.full)

    def _report_disk(self, *, written: bool) -> None:
        """Write an event when the disk takes no more data, and when it does again."""
        if not written and not self._full:
            self._full = True
            self.event("warning", f"the disk of {self.folder} is full: records wait in memory, and training continues")
        elif written and self._full and self.flush():
            self._full = False
            dropped = sum(file.dropped for file in self._files.values())
            lost = f"; {dropped} lines were dropped" if dropped else ""
            self.event("disk_free", f"the disk of {self.folder} has room again, and the records are written{lost}")


def _encode(value: Record) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:  # a metric is NaN or infinite, which JSON does not allow
        return json.dumps(_drop_infinite(value))


def _drop_infinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _drop_infinite(item) for key, item in value.items()}
    return [_drop_infinite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _replace(path: Path, value: Record) -> bool:
    """Replace a file atomically; return whether the disk had room. Raises OSError if it fails for another reason."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(_encode(value))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        if not reports_full_disk(error):
            raise
        return False
    return True


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _find_last_evaluated(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        points = [json.loads(line) for line in file if b'"evaluation"' in line and line.endswith(b"}\n")]
    return int(points[-1]["round"]) if points else 0


def _find_newest_round(path: Path) -> int:
    """Return the newest round of the points in a file that count, -1 if there is none."""
    if not path.exists():
        return -1
    newest = -1
    with path.open("rb") as file:
        for line in file:
            found = _ROUND.search(line)
            if found is not None:
                newest = max(newest, int(found[2])) if found[1] == b"round" else int(found[2]) - 1
    return newest


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
