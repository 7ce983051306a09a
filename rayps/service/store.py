"""The store: jobs, their events and the tokens. Metrics and logs are in the job folders.

Guarantees: when a method returns, its writes are durable (one SQLite file, WAL, synchronous=FULL). A change of status
is checked against `rayps.core.job.job_status.MOVES` in the transaction that writes it. Therefore one of two concurrent
changes is refused and writes nothing. There is one writer, whose transactions begin IMMEDIATE, and several readers.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from rayps_client.errors import ConfigError, Conflict, NotFound, first_line
from rayps_client.values import Keywords
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from rayps.core.failpoint import passing
from rayps.core.job.job_status import Status, may_move
from rayps.service.job_folders import JobRow
from rayps.service.state_disk import StateDisk, is_full
from rayps.strategies.job import JobSpec

ID_LETTERS = 26
FEWEST_LETTERS = 4  # the least number of letters of an abbreviated id
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32, as in ULID: texts sort like their numbers
_UNFINISHED = [s.value for s in Status if not s.terminal]
_CODE_SECONDS = 300.0
LOCKED_SECONDS = 30.0  # seconds that a transaction waits while another program has locked the file
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_MOST_IDS = 500  # the most ids in one SQL statement
_SESSION_SECONDS = 30 * 86400.0

_meta = sa.MetaData()
_jobs = sa.Table(
    "jobs",
    _meta,
    *[
        sa.Column(name, kind)
        for name, kind in {
            "id": sa.String,
            "name": sa.String,
            "status": sa.String,
            "reason": sa.Text,
            "spec": sa.Text,
            "attempt": sa.Integer,
            "failures": sa.Integer,
            "interrupted": sa.Boolean,
            "stop_requested_at": sa.Float,
            "created_at": sa.Float,
            "started_at": sa.Float,
            "attempt_at": sa.Float,
            "finished_at": sa.Float,
            "metrics": sa.Text,
            "checkpoint": sa.Text,
            "idempotency_key": sa.String,
            "idempotency_hash": sa.String,
            "sweep": sa.String,
            "scale_to": sa.Integer,
            "allowed": sa.Integer,
            "allowed_at": sa.Float,
        }.items()
    ],
)
_events = sa.Table(
    "events",
    _meta,
    *[
        sa.Column(name, kind)
        for name, kind in {
            "id": sa.Integer,
            "job_id": sa.String,
            "time": sa.Float,
            "kind": sa.String,
            "message": sa.Text,
            "attempt": sa.Integer,
        }.items()
    ],
)
_tokens = sa.Table(
    "tokens",
    _meta,
    *[
        sa.Column(name, kind)
        for name, kind in {
            "hash": sa.String,
            "kind": sa.String,
            "created_at": sa.Float,
            "expires_at": sa.Float,
            "revoked_at": sa.Float,
        }.items()
    ],
)
_codes = sa.Table("login_codes", _meta, sa.Column("hash", sa.String), sa.Column("expires_at", sa.Float))


class StoredEvent(TypedDict):
    """An event of a job; `time` in seconds since the epoch."""

    seq: int
    time: float
    kind: str
    message: str
    attempt: int


class AttemptFacts(TypedDict, total=False):
    """Columns of a job's row that change with its attempt."""

    reason: str | None
    failures: int
    interrupted: bool


class RowFacts(AttemptFacts, total=False):
    """Columns of a job's row that change with its status."""

    attempt: int
    started_at: float
    attempt_at: float
    finished_at: float
    metrics: dict[str, float] | None
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job's row. Times are seconds since the epoch."""

    id: str
    name: str
    status: Status
    reason: str | None
    spec: JobSpec
    attempt: int
    failures: int  # losses of the job's driver or of an actor before this attempt
    interrupted: bool  # the service stopped its own Ray: the next start does not count as a failure
    stop_requested_at: float | None
    created_at: float
    started_at: float | None
    attempt_at: float | None
    finished_at: float | None
    metrics: dict[str, float] | None
    checkpoint: str | None
    sweep: str | None = None  # name of the sweep to which the job belongs
    scale_to: int | None = None  # the most workers of an elastic job that the user wants now; None: as many as it may
    allowed: int | None = None  # the workers that an elastic job may have now; None: its least number
    allowed_at: float | None = None  # when `allowed` was set


