"""Notices that arrive from outside of the cluster, such as from a cloud's agent: stored, and handed to the cluster.

The scheduler announces each stored notice to the cluster, from which every driver and server manager gets it
(`rayps.cluster.notices`), and announces it again if the cluster has forgotten it. A notice that was withdrawn stays
stored until the cluster has none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import sqlalchemy as sa
from rayps_client.errors import NotFound

from rayps.cluster.notices import Notice, StoredNotice
from rayps.service.store import Store

_TOLERANCE = 2.0  # seconds by which the deadline of a notice may differ after its way to the cluster and back

_table = sa.Table(
    "notices",
    sa.MetaData(),
    *[
        sa.Column(name, kind)
        for name, kind in {
            "key": sa.String,
            "node": sa.String,
            "host": sa.String,
            "reason": sa.Text,
            "until": sa.Float,
            "withdrawn": sa.Boolean,
        }.items()
    ],
)


@dataclass(frozen=True, slots=True)
class NoticeChanges:
    """What is to be done in the cluster so that it has the stored notices, and no others of these hosts."""

    announce: tuple[Notice, ...] = ()
    withdraw: tuple[Notice, ...] = ()
    forget: tuple[str, ...] = ()  # keys of stored notices that are over, or that were withdrawn and are gone


def find_notice_changes(
    stored: dict[str, tuple[StoredNotice, bool]], known: tuple[Notice, ...], now: float
) -> NoticeChanges:
    """Compare the stored notices with those that the cluster knows. Pure.

    `stored`: from key to the notice and whether it was withdrawn. `now` is in seconds since the epoch.
    """
    there = {one.key: one for one in known}
    announce, withdraw, forget = [], [], []
    for key, (one, withdrawn) in stored.items():
        found = there.get(key)
        if withdrawn and found is not None:
            withdraw.append(found)
        elif withdrawn or one.over(now):
            forget.append(key)
        elif found is None or not _are_same(found, one.at(now)):
            announce.append(one.at(now))
    return NoticeChanges(tuple(announce), tuple(withdraw), tuple(forget))


def _are_same(one: Notice, other: Notice) -> bool:
    if one.seconds is None or other.seconds is None:
        return one.seconds is other.seconds and one.reason == other.reason
    return abs(one.seconds - other.seconds) <= _TOLERANCE and one.reason == other.reason


class NoticeStore:
    """The notices of the service's store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, tuple[StoredNotice, bool]] | None = None  # the rows; None until they are read

    async def add(self, notice: Notice) -> None:
        """Store a notice. It replaces an earlier one about the same host."""
        one = StoredNotice.of(notice, time.time())
        values = {"node": notice.node, "host": notice.host, "reason": notice.reason, "until": one.until}
        async with self._store.writing() as tx:
            await tx.execute(_table.delete().where(_table.c.key == notice.key))
            await tx.execute(_table.insert().values(key=notice.key, withdrawn=False, **values))
        (await self._read_rows())[notice.key] = one, False

    async def withdraw(self, node: str, host: str) -> Notice:
        """Withdraw a stored notice, and return it.

        Raises:
            NotFound: there is no stored notice about this host.
        """
        key = Notice(node, host, None, "").key
        found = (await self._read_rows()).get(key)
        if found is None or found[1]:
            raise NotFound(
                f"there is no notice about {node or host!r} that was sent to the service: GET /api/v1/notices lists "
                "all; those of Ray and of ending processes cannot be withdrawn",
                status=404,
            )
        async with self._store.writing() as tx:
            await tx.execute(_table.update().where(_table.c.key == key).values(withdrawn=True))
        (await self._read_rows())[key] = found[0], True
        return found[0].at(time.time())

    async def current(self) -> tuple[Notice, ...]:
        """Return the stored notices that are not over and were not withdrawn."""
        now = time.time()
        return tuple(
            one.at(now) for one, withdrawn in (await self._read_rows()).values() if not withdrawn and not one.over(now)
        )

    async def pending(self, known: tuple[Notice, ...]) -> NoticeChanges:
        """Return what is to be done in the cluster, which knows the notices `known`; forget what is over."""
        rows = await self._read_rows()
        found = find_notice_changes(rows, known, time.time()) if rows else NoticeChanges()
        if found.forget:
            async with self._store.writing() as tx:
                await tx.execute(_table.delete().where(_table.c.key.in_(found.forget)))
            for key in found.forget:
                rows.pop(key, None)
        return found

    async def _read_rows(self) -> dict[str, tuple[StoredNotice, bool]]:
        if self._held is None:
            async with self._store.reading() as tx:
                rows = (await tx.execute(_table.select())).all()
            read = {
                row.key: (StoredNotice(Notice(row.node, row.host, None, row.reason), row.until), row.withdrawn)
                for row in rows
            }
            self._held = read if self._held is None else read | self._held  # a notice was added during the read
        return self._held
