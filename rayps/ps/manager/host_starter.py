"""Start servers by one actor on each host (`rayps.ps.server.server_host`), with their CPUs reserved there.

`choose_node` decides on which host a server starts: one that has room, and the fewest servers of the group.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

from rayps_client.errors import NoResources, RaypsError

from rayps.cluster.local import ActorHandle, ActorReply, Bundle, Cluster
from rayps.ps.manager.launcher import MOST_ROOM, StartOrder
from rayps.ps.server.server_host import name_host_actor, name_reservation

HOST = "rayps.ps.server.server_host:ServerHost"
RESERVE_SECONDS = 2.0  # seconds in which Ray must reserve CPUs that are free
END_SECONDS = 10.0  # seconds in which a host's actor must answer


def choose_node(
    free: Mapping[str, Bundle], total: Mapping[str, Bundle], on_nodes: Sequence[str], avoid: frozenset[str], cpus: float
) -> str | None:
    """Return the id of the host on which a server starts, or None if no host has room.

    `free` and `total`: the resources of each host. `on_nodes`: the host of each of the group's servers. `avoid`: hosts
    that will end. `cpus`: the CPUs that the server reserves; with 0, a host without CPUs is chosen only if there is no
    other. Of hosts with equally many servers of the group, the one with the most free CPUs is chosen.
    """
    count = Counter(on_nodes)
    fits = [node for node in total if node not in avoid and free.get(node, {}).get("cpu", 0.0) >= cpus]
    usual = [node for node in fits if total[node].get("cpu", 0.0) > 0]
    return min(usual or fits, key=lambda node: (count[node], -free.get(node, {}).get("cpu", 0.0), node), default=None)


class HostStarter:
    """Starts the servers of a group by one actor on each host, each with `cpus` reserved CPUs.

    `detached`: the servers outlive the manager.
    """

    def __init__(self, group: str, cluster: Cluster, *, cpus: float, detached: bool) -> None:
        self._group, self._cluster, self._cpus, self._detached = group, cluster, cpus, detached
        self._hosts: dict[str, ActorHandle] = {}  # node id -> the actor there
        self._nodes: dict[str, str] = {}  # server that was started here -> its node id

    def start(self, order: StartOrder) -> ActorReply:
        """Reserve CPUs for a server, and start it on that host. See `ServerStarter.start`."""
        free, total = self._cluster.hosts(), self._cluster.hosts(free=False)
        placed = {**order.placed, **self._nodes}
        node = choose_node(free, total, list(placed.values()), order.avoid, self._cpus)
        if node is None:
            raise NoResources(
                f"{order.server} needs {self._cpus:g} CPU, and no host has them free: wait for other jobs, or start "
                "the group with fewer --cpus for each server (0 reserves none)",
                needed=[{"cpu": self._cpus}],
                free=dict(free),
            )
        self._nodes[order.server] = node
        try:
            if self._cpus:
                self._cluster.reserve_named(
                    name_reservation(self._group, order.server),
                    {"cpu": self._cpus},
                    node,
                    RESERVE_SECONDS,
                    detached=self._detached,
                )
            return self._find_host(node, order.gently).call("start", order.server, order.secret, order.manager)
        except (RaypsError, OSError, RuntimeError):
            self.end(order.server, node)
            raise

    def room(self, placed: Mapping[str, str], avoid: frozenset[str]) -> int:
        """Return how many servers' CPUs are free. See `ServerStarter.room`."""
        if not self._cpus:
            return MOST_ROOM
        free = [has.get("cpu", 0.0) for node, has in self._cluster.hosts().items() if node not in avoid]
        return sum(int(cpus / self._cpus + 1e-9) for cpus in free)

    def end(self, server: str, node: str) -> None:
        """Kill a server, and release its CPUs. See `ServerStarter.end`."""
        node = self._nodes.pop(server, node)
        host = self._hosts.get(node) or self._cluster.find(name_host_actor(self._group, node))
        if host is not None:
            with contextlib.suppress(RaypsError, TimeoutError):  # the host has ended, and the server with it
                host.call("end", server).result(END_SECONDS)
        found = self._cluster.reservation(name_reservation(self._group, server)) if self._cpus else None
        if found is not None:
            found.release()

    def close(self) -> None:
        """End the actors on all hosts. See `ServerStarter.close`."""
        for node in {*self._hosts, *self._cluster.hosts(free=False)}:
            found = self._cluster.find(name_host_actor(self._group, node))
            if found is not None:
                self._cluster.kill(found)
        self._hosts = {}

    def _find_host(self, node: str, gently: bool) -> ActorHandle:
        name = name_host_actor(self._group, node)
        found = self._cluster.find(name)
        if found is not None:  # the handle that `spawn` returned is kept: without it, Ray would end the actor
            found = self._hosts.get(node, found)
        else:
            found = self._cluster.spawn(
                HOST, self._group, node, gently=gently, name=name, node=node, detached=self._detached
            )
        self._hosts[node] = found
        return found
