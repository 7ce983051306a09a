"""Planted bugs: each switches one guard of the product off. The simulation must find each of them.

`python scripts/simulate.py --planted` searches the seeds from 0 on, and prints which seed finds which bug.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rayps.cluster import reservation
from rayps.core.job.repeated_pushes import Ledger
from rayps.core.rows.row_shares import RowShares
from rayps.ps.client.replay_buffer import ReplayBuffer
from rayps.ps.manager import assign_segments
from rayps.ps.manager.group_state import GroupState
from rayps.ps.manager.record import RecordFile
from rayps.ps.protocol.messages import Event
from rayps.ps.server import replication, requests
from rayps.recovery import backup_assignment
from rayps.runtime.driver import recover
from rayps.runtime.driver.driver_actor import DriverActor
from rayps.runtime.size import noticed_workers
from rayps.service import adoption, drivers, elastic_jobs, elastic_plan, job_folders, notice_store, scheduler, store
from simulation.service import SimCheckpoints


@dataclass(frozen=True)
class Planted:
    """A guard that is switched off."""

    scenario: str
    what: str  # what the product then does
    changes: Callable[[], list[tuple[Any, str, Any]]]  # (owner, name, what takes its place)

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Switch the guard off."""
        undo = []
        try:
            for owner, name, value in self.changes():
                undo.append((owner, name, owner.__dict__[name]))
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in reversed(undo):
                setattr(owner, name, value)


def _counts_again() -> list[tuple[Any, str, Any]]:
    add = Ledger.add

    def always(self: Ledger, rank: int, step: int) -> bool:
        add(self, rank, step)
        return True

    return [(Ledger, "add", always), (Ledger, "seen", lambda self, rank, step: False)]


def _stale_is_served() -> list[tuple[Any, str, Any]]:
    return [(requests.RequestHandler, "_is_stale", lambda self, space, request: self.fences(space, request))]


def _any_copy_is_in_sync() -> list[tuple[Any, str, Any]]:
    def in_sync(self: Any, segment: Any) -> tuple[str, ...]:
        return tuple(copy for copy in segment.copies if not self._is_gone(copy))

    return [(assign_segments._SegmentDecisions, "_list_in_sync", in_sync)]


def _orders_before_the_record() -> list[tuple[Any, str, Any]]:
    write, kept = RecordFile.write, {}

    def rarely(self: RecordFile, record: Any) -> None:
        kept[id(self)] = kept.get(id(self), 0) + 1
        if kept[id(self)] % 4 == 1:
            write(self, record)

    return [(RecordFile, "write", rarely)]


def _synced_at_once() -> list[tuple[Any, str, Any]]:
    set_backups = replication.Replication.set_backups

    def reported(self: Any, assigned: Any, copies: Any, *, anew: bool) -> None:
        set_backups(self, assigned, copies, anew=anew)
        for copy in assigned.copies.values():
            if not copy.synced:
                copy.synced = True
                self._report(Event.SYNCED, copy)

    return [(replication.Replication, "set_backups", reported)]


def _takes_the_newest_of_any() -> list[tuple[Any, str, Any]]:
    plan = backup_assignment.plan_rebuild

    def newest(grid: Any, held: Any) -> Any:
        found = plan(grid, held)
        own = [max(rounds[rank].rounds) for rank, rounds in held.items() if rank in rounds and rounds[rank].rounds]
        return found if found is None or not own else replace(found, round=max(own))

    return [(recover, "plan_rebuild", newest)]


def _forgets_keys() -> list[tuple[Any, str, Any]]:
    add = store.Store.add

    async def without(self: Any, spec: Any, *, name: str, key: str | None = None, now: float | None = None) -> Any:
        return await add(self, spec, name=name, now=now)

    return [(store.Store, "add", without)]


async def _no_adoption(store: Any, jobs_dir: Any) -> None:
    return None


