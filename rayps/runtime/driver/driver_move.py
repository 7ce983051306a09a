"""A driver moves: before its process ends, it saves the newest state, and the service starts the next attempt.

The next driver continues from that state. Both write an event with what the move costs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rayps.cluster.local import Cluster, host_address
from rayps.cluster.members import ActorHost
from rayps.cluster.notices import Notice
from rayps.core.job.records import Event
from rayps.runtime.records.journal import Journal

log = logging.getLogger(__name__)

DEPARTURE, ARRIVAL = "driver_moves", "driver_moved"  # kinds of events
MARGIN_SECONDS = 2.0  # seconds before the end of the process at which the driver must have left
SAVE_SECONDS = 30.0  # seconds for the last state if the notice has no deadline
LEAD_SECONDS = 15.0  # seconds before the end of its host at which a driver that stays saves the newest state
_LOOK_SECONDS = 0.25  # seconds between two looks at the notices


def move_seconds(notice: Notice) -> float:
    """Return how many seconds a driver has for its last state."""
    return SAVE_SECONDS if notice.seconds is None else max(0.0, min(SAVE_SECONDS, notice.seconds - MARGIN_SECONDS))


def save_delay(notice: Notice) -> float:
    """Return in how many seconds a driver that stays saves its newest state."""
    return 0.0 if notice.seconds is None else max(0.0, notice.seconds - LEAD_SECONDS)


def can_leave(notice: Notice, hosts: frozenset[str], notices: tuple[Notice, ...], *, anywhere: bool) -> bool:
    """Return whether the next driver can live where the end that `notice` announces does not reach it. Pure.

    A process that ends alone is replaced by another one of its host. If the host ends, a driver may only start
    `anywhere` else in the cluster, on one of the `hosts` (Ray node ids) without a notice.
    """
    if notice.pid is not None:
        return True
    ending = {one.node for one in notices if one.pid is None and one.node}
    return anywhere and bool(hosts - ending - {notice.node})


class DriverMove:
    """The move of one driver: the request, and what it costs."""

    def __init__(self, journal: Journal) -> None:
        self.reason: str | None = None  # why the driver moves; None if it does not
        self.saves = False  # whether a checkpoint is to be saved soon, while training continues
        self.left = False  # whether the run has ended without an outcome
        self._journal, self._deadline = journal, 0.0

    def request(self, reason: str, seconds: float) -> None:
        """Request that the driver leaves within `seconds`."""
        self._deadline, self.reason = time.monotonic() + seconds, reason

    def take_save(self) -> bool:
        """Return whether a checkpoint is to be requested now; a later call returns False."""
        taken, self.saves = self.saves, False
        return taken

    @property
    def seconds(self) -> float:
        """The seconds that are left for the last state."""
        return max(0.0, self._deadline - time.monotonic())

    def report_departure(self, saved: int, again: int) -> str:
        """Write the event of the departure, and return its text.

        `saved`: the round of the saved state. `again`: how many rounds are computed again.
        """
        self.left = True
        lost = "no round is computed again" if not again else f"{again} rounds are computed again"
        message = f"{self.reason}: the driver moves to another process, which continues after round {saved}; {lost}"
        self._journal.event(DEPARTURE, message, round=saved, repeated=again)
        return message

    def report_arrival(self, begin: int) -> None:
        """Write what the move has cost, if this driver continues after one. `begin` is the round where it continues."""
        event = find_last_departure(self._journal.folder)
        if event is None:
            return
        seconds = time.time() - float(event["time"])
        again = int(event["repeated"]) + max(0, int(event["round"]) - begin)
        lost = "no round is computed again" if not again else f"{again} rounds are computed again"
        message = f"the driver has moved: the workers stood still for {seconds:.1f} s, and {lost}"
        self._journal.event(ARRIVAL, message, round=begin, repeated=again, seconds=seconds)


def find_last_departure(folder: Path | None) -> Event | None:
    """Return the event of the last departure of a driver, if no driver has arrived since; None if there is none."""
    path = None if folder is None else folder / "events.jsonl"
    if path is None or not path.exists():
        return None
    found: Event | None = None
    with path.open("rb") as file:
        for line in file:
            if (b'"driver_moves"' in line or b'"driver_moved"' in line) and line.endswith(b"}\n"):
                event: Event = json.loads(line)
                found = event if event["kind"] == DEPARTURE else None if event["kind"] == ARRIVAL else found
    return found


class NoticeWatch:
    """Looks, in a thread, for a notice that this process or its host will end, and reports each notice once."""

    def __init__(self, cluster: Cluster, heard: Callable[[Notice], None]) -> None:
        """Start the thread. It calls `heard`, once for each host or process that a notice names."""
        self._cluster, self._heard = cluster, heard
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="rayps-notice").start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _watch(self) -> None:
        place = ActorHost.own(f"{host_address()}:0")
        known: set[str] = set()
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                notice = place.notice(tuple(one for one in self._cluster.notices() if one.key not in known))
            except Exception as error:  # Ray is ending, and this process with it
                log.info("notices cannot be read any more: %s", error)
                return
            if notice is not None:
                known.add(notice.key)
                self._heard(notice)
