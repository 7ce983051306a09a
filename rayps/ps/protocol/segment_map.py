"""The map of a space: which server holds each segment, and the servers' addresses. Also the list of a cluster's groups.

The manager of a server group makes the maps of its spaces. Where there is no manager, the owner of the servers
publishes a `StaticMap`, and a newer one when it has replaced a server. Each request of a worker names the generation of
each segment that it touches. A server that holds a segment in another generation, or not at all, refuses the whole
request, so a request under an old map has no effect.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rayps.cluster.local import KeyValues
from rayps.comm.link.wakeup import Wakeup


@dataclass(frozen=True, slots=True)
class SegmentHolders:
    """The servers that hold one segment: the primary, and the backups that have every acknowledged push (`copies`).

    A new primary begins a new generation.
    """

    primary: str | None  # None if the segment is lost, or not placed yet
    copies: tuple[str, ...] = ()
    generation: int = 0


@dataclass(frozen=True, slots=True)
class SpaceMap:
    """The servers that hold each segment of one space, in the segments' order, and the addresses of these servers.

    Plain data, sent as JSON. A newer map has a higher version.
    """

    version: int
    holders: tuple[SegmentHolders, ...]
    addresses: dict[str, str] = field(default_factory=dict)  # server -> address

    def by_server(self, segments: Iterable[int]) -> dict[str | None, list[int]]:
        """Group segments by their primary, in the given order; segments without a primary are under None."""
        found: dict[str | None, list[int]] = {}
        for index in segments:
            found.setdefault(self.holders[index].primary, []).append(index)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the map as JSON-ready data."""
        return {
            "version": self.version,
            "holdings": [[each.primary, list(each.copies), each.generation] for each in self.holders],
            "addresses": self.addresses,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the map that `to_json` wrote."""
        holders = tuple(SegmentHolders(primary, tuple(copies), number) for primary, copies, number in data["holdings"])
        return cls(data["version"], holders, dict(data["addresses"]))


class StaticMap:
    """The map of a space whose servers have no manager, and the servers' secret. May be passed to other processes.

    Any thread may call `publish`. `final`: a server that dies is not replaced, and a worker that loses a server raises
    PeerLost at once. If not `final`, the worker waits for a newer map.
    """

    def __init__(self, found: SpaceMap, secret: bytes, *, final: bool = True) -> None:
        self.map, self.secret, self.final = found, secret, final
        self._lock = threading.Lock()
        self._subscriptions: weakref.WeakSet[StaticSubscription] = weakref.WeakSet()

    @classmethod
    def of(cls, addresses: dict[str, str], secret: bytes, *, final: bool = True) -> StaticMap:
        """Return the first map of a space: one segment on each of these servers (name -> address), in their order."""
        holders = tuple(SegmentHolders(server, (), 1) for server in addresses)
        return cls(SpaceMap(1, holders, dict(addresses)), secret, final=final)

    def moved(self, segment: int, address: str) -> SpaceMap:
        """Return the next map, in which a new server at `address` holds `segment`, in a new generation.

        The caller must publish the map.
        """
        old = self.map
        old_holders = old.holders[segment]
        holders = list(old.holders)
        holders[segment] = replace(old_holders, generation=old_holders.generation + 1)
        return SpaceMap(old.version + 1, tuple(holders), old.addresses | {str(old_holders.primary): address})

    def publish(self, found: SpaceMap) -> None:
        """Replace the present map if `found` is newer, and notify all subscriptions in this process."""
        with self._lock:
            if found.version > self.map.version:
                self.map = found
                for each in list(self._subscriptions):
                    each.wake()

    def subscribe(self) -> StaticSubscription:
        """Return a subscription to this map and to each newer one."""
        with self._lock:
            made = StaticSubscription(self)
            self._subscriptions.add(made)
            return made

    def __getstate__(self) -> dict[str, Any]:
        return {"map": self.map, "secret": self.secret, "final": self.final}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["map"], state["secret"], final=state["final"])  # type: ignore[misc]


class StaticSubscription:
    """One session's subscription to a `StaticMap`. It has the methods of `client.connections.MapSubscription`."""

    lost = False  # there is no connection to a manager that could be lost

    def __init__(self, source: StaticMap) -> None:
        self.map = source.map
        self.final = source.final
        self.contact: dict[str, Any] = {"secret": source.secret}
        self._source = source
        self._wakeup = Wakeup()
        self._woken = False

    def wake(self) -> None:
        """Make the descriptor `fileno()` readable. Any thread may call this."""
        self._wakeup.wake()
        self._woken = True

    def poll(self) -> SpaceMap | None:
        """Return the newest map, or None if this method has returned it before. Does not wait."""
        if self._woken:
            self._woken = False
            self._wakeup.clear()
        newer = self._source.map
        if newer.version <= self.map.version:
            return None
        self.map = newer
        return newer

    def reconnect(self) -> None:
        """Do nothing: there is no manager to connect to, and the owner publishes the maps."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when `poll` may return a map."""
        return self._wakeup.fileno()

    def hang_up(self) -> None:
        """Wake the thread that waits on the descriptor `fileno()`. Any thread may call this."""
        self.wake()

    def close(self) -> None:
        """Close the descriptor. Safe to call twice."""
        self._wakeup.close()


# ---- the groups of a cluster, in the key-value map that all its actors share

_ALL = "rayps-servers"


def make_address_key(group: str) -> str:
    """Return the key under which the address of the group's manager is stored."""
    return f"{_ALL}/{group}"


def manager_actor(group: str) -> str:
    """Return the name of the actor that is the group's manager."""
    return f"{_ALL}-{group}"


def list_groups(values: KeyValues) -> list[str]:
    """Return the names of all registered groups. A group exists only if the actor `manager_actor(name)` exists too."""
    found = values.get(_ALL)
    names: list[str] = json.loads(found) if found else []
    return names


def register_group(values: KeyValues, group: str, address: str) -> None:
    """Store the group's name, and the address of its manager."""
    values.put(_ALL, json.dumps(sorted({*list_groups(values), group})).encode())
    values.put(make_address_key(group), address.encode())


def unregister_group(values: KeyValues, group: str) -> None:
    """Remove the group's name, and its manager's address."""
    values.put(_ALL, json.dumps(sorted({*list_groups(values)} - {group})).encode())
    values.delete(make_address_key(group))