PLANTED: dict[str, Planted] = {
    "ledger": Planted("servers", "a server applies a repeated push again", _counts_again),
    "generation": Planted("servers", "a server serves a segment under an old generation", _stale_is_served),
    "promotion": Planted("servers", "the manager promotes a backup that is not in sync", _any_copy_is_in_sync),
    "record": Planted("servers", "the manager sends orders that its record does not have", _orders_before_the_record),
    "backups": Planted(
        "servers",
        "a server acknowledges a push before the backups have it",
        lambda: [(replication.Replication, "needs", lambda self, segments: {})],
    ),
    "synced": Planted("servers", "a server reports a backup as in sync before it has the state", _synced_at_once),
    "replay": Planted(
        "servers",
        "a worker does not repeat its pushes to a new primary",
        lambda: [(ReplayBuffer, "of", lambda self, segments, marks=None: [])],
    ),
    "orphan": Planted(
        "servers",
        "the manager leaves a server alone that it does not know",
        lambda: [(GroupState, "registered", _registered_without_end(GroupState.registered))],
    ),
    "two drivers": Planted(
        "service",
        "the service starts a driver and leaves the process of the earlier one alone",
        lambda: [(drivers, "end_process", lambda folder: None), (scheduler, "end_process", lambda folder: None)],
    ),
    "lost driver": Planted(
        "service",
        "the service ends a job whose driver Ray has lost, and leaves the driver's process alone",
        lambda: [(scheduler, "end_process", lambda folder: None)],
    ),
    "idle driver": Planted(
        "service",
        "a driver whose run has ended waits for Ray to end its process",
        lambda: [(DriverActor, "_end_actor", _end_by_ray_alone)],
    ),
    "adoption": Planted(
        "service",
        "the service does not restore the rows that its store has lost",
        lambda: [(adoption, "adopt", _no_adoption)],
    ),
    "job file": Planted(
        "service",
        "the service acknowledges a job without writing it into the job's folder",
        lambda: [(job_folders, "write_row", lambda folder, row, sync=True: None)],
    ),
    "idempotency": Planted("service", "the store forgets the keys of requests", _forgets_keys),
    "rebuild": Planted("service", "workers continue from a round that not all of them have", _takes_the_newest_of_any),
    "resume": Planted(
        "service",
        "a new driver starts at round 0 although there is a checkpoint",
        lambda: [(SimCheckpoints, "usable", staticmethod(lambda folder: (None, [])))],
    ),
}


PLANTED |= {
    "greedy": Planted(
        "elastic",
        "elastic jobs give up no worker for a job that waits",
        lambda: [(elastic_plan, "_shrink_for", lambda *_: False)],
    ),
    "rows": Planted(
        "elastic",
        "a change of the workers begins the epoch's rows again",
        lambda: [(RowShares, "followed_by", _from_the_first_row)],
    ),
    "cooldown": Planted(
        "elastic",
        "a job may grow within its cooldown",
        lambda: [(scheduler, "describe_elastic_job", _settled(elastic_jobs.describe_elastic_job))],
    ),
    "placement": Planted(
        "elastic",
        "workers start on hosts that will end",
        lambda: [(reservation, "to_avoid", lambda cluster, wanted: [])],
    ),
    "notice": Planted(
        "elastic",
        "a service that starts does not read the notices that it has acknowledged",
        lambda: [(notice_store.NoticeStore, "_read_rows", _not_read)],
    ),
    "leavers": Planted(
        "elastic",
        "workers stay on a host until it ends",
        lambda: [(noticed_workers.NoticedWorkers, "ranks", lambda self, workers: {})],
    ),
}


def _from_the_first_row(self: RowShares, round: int, shares: Any, rows: int) -> RowShares:
    return RowShares(round, self.after(round, rows)[0], 0, tuple(shares))


def _settled(facts_of: Any) -> Any:
    def settled(*args: Any, **options: Any) -> Any:
        found = facts_of(*args, **options)
        return None if found is None else replace(found, settled=float("inf"))

    return settled


async def _not_read(self: Any) -> Any:
    if self._held is None:
        self._held = {}
    return self._held


def _registered_without_end(registered: Any) -> Any:
    def without(self: Any, connection: Any, body: Any) -> bool:
        end, self.launcher.end = self.launcher.end, lambda name: None
        try:
            found: bool = registered(self, connection, body)
        finally:
            self.launcher.end = end
        return found

    return without


def _end_by_ray_alone(self: Any) -> None:
    with contextlib.suppress(Exception):
        from simulation.cluster import surrounding

        handle = surrounding().find(f"driver-{self._folder.name}")
        if handle is not None:
            surrounding().kill(handle)
