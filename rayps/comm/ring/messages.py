"""The messages between the ranks of a ring, and functions that build and check them."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from rayps_client.errors import LinkError, PeerLost, PeerTimeout
from rayps_client.values import Buffer

from rayps.comm.link import Message

Piece = tuple[int, Buffer]  # (rank, buffer to send to that rank, or to fill with data from it)
Arrival = tuple[Buffer, Callable[[], Buffer | None]]  # (buffer to fill, function that returns the data to pass on)
# an awaited message: (kind, tag, step, the buffer to fill; for a PARCEL the list to append it to)
Want = tuple[int, int, int, "Buffer | list[Message]"]


class RingMessage(enum.IntEnum):
    """Kinds of messages between two ranks."""

    DATA = 0  # data of a collective: tag is the collective's number, a the step within it
    POINT = 1  # a message of `Ring.send`: tag is the caller's
    ASK = 2  # asks whether the receiver is alive
    HERE = 3  # answers ASK
    ABORT = 4  # the ring has failed: a is the kind of error; the payload has the rank at fault and the error's message
    BYE = 5  # the sender closes its ring without an error
    PARCEL = 6  # tensors of any shape; `rayps.comm.ring.p2p` defines tag, a and b
    # with backup workers; tag is the number of a step
    ARRIVED = 7  # to rank 0: the sender's gradient of this step is complete; a is the number of members of the step
    MEMBERS = 8  # from rank 0: the members of this step are known; the payload has their ranks as int64


EARLY = frozenset({RingMessage.POINT, RingMessage.PARCEL, RingMessage.ARRIVED, RingMessage.MEMBERS})


class EarlyMessages:
    """Messages of other ranks that arrived before this rank called a function that receives them."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int, int], deque[Message]] = {}  # by sending rank, kind and tag

    def put(self, peer: int, message: Message) -> None:
        """Store a message of one of the kinds `EARLY` from rank `peer`."""
        self._messages.setdefault((peer, message.kind, message.tag), deque()).append(message)

    def fetch(self, peer: int, want: Want) -> bool:
        """If the message `want` of rank `peer` is stored, remove and deliver it; return whether it was stored.

        The payload of a POINT is copied into the buffer in `want`. A PARCEL is appended to the list in `want`.
        """
        kind, tag, _, into = want
        queue = self._messages.get((peer, kind, tag))
        if not queue:
            return False
        message = queue.popleft()
        if isinstance(into, list):
            into.append(message)
        else:
            fill(into, message.payload, peer)
        return True

    def waiting(self, peer: int, kind: int) -> Iterator[Message]:
        """Yield the stored messages of this kind from rank `peer`."""
        for (frm, what, _), queue in self._messages.items():
            if frm == peer and what == kind:
                yield from queue

    def take_all(self, kind: int) -> list[tuple[int, Message]]:
        """Remove and return the stored messages of this kind, each with its sender, in the order of each sender."""
        keys = [key for key in self._messages if key[1] == kind]
        return [(key[0], message) for key in keys for message in self._messages.pop(key)]

    def clear(self) -> None:
        """Drop all messages."""
        self._messages.clear()


_WHY: list[type[LinkError]] = [LinkError, PeerLost, PeerTimeout]  # the index is the kind of error in an ABORT


def abort_message(error: LinkError) -> tuple[Message, bytes]:
    """Return an ABORT message that reports `error` to the other ranks, and the message's payload."""
    why = next((i for i in (1, 2) if isinstance(error, _WHY[i])), 0)
    return Message(RingMessage.ABORT, a=why), f"{error.data.get('peer', '')}\n{error.message}".encode()


def abort_error(abort: Message, by: str) -> LinkError:
    """Return the error that an ABORT message reports; `by` is the rank that sent it."""
    who, why = bytes(abort.payload).decode(errors="replace").split("\n", 1)
    return _WHY[abort.a](why, peer=who, told_by=by)


def must_match(head: Message, size: int, peer: str, want: Want) -> None:
    """Raise LinkError if a message of `peer`, with this header and `size` bytes, is not the awaited message `want`."""
    _, number, step, into = want
    expected = 0 if isinstance(into, list) else memoryview(into).nbytes
    if (head.tag, head.a, size) != (number, step, expected):
        raise LinkError(
            f"{peer} is at step {head.a} of collective {head.tag} and sent {size} bytes, but this rank is at step "
            f"{step} of collective {number} and expects {expected} bytes: all ranks must make the same calls with the "
            "same sizes",
            peer=peer,
        )


def fill(into: Buffer, payload: Buffer, peer: int) -> None:
    """Copy the payload that rank `peer` sent into a buffer. Raises LinkError if the sizes differ."""
    target = memoryview(into).cast("B") if memoryview(into).nbytes else memoryview(b"")
    if len(target) != len(payload):
        raise LinkError(f"rank {peer} sent {len(payload)} bytes where {len(target)} were expected", peer=f"rank {peer}")
    if len(target):
        target[:] = payload


def format_ranks(some: Iterable[int]) -> str:
    """Format rank numbers as text: `rank 2`, or `ranks 2, 3`."""
    some = list(some)
    return f"rank{'s' if len(some) != 1 else ''} {', '.join(map(str, some))}"
