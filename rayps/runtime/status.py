"""Where a run stands, said to whoever watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayps.core.job import Status
from rayps.runtime.journal import Journal
from rayps.runtime.report import ProgressReport


class RunStatus:
    """A run's status, and the progress that its journal shows."""

    def __init__(
        self, journal: Journal, report: ProgressReport, facts: Callable[[], tuple[int, dict[str, Any]]]
    ) -> None:
        """`facts` gives the round of the last snapshot, and what else is to be shown."""
        self.status = Status.STARTING
        self._message = ""
        self._journal, self._report, self._facts = journal, report, facts

    def say(self, status: Status, message: str) -> None:
        """It stands elsewhere now."""
        self.status, self._message = status, message
        self.show(now=True)

    def show(self, *, now: bool = False) -> None:
        """Show how far it is; kept to a few times a second unless `now`."""
        done, more = self._facts()
        progress = self._report.progress(done, status=self.status, message=self._message, **more)
        self._journal.progress(progress, now=now)
