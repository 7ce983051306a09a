"""The addresses of a space's servers by segment, and of the managers of a cluster's server groups.

A space's map is made by its group's manager. Where there is no manager, the owner of the servers publishes a
`StaticMap`, and publishes it again when a server is replaced. Each request of a worker names the generation of each
segment that it touches. A server that holds a segment in another generation, or not at all, refuses the whole request,
so a request under an old map has no effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rayps.cluster.local import KeyValues


@dataclass(frozen=True, slots=True)
class SegmentHolders:
    """The servers that hold one segment: the primary, and as `copies` the backups that hold every acknowledged push.

    A new primary begins a new generation.
    """

    primary: str | None  # None: lost, or not placed yet
    copies: tuple[str, ...] = ()
    generation: int = 0


@dataclass(frozen=True, slots=True)
class SpaceMap:
    """The holders of each segment of one space, by number, and the servers' addresses. Plain data, sent as JSON.

    A newer map has a higher version.
    """

    version: int
    holdings: tuple[SegmentHolders, ...]
    addresses: dict[str, str] = field(default_factory=dict)  # server -> address

    def by_server(self, segments: Iterable[int]) -> dict[str | None, list[int]]:
        """Return segments by their primaries, in order; segments without a primary are under None."""
        found: dict[str | None, list[int]] = {}
        for index in segments:
            found.setdefault(self.holdings[index].primary, []).append(index)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the map as JSON-ready data."""
        return {
            "version": self.version,
            "holdings": [[each.primary, list(each.copies), each.generation] for each in self.holdings],
            "addresses": self.addresses,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the map that `to_json` wrote."""
        holdings = tuple(SegmentHolders(primary, tuple(copies), number) for primary, copies, number in data["holdings"])
        return cls(data["version"], holdings, dict(data["addresses"]))


class StaticMap:
    """A space's map without a manager, and the secret of its servers. May be passed to other processes.

    Any thread may `publish`. `final`: a server that dies is not replaced, so a worker that loses one raises PeerLost at
    once; otherwise it waits for the next map.
    """

    def __init__(self, found: SpaceMap, secret: bytes, *, final: bool = True) -> None:
        self.map, self.secret, self.final = found, secret, final
        self._lock = threading.Lock()
        self._subscriptions: weakref.WeakSet[StaticSubscription] = weakref.WeakSet()

    @classmethod
    def of(cls, addresses: dict[str, str], secret: bytes, *, final: bool = True) -> StaticMap:
        """Return the first map: one segment on each of these servers, in their order."""
        holders = tuple(SegmentHolders(server, (), 1) for server in addresses)
        return cls(SpaceMap(1, holders, dict(addresses)), secret, final=final)

    def moved(self, segment: int, address: str) -> SpaceMap:
        """Return the next map: the server of `segment` is replaced by one at `address`, in a new generation."""
        old = self.map
        held = old.holdings[segment]
        holdings = list(old.holdings)
        holdings[segment] = replace(held, generation=held.generation + 1)
        return SpaceMap(old.version + 1, tuple(holdings), old.addresses | {str(held.primary): address})

    def publish(self, found: SpaceMap) -> None:
        """Give all subscriptions a newer map; an older one changes nothing."""
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
    """One session's view of a `StaticMap`: the calls of `rayps.ps.client.connections.MapSubscription`."""

    lost = False  # there is no connection to a manager that could be lost

    def __init__(self, source: StaticMap) -> None:
        self.map = source.map
        self.final = source.final
        self.door: dict[str, Any] = {"secret": source.secret}
        self._source = source
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._lock = threading.Lock()  # protects the descriptor against a concurrent `close`

    def wake(self) -> None:
        """Make `fileno` readable. Any thread."""
        with self._lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)
                self._woken = True

    def look(self) -> SpaceMap | None:
        """Return the newest map if it is newer than the last one returned; does not wait."""
        if self._woken:
            self._clear()
        newer = self._source.map
        if newer.version <= self.map.version:
            return None
        self.map = newer
        return newer

    def seek(self) -> None:
        """Do nothing: there is no manager to connect to; the owner publishes."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when `look` may find a map."""
        return self._wakeup

    def hang_up(self) -> None:
        """Wake the thread that waits on `fileno`. Any thread."""
        self.wake()

    def close(self) -> None:
        """Close the descriptor. Safe to call twice."""
        with self._lock:
            descriptor, self._wakeup = self._wakeup, -1
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_wakeup", -1) >= 0:  # of a session that was not closed
            os.close(self._wakeup)

    def _clear(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            self._woken = False
            if self._wakeup >= 0:
                os.eventfd_read(self._wakeup)


# ---- the groups of a cluster, in the key-value map that all its actors share

_ALL = "rayps-servers"


def address_key(group: str) -> str:
    """Return the key under which the address of the group's manager is stored."""
    return f"{_ALL}/{group}"


def manager_actor(group: str) -> str:
    """Return the name of the actor of the group's manager."""
    return f"{_ALL}-{group}"


def group_names(values: KeyValues) -> list[str]:
    """Return the names of all groups. A name may be out of date: the group exists if its manager's actor does."""
    found = values.get(_ALL)
    names: list[str] = json.loads(found) if found else []
    return names


def register_group(values: KeyValues, group: str, address: str) -> None:
    """Store the group's name, and the address of its manager."""
    values.put(_ALL, json.dumps(sorted({*group_names(values), group})).encode())
    values.put(address_key(group), address.encode())


def unregister_group(values: KeyValues, group: str) -> None:
    """Remove the group's name, and its manager's address."""
    values.put(_ALL, json.dumps(sorted({*group_names(values)} - {group})).encode())
    values.delete(address_key(group))
