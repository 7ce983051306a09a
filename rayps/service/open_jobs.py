"""Cache the jobs that have not ended in memory, and read only changed rows from the store.

The service is the only writer of its store, and the store records which rows each transaction changed. At the first
refresh, and after an error, the rows of all jobs that have not ended are read.
"""

from __future__ import annotations

from rayps.core.job.job_status import Status
from rayps.service.plan import find_cores, needs
from rayps.service.store import JobRecord, Store
from rayps.service.waiting import JobQueue, QueuedJob, with_cores


class OpenJobs:
    """The jobs that have not ended. `queue`: the QUEUED jobs; `started`: a dict from id to record of the others.

    `cores`: how many CPUs jobs that run side by side may reserve; None: all. See `rayps.service.waiting.with_cores`.
    """

    def __init__(self, store: Store, cores: float | None = None) -> None:
        self.queue = JobQueue()
        self.cores = cores
        self.started: dict[str, JobRecord] = {}
        self._store = store
        self._whole = False  # whether all rows have been read

    async def refresh(self) -> None:
        """Read from the store the rows that have changed since the last call."""
        changed = self._store.take_changed()
        whole, self._whole = self._whole, False  # set again below, after the changed rows were read
        if not whole:
            self.queue.clear()
            self.started.clear()
            for record in await self._store.unfinished():
                self._take(record)
        elif changed:
            found = {record.id: record for record in await self._store.get_many(changed)}
            for job_id in changed:
                self._forget(job_id)
                if job_id in found and not found[job_id].status.terminal:
                    self._take(found[job_id])
            if any(job_id in self.started for job_id in changed):
                self.started = dict(sorted(self.started.items()))  # oldest first
        self._whole = True

    def _forget(self, job_id: str) -> None:
        self.queue.drop(job_id)
        self.started.pop(job_id, None)

    def _take(self, record: JobRecord) -> None:
        if record.status is Status.QUEUED:
            self.queue.put(
                QueuedJob(
                    record.id,
                    record.name,
                    with_cores(needs(record.spec), find_cores(record.spec, self.cores)),
                    record.attempt,
                    record.spec.server_group,
                    record.stop_requested_at is not None,
                )
            )
        else:
            self.started[record.id] = record
