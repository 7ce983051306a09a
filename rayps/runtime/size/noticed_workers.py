"""The workers of an elastic job that are under notice: which ranks will end, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayps.cluster.members import GroupMember
from rayps.cluster.notices import Notice
from rayps.runtime.records.journal import Journal


class NoticedWorkers:
    """Finds the workers that notices concern, and writes each notice as an event once."""

    def __init__(self, journal: Journal) -> None:
        """Prepare. `begin` sets what returns the notices; before, there are none."""
        self._journal = journal
        self._notices: Callable[[], tuple[Notice, ...]] = tuple
        self._reported: set[str] = set()  # keys of notices that were written as events

    def begin(self, notices: Callable[[], tuple[Notice, ...]]) -> None:
        """Set what returns notices of ends."""
        self._notices = notices

    def ranks(self, workers: Sequence[GroupMember]) -> dict[int, float | None]:
        """Return the ranks that will end, and the seconds until then; None for a rank without a deadline."""
        notices = self._notices()
        found: dict[int, float | None] = {}
        for worker in workers if notices else ():
            notice = None if worker.place is None else worker.place.notice(notices)
            if notice is None:
                continue
            found[worker.rank] = notice.seconds
            key = f"{notice.key} {worker.place}"
            if key not in self._reported:
                self._reported.add(key)
                when = "" if notice.seconds is None else f" in {notice.seconds:.0f} s"
                self._journal.event(
                    "notice", f"{worker.name} ends{when}: {notice.reason}", rank=worker.rank, seconds=notice.seconds
                )
        return found
