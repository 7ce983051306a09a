"""The links of one rank by number, and the watch over all of them at once.

Two ranks may have several TCP links, called streams. A link's number is its rank plus the size of the ring times its
stream, so that a rank is the number of its first link.
"""

from __future__ import annotations

import contextlib
import math
import select
from collections.abc import Iterable, Iterator, Mapping

from rayps.comm.link import Link
from rayps.comm.ring.messages import Piece
from rayps.core.partition import slices

STRIPE_BYTES = 256 << 10  # what a stream must have of a buffer at least

Place = tuple[int, int]  # a rank, and the number of a stream to it


class RingConnections(dict[int, Link]):
    """Links by number. `streams` is how many are used between two ranks that speak TCP."""

    def __init__(self, size: int, links: Mapping[Place, Link]) -> None:
        super().__init__({peer + size * stream: links[peer, stream] for peer, stream in sorted(links)})
        self.size = size
        self.streams = 1 + max((stream for _, stream in links), default=0)
        self.ranks = [number for number in self if number < size]
        self.poll = select.poll()
        self._masks = dict.fromkeys(self, 0)
        self._ears: dict[int, select.poll] = {}  # by bell: it and all links
        self._by_descriptor = {link.fileno(): number for number, link in self.items()}
        for number, link in self.items():
            link.peer = f"rank {number % size}"

    @property
    def transports(self) -> dict[int, str]:
        """How each other rank is reached."""
        return {peer: self[peer].transport for peer in self.ranks}

    def watch(self, number: int, mask: int) -> None:
        """Let `poll` look for these events at a link; 0 for none."""
        if mask == self._masks[number]:
            return
        self._masks[number] = mask
        if mask:
            self.poll.register(self[number], mask)
        else:
            self.poll.unregister(self[number])

    def only_hears(self, bell: int, seconds: float) -> bool:
        """Wait for any link and the bell, and whether it was the bell alone."""
        ears = self._ears.get(bell)
        if ears is None:
            ears = self._ears[bell] = select.poll()
            for descriptor in (bell, *self._by_descriptor):
                ears.register(descriptor, select.POLLIN)
        ready = ears.poll(max(0, math.ceil(seconds * 1000)))
        return len(ready) == 1 and ready[0][0] == bell

    @contextlib.contextmanager
    def hearing(self, bell: int) -> Iterator[None]:
        """Let `poll` look for the bell too."""
        self.poll.register(bell, select.POLLIN)
        try:
            yield
        finally:
            self.poll.unregister(bell)

    def at(self, descriptor: int) -> int:
        """The number of the link that `poll` found; -1 for what is no link."""
        return self._by_descriptor.get(descriptor, -1)

    def drop(self, number: int) -> Link:
        """Take a link out, unwatched."""
        self.watch(number, 0)
        link = self.pop(number)
        self._ears.clear()
        del self._by_descriptor[link.fileno()]
        return link

    def stream(self, peer: int, turn: int) -> int:
        """The link to rank `peer` whose turn it is."""
        return peer + self.size * (turn % self._streams_to(peer))

    def stripes(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pieces for ranks as pieces for links: large ones are cut up between the streams."""
        for peer, buffer in pieces:
            parts = max(1, min(self._streams_to(peer), len(buffer) // STRIPE_BYTES))
            for i, cut in enumerate(slices(len(buffer), parts)):
                yield peer + self.size * i, buffer[cut]

    def _streams_to(self, peer: int) -> int:
        return self.streams if self.streams > 1 and self[peer].transport == "tcp" else 1

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        self.ranks = []
        self._masks.clear()
        self._ears.clear()
        self._by_descriptor.clear()
