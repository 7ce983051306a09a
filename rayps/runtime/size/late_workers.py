"""Replace workers that are late in a row, with backup workers and the option `replace_late`: each rank once.

A replacement is a restart of all workers from a snapshot. The driver first asks for a snapshot, so that few rounds are
repeated. If the new process is late as well, its machine is slow, and another process would not help.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rayps.core.job.records import Event, Point
from rayps.worker.exchange.dropped import LATE

if TYPE_CHECKING:
    from rayps.runtime.driver.worker_group import WorkerGroup


class LateReplacements:
    """Decides which late workers are replaced, and when. `newest` is the round of the newest snapshot."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # the ranks that were replaced, or will be
        self._due: dict[int, Event] = {}  # from a rank to the report, for ranks that await a snapshot

    def add(self, events: Iterable[Event]) -> bool:
        """Add the events of a poll. Return whether a snapshot is needed, because a worker will be replaced."""
        new = [e for e in events if e["kind"] == LATE and e.get("replace") and e["rank"] not in self._known]
        for event in new:
            self._known.add(event["rank"])
            self._due[event["rank"]] = event
        return bool(new)

    def take_due(self, newest: int, *, allowed: bool) -> dict[int, str]:
        """Return the ranks to replace now, each with the reason. Forget them if no failure is `allowed` any more."""
        ready = {rank: event for rank, event in self._due.items() if newest > event["round"] or not allowed}
        for rank in ready:
            del self._due[rank]
        return {rank: _explain(event) for rank, event in ready.items()} if allowed else {}

    def look(self, group: WorkerGroup, points: list[Point], newest: int, *, allowed: bool) -> None:
        """Read the points of a poll, and mark the workers that are replaced now as dead.

        `allowed`: whether the run may have another failure.
        """
        if self.add(point["event"] for point in points if point["kind"] == "event") and allowed:
            group.snapshot_soon()
        for rank, reason in self.take_due(newest, allowed=allowed).items():
            group.workers[rank].dead = reason


def _explain(event: Event) -> str:
    return f"the driver ended it, because it was dropped in {event['steps']} steps in a row"
