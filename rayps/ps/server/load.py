"""What a server tells its manager about its load, as JSON-ready data.

{"cpu": share of one core since the last, "bytes": of all parameters and optimizer states here, copies too,
 "connections": n, "spaces": {number: {"bytes", "rows", "evicted", "operations", "rejected", "throttled",
 "queued" (bytes), "seconds" (of service), "segments": {index: [bytes, rows, operations, seq]}}}}
What counts up is never reset. The segments are those that the server is primary of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rayps.ps.server.assignments import AssignedSpace, Assignments
from rayps.ps.tables.table_segment import TableSegment


class Load:
    """Makes one heartbeat after another."""

    def __init__(self) -> None:
        self._cpu, self._at = time.process_time(), time.monotonic()

    def now(self, holdings: Assignments, connections: int, waits: Callable[[int], tuple[int, int]]) -> dict[str, Any]:
        """A heartbeat; `waits(space)` = its requests that had to wait for the quota, its bytes that wait now."""
        cpu, at = time.process_time(), time.monotonic()
        share = (cpu - self._cpu) / max(1e-6, at - self._at)
        self._cpu, self._at = cpu, at
        spaces = {str(number): _of_space(held, *waits(number)) for number, held in list(holdings.spaces.items())}
        total = sum(
            holding.segment.nbytes
            for held in list(holdings.spaces.values())
            for holding in list(held.holdings.values())
            if holding.segment is not None
        )
        return {"cpu": round(share, 3), "bytes": total, "connections": connections, "spaces": spaces}


def _of_space(held: AssignedSpace, throttled: int, queued: int) -> dict[str, Any]:
    segments: dict[str, list[int]] = {}
    for holding in held.primaries():
        segment = holding.segment
        if segment is not None:
            segments[str(holding.index)] = [segment.nbytes, segment.rows, segment.operations, segment.seq]
    tables = [holding.segment for holding in held.primaries() if isinstance(holding.segment, TableSegment)]
    return {
        "bytes": sum(row[0] for row in segments.values()),
        "rows": sum(row[1] for row in segments.values()),
        "evicted": sum(table.life.evicted for table in tables),
        "operations": held.operations,
        "rejected": held.rejected,
        "throttled": throttled,
        "queued": queued,
        "seconds": round(held.seconds, 6),
        "segments": segments,
    }
