"""What does not go together: each pair of features once, with the reason. Pure.

Those that refuse collect the features of a job that they know, and ask this table: a topology those of its options, a
federated strategy and `dp(...)` those of theirs, a job's specification those of its fields too, the check before a run
those of the workload, its model and its data. A pair that is missing here is allowed. `docs/limits.md` shows the table
(`scripts/write_refusals.py`), and a test walks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rayps.core.refusals.excluded_pair import Door, ExcludedPair, Features
from rayps.core.refusals.of_clients import OF_CLIENTS
from rayps.core.refusals.of_elastic_workers import OF_ELASTIC_WORKERS
from rayps.core.refusals.of_jobs import OF_ARGUMENTS, OF_JOBS, OF_REQUESTS
from rayps.core.refusals.of_privacy import OF_PRIVACY
from rayps.core.refusals.of_topologies import OF_TOPOLOGIES
from rayps.core.refusals.of_workloads import OF_A_WORKLOAD, OF_WORKLOADS

TABLE: tuple[ExcludedPair, ...] = (
    *OF_JOBS,
    *OF_TOPOLOGIES,
    *OF_CLIENTS,
    *OF_PRIVACY,
    *OF_ELASTIC_WORKERS,
    *OF_WORKLOADS,
)


def door_of(row: ExcludedPair) -> Door:
    """Return the doors at which both features of a pair are known, so that it is refused there."""
    both = {row.one, row.other}
    if both & OF_A_WORKLOAD:
        return Door.RUN
    if both & OF_ARGUMENTS:
        return Door.TRAIN
    return Door.REQUEST if both & OF_REQUESTS else Door.REQUEST | Door.TRAIN


def rows_by_feature(table: Iterable[ExcludedPair]) -> dict[str, tuple[tuple[int, ExcludedPair], ...]]:
    """Return the rows of each feature that is the first of a pair, each with its place in the table."""
    found: dict[str, tuple[tuple[int, ExcludedPair], ...]] = {}
    for place, row in enumerate(table):
        found[row.one] = (*found.get(row.one, ()), (place, row))
    return found


ROWS: Mapping[str, tuple[tuple[int, ExcludedPair], ...]] = rows_by_feature(TABLE)


def refuse(given: Features) -> None:
    """Refuse a job that has both features of a pair of the table: by the first such row.

    Raises:
        ConfigError: the text says why they exclude each other, and what to do instead.
    """
    first: tuple[int, ExcludedPair] | None = None
    for name in given:
        for place, row in ROWS.get(name, ()):
            if row.other in given and (first is None or place < first[0]):
                first = place, row
    if first is not None:
        raise first[1].error(given)
