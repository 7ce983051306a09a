"""What workers with backup workers report: the dropped steps of an epoch, and the workers that are always late."""

from __future__ import annotations

from rayps_client.values import JsonObject

from rayps.core.rows.backup_portions import Portions
from rayps.core.rows.dropped_steps import DroppedSteps, LateWorkers
from rayps.core.rows.step_members import Members
from rayps.worker.core import RoundLog

LATE = "late"  # the kind of the event about a worker that is late in a row
_WAY_OUT = (
    "its rows are late in each epoch; look at its machine (`rayps report`, `rayps doctor`), or leave the machine out"
)


class DropReports:
    """Reports the dropped steps: a number in each round's point and, on the worker that `reports`, events."""

    def __init__(self, log: RoundLog, size: int, late: LateWorkers, *, reports: bool) -> None:
        """Count the steps of `size` workers."""
        self._log, self._size, self._reports, self._late = log, size, reports, late
        self._row = DroppedSteps(size, late.limit)  # of the whole generation, for workers that are late in a row
        self._epoch = DroppedSteps(size)

    def add(self, portions: Portions, members: Members, round: int) -> None:
        """Add a step with these members. `portions` are those before the step."""
        dropped = portions.dropped(members)
        idle = [rank for rank in range(self._size) if rank not in portions.holders]
        self._log.add_numbers({"dropped": len(dropped)})
        late = self._row.add(dropped, idle)
        self._epoch.add(dropped, idle)
        if self._reports:
            for rank in late:
                count = self._row.in_a_row[rank]
                message = f"worker-{rank} was dropped in {count} steps in a row, up to round {round}: {_WAY_OUT}"
                facts: JsonObject = {"rank": rank, "steps": count, "round": round, "replace": self._late.replace}
                self._log.add_event(LATE, message, facts)

    def end_epoch(self, epoch: int) -> None:
        """Report the epoch's dropped steps by worker, if there are any."""
        summary = self._epoch.summary()
        if summary and self._reports:
            counts = {str(rank): count for rank, count in enumerate(self._epoch.counts) if count}
            message = f"epoch {epoch + 1}: gradients that came late and were computed again: {summary}"
            self._log.add_event("dropped", message, {"epoch": epoch, "steps": self._epoch.steps, "ranks": counts})
        self._epoch = DroppedSteps(self._size)
