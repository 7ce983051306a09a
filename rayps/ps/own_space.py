"""A space of one's own on a server group: opened, given its first values, joined by any actor, dropped at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rayps.core.errors import ConfigError, RaypsError
from rayps.ps.client.client import GroupServer
from rayps.ps.client.session import KEEP_BYTES, Session
from rayps.ps.group import ManagerClient
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.rows import cuts
from rayps.ps.protocol.space import Quota, Space
from rayps.ps.server.dense_segment import state_of
from rayps.tensors.flat import Layout

log = logging.getLogger(__name__)

SEGMENTS = 32  # of a large vector
SEGMENT_BYTES = 1 << 17  # each costs a request some 30 microseconds, whatever its size


def cut(layout: Layout, segments: int | None = None) -> tuple[tuple[int, int], ...]:
    """The elements [lo, hi) of each segment; by default 32 of them, and fewer, but 8, where the vector is small.

    A column of a model may own nothing: it has one empty segment, whose clock counts the column's pushes.

    Raises:
        ConfigError: there are to be fewer than one.
    """
    if segments is None:
        if not layout.size:
            return ((0, 0),)
        segments = min(SEGMENTS, max(8, layout.size * layout.dtype.itemsize // SEGMENT_BYTES), layout.size)
    if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= layout.size:
        raise ConfigError(
            f"segments is {segments!r}: give a whole number from 1 to the {layout.size} elements", field="segments"
        )
    return tuple(cuts(layout, segments, 1 / 2))  # a server has many of them, so that they need not be equal


class OwnSpace:
    """One space on a group, as whoever opened it holds it. Pickled, it can be joined, and not ended."""

    def __init__(self, group: ManagerClient, space: Space, timeout: float, *, private: bool, replicas: int) -> None:
        """`private`: the group ends with the space."""
        self.group, self.space, self.timeout = group, space, timeout
        self._private, self._replicas, self._mine = private, replicas, True

    @classmethod
    def open(
        cls, group: ManagerClient, space: Space, vector: Tensor, timeout: float, *, private: bool, marks: Sequence[int]
    ) -> OwnSpace:
        """Open a space, and give it its first values.

        Raises:
            Conflict: a space of that name is open.
            PeerTimeout, PeerLost: the group does not answer.
        """
        opened = group.open(space)
        found = cls(group, opened, timeout, private=private, replicas=int(group.facts()["replicas"]))
        talk = Session(group.door(), opened, -1, timeout=timeout)
        try:
            assert opened.layout is not None
            states = {i: state_of(vector[a:b], opened.layout, a, marks=marks) for i, (a, b) in enumerate(opened.cuts)}
            talk.exchange(GroupMessage.LOAD, states)
            if gone := found.lost():  # a server died meanwhile
                talk.exchange(GroupMessage.LOAD, {i: states[i] for i in gone})
                group.restored(opened.number, gone)
        finally:
            talk.close()
        return found

    def server(self, rank: int) -> GroupServer:
        """Become worker `rank`; a former holder of the rank is fenced. Raises as `GroupServer`."""
        incarnation = self.group.join(self.space.number, rank)
        keep = KEEP_BYTES if self._replicas else 0  # without copies nobody could be told them again
        talk = Session(
            self.group.door(),
            self.space,
            rank,
            incarnation=incarnation,
            timeout=self.timeout,
            keep=keep,
            lost=self.lost,
        )
        try:
            return GroupServer(talk)
        except BaseException:
            talk.close()
            raise

    def facts(self) -> dict[str, Any]:
        """The group's facts; `spaces` has this one among others."""
        return self.group.facts()

    def lost(self) -> list[int]:
        """The segments that nobody holds any more."""
        for space in self.facts()["spaces"]:
            if space["number"] == self.space.number:
                return [each["index"] for each in space["segments"] if each["state"] == "lost"]
        return []

    def branch(self, name: str, quota: Quota | None) -> OwnSpace:
        """Another space that begins with these values; memory is shared until they differ."""
        space = self.group.branch(self.space.name, name, quota)
        return OwnSpace(self.group, space, self.timeout, private=False, replicas=self._replicas)

    def close(self) -> None:
        """Drop the space, and with a private group all of it. Only where it was opened; elsewhere it does nothing."""
        if not self._mine:
            return
        self._mine = False
        if self._private:
            self.group.stop()
            return
        try:
            self.group.drop(self.space.name)
        except RaypsError as error:  # the group may be gone, and the space with it
            log.info("space %s could not be dropped: %s", self.space.name, str(error))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mine": False}
