"""Answers of a server, and whoever waits for one: withheld until copies have it, parked until the clock allows it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, Protocol

from rayps.comm.link import Message
from rayps.core.errors import ConfigError, PeerTimeout, RaypsError
from rayps.core.failpoint import passing
from rayps.ps.protocol.messages import GroupMessage, numbers, read_numbers, refusal
from rayps.ps.protocol.segment import ServedSegment
from rayps.ps.protocol.shared_memory import SharedSlice
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace
from rayps.ps.server.connection import PeerRequest, ServerPeer, Withheld
from rayps.ps.server.dense_segment import DenseSegment
from rayps.ps.server.replication import Replication, stuck_on

log = logging.getLogger(__name__)


class ReplySender(Protocol):
    """How answers leave."""

    def say(self, guest: ServerPeer, message: Message, payload: Any) -> None:
        """Queue a message; a guest that is lost is dropped."""

    def answer(self, guest: ServerPeer, tag: int, version: int, lead: int, durable: int) -> None:
        """Answer the request of a mailbox, where all that there is to say lies in memory."""

    def offer(self, guest: ServerPeer, segment: int, slice_: SharedSlice) -> None:
        """Let a worker of this host read a segment's memory."""


class PendingReplies:
    """How requests are answered; and those that are not answered yet."""

    def __init__(self, copies: Replication, mouth: ReplySender, name: str) -> None:
        """`name` is the server's."""
        self._copies, self._mouth, self._name = copies, mouth, name

    def fail(self, held: AssignedSpace | None, request: PeerRequest, error: Exception) -> None:
        """Tell who asked what went wrong; a fault of ours too, and the server goes on."""
        if not isinstance(error, (ValueError, RaypsError)):
            log.error("a request of kind %d failed", request.kind, exc_info=error)
            error = RaypsError(f"{self._name} failed: {type(error).__name__}: {error}")
        if held is not None and isinstance(error, ConfigError):
            held.rejected += 1
        release(request)
        self._mouth.say(request.guest, Message(GroupMessage.ERROR, request.tag), refusal(request.tag, error)[1])

    def say_stale(self, request: PeerRequest, segments: Iterable[int]) -> None:
        """These segments are not served here in the generation asked for; nothing was applied."""
        release(request)
        self._mouth.say(request.guest, Message(GroupMessage.STALE, request.tag), numbers(segments))

    def reply(
        self,
        request: PeerRequest,
        kind: GroupMessage,
        touched: list[AssignedSegment],
        *,
        lead: int = 0,
        payload: Any = None,
    ) -> None:
        """Answer as soon as the copies of the touched segments have everything that they were sent so far."""
        release(request)
        rank = request.guest.rank
        durable = min((holding.durable(rank) for holding in touched), default=0) if rank >= 0 else 0
        version = min((segment_of(holding).version for holding in touched), default=0)
        message = Message(kind, request.tag, version, lead, float(durable))
        needs = self._copies.needs(touched)
        if needs:
            deadline = time.monotonic() + request.guest.patience
            withheld = Withheld(request, message, payload, touched, needs, deadline)
            touched[0].space.withheld.append(withheld)
        else:
            self._mouth.say(request.guest, message, payload)

    def settled(self, held: AssignedSpace, *, anew: bool) -> None:
        """Let go the answers whose copies have everything; `anew`: what they wait for may have changed."""
        left: list[Withheld] = []
        free: list[Withheld] = []
        for answer in held.withheld:
            if anew:
                answer.needs = self._copies.needs(answer.holdings)
            waits = any(peer.acked < tag for peer, tag in answer.needs.items())
            (left if waits else free).append(answer)
        if free:
            held.withheld = left
            passing("host: copied, not acknowledged")
            for answer in free:
                self._mouth.say(answer.request.guest, answer.message, answer.payload)

    def stop_serving(self, holding: AssignedSegment) -> None:
        """Refuse the parked requests that touch this segment."""
        held = holding.space
        gone = [request for request in held.parked if any(p.segment == holding.index for p in request.pieces)]
        if gone:
            held.parked = [request for request in held.parked if request not in gone]
            for request in gone:
                self.say_stale(request, [holding.index])

    def withdraw(self, holding: AssignedSegment) -> None:
        """Refuse the answers too that wait for this segment's copies: whether those have it is not known here."""
        held = holding.space
        gone = [answer for answer in held.withheld if holding in answer.holdings]
        for answer in [answer for answer in gone if answer.message.kind == GroupMessage.JOINED]:
            gone.remove(answer)  # it says what the others know
            answer.holdings.remove(holding)
            pairs = read_numbers(answer.payload)
            kept = [pair for pair in zip(pairs[::2], pairs[1::2], strict=True) if pair[0] != holding.index]
            answer.payload = numbers(value for pair in kept for value in pair)
        if gone:
            held.withheld = [answer for answer in held.withheld if answer not in gone]
            for answer in gone:
                self.say_stale(answer.request, [holding.index])

    def forget(self, held: AssignedSpace, guest: ServerPeer) -> None:
        """A guest is gone, or fenced: it hears nothing any more."""
        held.parked = [request for request in held.parked if request.guest is not guest]
        held.withheld = [answer for answer in held.withheld if answer.request.guest is not guest]
        if guest.rank >= 0:
            for holding in held.primaries():
                own(holding, guest.rank)

    def expire(self, held: AssignedSpace, now: float) -> None:
        """Refuse what has waited too long, naming whom it waited for."""
        for request in [waiting for waiting in held.parked if waiting.deadline < now]:
            remove(held.parked, request)
            behind = sorted(
                {
                    rank
                    for p in request.pieces
                    if p.segment in held.holdings
                    for rank in segment_of(held.holdings[p.segment]).laggards()
                }
            )
            names = ", ".join(f"rank {rank}" for rank in behind) or "nobody"
            marks = [mark for p in request.pieces if (h := held.holdings.get(p.segment)) for mark in h.marks().values()]
            self.fail(
                held,
                request,
                PeerTimeout(
                    f"{request.guest.link.peer} waited {request.guest.patience:g} s on {self._name} for {names} to "
                    f"push step {min(marks, default=0)}: raise timeout if a step may take longer",
                    peer=f"worker-{behind[0]}" if behind else "server",
                    seconds=request.guest.patience,
                    ranks=behind,
                    server=self._name,
                ),
            )
        for answer in [waiting for waiting in held.withheld if waiting.deadline < now]:
            remove(held.withheld, answer)
            names = ", ".join(stuck_on(answer.needs))
            self.fail(
                held,
                answer.request,
                PeerTimeout(
                    f"the copies on {names} have not acknowledged what {answer.request.guest.link.peer} pushed or read "
                    "(the knob is `timeout`)",
                    peer=names,
                ),
            )


def segment_of(holding: AssignedSegment) -> ServedSegment:
    """What a primary holds."""
    assert holding.segment is not None
    return holding.segment


def own(holding: AssignedSegment, rank: int) -> None:
    """Copy what a segment still needs out of the memory of a rank, which may write to it from now on."""
    if isinstance(holding.segment, DenseSegment):
        holding.segment.own(rank)


def release(request: PeerRequest) -> None:
    """Before the answer to a request by mailbox: its memory is the worker's again."""
    for holding in request.lent:
        own(holding, request.guest.rank)


def remove(waiting: list[Any], item: object) -> None:
    """Take something out that may not be there any more."""
    if item in waiting:  # else it went with its guest, who was lost meanwhile
        waiting.remove(item)