@dataclass(frozen=True, slots=True)
class Holder:
    """Who sent a request: the hash of its token or session, and when this expires (None: never)."""

    hash: str
    expires_at: float | None

    def outlives(self, expires_at: float | None) -> bool:
        """Return whether this secret lives at least as long as one that expires then (None: never)."""
        return self.expires_at is None or (expires_at is not None and expires_at <= self.expires_at)


class Store:
    """Jobs and tokens in one SQLite file, which one process opens for writing."""

    def __init__(self, writer: AsyncEngine, reader: AsyncEngine, disk: StateDisk) -> None:
        self._writer = writer
        self._reader = reader
        self.disk = disk
        self.version = 0  # number of write transactions so far; a reader sees by it whether anything changed
        self._changed: set[str] = set()

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open the store in `path`; create it or migrate it to the newest schema as needed.

        Raises:
            ConfigError: the file is not a store, or is the store of another version of rayps.
        """
        url = sa.URL.create("sqlite+aiosqlite", database=str(path))
        disk = StateDisk(path.parent)
        store = cls(_make_engine(url, "BEGIN IMMEDIATE", size=1), _make_engine(url, "BEGIN", size=4), disk)
        try:
            async with store._writer.connect() as connection:
                await connection.run_sync(_migrate)
            path.chmod(0o600)
        except Exception as error:
            await store.close()
            if is_full(error):
                raise ConfigError(
                    f"the store {path} cannot be opened: {disk.full_message()}", field="state_dir"
                ) from error
            raise ConfigError(
                f"the store {path} cannot be opened: {first_line(error)}\n"
                "Move the file away, or give another directory with --state-dir or RAYPS_STATE_DIR."
            ) from error
        return store

    async def close(self) -> None:
        """Close the file."""
        await self._writer.dispose()
        await self._reader.dispose()

    @asynccontextmanager
    async def writing(self, *jobs: str) -> AsyncIterator[AsyncConnection]:
        """Open a write transaction, one at a time. `jobs`: the ids of the jobs whose rows the transaction changes."""
        try:
            async with self._writer.begin() as tx:
                yield tx
        except Exception as error:
            if is_full(error):
                self.disk.record_failure()
            raise
        self.disk.record_success()
        self._changed.update(jobs)
        self.version += 1  # after the commit, so that a reader that sees the new number also sees the new rows

    def take_changed(self) -> set[str]:
        """Return the ids of the jobs whose rows have changed since the last call. Only one object may call this."""
        taken, self._changed = self._changed, set()
        return taken

    def reading(self) -> AsyncConnection:
        """Return a connection for reading, to be used with `async with`."""
        return self._reader.connect()

    # jobs

    async def add(
        self, spec: JobSpec, *, name: str, key: str | None = None, now: float | None = None
    ) -> tuple[JobRecord, bool]:
        """Add a QUEUED job; return its record and True.

        If the idempotency key `key` was used before for an equal job, return the record of that job and False.

        Raises:
            ConfigError: the key was used for another job.
        """
        records, created = await self.add_all([(spec, name)], key=key, now=now)
        return records[0], created

    async def add_all(
        self,
        jobs: Sequence[tuple[JobSpec, str]],
        *,
        sweep: str | None = None,
        key: str | None = None,
        now: float | None = None,
    ) -> tuple[list[JobRecord], bool]:
        """Add QUEUED jobs, given as specifications and names, all in one transaction; return their records and True.

        `sweep`: the name of the sweep that the jobs are. If the idempotency key `key` was used before for equal jobs,
        return the records of those that still exist and False.

        Raises:
            ConfigError: the key was used for other jobs.
            Conflict: there is a sweep of that name.
        """
        now = time.time() if now is None else now
        texts = [json.dumps(spec.to_dict(), sort_keys=True) for spec, _ in jobs]
        digest = _hash(texts[0] if sweep is None else json.dumps([sweep, *texts]))
        ids: list[str] = []
        async with self.writing() as tx:
            if key is not None:
                row = (await tx.execute(_jobs.select().where(_jobs.c.idempotency_key == key))).first()
                if row is not None:
                    _check_same(row, digest, key)
                    mine = _jobs.c.id == row.id if sweep is None else _jobs.c.sweep == sweep
                    return [_read_record(each) for each in await tx.execute(_jobs.select().where(mine))], False
            if sweep is not None and (await tx.execute(_jobs.select().where(_jobs.c.sweep == sweep))).first():
                raise Conflict(
                    f"there is a sweep {sweep!r} already: give another name, or delete its jobs",
                    status=409,
                    field="name",
                )
            last = (await tx.execute(sa.select(sa.func.max(_jobs.c.id)))).scalar()
            for (_, name), text in zip(jobs, texts, strict=True):
                last = _make_id(now, last)
                await tx.execute(
                    _jobs.insert().values(
                        id=last,
                        name=name,
                        status=Status.QUEUED.value,
                        spec=text,
                        attempt=0,
                        failures=0,
                        interrupted=False,
                        created_at=now,
                        idempotency_key=None if ids else key,  # of the first job, because keys are unique
                        idempotency_hash=digest,
                        sweep=sweep,
                    )
                )
                await _add_event(tx, last, "queued", f"{name} was submitted", 0, now)
                ids.append(last)
            passing("submit: written, not committed")
        self._changed.update(ids)
        return await self.get_many(ids), True

    async def get(self, job_id: str) -> JobRecord:
        """Return the job with this id.

        Raises:
            NotFound: there is no job with this id.
        """
        async with self.reading() as tx:
            return await _get(tx, job_id)

    async def find(self, text: str) -> JobRecord:
        """Return the job with this id, or whose id begins with this text (at least 4 letters, in any case).

        Raises:
            NotFound: there is no such job.
            ConfigError: there are several such jobs.
        """
        start = text.upper() if text.isascii() and text.isalnum() else ""
        query = _jobs.select().where(_jobs.c.id.startswith(start)).order_by(_jobs.c.id).limit(3)
        found = []
        if FEWEST_LETTERS <= len(start) <= ID_LETTERS:
            async with self.reading() as tx:
                found = [_read_record(row) for row in await tx.execute(query)]
        if not found:
            few = 0 < len(start) < FEWEST_LETTERS
            short = f"; give at least {FEWEST_LETTERS} letters of a job's id" if few else ""
            raise NotFound(f"there is no job {text[:100]!r}: `rayps ls` lists them{short}", job=text[:100], status=404)
        if len(found) > 1:
            names = " and ".join(f"{job.id} ({job.name})" for job in found[:2]) + (", ..." if len(found) > 2 else "")
            raise ConfigError(
                f"several jobs begin with {text!r}: {names}\ngive more of the id", field="job_id", code="ambiguous"
            )
        return found[0]

    async def page(
        self,
        *,
        status: Sequence[Status] = (),
        limit: int = 50,
        before: str | None = None,
        sweep: str | None = None,
        text: str = "",
    ) -> list[JobRecord]:
        """List at most `limit` jobs, newest first. `before`: the last id of the previous page.

        With `sweep`, only the jobs of the sweep of this name; with `text`, only those that `_holds` its words.
        """
        query = _jobs.select().where(_holds(sweep, text)).order_by(_jobs.c.id.desc()).limit(limit)
        if status:
            query = query.where(_jobs.c.status.in_([s.value for s in status]))
        if before is not None:
            query = query.where(_jobs.c.id < before)
        async with self.reading() as tx:
            return [_read_record(row) for row in await tx.execute(query)]

    async def unfinished(self) -> list[JobRecord]:
        """List the jobs that have not ended, oldest first."""
        query = _jobs.select().where(_jobs.c.status.in_(_UNFINISHED)).order_by(_jobs.c.id)
        async with self.reading() as tx:
            return [_read_record(row) for row in await tx.execute(query)]

    async def ids(self, statuses: Collection[Status]) -> list[str]:
        """List the ids of the jobs with these statuses, oldest first."""
        query = sa.select(_jobs.c.id).where(_jobs.c.status.in_([s.value for s in statuses])).order_by(_jobs.c.id)
        async with self.reading() as tx:
            return list((await tx.execute(query)).scalars())

    async def get_many(self, ids: Collection[str]) -> list[JobRecord]:
        """List the jobs with these ids, oldest first. Ids of deleted jobs are ignored."""
        async with self.reading() as tx:
            return await _get_many(tx, ids)

    async def counts(self, *, sweep: str | None = None, text: str = "") -> dict[str, int]:
        """Return a dict from status to the number of jobs with that status; `sweep` and `text` as in `page`."""
        query = sa.select(_jobs.c.status, sa.func.count()).where(_holds(sweep, text)).group_by(_jobs.c.status)
        async with self.reading() as tx:
            return {row[0]: row[1] for row in await tx.execute(query)}

    async def change_status(
        self,
        job_id: str,
        new: Status,
        *,
        message: str | None,
        old: Status | None = None,
        kind: str | None = None,
        now: float | None = None,
        **facts: Unpack[RowFacts],
    ) -> JobRecord:
        """Change a job's status and write an event with `message`, in one transaction.

        `old`: the status that the job should have now. `facts`: columns that change with the status. If `message` is
        None, no event is written.

        Raises:
            Conflict: the status is not `old` any more, or may not become `new`. Nothing is changed.
            NotFound: there is no such job.
        """
        now = time.time() if now is None else now
        async with self.writing(job_id) as tx:
            found = await _get(tx, job_id)
            if (old is not None and found.status is not old) or not may_move(found.status, new):
                raise Conflict(
                    f"job {job_id} is {found.status}: it cannot become {new}",
                    job=job_id,
                    status=409,
                    current=found.status.value,
                )
            if new.terminal:
                facts.setdefault("finished_at", now)
            columns = {**facts, "metrics": json.dumps(facts["metrics"])} if facts.get("metrics") is not None else facts
            await tx.execute(_jobs.update().where(_jobs.c.id == job_id).values(status=new.value, **columns))
            attempt = facts.get("attempt", found.attempt)
            if message is not None:
                await _add_event(tx, job_id, kind or new.value.lower(), message, attempt, now)
            return await _get(tx, job_id)

    async def begin_attempt(
        self,
        job_id: str,
        *,
        attempt: int,
        message: str,
        kind: str,
        now: float | None = None,
        **facts: Unpack[AttemptFacts],
    ) -> JobRecord:
        """Record a new attempt of a job whose driver was lost. The status does not change.

        Raises:
            Conflict: the job has ended, or that attempt has begun already.
        """
        now = time.time() if now is None else now
        async with self.writing(job_id) as tx:
            found = await _get(tx, job_id)
            if found.status.terminal or found.attempt >= attempt:
                raise Conflict(
                    f"job {job_id} is {found.status} in attempt {found.attempt}: attempt {attempt} cannot begin",
                    job=job_id,
                    status=409,
                )
            await tx.execute(
                _jobs.update().where(_jobs.c.id == job_id).values(attempt=attempt, attempt_at=now, **facts)
            )
            await _add_event(tx, job_id, kind, message, attempt, now)
            return await _get(tx, job_id)

    async def set_reason(self, job_id: str, reason: str | None) -> None:
        """Set the reason for a job's status. If the job has ended, change nothing."""
        async with self.writing(job_id) as tx:
            await tx.execute(
                _jobs.update()
                .where(_jobs.c.id == job_id, _jobs.c.status.in_(_UNFINISHED), _jobs.c.reason.is_distinct_from(reason))
                .values(reason=reason)
            )

    async def request_stop(self, job_id: str, now: float | None = None) -> JobRecord:
        """Record a request to stop, which the scheduler carries out. A repeated request changes nothing.

        Raises:
            Conflict: the job has ended.
            NotFound: there is no such job.
        """
        now = time.time() if now is None else now
        async with self.writing(job_id) as tx:
            found = await _get(tx, job_id)
            if found.status.terminal:
                raise Conflict(
                    f"job {job_id} has ended already: {found.status}",
                    job=job_id,
                    status=409,
                    current=found.status.value,
                )
            if found.stop_requested_at is None:
                await tx.execute(_jobs.update().where(_jobs.c.id == job_id).values(stop_requested_at=now))
                await _add_event(tx, job_id, "stop_requested", "stop requested", found.attempt, now)
            return await _get(tx, job_id)

    async def request_stops(self, ids: Collection[str], now: float | None = None) -> list[JobRecord]:
        """Record in one transaction a request to stop each of these jobs that has not ended; return those jobs.

        Jobs that have ended or were deleted are left out, and a job whose stop was requested before is not changed.
        """
        now = time.time() if now is None else now
        async with self.writing(*ids) as tx:
            found = [job for job in await _get_many(tx, ids) if not job.status.terminal]
            asked = [job for job in found if job.stop_requested_at is None]
            await _add_events(tx, [(job.id, job.attempt) for job in asked], "stop_requested", "stop requested", now)
            for some in _cut_ids([job.id for job in asked]):
                await tx.execute(_jobs.update().where(_jobs.c.id.in_(some)).values(stop_requested_at=now))
            return await _get_many(tx, [job.id for job in found])

    async def end_queued(self, ids: Collection[str], message: str, now: float | None = None) -> list[str]:
        """End jobs as STOPPED before they have started, in one transaction; return the ids of those that it ended.

        Jobs that are not QUEUED any more, or were deleted, are left as they are.
        """
        now = time.time() if now is None else now
        async with self.writing(*ids) as tx:
            found = [job for job in await _get_many(tx, ids) if job.status is Status.QUEUED]
            kind = Status.STOPPED.value.lower()
            await _add_events(tx, [(job.id, job.attempt) for job in found], kind, message, now)
            ended: Keywords = {"status": Status.STOPPED.value, "reason": message, "finished_at": now}
            for some in _cut_ids([job.id for job in found]):
                await tx.execute(_jobs.update().where(_jobs.c.id.in_(some)).values(ended))
            return [job.id for job in found]

    async def scale(self, job_id: str, workers: int, now: float | None = None) -> JobRecord:
        """Record the most workers that the user wants an elastic job to have. A repeated request changes nothing.

        Raises:
            Conflict: the job has ended, or a stop was requested.
            ConfigError: the job has a fixed number of workers, or `workers` is outside of its range.
            NotFound: there is no such job.
        """
        now = time.time() if now is None else now
        async with self.writing(job_id) as tx:
            found = await _get(tx, job_id)
            if found.status.terminal or found.stop_requested_at is not None:
                why = f"has ended: {found.status}" if found.status.terminal else "is stopping"
                raise Conflict(
                    f"job {job_id} {why}; its number of workers cannot change",
                    job=job_id,
                    status=409,
                    current=found.status.value,
                )
            least, elastic = found.spec.workers, found.spec.elastic
            if elastic is None:
                raise ConfigError(
                    f"job {job_id} has a fixed number of workers, {least}: submit it with a range, such as workers: "
                    f"[{least}, {2 * least}], to change the number while it runs",
                    field="workers",
                    code="not_elastic",
                )
            if not least <= workers <= elastic.most:
                raise ConfigError(
                    f"workers is {workers}, and job {job_id} was submitted with {least} to {elastic.most} workers: "
                    "give a number in this range",
                    field="workers",
                    code="out_of_range",
                )
            if found.scale_to != workers:
                await tx.execute(_jobs.update().where(_jobs.c.id == job_id).values(scale_to=workers))
                text = f"at most {workers} of {least} to {elastic.most} workers were requested"
                await _add_event(tx, job_id, "scale_requested", text, found.attempt, now)
            return await _get(tx, job_id)

    async def set_allowed(self, job_id: str, workers: int, *, message: str, now: float | None = None) -> JobRecord:
        """Record how many workers an elastic job may have, with an event. If the job has ended, change nothing.

        Raises NotFound if there is no such job.
        """
        now = time.time() if now is None else now
        async with self.writing(job_id) as tx:
            found = await _get(tx, job_id)
            if not found.status.terminal and found.allowed != workers:
                changed = _jobs.update().where(_jobs.c.id == job_id).values(allowed=workers, allowed_at=now)
                await tx.execute(changed)
                await _add_event(tx, job_id, "allowed", message, found.attempt, now)
            return await _get(tx, job_id)

    async def add_event(self, job_id: str, kind: str, message: str) -> bool:
        """Write an event of a job, unless the job has the same event. Return whether it was written.

        Raises NotFound if there is no such job.
        """
        async with self.writing(job_id) as tx:
            found = await _get(tx, job_id)
            same = (_events.c.job_id == job_id) & (_events.c.kind == kind) & (_events.c.message == message)
            if (await tx.execute(sa.select(_events.c.id).where(same))).first() is not None:
                return False
            await _add_event(tx, job_id, kind, message, found.attempt, time.time())
            return True

    async def delete(self, job_id: str) -> None:
        """Remove an ended job with its events and its clients' tokens.

        Raises:
            Conflict: the job has not ended.
            NotFound: there is no such job.
        """
        async with self.writing(job_id) as tx:
            found = await _get(tx, job_id)
            if not found.status.terminal:
                raise Conflict(
                    f"job {job_id} is {found.status}: stop it first (`rayps stop {job_id}`)",
                    job=job_id,
                    status=409,
                    current=found.status.value,
                )
            await tx.execute(_jobs.delete().where(_jobs.c.id == job_id))

    async def jobs_resuming_from(self, folder: Path) -> list[JobRecord]:
        """List the jobs that have not ended and resume from a checkpoint below `folder`."""
        text = json.dumps(str(folder))[:-1] + "/"  # as in the spec's JSON text, without the closing quote
        query = _jobs.select().where(
            _jobs.c.status.in_(_UNFINISHED), _jobs.c.spec.contains(f'"resume": {text}', autoescape=True)
        )
        async with self.reading() as tx:
            return [_read_record(row) for row in await tx.execute(query)]

    async def code_in_use(self, code: str | None = None) -> set[str]:
        """Return the archives that jobs need, by their SHA-256; with `code`, at most this one."""
        archive = sa.func.json_extract(_jobs.c.spec, "$.code")
        query = sa.select(archive).where(archive.is_not(None) if code is None else archive == code).distinct()
        async with self.reading() as tx:
            return {row[0] for row in await tx.execute(query)}

    async def json_row(self, job_id: str) -> JobRow:
        """Return a job's row as JSON data, as `restore_rows` expects it. Raises NotFound if there is no such job."""
        for row in await self.json_rows([job_id]):
            return row
        raise NotFound(f"there is no job {job_id!r}: `rayps ls` lists them", job=job_id, status=404)

    async def json_rows(self, ids: Collection[str]) -> list[JobRow]:
        """Return the rows of jobs as JSON data, as `restore_rows` expects them. Deleted jobs are left out."""
        found: list[JobRow] = []
        async with self.reading() as tx:
            for some in _cut_ids(ids):
                for row in (await tx.execute(_jobs.select().where(_jobs.c.id.in_(some)))).mappings():
                    columns: Any = {**row, "spec": json.loads(row["spec"])}
                    found.append(columns)
        return found

    async def statuses(self) -> list[tuple[str, Status, int]]:
        """List every job's id, status and attempt."""
        query = sa.select(_jobs.c.id, _jobs.c.status, _jobs.c.attempt)
        async with self.reading() as tx:
            return [(row.id, Status(row.status), row.attempt) for row in await tx.execute(query)]

    async def restore_rows(self, rows: Sequence[tuple[JobRow, str]], now: float | None = None) -> None:
        """Write lost or outdated rows and an event for each, in one transaction.

        `rows`: pairs of a row and the message of its event.
        """
        now = time.time() if now is None else now
        async with self.writing(*(row["id"] for row, _ in rows)) as tx:
            for row, message in rows:
                facts: Keywords = {key: value for key, value in row.items() if key in _jobs.c}
                facts |= {
                    name: json.dumps(facts[name], sort_keys=True)
                    for name in ("spec", "metrics")
                    if facts.get(name) is not None
                }
                key = facts.get("idempotency_key")
                if key is not None and (await tx.execute(_jobs.select().where(_jobs.c.idempotency_key == key))).first():
                    facts["idempotency_key"] = None  # the key was used again for a later job
                known = (await tx.execute(sa.select(_jobs.c.id).where(_jobs.c.id == row["id"]))).first()
                if known is None:
                    await tx.execute(_jobs.insert().values({"interrupted": False} | facts))
                else:
                    await tx.execute(_jobs.update().where(_jobs.c.id == row["id"]).values(facts))
                await _add_event(tx, row["id"], "adopted", message, facts["attempt"], now)

    async def mark_interrupted(self) -> int:
        """Mark every started job as interrupted, because the service stops Ray on purpose; return their number.

        An interruption does not count as a failure of the job.
        """
        held = [s for s in _UNFINISHED if s != Status.QUEUED.value]
        async with self.writing() as tx:
            ids = [row.id for row in await tx.execute(sa.select(_jobs.c.id).where(_jobs.c.status.in_(held)))]
            await tx.execute(_jobs.update().where(_jobs.c.status.in_(held)).values(interrupted=True))
        self._changed.update(ids)
        return len(ids)

    async def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """List the scheduler's events of a job with ids above `after`, oldest first."""
        query = (
            _events.select().where(_events.c.job_id == job_id, _events.c.id > after).order_by(_events.c.id).limit(limit)
        )
        async with self.reading() as tx:
            return [
                {"seq": r.id, "time": r.time, "kind": r.kind, "message": r.message, "attempt": r.attempt}
                for r in await tx.execute(query)
            ]

    # tokens

    async def accepts_secret(self, secret: str, now: float | None = None) -> bool:
        """Return whether a token's or session's secret is known, not revoked and not expired."""
        return await self.holder(secret, now) is not None

    async def holder(self, secret: str, now: float | None = None) -> Holder | None:
        """Return the facts of a token's or session's secret; None if it is unknown, was revoked or has expired."""
        now = time.time() if now is None else now
        query = sa.select(_tokens.c.hash, _tokens.c.expires_at).where(
            _tokens.c.hash == _hash(secret),
            _tokens.c.revoked_at.is_(None),
            sa.or_(_tokens.c.expires_at.is_(None), _tokens.c.expires_at > now),
        )
        async with self.reading() as tx:
            row = (await tx.execute(query)).first()
        return None if row is None else Holder(row.hash, row.expires_at)

    async def revoke(self, secret: str) -> None:
        """Revoke a token or a session at once."""
        async with self.writing() as tx:
            await tx.execute(_tokens.update().where(_tokens.c.hash == _hash(secret)).values(revoked_at=time.time()))

    async def login_code(self, now: float | None = None, most: float | None = None) -> str:
        """Create a code that a browser can exchange for a session once, within five minutes.

        `most`: when the session expires at the latest, in seconds since the epoch. It is the code's end, so that it
        cannot be changed: the store has the hash of the whole code.
        """
        now = time.time() if now is None else now
        code = secrets.token_urlsafe(24) + ("" if most is None else f".{int(most)}")
        async with self.writing() as tx:
            await tx.execute(_codes.delete().where(_codes.c.expires_at < now))
            await tx.execute(_codes.insert().values(hash=_hash(code), expires_at=now + _CODE_SECONDS))
        return code

    async def login(self, code: str, now: float | None = None) -> str | None:
        """Exchange a code for a new browser session's secret. Return None if the code is unknown, used or expired."""
        now = time.time() if now is None else now
        async with self.writing() as tx:
            used = await tx.execute(_codes.delete().where(_codes.c.hash == _hash(code), _codes.c.expires_at > now))
            if used.rowcount != 1:
                return None
        most = float(code.rpartition(".")[2]) if "." in code else math.inf
        return await self._add_token("session", min(most, now + _SESSION_SECONDS))

    async def _add_token(self, kind: str, expires_at: float | None) -> str:
        secret = f"rps_{secrets.token_urlsafe(32)}"
        async with self.writing() as tx:
            await tx.execute(
                _tokens.insert().values(hash=_hash(secret), kind=kind, created_at=time.time(), expires_at=expires_at)
            )
        return secret


