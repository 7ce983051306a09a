"""A copy of the rows of one table, for a system that serves them while the job trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rayps.ps.client.connections import MapSource
from rayps.ps.client.session import Session
from rayps.ps.protocol.messages import GroupMessage, pack_numbers
from rayps.ps.protocol.space import Space
from rayps.ps.tables.delta import Served, read_delta
from rayps.ps.tables.wire_format import bucket


class Follower:
    """A copy of the rows of one table of a space, as of the last `update`.

    Raises ConfigError if the space has no such table.
    """

    def __init__(self, source: MapSource, space: Space, table: str, timeout: float) -> None:
        self.table, first = space.table(table)
        self._segments = range(first, first + self.table.segments)
        self._first = first
        self._served = Served()
        self._session = Session(source, space, -1, timeout=timeout, name="follower")

    def update(self) -> int:
        """Apply the changes since the last update; return how many rows were changed, created or evicted.

        Raises:
            PeerTimeout, PeerLost: servers do not answer, or the space was closed.
        """
        known = self._served.versions
        found = self._session.exchange(
            GroupMessage.CHANGES, {i: pack_numbers([known.get(i - self._first, 0)]) for i in self._segments}
        )
        changed = 0
        for payload in found.pieces.values():
            news = read_delta(payload)
            changed += len(news.ids) + len(news.gone)
            self._served.apply_decoded(news)
        return changed

    def __len__(self) -> int:
        segments = self._served.rows
        return sum(len(rows) for rows in segments.values())

    def get(self, ids: Iterable[int]) -> Any:
        """Return the rows with these ids, [number of ids, dim]; zeros for an id without a row."""
        wanted = np.fromiter(ids, np.int64)
        found, segments = np.zeros((len(wanted), self.table.dim), np.dtype(self.table.dtype)), self._served.rows
        for i, (each, segment) in enumerate(zip(wanted.tolist(), bucket(wanted, self.table.segments), strict=True)):
            row = segments.get(int(segment), {}).get(each)
            if row is not None:
                found[i] = row
        return found

    def close(self) -> None:
        """Close the connections to the servers."""
        self._session.close()
