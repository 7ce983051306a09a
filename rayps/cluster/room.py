"""Watch how many more workers fit into the free resources of a cluster, without blocking the caller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from rayps.cluster.local import Bundle, Cluster
from rayps.cluster.notices import ending_hosts
from rayps.cluster.placement import slots

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # seconds between two looks at the cluster
STALE_SECONDS = 10.0  # a look that is older does not count: the cluster does not answer


class RoomWatch:
    """Looks at the free resources in a thread. A cluster that does not answer has no room."""

    def __init__(self, cluster: Cluster, bundle: Bundle, every: float = LOOK_SECONDS) -> None:
        """Prepare; `bundle` are the resources of one worker. `start` starts the thread."""
        self._cluster, self._bundle, self._every = cluster, bundle, every
        self._found, self._at = 0, -STALE_SECONDS
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def room(self) -> int:
        """How many more workers fit, as of the last look."""
        return self._found if time.monotonic() - self._at < STALE_SECONDS else 0

    def start(self) -> None:
        """Start to look, if this was not done before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, daemon=True, name="room")
            self._thread.start()

    def close(self) -> None:
        """Stop looking. A look that the cluster does not answer is not waited for."""
        self._stop.set()

    def _look(self) -> None:
        while not self._stop.is_set():
            try:
                held = self._cluster.held()
                if held is None:
                    ending = avoided_hosts(self._cluster)
                    hosts = {name: free for name, free in self._cluster.hosts().items() if name not in ending}
                    self._found = room_in(hosts.values(), self._bundle)
                else:
                    self._found = room_in(held, self._bundle)
                self._at = time.monotonic()
            except Exception as error:  # a cluster that ends or does not answer; the next look may succeed
                log.debug("the free resources are not known: %s", error)
            self._stop.wait(self._every)


def room_in(free: Iterable[Bundle], bundle: Bundle) -> int:
    """Return how many workers that each need `bundle` fit into the `free` resources, each on one host."""
    return sum(max(0, slots(each, bundle)) for each in free)


def avoided_hosts(cluster: Cluster) -> frozenset[str]:
    """Return the ids of the hosts on which nothing more starts, because they are under notice."""
    notices = cluster.notices()
    return ending_hosts(notices, cluster.host_names()) if notices else frozenset()
