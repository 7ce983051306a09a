"""The map of a space: which server holds which segment. Plain data, sent as JSON.

A space's map is made by the group's manager; where there is none, by the owner of the servers (`StaticMap`), who
publishes it again when a server is replaced. Workers keep a copy, and name in each request the generation of each
segment that it touches: a server that holds a segment in another generation, or not at all, refuses the whole request.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class SegmentHolders:
    """Who holds one segment. `copies` hold every acknowledged push; a new primary begins a new generation."""

    primary: str | None  # None: lost, or not placed yet
    copies: tuple[str, ...] = ()
    generation: int = 0


@dataclass(frozen=True, slots=True)
class SpaceMap:
    """The holdings of one space, by number of segment, and where its servers are. A later map has a higher version."""

    version: int
    holdings: tuple[SegmentHolders, ...]
    addresses: dict[str, str] = field(default_factory=dict)  # server -> address

    def by_server(self, segments: Iterable[int]) -> dict[str | None, list[int]]:
        """These segments by their primaries, in order; under None those that nobody holds."""
        found: dict[str | None, list[int]] = {}
        for index in segments:
            found.setdefault(self.holdings[index].primary, []).append(index)
        return found

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "version": self.version,
            "holdings": [[each.primary, list(each.copies), each.generation] for each in self.holdings],
            "addresses": self.addresses,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read back what `to_json` gave."""
        holdings = tuple(SegmentHolders(primary, tuple(copies), number) for primary, copies, number in data["holdings"])
        return cls(data["version"], holdings, dict(data["addresses"]))


class StaticMap:
    """Where the segments of a space are, and the secret of their servers. May be passed to other processes.

    Any thread may `publish`. `final`: a server that dies is not replaced, so a worker that loses one raises PeerLost at
    once; else it waits for the next map.
    """

    def __init__(self, found: SpaceMap, secret: bytes, *, final: bool = True) -> None:
        self.map, self.secret, self.final = found, secret, final
        self._lock = threading.Lock()
        self._subscriptions: weakref.WeakSet[StaticSubscription] = weakref.WeakSet()

    @classmethod
    def of(cls, addresses: dict[str, str], secret: bytes, *, final: bool = True) -> StaticMap:
        """The first map: one segment on each of these servers, in their order."""
        holders = tuple(SegmentHolders(server, (), 1) for server in addresses)
        return cls(SpaceMap(1, holders, dict(addresses)), secret, final=final)

    def moved(self, segment: int, address: str) -> SpaceMap:
        """The next map: the server of `segment` is replaced by one at `address`, in a new generation."""
        old = self.map
        held = old.holdings[segment]
        holdings = list(old.holdings)
        holdings[segment] = replace(held, generation=held.generation + 1)
        return SpaceMap(old.version + 1, tuple(holdings), old.addresses | {str(held.primary): address})

    def publish(self, found: SpaceMap) -> None:
        """Tell all subscriptions a newer map; an older one changes nothing."""
        with self._lock:
            if found.version > self.map.version:
                self.map = found
                for each in list(self._subscriptions):
                    each.wake()

    def subscribe(self) -> StaticSubscription:
        """Follow the map from now on."""
        with self._lock:
            made = StaticSubscription(self)
            self._subscriptions.add(made)
            return made

    def __getstate__(self) -> dict[str, Any]:
        return {"map": self.map, "secret": self.secret, "final": self.final}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["map"], state["secret"], final=state["final"])  # type: ignore[misc]


class StaticSubscription:
    """One session's view of a `StaticMap`: the calls of `rayps.ps.client.map_subscription.MapSubscription`."""

    lost = False  # there is no manager to lose

    def __init__(self, source: StaticMap) -> None:
        self.map = source.map
        self.final = source.final
        self.door: dict[str, Any] = {"secret": source.secret}
        self._source = source
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._lock = threading.Lock()  # of the descriptor, against who closes it

    def wake(self) -> None:
        """Make `fileno` readable. Any thread."""
        with self._lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)
                self._woken = True

    def look(self) -> SpaceMap | None:
        """A newer map, if one was published; does not wait."""
        if self._woken:
            self._hush()
        newer = self._source.map
        if newer.version <= self.map.version:
            return None
        self.map = newer
        return newer

    def seek(self) -> None:
        """Do nothing: the owner publishes."""

    def fileno(self) -> int:
        """Readable when `look` may find something."""
        return self._wakeup

    def hang_up(self) -> None:
        """End what waits here. Any thread may call it."""
        self.wake()

    def close(self) -> None:
        """Leave. Safe to call twice."""
        with self._lock:
            descriptor, self._wakeup = self._wakeup, -1
            if descriptor >= 0:
                os.close(descriptor)

    def _hush(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            self._woken = False
            if self._wakeup >= 0:
                os.eventfd_read(self._wakeup)
