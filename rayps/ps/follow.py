"""Follow a table while jobs train it: how a system that serves its rows keeps them fresh.

rows = group.follow("job-1", "users")     # any process of the cluster; reads only, outside every clock
rows.update(); vectors = rows.get([3, 17, 42])

An update asks each segment for what changed since the last one: rows, and ids that were evicted. It costs what changed,
not what there is, and goes on through moves and deaths of servers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rayps.ps.client.map_subscription import Door
from rayps.ps.client.session import Session
from rayps.ps.protocol.messages import GroupMessage, numbers
from rayps.ps.protocol.space import Space
from rayps.ps.tables.delta import Served, read_delta
from rayps.ps.tables.wire_format import bucket


class Follower:
    """The rows of one table of a space, as of the last `update`. Raises ConfigError: there is no such table."""

    def __init__(self, door: Door, space: Space, table: str, timeout: float) -> None:
        self.table, first = space.table(table)
        self._segments = range(first, first + self.table.segments)
        self._first = first
        self._served = Served()
        self._talk = Session(door, space, -1, timeout=timeout, name="follower")

    def update(self) -> int:
        """Take in what changed; how many rows were changed, made or evicted.

        Raises:
            PeerTimeout, PeerLost: servers do not answer, or the space was closed.
        """
        known = self._served.versions
        found = self._talk.exchange(
            GroupMessage.CHANGES, {i: numbers([known.get(i - self._first, 0)]) for i in self._segments}
        )
        changed = 0
        for payload in found.pieces.values():
            news = read_delta(payload)
            changed += len(news.ids) + len(news.gone)
            self._served.take(news)
        return changed

    def __len__(self) -> int:
        segments = self._served.rows
        return sum(len(rows) for rows in segments.values())

    def get(self, ids: Iterable[int]) -> Any:
        """The rows [n, dim] with these ids; zeros where there is none."""
        wanted = np.fromiter(ids, np.int64)
        found, segments = np.zeros((len(wanted), self.table.dim), np.dtype(self.table.dtype)), self._served.rows
        for i, (each, segment) in enumerate(zip(wanted.tolist(), bucket(wanted, self.table.segments), strict=True)):
            row = segments.get(int(segment), {}).get(each)
            if row is not None:
                found[i] = row
        return found

    def close(self) -> None:
        """Leave."""
        self._talk.close()
