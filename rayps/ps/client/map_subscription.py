"""Who holds what, as the manager says it: the map of a space, and again each time that it changes.

A map that is old does no harm: servers refuse what names the wrong holder. So a manager that is away is looked for only
while something waits for a newer map.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from rayps.comm.link import Link, Message, connect
from rayps.core.errors import LinkError, PeerTimeout
from rayps.ps.protocol.messages import GroupMessage, error_of
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap, StaticSubscription

ManagerDoor = dict[str, Any] | Callable[[], dict[str, Any]]  # {"address", "secret"} of a manager, or what finds it
Door = ManagerDoor | StaticMap  # where the map of a space comes from

RETRY_SECONDS = 0.2  # between two tries to find a manager that was lost
CALL_SECONDS = 0.25  # that one such try may take


class MapSubscription:
    """One space's map, kept up to date over a link to the manager. For one thread.

    Raises:
        PeerLost, PeerTimeout: no manager answers.
        NotFound: it knows no such space.
    """

    final = False  # the manager may replace a server that dies

    def __init__(self, door: ManagerDoor, space: int, name: str, timeout: float) -> None:
        self.door: dict[str, Any] = door() if callable(door) else door
        self._find = door if callable(door) else None
        self._space, self._name = space, name
        self._link: Link | None = None
        self._next = 0.0  # when to look for a lost manager again
        deadline = time.monotonic() + timeout
        self._call(timeout)
        found: SpaceMap | None = None
        while found is None and (link := self._link) is not None:
            message = link.recv(max(0.0, deadline - time.monotonic()))
            found = _map_of(message, None)
        if found is None:
            raise PeerTimeout(
                f"the manager of the server group sent no map of space {space} within {timeout:g} s (the knob is "
                "`timeout`)",
                peer="manager",
                seconds=timeout,
            )
        self.map = found

    def look(self) -> SpaceMap | None:
        """A newer map, if one has come; does not wait. Raises NotFound: the space is closed."""
        link = self._link
        if link is None:
            return None
        newer, messages = None, list[Message]()
        try:
            messages = link.feed()
        except LinkError:
            self._drop()
        for message in messages:
            newer = _map_of(message, newer or self.map) or newer
        if newer is not None:
            self.map = newer
        return newer

    def seek(self) -> None:
        """Look for a manager that was lost; does nothing where none was, or just after another try."""
        now = time.monotonic()
        if self._link is None and now >= self._next:
            self._next = now + RETRY_SECONDS
            with contextlib.suppress(LinkError):
                if self._find is not None:
                    self.door = self._find()
                self._call(CALL_SECONDS)

    @property
    def lost(self) -> bool:
        """Whether the manager is not there."""
        return self._link is None

    def fileno(self) -> int:
        """Readable when `look` may find something; -1 while the manager is lost."""
        return -1 if self._link is None else self._link.fileno()

    def hang_up(self) -> None:
        """End what waits here. Any thread may call it."""
        if (link := self._link) is not None:
            link.hang_up()

    def close(self) -> None:
        """Leave. Safe to call twice."""
        self._drop()

    def _call(self, timeout: float) -> None:
        where = self.door
        link = connect(where["address"], name=self._name, secret=where["secret"], generation=0, timeout=timeout)
        try:
            link.send(Message(GroupMessage.WATCH, a=self._space), timeout=timeout)
        except BaseException:
            link.close()
            raise
        self._link = link

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def subscribe(door: Door, space: int, name: str, timeout: float) -> MapSubscription | StaticSubscription:
    """Follow the map of a space. Raises as `MapSubscription`."""
    if isinstance(door, StaticMap):
        return door.subscribe()
    return MapSubscription(door, space, name, timeout)


def _map_of(message: Message, known: SpaceMap | None) -> SpaceMap | None:
    """The map in a message, where it is newer than the one that is known. Raises what the manager says instead."""
    if message.kind == GroupMessage.ERROR:
        raise error_of(message)
    if message.kind != GroupMessage.MAP:
        return None
    found = SpaceMap.from_json(json.loads(bytes(message.payload)))
    return found if known is None or found.version > known.version else None
