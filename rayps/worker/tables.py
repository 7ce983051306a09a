"""Connect the sparse tables of a worker's model to servers."""

from __future__ import annotations

from rayps.core.strategy.topology import SharedVector
from rayps.ps.client.session import Session
from rayps.ps.client.table_face import find_tables
from rayps.worker.core import Worker


def bind_tables(w: Worker, session: Session) -> None:
    """Connect the model's sparse tables to the tables of the session's space, and start their prefetch.

    If the space has no tables, do nothing.

    Raises:
        ConfigError: the space lacks a table of the model, or has a different one of the same name.
    """
    if not session.space.tables:
        return
    topology = w.plan.strategy.topology
    lookups = None if isinstance(topology, SharedVector) or not topology.prefetch else w.workload.lookups
    w.tables = find_tables().bind(w.flat.model, session, session.space, lookups)
    w.batches.ahead = w.tables.ahead