def is_locked(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports that another program has locked the store's file."""
    while error is not None:
        code = getattr(error, "sqlite_errorcode", None)
        if isinstance(error, sqlite3.Error) and code is not None and code & 0xFF in _LOCKED:  # without the extension
            return True
        error = getattr(error, "orig", None) or error.__cause__
    return False


def _make_engine(url: sa.URL, begin: str, size: int) -> AsyncEngine:
    engine = create_async_engine(url, pool_size=size, max_overflow=0, pool_timeout=30)

    @sa.event.listens_for(engine.sync_engine, "connect")
    def _connect(dbapi: sqlite3.Connection, _: sa.pool.ConnectionPoolEntry) -> None:
        dbapi.isolation_level = None  # the SQLite driver then opens no transaction by itself; `_begin` opens it
        dbapi.create_function("lower", 1, _lower, deterministic=True)  # SQLite's own knows the letters A to Z only
        cursor = dbapi.cursor()
        for pragma in (
            f"busy_timeout={LOCKED_SECONDS * 1000:.0f}",
            "journal_mode=WAL",
            "foreign_keys=ON",
            "synchronous=FULL",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @sa.event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _lower(text: str | None) -> str | None:
    return None if text is None else text.lower()


def _holds(sweep: str | None, text: str) -> sa.ColumnElement[bool]:
    """Return the condition that a job is of this sweep, and that each word of `text` is in one of its facts.

    These are its id, name, status, stored reason and sweep, and the strategy, workload and function of its
    specification. Letters are compared in lower case.
    """
    found = sa.true() if sweep is None else _jobs.c.sweep == sweep
    spec = [sa.func.json_extract(_jobs.c.spec, f"$.{name}") for name in ("strategy", "workload", "run")]
    columns = (_jobs.c.id, _jobs.c.name, _jobs.c.status, _jobs.c.reason, _jobs.c.sweep, *spec)
    for word in text.lower().split():
        found &= sa.or_(*(sa.func.lower(column).contains(word, autoescape=True) for column in columns))
    return found


def _migrate(connection: sa.Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    found = MigrationContext.configure(connection).get_current_revision()
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if found is not None and found not in known:
        raise ConfigError(
            f"another version of rayps wrote it, with schema {found}, and this version reads schema {known[0]}"
        )
    command.upgrade(config, "head")
    connection.commit()


async def _get(tx: AsyncConnection, job_id: str) -> JobRecord:
    row = (await tx.execute(_jobs.select().where(_jobs.c.id == job_id))).first()
    if row is None:
        raise NotFound(f"there is no job {job_id!r}: `rayps ls` lists them", job=job_id, status=404)
    return _read_record(row)


async def _get_many(tx: AsyncConnection, ids: Collection[str]) -> list[JobRecord]:
    found: list[JobRecord] = []
    for some in _cut_ids(ids):
        query = _jobs.select().where(_jobs.c.id.in_(some)).order_by(_jobs.c.id)
        found += [_read_record(row) for row in await tx.execute(query)]
    return found


def _cut_ids(ids: Collection[str]) -> list[list[str]]:
    """Return sorted ids in lists that one SQL statement can hold."""
    chosen = sorted(ids)
    return [chosen[first : first + _MOST_IDS] for first in range(0, len(chosen), _MOST_IDS)]


async def _add_events(
    tx: AsyncConnection, jobs: Sequence[tuple[str, int]], kind: str, message: str, now: float
) -> None:
    """Write the same event of several jobs, given as ids and attempts."""
    facts = {"kind": kind, "message": message, "time": now}
    if jobs:
        await tx.execute(_events.insert(), [{"job_id": job, "attempt": attempt, **facts} for job, attempt in jobs])


async def _add_event(tx: AsyncConnection, job_id: str, kind: str, message: str, attempt: int, now: float) -> None:
    await tx.execute(_events.insert().values(job_id=job_id, time=now, kind=kind, message=message, attempt=attempt))


def _read_record(row: sa.Row[Any]) -> JobRecord:
    facts = {name: getattr(row, name) for name in JobRecord.__dataclass_fields__}
    facts["status"] = Status(row.status)
    facts["spec"] = JobSpec.of_stored(json.loads(row.spec))
    facts["metrics"] = None if row.metrics is None else json.loads(row.metrics)
    return JobRecord(**facts)


def _check_same(row: sa.Row[Any], digest: str, key: str) -> None:
    """Raise ConfigError if the jobs that were added with this idempotency key are others."""
    if row.idempotency_hash != digest:
        raise ConfigError(
            f"the Idempotency-Key {key!r} was used for another job, {row.id}: use a new key",
            field="Idempotency-Key",
            job=row.id,
        )


def _make_id(now: float, last: str | None) -> str:
    """Return a new id that sorts after `last`: 48 bits of milliseconds, 80 random bits."""
    number = (int(now * 1000) << 80) | secrets.randbits(80)
    if last is not None:
        number = max(number, sum(_ALPHABET.index(c) << 5 * i for i, c in enumerate(reversed(last))) + 1)
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
