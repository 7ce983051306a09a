"""The connections of one rank by number, and the poll over all of them.

Two ranks may have several TCP connections, called streams. A connection's number is the peer's rank plus the size of
the ring times the stream's number. The number of the first connection to a peer is therefore the peer's rank.
"""

from __future__ import annotations

import contextlib
import math
import select
from collections.abc import Iterable, Iterator, Mapping

from rayps.comm.link import Link
from rayps.comm.ring.messages import Piece
from rayps.core.partition import cut_slices
from rayps.core.time.member_times import LineFacts

STRIPE_BYTES = 256 << 10  # a buffer is divided among streams only into parts of at least this many bytes

Place = tuple[int, int]  # (a peer's rank, the number of the stream to that peer)


class RingConnections(dict[int, Link]):
    """A dict from numbers to one rank's connections. `streams` is the number of TCP connections used to each rank."""

    def __init__(self, size: int, links: Mapping[Place, Link]) -> None:
        super().__init__({peer + size * stream: links[peer, stream] for peer, stream in sorted(links)})
        self.size = size
        self.streams = 1 + max((stream for _, stream in links), default=0)
        self.ranks = [number for number in self if number < size]
        self.poll = select.poll()
        self._masks = dict.fromkeys(self, 0)
        self._polls: dict[int, select.poll] = {}  # from an eventfd to a poll over this eventfd and all connections
        self._by_descriptor = {link.fileno(): number for number, link in self.items()}
        for number, link in self.items():
            link.peer = f"rank {number % size}"

    @property
    def transports(self) -> dict[int, str]:
        """The transport (shm, unix or tcp) to each other rank."""
        return {peer: self[peer].transport for peer in self.ranks}

    @property
    def lines(self) -> dict[int, LineFacts]:
        """What the kernel counts for the TCP connections, by the peer's rank. Any thread may read it."""
        found: dict[int, LineFacts] = {}
        for number, link in list(self.items()):
            line = link.line
            if line is not None:
                rank = number % self.size
                found[rank] = line if rank not in found else found[rank].plus(line)
        return found

    def watch(self, number: int, mask: int) -> None:
        """Poll connection `number` for the events in `mask`, or stop polling it if `mask` is 0."""
        if mask == self._masks[number]:
            return
        self._masks[number] = mask
        if mask:
            self.poll.register(self[number], mask)
        else:
            self.poll.unregister(self[number])

    def only_wakeup(self, wakeup: int, seconds: float) -> bool:
        """Sleep at most `seconds`, until a connection or the eventfd `wakeup` is readable.

        Return whether the eventfd is readable and no connection is.
        """
        poll = self._polls.get(wakeup)
        if poll is None:
            poll = self._polls[wakeup] = select.poll()
            for descriptor in (wakeup, *self._by_descriptor):
                poll.register(descriptor, select.POLLIN)
        ready = poll.poll(max(0, math.ceil(seconds * 1000)))
        return len(ready) == 1 and ready[0][0] == wakeup

    @contextlib.contextmanager
    def polling(self, wakeup: int) -> Iterator[None]:
        """Inside the block, poll the eventfd `wakeup` together with the connections."""
        self.poll.register(wakeup, select.POLLIN)
        try:
            yield
        finally:
            self.poll.unregister(wakeup)

    def at(self, descriptor: int) -> int:
        """Return the number of the connection that has this file descriptor, or -1 if none has."""
        return self._by_descriptor.get(descriptor, -1)

    def drop(self, number: int) -> Link:
        """Remove a connection and stop polling it; return the connection."""
        self.watch(number, 0)
        link = self.pop(number)
        self._polls.clear()
        del self._by_descriptor[link.fileno()]
        return link

    def stream(self, peer: int, turn: int) -> int:
        """Return the number of the connection for message number `turn` to rank `peer`; streams are used in turn."""
        return peer + self.size * (turn % self._count_streams_to(peer))

    def stripes(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Divide buffers among streams: convert (rank, buffer) pairs to (connection number, part of buffer) pairs."""
        for peer, buffer in pieces:
            parts = max(1, min(self._count_streams_to(peer), len(buffer) // STRIPE_BYTES))
            for i, cut in enumerate(cut_slices(len(buffer), parts)):
                yield peer + self.size * i, buffer[cut]

    def _count_streams_to(self, peer: int) -> int:
        return self.streams if self.streams > 1 and self[peer].transport == "tcp" else 1

    def clear(self) -> None:
        """Remove all connections."""
        super().clear()
        self.ranks = []
        self._masks.clear()
        self._polls.clear()
        self._by_descriptor.clear()
