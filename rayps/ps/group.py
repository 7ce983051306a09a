"""Start, find, resize and stop a server group: the interface for users and drivers.

group = start(cluster, "prod", servers=3, replicas=1, folder="/var/lib/rayps/prod")
space = group.open(Space(...)); group.resize(4); group.wait_settled(60); group.stop()
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rayps_client.errors import ActorDied, ConfigError, Conflict, PeerTimeout

from rayps.cluster.local import ActorHandle, Cluster, LocalCluster, rendezvous, surrounding
from rayps.core.strategy.staleness_bound import MovedBound
from rayps.ps.client.table_face import TableCopy, find_tables
from rayps.ps.manager.assign_segments import Balance
from rayps.ps.manager.decide_scale import ScaleRule
from rayps.ps.manager.manager import BALANCE, SILENCE, ServerCount, check_size
from rayps.ps.protocol.segment_map import SpaceMap, list_groups, manager_actor
from rayps.ps.protocol.space import Quota, Space

CALL_SECONDS = 90.0  # seconds for a manager to answer a call; the longest call is `open`, which waits for servers
PAUSE_SECONDS = 0.1  # seconds between two checks of a group, and before a call of a manager that died is repeated
# calls that are repeated if the manager dies before it answers; executing one of them twice does no harm
_REPEATABLE = frozenset(
    {
        "contact",
        "space",
        "map",
        "facts",
        "loads",
        "settled",
        "set_quota",
        "move_bound",
        "restored",
        "join",
        "resize",
        "drain",
    }
)


class ManagerClient:
    """A client of a group's manager, for any process of the group's cluster. May be passed to actors.

    `restarts`: whether the cluster may start the manager again after its death.
    """

    def __init__(
        self, name: str, handle: ActorHandle | None = None, cluster: Cluster | None = None, *, restarts: bool = True
    ) -> None:
        self.name = name
        self._handle, self._cluster, self._restarts = handle, cluster, restarts

    @property
    def gone(self) -> bool:
        """Whether there is no manager, and the cluster will not start it again."""
        return not self._restarts and (self._cluster or surrounding()).find(manager_actor(self.name)) is None

    def contact(self) -> dict[str, Any]:
        """Return {"address", "secret"}: the manager's address, and the secret with which a worker connects."""
        found: dict[str, Any] = self._call("contact")
        return found

    def open(self, space: Space) -> Space:
        """Open a space: assign its segments to servers, and return it with its number.

        Raises ConfigError if the space is not valid, Conflict if a space of that name is open, and ClusterError if
        segments have no ready server in time.
        """
        found: Space = self._call("open", space)
        return found

    def branch(
        self,
        parent: str,
        name: str,
        quota: Quota | dict[str, Any] | None = None,
        workers: int | None = None,
        strategy: Any = None,
        factory: bytes | None = None,
    ) -> Space:
        """Create the space `name`, which begins at step 0 with the parameters of the space `parent`.

        The two spaces share memory until one of them changes. An argument that is None has the value of `parent`.

        Raises NotFound if there is no space `parent`, Conflict if a space `name` is open, and ConfigError if an
        argument is not valid.
        """
        found: Space = self._call("branch", parent, name, quota, workers, strategy, factory)
        return found

    def space(self, name: str) -> Space:
        """Return the open space of this name. Raises NotFound if there is none."""
        found: Space = self._call("space", name)
        return found

    def drop(self, name: str) -> None:
        """Close a space. Raises NotFound if no open space has this name."""
        self._call("drop", name)

    def set_quota(self, name: str, quota: Quota | dict[str, Any]) -> None:
        """Set the limits of a space from now on.

        Raises NotFound if no open space has this name, and ConfigError if the quota is not valid.
        """
        self._call("set_quota", name, quota)

    def move_bound(self, number: int, bound: MovedBound) -> None:
        """Replace the staleness bound of the space with this number from now on.

        Raises NotFound if no open space has this number.
        """
        self._call("move_bound", number, bound)

    def map(self, number: int) -> SpaceMap:
        """Return the map of the space with this number: the servers that hold its segments.

        Raises NotFound if no open space has this number.
        """
        return SpaceMap.from_json(self._call("map", number))

    def join(self, number: int, rank: int) -> int:
        """Assign `rank` of the space with this number to a new process; return the number of this incarnation.

        Servers refuse the processes that had the rank before. Raises NotFound if no open space has this number, and
        ConfigError if the space has no such rank.
        """
        found: int = self._call("join", number, rank)
        return found

    def follow(self, space: str, table: str, timeout: float = 60.0) -> TableCopy:
        """Return a copy of a table's rows, which is empty until its `update` is called.

        `timeout`: seconds for servers to answer. Raises NotFound if there is no such space, and ConfigError if the
        space has no such table.
        """
        return find_tables().follow(self.contact, self.space(space), table, timeout)

    def restored(self, number: int, segments: list[int]) -> None:
        """Report to the manager that lost segments of the space with this number have been loaded again."""
        self._call("restored", number, segments)

    def resize(self, servers: ServerCount) -> None:
        """Set the number of servers. Segments move in the background, while pushes and pulls continue.

        With a pair (least, most), load chooses the number from this range. A number stays: load does not change it
        until `resize` is called with a pair.

        Raises ConfigError if `servers` is 0 or below replicas + 1, and Conflict if a resize is in progress.
        """
        self._call("resize", servers)

    def drain(self, server: str) -> None:
        """Move all segments of one server to the others, then end it. The group then has one server less.

        Raises NotFound if there is no such server or it does not respond, ConfigError if too few servers would be left,
        and Conflict if a resize is in progress.
        """
        self._call("drain", server)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the group as plain data: servers, spaces, segments, moves, counts, events."""
        found: dict[str, Any] = self._call("facts")
        return found

    def loads(self) -> dict[str, dict[str, Any]]:
        """Return the spaces in each server's last heartbeat: counters of operations, seconds of service, segments."""
        found: dict[str, dict[str, Any]] = self._call("loads")
        return found

    def settled(self) -> bool:
        """Return whether all servers are alive, and have the segments and backups that the manager assigns to them."""
        return bool(self._call("settled"))

    def wait_settled(self, timeout: float = 60.0) -> None:
        """Wait until the group is `settled()`. Raises PeerTimeout if this takes longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.settled():
            if time.monotonic() > deadline:
                facts = self.facts()
                there = sum(server["state"] == "alive" for server in facts["servers"])
                raise PeerTimeout(
                    f"server group {self.name!r} has not settled within {timeout:g} s (the knob is `timeout`): its "
                    f"status is {facts['status']}, {there} of {facts['wanted']} servers are alive, and "
                    f"{len(facts['moves'])} segments are still moving",
                    peer=manager_actor(self.name),
                    seconds=timeout,
                )
            time.sleep(PAUSE_SECONDS)

    def stop(self) -> None:
        """End the group: its servers, its manager, its spaces and its record."""
        self._call("stop")
        if self._handle is not None:
            (self._cluster or surrounding()).kill(self._handle)
            self._handle = None

    def _call(self, method: str, *args: Any, timeout: float = CALL_SECONDS) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            try:
                if self._handle is None:
                    self._handle = self._find()
                return self._handle.call(method, *args).result(timeout)
            except ActorDied:  # Ray may restart the manager, which then continues from its record
                self._handle = None
                if method not in _REPEATABLE or time.monotonic() > deadline or self.gone:
                    raise
            except TimeoutError as error:
                raise PeerTimeout(
                    f"the manager of server group {self.name!r} did not answer {method!r} within {timeout:g} s",
                    peer=manager_actor(self.name),
                    seconds=timeout,
                ) from error
            time.sleep(PAUSE_SECONDS)

    def _find(self) -> ActorHandle:
        found = (self._cluster or surrounding()).find(manager_actor(self.name))
        if found is None:
            raise ActorDied(
                f"server group {self.name!r} has no manager: the group was stopped, or its manager died. If it died, "
                "start the group again with the folder of its record: the group then continues",
                actor=manager_actor(self.name),
            )
        return found

    def __getstate__(self) -> dict[str, Any]:
        # the receiver finds the manager by its name
        return {"name": self.name, "_handle": None, "_cluster": None, "_restarts": self._restarts}

    def __enter__(self) -> ManagerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(
    cluster: Cluster,
    name: str,
    servers: ServerCount = 2,
    replicas: int = 1,
    *,
    folder: str | Path | None = None,
    detached: bool = True,
    timeout: float = 120.0,
    cpus: float = 0.0,
    hosts: Cluster | None = None,
    silence: float = SILENCE,
    balance: Balance | None = BALANCE,
    scale: ScaleRule | None = None,
) -> ManagerClient:
    """Start a group of `servers` servers with `replicas` backups of each segment; return when all servers are alive.

    If `servers` is a pair, the least and the most, the group begins with the least, and load changes the number by the
    rule `scale` (see `rayps.ps.manager.decide_scale`).

    `folder`: where the manager writes the group's record. A manager on Ray that has a folder is restarted when its
    process dies. If the folder has the record of a group of this name, the group continues with those of its servers
    that still run. `detached`: the group outlives this process. `cpus`: CPUs that the cluster reserves for each server.
    `hosts`: another cluster, in which the servers run. `silence`: seconds after which a server that sends nothing
    counts as dead. `balance`: the rule by which segments move because of load; with None no segment does.

    Raises ConfigError if an argument is not valid, Conflict if a group of this name runs, and PeerTimeout if not all
    servers are alive within `timeout` seconds.
    """
    if not isinstance(name, str) or not name.strip() or "/" in name:
        raise ConfigError(
            f"{name!r} cannot name a server group: give a text that is not blank, without /", field="name"
        )
    check_size(name, servers, replicas)
    home, given = _find_home(cluster, hosts)
    if home.find(manager_actor(name)) is not None:
        raise Conflict(
            f"there is a server group {name!r} already: give another name, resize that group, or stop it first",
            status=409,
        )
    more: dict[str, Any] = {} if given is None else {"cluster": given}
    handle = home.spawn(
        "rayps.ps.manager.manager:ManagerActor",
        name,
        servers,
        replicas,
        None if folder is None else str(folder),
        name=manager_actor(name),
        detached=detached,
        here=folder is not None,
        restarts=0 if folder is None else -1,
        cpus=0.0,
        **more,
        options={"detached": detached, "cpus": cpus, "silence": silence, "balance": balance, "scale": scale},
    )
    group = ManagerClient(name, handle, home, restarts=folder is not None)
    try:
        _await_servers(group, timeout)
    except BaseException:
        home.kill(handle)
        raise
    return group


def find(cluster: Cluster, name: str) -> ManagerClient:
    """Return the running group of this name. Raises ConfigError, which lists the running groups, if there is none."""
    for home in (cluster, surrounding()):
        handle = home.find(manager_actor(name))
        if handle is not None:
            return ManagerClient(name, handle, home)
    known = ", ".join(repr(other) for other in names(cluster)) or "none"
    raise ConfigError(
        f"there is no server group {name!r}; running groups: {known}. Start one with `rayps servers start {name}`",
        field="server_group",
    )


def names(cluster: Cluster) -> list[str]:
    """Return the names of the server groups that run in a cluster."""
    homes = (cluster, surrounding())
    return [
        name for name in list_groups(rendezvous()) if any(home.find(manager_actor(name)) is not None for home in homes)
    ]


def _find_home(cluster: Cluster, hosts: Cluster | None) -> tuple[Cluster, Cluster | None]:
    """Return the cluster in which the manager runs, and the cluster that is passed to it, in which it starts servers.

    The second is None on Ray, where an actor can find its own cluster. In a cluster of threads, or of a test's
    processes, an actor cannot do so. The manager then runs in this process, and the cluster is passed to it.
    """
    if isinstance(cluster, LocalCluster):
        return cluster, hosts or cluster
    if isinstance(cluster, type(surrounding())):
        return cluster, None
    return surrounding(), hosts or cluster


def _await_servers(group: ManagerClient, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        facts = group.facts()
        if sum(server["state"] == "alive" for server in facts["servers"]) >= facts["wanted"]:
            return
        if time.monotonic() > deadline:
            said = [event["message"] for event in facts["events"] if event["kind"] == "server_not_started"]
            raise PeerTimeout(
                f"{len(facts['servers'])} of {facts['wanted']} servers of group {group.name!r} have started within "
                f"{timeout:g} s (the knob is `timeout`){': ' + said[-1] if said else ''}",
                peer=manager_actor(group.name),
                seconds=timeout,
            )
        time.sleep(PAUSE_SECONDS)


__all__ = ["ManagerClient", "find", "names", "start"]
