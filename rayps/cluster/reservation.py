"""Reserve the resources of a job's workers together, with each model replica inside one host where it fits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rayps.cluster.local import Bundle, Cluster, Reservation, not_free
from rayps.cluster.placement import bundles, seat, words
from rayps.core.errors import NoResources
from rayps.core.grid import Grid

_LOOK_SECONDS = 3.0  # seconds until free resources are checked again; doubled after each check


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """The reserved bundles, and the bundle of each rank; `message` describes on which hosts the replicas are."""

    gang: Reservation | None = None
    index: list[int] = field(default_factory=list)
    message: str | None = None

    def release(self) -> None:
        """Release the bundles."""
        if self.gang is not None:
            self.gang.release()


def reserve(cluster: Cluster, resources: Bundle, grid: Grid, timeout: float) -> WorkerResources:
    """Reserve the workers' resources together, all or none.

    If too few resources are free now, wait until enough are free, and place the replicas again at each check.

    Raises:
        NoResources: the cluster is too small, or too few resources are free within `timeout` seconds.
    """
    one_each = [resources] * grid.size
    if grid.columns == 1 or not any(resources.values()):
        return WorkerResources(cluster.reserve(one_each, timeout), list(range(grid.size)))
    end, patience = time.monotonic() + timeout, _LOOK_SECONDS
    while True:
        seating = seat(cluster.hosts(), grid, resources) or seat(cluster.hosts(free=False), grid, resources)
        wanted, index = one_each, list(range(grid.size))
        if seating is not None:
            wanted, index = bundles(seating.hosts, grid, resources)
        left = end - time.monotonic()
        try:
            gang = cluster.reserve(wanted, max(min(patience, left), 0.1))
        except NoResources as error:
            if "free" not in error.data:  # the whole cluster is too small
                raise
            if left <= patience:
                raise not_free(one_each, error.data["free"], timeout) from None
            patience *= 2
            continue
        if gang is None:
            return WorkerResources(None, index)
        held = gang.hosts()
        reasons = {} if seating is None else seating.reasons
        return WorkerResources(gang, index, words([held[i] for i in index], grid, reasons))
