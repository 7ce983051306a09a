"""The jobs that have not ended, in memory, kept equal to the store: only rows that changed are read again.

The service is the only writer of its store, which notes the ids that each transaction touched. After an error, and at
the start, all living rows are read.
"""

from __future__ import annotations

from rayps.service.plan import needs
from rayps.service.store import JobRecord, Store
from rayps.service.waiting import Waiting, WaitingJobs
from rayps.strategies.job import Status


class OpenJobs:
    """Those that wait, and the records of those that were started."""

    def __init__(self, store: Store) -> None:
        self.waiting = WaitingJobs()
        self.started: dict[str, JobRecord] = {}
        self._store = store
        self._whole = False  # whether every living row was taken in

    async def refresh(self) -> None:
        """Take in what the store has changed."""
        changed = self._store.take_touched()
        whole, self._whole = self._whole, False  # until what was taken is taken in
        if not whole:
            self.waiting.clear()
            self.started.clear()
            for record in await self._store.live():
                self._take(record)
        elif changed:
            found = {record.id: record for record in await self._store.some(changed)}
            for job_id in changed:
                self._forget(job_id)
                if job_id in found and not found[job_id].status.terminal:
                    self._take(found[job_id])
            if any(job_id in self.started for job_id in changed):
                self.started = dict(sorted(self.started.items()))  # oldest first
        self._whole = True

    def _forget(self, job_id: str) -> None:
        self.waiting.drop(job_id)
        self.started.pop(job_id, None)

    def _take(self, record: JobRecord) -> None:
        if record.status is Status.QUEUED:
            self.waiting.put(
                Waiting(
                    record.id,
                    record.name,
                    needs(record.spec),
                    record.attempt,
                    record.spec.server_group,
                    record.stop_requested_at is not None,
                )
            )
        else:
            self.started[record.id] = record
