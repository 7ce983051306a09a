"""A worker as a shard sees it, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayps.comm.link import Link
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.core.errors import StaleGeneration
from rayps.ps.fixed.coded import value_of
from rayps.ps.fixed.messages import CODED
from rayps.ps.protocol.rows import ShardRows
from rayps.ps.protocol.shared_memory import BELL, SLICE, RequestMailbox, SharedSlice, offered


class ShardPeer:
    """A worker's connection, as the shard sees it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.descriptor = link.fileno()
        self.rank = -1  # none yet, or fenced
        self.patience = 0.0  # seconds that its pulls may wait
        self.box: RequestMailbox | None = None
        self.full = False  # takes no more for now
        self.ids: dict[int, ShardRows] = {}  # by number: the rows that it named

    def share(self, part: SharedSlice, lo: int, bell: int) -> bool:
        """Take the memory that a worker of this host has offered, and offer the shard's; whether there was any.

        The shard's slice begins at element `lo`; `bell` wakes the shard. Raises ValueError when it is shared already.
        """
        link = self.link
        if part.memory is None or not isinstance(link, SharedLink) or not offered(link):
            return False
        if self.box is not None:
            raise ValueError(f"{link.peer} has joined by this link already")
        self.box = RequestMailbox(link, part.params, lo)
        link.offer(SLICE, part.memory, read_only=True)
        link.offer_descriptor(BELL, bell)
        return True


@dataclass(slots=True)
class ShardRequest:
    """What a guest asks for; the fields are those of `Kind`."""

    guest: ShardPeer
    kind: int
    tag: int
    a: int
    b: int
    weight: float
    payload: memoryview | bytearray | None  # None: the request is in the box, and its payload in the worker's gradient
    count: int = 0  # elements of such a payload
    deadline: float = 0.0

    def value(self, like: Tensor, offset: int = 0) -> Tensor:
        """The payload, as elements of the shard's kind; `offset` is where it lies in a gradient. Raises ValueError."""
        if self.payload is None:
            assert self.guest.box is not None
            return self.guest.box.value(offset, self.count)
        if self.kind in CODED.values():
            return value_of(self.payload, like.dtype)
        return torch.frombuffer(self.payload, dtype=like.dtype) if self.payload else like[:0]

    def numbers(self) -> Tensor:
        """The payload of a message, as int64."""
        return torch.frombuffer(self.payload, dtype=torch.int64) if self.payload else torch.empty(0, dtype=torch.int64)


def fenced(guest: ShardPeer) -> StaleGeneration:
    """What a guest hears whose rank another worker has taken."""
    return StaleGeneration(
        f"{guest.link.peer} does not hold its rank any more: another worker has joined with it", peer=guest.link.peer
    )
