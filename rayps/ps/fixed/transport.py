"""Two transports from a worker to one shard: shared memory, and messages.

Each takes a request, then returns its answer. To ask several shards at once, send all requests first.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from rayps.comm.link import Link, Message
from rayps.comm.link.memory import Fence, Memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.comm.link.socket_link import EMPTY
from rayps.core.errors import LinkError, PeerLost, PeerTimeout
from rayps.ps.fixed.messages import CODED, ShardMessage, error_of
from rayps.ps.protocol.rows import ShardRows, take_rows
from rayps.ps.protocol.shared_memory import (
    ANSWERED,
    ASKED,
    ASLEEP,
    BELL,
    BY_MESSAGE,
    DURABLE,
    LEAD,
    PAGE,
    REQUEST,
    REQUEST_AT,
    SAYS,
    SLICE,
    STEPS,
    VERSION,
    WAITS,
    GradientBuffer,
)
from rayps.tensors.packing import flat_bytes

GRACE_SECONDS = 5.0  # the shard answers a pull that waits too long itself, naming the slowest rank: it gets time to
TRIES = 20  # readings of a slice that the shard steps in the middle of, before it is asked to send a copy

Place = Any  # np.ndarray of uint8: where the bytes of a pull go


# what is said by message also to a shard of this host: rare, or with a payload that lies nowhere else
ALWAYS_BY_MESSAGE = frozenset(CODED.values()) | {
    ShardMessage.JOIN,
    ShardMessage.IDS,
    ShardMessage.HOLD,
    ShardMessage.AIM,
    ShardMessage.RELEASE,
    ShardMessage.REACHED,
}


class ShardCall(NamedTuple):
    """One request to one shard. `elements` are those of the payload, `piece` is the payload, `place` the answer's.

    A pull of rows has them as `rows`, for a shard whose memory is read.
    """

    shard: int
    kind: int
    a: int
    b: int
    weight: float = 0.0
    elements: int = 0
    piece: Tensor | None = None
    place: Place | None = None
    rows: ShardRows | None = None


class ShardAnswer(NamedTuple):
    """Hold a shard's answer.

    `lead`: rounds that this worker is ahead; `version` (after a JOIN: this rank's next step); `durable`: the step of
    this rank below which all pushes are durable; `payload`, where no place was given for it.
    """

    lead: int
    version: int
    durable: int
    payload: memoryview | bytearray = EMPTY


class Transport(Protocol):
    """From a worker to one shard. `hear` must follow `ask` with the same tag, unless the way is given up."""

    @property
    def by_message(self) -> MessageTransport:
        """The same shard by message, also where memory is shared with it."""

    def ask(self, tag: int, ask: ShardCall) -> None:
        """Say a request. Raises LinkError."""

    def ring(self) -> None:
        """See to it that the request is heard, once all shards were asked: who is woken may take this processor."""

    def hear(self, tag: int, ask: ShardCall, consistent: bool) -> ShardAnswer:
        """The answer; its payload lands in the request's place. Raises PeerTimeout, PeerLost, what the shard raised."""

    def rest(self) -> None:
        """Return once the shard has no use for the payload of any earlier request. Raises PeerTimeout, PeerLost."""

    def hang_up(self) -> None:
        """Make whoever waits here, and the shard, see this way as lost. Any thread may call it."""

    def close(self) -> None:
        """Close the link, give up what is shared. Safe to call twice."""


class MessageTransport:
    """By link: payloads travel as messages, between hosts as on one."""

    def __init__(self, link: Link, timeout: float) -> None:
        self.link, self.patience = link, timeout + GRACE_SECONDS
        self._heard: Message | LinkError | None = None  # the answer, while nobody has asked for it

    @property
    def by_message(self) -> MessageTransport:
        """Itself."""
        return self

    def ask(self, tag: int, ask: ShardCall) -> None:
        """Say a request; what the line does not take at once leaves while answers are awaited. Raises LinkError."""
        self._heard = None
        payload = None if ask.piece is None else flat_bytes(ask.piece)
        self.link.queue(Message(ask.kind, tag, ask.a, ask.b, ask.weight), payload, copy=False)

    def ring(self) -> None:
        """Nothing to do: the link has sent it."""

    def hear(self, tag: int, ask: ShardCall, consistent: bool) -> ShardAnswer:
        """The answer; always one version of this shard."""
        reply = self._reply(tag, ask.place)
        return ShardAnswer(reply.b, reply.a, int(reply.weight), reply.payload)

    def _reply(self, tag: int, into: Place | None = None) -> Message:
        """The message that answers `tag`; answers to what was given up are passed over."""
        while not self.advance(tag, into):
            self.link.wait(self.events, self.patience, "send a message")
        heard, self._heard = self._heard, None
        if isinstance(heard, LinkError):
            raise heard
        assert heard is not None
        if heard.kind == ShardMessage.ERROR:
            raise error_of(heard)
        return heard

    @property
    def events(self) -> int:
        """What to wait for before `advance` can do more."""
        return select.POLLIN | (self.link.interest if self.link.queued else 0)

    def advance(self, tag: int, into: Place | None) -> bool:
        """Move what can be moved without waiting; whether the answer to `tag` is here, or why there is none."""
        link = self.link
        try:
            if link.queued:
                with contextlib.suppress(PeerLost):  # found again when what it sent has been read
                    link.flush()
            while self._heard is None and (head := link.peek()) is not None:
                refused, mine = head.kind == ShardMessage.ERROR, head.tag == tag
                message = link.try_recv(into if mine and not refused else None)
                if message is None:
                    return False
                self._heard = message if mine else None
        except LinkError as error:
            self._heard = error
        return self._heard is not None

    def rest(self) -> None:
        """Nothing to wait for: what was said has left once it was answered."""

    def hang_up(self) -> None:
        """Make whoever waits here, and the shard, see this way as lost. Any thread may call it."""
        self.link.hang_up()

    def close(self) -> None:
        """Close the link."""
        self.link.close()


def together(lines: list[tuple[MessageTransport, Place | None]], tag: int) -> None:
    """Let requests leave and answers arrive on several lines at once, each as fast as it can; `hear` then finds them.

    One line after the other, all but one would stand idle. What fails, or stays silent too long, is left to `hear`.
    """
    poll, waiting = select.poll(), {line.link.fileno(): (line, place) for line, place in lines}
    while True:
        for number, (line, place) in list(waiting.items()):
            if line.advance(tag, place):
                del waiting[number]
                with contextlib.suppress(KeyError):  # it never had to wait
                    poll.unregister(number)
            else:
                poll.register(number, line.events)
        if len(waiting) < 2 or not poll.poll(1000 * max(line.patience for line, _ in waiting.values())):
            return


class MemoryTransport:
    """By memory: requests in a box, payloads where they lie."""

    def __init__(self, link: SharedLink, box: Memory, desk: GradientBuffer, timeout: float) -> None:
        self.link, self._timeout = link, timeout
        self._messages = MessageTransport(link, timeout)
        self._view, self._words = box.view, box.view.cast("q")
        held = link.memories.pop(SLICE)
        self._slice = held.view[:PAGE].cast("q")
        self._params = np.frombuffer(held.view, np.uint8, offset=PAGE) if held.size > PAGE else np.empty(0, np.uint8)
        self._their_bell, self._my_bell = link.descriptors.pop(BELL), desk.bell
        self._item = desk.gradient.element_size()
        self._asked = 0
        self._fence = Fence()
        self._poll = select.poll()
        self._poll.register(desk.bell, select.POLLIN)
        self._poll.register(link.fileno(), select.POLLIN)

    @property
    def by_message(self) -> MessageTransport:
        """The same shard by message: what is in the box and in the desk stays as it is."""
        return self._messages

    def ask(self, tag: int, ask: ShardCall) -> None:
        """Say a request. Raises LinkError."""
        self.rest()
        if ask.kind in ALWAYS_BY_MESSAGE:
            self._messages.ask(tag, ask)
            return
        kind, a = (
            (ask.kind, ask.a) if ask.rows is None else (ShardMessage.PULL, 0)
        )  # rows are found in the shard's memory
        self.put(tag, kind, a, ask.b, ask.elements, ask.weight)
        self._fence()

    def put(self, tag: int, kind: int, a: int, b: int, elements: int, weight: float) -> None:
        """Put a request into the box; the one before must be answered, and a fence and `ring` must follow."""
        REQUEST.pack_into(self._view, REQUEST_AT, kind, a, b, elements, weight)
        self._asked = self._words[ASKED] = tag

    def take(self, tag: int, place: Place, consistent: bool) -> int:
        """The whole slice, as the answer to a request that was put; by how many rounds this worker leads."""
        words = self._words
        if words[ANSWERED] != tag:
            self._wait(tag)
        if consistent or words[SAYS] == BY_MESSAGE:
            return self.hear(tag, ShardCall(0, ShardMessage.PUSH_PULL, 0, 0, place=place), consistent).lead
        np.copyto(place, self._params)
        return words[LEAD]

    def ring(self) -> None:
        """Wake the shard where it sleeps."""
        if self._slice[ASLEEP]:
            os.eventfd_write(self._their_bell, 1)

    def hear(self, tag: int, ask: ShardCall, consistent: bool) -> ShardAnswer:
        """The answer; with `consistent` its payload is of one version of the shard, else it may be a mixture."""
        if ask.kind in ALWAYS_BY_MESSAGE:
            return self._messages.hear(tag, ask, consistent)
        words = self._words
        if words[ANSWERED] != tag:
            self._wait(tag)
        if words[SAYS] == BY_MESSAGE:
            self._messages.hear(tag, ask._replace(place=None), consistent)  # raises what it says
        if ask.place is not None:
            self._fill(tag, ask, ask.place, consistent)
        return ShardAnswer(words[LEAD], words[VERSION], words[DURABLE])

    def _fill(self, tag: int, ask: ShardCall, place: Place, consistent: bool) -> None:
        """Put what was asked for out of the shard's memory into its place."""
        if not consistent:
            self._copy_out(ask, self._params, place)
        elif not self._copy(ask, place):
            whole = np.empty_like(self._params)
            fallback = ShardCall(ask.shard, ShardMessage.READ, 0, len(whole) // self._item, place=whole)
            self._messages.ask(tag, fallback)
            self._messages.hear(tag, fallback, True)
            self._copy_out(ask, whole, place)

    def _copy_out(self, ask: ShardCall, params: Place, place: Place) -> None:
        if ask.rows is not None:
            take_rows(ask.rows, params, place, self._item)
        else:
            np.copyto(place, params if len(place) == len(params) else params[ask.a * self._item : ask.b * self._item])

    def _copy(self, ask: ShardCall, place: Place) -> bool:
        """Copy while the shard does not step; False when it always did."""
        steps = self._slice
        for _ in range(TRIES):
            before = steps[STEPS]
            if before & 1:
                os.sched_yield()
                continue
            self._copy_out(ask, self._params, place)
            if steps[STEPS] == before:
                return True
        return False

    def rest(self) -> None:
        """Return once the shard has answered."""
        if self._words[ANSWERED] != self._asked:
            self._wait(self._asked)

    def _wait(self, tag: int) -> None:
        words, patience = self._words, self._timeout + GRACE_SECONDS
        deadline = time.monotonic() + patience
        while True:
            words[WAITS] = 1
            self._fence()
            ready = [] if words[ANSWERED] == tag else self._poll.poll(1000 * min(patience, 1.0))
            words[WAITS] = 0
            for descriptor, _ in ready:
                if descriptor == self._my_bell:
                    self._hush()
                else:
                    self.link.absorb()
            if words[ANSWERED] == tag:
                return
            if self.link.closed or self.link.ended:
                raise PeerLost(f"{self.link.peer!r} closed the connection or died", peer=self.link.peer)
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"{self.link.peer!r} did not answer within {patience:g} s (the knob is `timeout`)",
                    peer=self.link.peer,
                    seconds=patience,
                )

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):  # rung for a shard that was heard meanwhile
            os.eventfd_read(self._my_bell)

    def hang_up(self) -> None:
        """Make whoever waits here, and the shard, see this way as lost. Any thread may call it."""
        self.link.hang_up()

    def close(self) -> None:
        """Close the link, and give up the bell."""
        self.link.close()
        if self._their_bell >= 0:
            os.close(self._their_bell)
            self._their_bell = -1
