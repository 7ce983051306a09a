"""Reserve the resources of a job's workers together, with each model replica on one host if it fits on one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayps_client.errors import NoResources

from rayps.cluster.local import Bundle, Cluster, Reservation, not_free
from rayps.cluster.placement import bundles, describe, place_ranks, slots
from rayps.cluster.room import avoided_hosts
from rayps.core.grid import Grid

_CHECK_SECONDS = 3.0  # seconds until free resources are checked again; doubled after each check


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """The reserved bundles `gang`, the index of each rank's bundle, and a `message` about the replicas' hosts.

    `others` is the index of the first bundle that is not for workers.
    """

    gang: Reservation | None = None
    index: list[int] = field(default_factory=list)
    message: str | None = None
    others: int = 0

    def release(self) -> None:
        """Release the bundles."""
        if self.gang is not None:
            self.gang.release()


def torch_threads(cpus: float) -> int:
    """Return how many threads torch uses in a process with these CPUs."""
    return max(1, int(cpus))


def reserve(
    cluster: Cluster, resources: Bundle, grid: Grid, timeout: float, others: Sequence[Bundle] = ()
) -> WorkerResources:
    """Reserve the resources of all workers, and the bundles `others` of other actors, or none of them.

    If too few resources are free, wait until enough are. Each check of the free resources places the replicas anew.
    If the actors fit on hosts without a notice, they are placed there.

    Raises:
        NoResources: the cluster is too small, or too few resources are free within `timeout` seconds.
    """
    one_each = [resources] * grid.size
    if grid.columns == 1 or not any(resources.values()):
        all_bundles = [*one_each, *others]
        gang = cluster.reserve(all_bundles, timeout, to_avoid(cluster, all_bundles))
        return WorkerResources(gang, list(range(grid.size)), others=grid.size)
    end, pause = time.monotonic() + timeout, _CHECK_SECONDS
    while True:
        placement = place_ranks(cluster.hosts(), grid, resources)
        placement = placement or place_ranks(cluster.hosts(free=False), grid, resources)
        wanted, index = one_each, list(range(grid.size))
        if placement is not None:
            wanted, index = bundles(placement.hosts, grid, resources)
        left = end - time.monotonic()
        try:
            all_bundles = [*wanted, *others]
            gang = cluster.reserve(all_bundles, max(min(pause, left), 0.1), to_avoid(cluster, all_bundles))
        except NoResources as error:
            if "free" not in error.data:  # the whole cluster is too small
                raise
            if left <= pause:
                raise not_free([*one_each, *others], error.data["free"], timeout) from None
            pause *= 2
            continue
        if gang is None:
            return WorkerResources(None, index, others=len(wanted))
        held = gang.hosts()
        reasons = {} if placement is None else placement.reasons
        return WorkerResources(gang, index, describe([held[i] for i in index], grid, reasons), len(wanted))


def to_avoid(cluster: Cluster, wanted: Sequence[Bundle]) -> list[str]:
    """Return the hosts under notice, if the others have room for `wanted` now; otherwise none."""
    ending = avoided_hosts(cluster)
    if not ending:
        return []
    rest = [dict(free) for name, free in cluster.hosts().items() if name not in ending]
    for bundle in sorted(wanted, key=lambda each: sum(each.values()), reverse=True):
        host = next((free for free in rest if slots(free, bundle)), None)
        if host is None:
            return []
        for kind, amount in bundle.items():
            host[kind] = host.get(kind, 0.0) - amount
    return sorted(ending)
