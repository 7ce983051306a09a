"""The messages between the ranks of a ring, and functions that build and check them."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from rayps.comm.link import Message
from rayps.core.errors import LinkError, PeerLost, PeerTimeout
from rayps.core.values import Buffer

Piece = tuple[int, Buffer]  # rank, buffer to send to this rank or to fill from this rank
Arrival = tuple[Buffer, Callable[[], Buffer | None]]  # buffer to fill, function that returns what to send on
Want = tuple[int, int, int, "Buffer | list[Message]"]  # kind, tag, step, buffer; for a PARCEL a list


class RingMessage(enum.IntEnum):
    """Kinds of messages between two ranks."""

    DATA = 0  # part of a collective: tag is its number, a the step within it
    POINT = 1  # a message of `send`: tag is the user's
    ASK = 2  # asks for HERE
    HERE = 3  # answers ASK
    ABORT = 4  # the ring has failed: a is the kind of error, the payload the peer and the message
    BYE = 5  # this rank closes in good order
    PARCEL = 6  # tensors of any shape: tag, a and b are those of `rayps.comm.ring.p2p`


class Mail:
    """Messages of other ranks that arrived before this rank called for them."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], deque[Message]] = {}

    def put(self, peer: int, message: Message) -> None:
        """Store a POINT or PARCEL of rank `peer`."""
        self._boxes.setdefault((peer, message.kind, message.tag), deque()).append(message)

    def fetch(self, peer: int, want: Want) -> bool:
        """Return whether the message that is wanted from rank `peer` has arrived.

        If it has, a POINT fills the buffer, and a PARCEL is appended to the list.
        """
        kind, tag, _, into = want
        box = self._boxes.get((peer, kind, tag))
        if not box:
            return False
        message = box.popleft()
        if isinstance(into, list):
            into.append(message)
        else:
            fill(into, message.payload, peer)
        return True

    def waiting(self, peer: int, kind: int) -> Iterator[Message]:
        """Return the stored messages of rank `peer` and this kind."""
        for (frm, what, _), box in self._boxes.items():
            if frm == peer and what == kind:
                yield from box

    def clear(self) -> None:
        """Drop all messages."""
        self._boxes.clear()


_WHY: list[type[LinkError]] = [LinkError, PeerLost, PeerTimeout]  # by the number in an ABORT


def abort_message(error: LinkError) -> tuple[Message, bytes]:
    """Return the ABORT, and its payload, that reports why the ring has failed."""
    why = next((i for i in (1, 2) if isinstance(error, _WHY[i])), 0)
    return Message(RingMessage.ABORT, a=why), f"{error.data.get('peer', '')}\n{error.message}".encode()


def abort_error(abort: Message, by: str) -> LinkError:
    """Return the error that an ABORT reports; `by` is its sender."""
    who, why = bytes(abort.payload).decode(errors="replace").split("\n", 1)
    return _WHY[abort.a](why, peer=who, told_by=by)


def must_match(head: Message, size: int, peer: str, want: Want) -> None:
    """Raise LinkError if a message of `peer` is not the one for which this rank waits."""
    _, number, step, into = want
    expected = 0 if isinstance(into, list) else memoryview(into).nbytes
    if (head.tag, head.a, size) != (number, step, expected):
        raise LinkError(
            f"{peer} is at step {head.a} of collective {head.tag} with {size} bytes, this rank at "
            f"step {step} of {number} with {expected}: "
            "all ranks must make the same calls with the same sizes",
            peer=peer,
        )


def fill(into: Buffer, payload: Buffer, peer: int) -> None:
    """Copy the payload that rank `peer` sent into a buffer of the same size. Raises LinkError."""
    target = memoryview(into).cast("B") if memoryview(into).nbytes else memoryview(b"")
    if len(target) != len(payload):
        raise LinkError(f"rank {peer} sent {len(payload)} bytes where {len(target)} were expected", peer=f"rank {peer}")
    if len(target):
        target[:] = payload


def ranks(some: Iterable[int]) -> str:
    """Format the numbers of ranks as `rank 2`, or `ranks 2, 3`."""
    some = list(some)
    return f"rank{'s' if len(some) != 1 else ''} {', '.join(map(str, some))}"
