"""The product's own store, on an SQLite database in memory. A killed service loses an open transaction only.

`Database.restore` puts an older copy in place, as an operator does who restores a backup.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import sqlalchemy as sa

from rayps.core.job.job_status import Status, may_move
from rayps.service import store as module
from rayps.service.state_disk import StateDisk
from rayps.service.store import Store
from simulation.disk import SimPath
from simulation.kernel import Broken, simulation
from simulation.substitutes import SimTime


@functools.cache
def _engine() -> tuple[sa.Engine, sqlite3.Connection, bytes]:
    """Return the database that all simulations of this process use, one after the other, and its empty content."""
    raw = sqlite3.connect(":memory:", check_same_thread=False)
    raw.isolation_level = None
    raw.execute("PRAGMA foreign_keys=ON")
    engine = sa.create_engine("sqlite://", creator=lambda: raw, poolclass=sa.pool.StaticPool)
    with engine.connect() as connection:
        module._migrate(connection)
    return engine, raw, raw.serialize()


class Database:
    """The content of the store, which outlives the service's processes; and the status of each job as of now."""

    def __init__(self) -> None:
        engine, self.raw, empty = _engine()
        self.raw.deserialize(empty)
        self.engine = engine
        self.statuses: dict[str, Status] = {}
        self.copies: list[bytes] = []
        self.restored = False  # whether a copy was ever put in place: the keys of later requests were lost with it

    def open(self) -> Store:
        """Return a store, as a service that starts opens it."""
        disk = StateDisk(SimPath("/state"), SimTime.monotonic)
        return Store(_Writer(self), _Reader(self), disk)  # type: ignore[arg-type]

    def copy(self) -> None:
        """Make a copy of the database."""
        self.copies.append(self.raw.serialize())

    def restore(self, number: int) -> None:
        """Put a copy in place of the database."""
        self.raw.deserialize(self.copies[number])
        self.statuses, self.restored = self._read(), True

    def _read(self) -> dict[str, Status]:
        return {row[0]: Status(row[1]) for row in self.raw.execute("SELECT id, status FROM jobs ORDER BY id")}

    def committed(self) -> None:
        """Check that statuses have moved along allowed moves only."""
        sim, before = simulation(), self.statuses
        self.statuses = self._read()
        for job, status in self.statuses.items():
            old = before.get(job)
            if status is old:
                continue
            sim.log("status", f"job {job}: {old or 'new'} -> {status}")
            sim.changed = True
            if old is not None and not may_move(old, status) and not sim.adopting:
                raise Broken(f"job {job} moved from {old} to {status}, which is no allowed move")


class _Transaction:
    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    async def execute(self, statement: Any, rows: Any = None) -> Any:
        simulation().alive()
        return self._connection.execute(statement, rows)


class _Writer:
    """Stands in for the writing engine."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[_Transaction]:
        sim = simulation()
        sim.alive()
        raw = self._database.raw
        with self._database.engine.connect() as connection:
            raw.execute("BEGIN IMMEDIATE")
            try:
                yield _Transaction(connection)
                sim.place("store: before the commit")
            except BaseException:
                raw.execute("ROLLBACK")
                raise
            raw.execute("COMMIT")
            self._database.committed()
        sim.place("store: after the commit")

    async def dispose(self) -> None:
        pass


class _Reader:
    """Stands in for the reading engine."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[_Transaction]:
        simulation().alive()
        with self._database.engine.connect() as connection:
            yield _Transaction(connection)

    async def dispose(self) -> None:
        pass
