"""What workers, servers and the manager of an elastic group say to each other.

A request of a worker to a server names segments: its payload begins with a head (`pack_head`), whose rows say which
segment, in which generation, and how many bytes of the rest are its piece. Either all of a request has effect or, where
a generation is not the server's, none of it, and the answer is STALE. An answer's pieces come in the order asked.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rayps.comm.link import Message
from rayps.core import errors
from rayps.core.errors import LinkError, RaypsError


class GroupMessage(enum.IntEnum):
    """What a message says. Fields: a, b, weight, payload. Answers carry the tag of what they answer."""

    # worker -> server (one link for each worker, server and space)
    # JOIN: payload = seconds that pulls may wait; behind it the first step that this rank can push again, or -1
    JOIN = 1  # a = space, b = rank (-1: the opener, a reader), weight = incarnation -> JOINED
    PUSH = 2  # a = step, weight = samples, payload = head + pieces  -> ACK
    PULL = 3  # payload = head + pieces (which rows, for a table)    -> VALUE, once the clock of all of them allows
    PUSH_PULL = 4  # as PUSH; dense segments only                    -> VALUE of the same segments
    READ = 5  # as PULL, outside the clock                           -> VALUE
    LOAD = 6  # payload = head + a state each (`Segment.dump`); rank -1 only -> ACK once copies have it
    PART = 7  # a = round, payload = head                            -> VALUE, a state each; ERROR if not kept
    SAVED = 8  # a = round: the state after it is kept elsewhere; no answer
    FLUSH = 9  # payload = head: answer once all pushes of this rank are durable -> ACK
    CHANGES = 10  # tables only; payload = head + since which version (int64) -> VALUE, an Arrow stream each
    MARKS = 11  # payload = head -> VALUE, int64 a segment and rank: its next step there
    HOLD = 12  # a = 1: once the clock lets this rank pull; payload = head -> VALUE, int64: steps by rank. Pushes wait
    AIM = 13  # payload = head + int64: steps by rank            -> ACK once all of these are applied
    RELEASE = 14  # pushes that wait are applied; no answer
    SEAT = 15  # a = space, b = rank: where no manager counts -> ACK, payload = int64: the incarnation of the next JOIN
    # server -> worker. Every answer: weight = step of this rank below which all pushes to these segments are durable
    JOINED = 20  # payload = int64 pairs: segment, this rank's next step there; of all segments that it is primary of
    ACK = 21
    VALUE = 22  # a = version (steps taken, the least of the segments), b = lead in rounds, payload = pieces
    STALE = 23  # payload = int64: the segments that are not here in that generation; nothing was applied
    ERROR = 24  # as `refusal`
    # primary -> copy, answered by COPIED in the order of sending
    STATE = 40  # a = space, b = segment, weight = generation, payload = Segment.dump(): begin a copy with it
    FORWARD = 41  # a = space, b = segment, weight = generation, payload = what `Segment.push` gave: apply it
    COPIED = 42  # tag = the last message that is applied
    # server <-> manager. Payloads are JSON, unless said otherwise
    REGISTER = 60  # {"name", "address", "host", "pid"} -> WELCOME
    WELCOME = 61  # {"heartbeat": seconds}
    HEARTBEAT = 62  # load: see `rayps.ps.server.orders`; tag counts up
    SPACE = 63  # payload = a pickled Space: a server that is to hold some of it learns it first
    ORDERS = 64  # {"space", "holdings": [[segment, role, generation, {copy: address}], ...]}; see `Role`
    REPORT = 65  # {"space", "events": [[what, segment, generation, name], ...]}; see `Event`
    FORGET = 66  # a = space: it is closed, its memory goes
    BRANCH = 67  # a = space, b = parent space: payload = {"segments": [[segment, generation], ...]}
    # worker <-> manager
    WATCH = 80  # a = space -> MAP now, and again each time it changes
    MAP = 81  # `SpaceMap.to_json`


class Role(enum.StrEnum):
    """What a server is to be for a segment. Orders say all of it: a server compares and makes it so."""

    PRIMARY = "primary"  # serve it; keep the named copies (make those that are new, and report them SYNCED)
    COPY = "copy"  # take STATE and FORWARD from the primary of that generation
    LEAVING = "leaving"  # refuse requests as STALE from now on; report HANDED once the copies have everything
    NONE = "none"  # forget it


class SegmentOrder(NamedTuple):
    """What a server is to be for a segment: a row of ORDERS. Two equal orders need the same state."""

    segment: int
    role: Role
    generation: int
    copies: dict[str, str]  # of a primary: backup -> address
    lost: bool = False  # its values were lost: it serves nothing before a state is loaded

    @classmethod
    def of(cls, row: Sequence[Any]) -> SegmentOrder:
        """Return the order that JSON has as this row."""
        return cls(row[0], Role(row[1]), *row[2:])


class Event(enum.StrEnum):
    """What a server reports about a segment."""

    READY = "ready"  # PRIMARY in that generation, and serving
    SYNCED = "synced"  # copy `name` has everything, and every later answer waits for it
    HANDED = "handed"  # LEAVING, and all copies have everything
    COPY_LOST = "copy lost"  # the link to copy `name` failed; answers wait until ORDERS leave it out
    ASKED = "asked"  # a COPY that heard nothing, or a gap: it needs a new STATE


def refusal(tag: int, error: Exception) -> tuple[Message, bytes]:
    """An error as the answer to a request."""
    body = {"kind": type(error).__name__, "message": str(error), "data": getattr(error, "data", {})}
    return Message(GroupMessage.ERROR, tag=tag), json.dumps(body).encode()


def error_of(reply: Message) -> RaypsError:
    """The error that an ERROR message carries."""
    body = json.loads(bytes(reply.payload))
    kind = getattr(errors, body["kind"], LinkError)
    found: RaypsError = kind(body["message"], **body["data"])
    return found


class SegmentPayload(NamedTuple):
    """A segment in a request: its number, its generation, and its bytes."""

    segment: int
    generation: int
    data: Any  # a buffer; memoryview when it was read


def pack_head(pieces: Sequence[SegmentPayload]) -> bytes:
    """The head of a request: int64 n, then n rows of segment, generation, bytes of its piece."""
    rows = [[each.segment, each.generation, memoryview(each.data).nbytes] for each in pieces]
    return np.array([len(rows), *(value for row in rows for value in row)], np.int64).tobytes()


def pack(pieces: Sequence[SegmentPayload]) -> bytearray:
    """A request's payload: head, then the pieces one after the other."""
    return bytearray().join(
        [
            pack_head(pieces),
            *(memoryview(each.data).cast("B") if memoryview(each.data).nbytes else b"" for each in pieces),
        ]
    )


def unpack(payload: Any) -> list[SegmentPayload]:
    """Read back what `pack` gave; the pieces are views. Raises ValueError."""
    view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
    if len(view) < 8:
        raise ValueError("a request names no segments")
    count = int(np.frombuffer(view[:8], np.int64)[0])
    at = 8 + 24 * count
    if not 0 <= count <= (len(view) - 8) // 24:
        raise ValueError(f"a request of {len(view)} bytes cannot name {count} segments")
    found = []
    for segment, generation, size in np.frombuffer(view[8:at], np.int64).reshape(count, 3).tolist():
        if size < 0 or at + size > len(view):
            raise ValueError(f"the piece of segment {segment} does not fit into the request")
        found.append(SegmentPayload(segment, generation, view[at : at + size]))
        at += size
    return found


def numbers(values: Iterable[int]) -> bytes:
    """Whole numbers as a payload."""
    return np.fromiter(values, np.int64).tobytes()


def read_numbers(payload: Any) -> list[int]:
    """Read back what `numbers` gave."""
    found: list[int] = np.frombuffer(payload, np.int64).tolist() if len(payload) else []
    return found
