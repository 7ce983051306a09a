"""The messages between workers, servers and the manager of a server group.

A request of a worker has effect as a whole or not at all: if the server does not serve one of the named segments in the
named generation, nothing is applied, and the answer is STALE. The payload of a request begins with a head
(`pack_head`): for each segment its number, its generation, and the bytes of its piece. The pieces follow, and the
pieces of the answer are in the same order.
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
    """The kind of a message, with the meaning of a, b, weight and payload. An answer has its request's tag."""

    # worker -> server (one connection for each worker, server and space)
    # JOIN: payload = seconds that pulls may wait, then the first step that this rank can push again, or -1
    JOIN = 1  # a = space, b = rank (-1: a reader, or the process that loads), weight = incarnation -> JOINED
    PUSH = 2  # a = step, weight = samples, payload = head + pieces  -> ACK
    PULL = 3  # payload = head + pieces (which rows, for a table)    -> VALUE, once the clocks of all segments allow it
    PUSH_PULL = 4  # as PUSH; dense segments only                    -> VALUE of the same segments
    READ = 5  # as PULL, outside the clock                           -> VALUE
    LOAD = 6  # payload = head + a state each (`ServedSegment.dump`); rank -1 only -> ACK once backups have it
    PART = 7  # a = round, payload = head                            -> VALUE, a state each; ERROR if not kept
    SAVED = 8  # a = round: the state after this round is stored elsewhere; no answer
    FLUSH = 9  # payload = head -> ACK, once all pushes of this rank are durable
    CHANGES = 10  # tables only; payload = head + a version (int64) -> VALUE: changes since, an Arrow stream each
    MARKS = 11  # payload = head -> VALUE, int64 for each segment and rank: its next step
    HOLD = 12  # a = 1: once the clock lets this rank pull; payload = head -> VALUE, int64: steps by rank; pushes wait
    AIM = 13  # payload = head + int64: steps by rank            -> ACK, once all these steps are applied
    RELEASE = 14  # apply the pushes that wait since HOLD; no answer
    SEAT = 15  # a = space, b = rank, without a manager -> ACK, payload = int64: the incarnation of the next JOIN
    # server -> worker. Every answer: weight = step of this rank below which all pushes to these segments are durable
    JOINED = 20  # payload = int64 pairs: segment, this rank's next step; of all segments that the server is primary of
    ACK = 21
    VALUE = 22  # a = version (steps taken, the least of the segments), b = lead in rounds, payload = pieces
    STALE = 23  # payload = int64: the segments that are not served in that generation; nothing was applied
    ERROR = 24  # as `refusal`
    # primary -> backup, answered by COPIED in the order of sending
    STATE = 40  # a = space, b = segment, weight = generation, payload = `ServedSegment.dump`: begin a backup with it
    FORWARD = 41  # a = space, b = segment, weight = generation, payload = a result of `ServedSegment.push`: replay it
    COPIED = 42  # tag = the last message that was applied
    # server <-> manager. Payloads are JSON, except that of SPACE
    REGISTER = 60  # {"name", "address", "host", "pid", "holds": {space: [[segment, role, generation], ...]}} -> WELCOME
    WELCOME = 61  # {"heartbeat": seconds}
    HEARTBEAT = 62  # the load, see `rayps.ps.server.outbound`; tag counts up
    SPACE = 63  # payload = a pickled Space: sent before the first orders about it
    ORDERS = 64  # {"space", "holdings": [a `SegmentOrder`, ...]}
    REPORT = 65  # {"space", "events": [[an `Event`, segment, generation, name of a backup], ...]}
    FORGET = 66  # a = space: the space is closed; free its memory
    BRANCH = 67  # a = space, b = parent space: payload = {"segments": [[segment, generation], ...]}
    # worker <-> manager
    WATCH = 80  # a = space -> MAP now, and each time the map changes
    MAP = 81  # `SpaceMap.to_json`


class Role(enum.StrEnum):
    """The role of a server for a segment."""

    PRIMARY = (
        "primary"  # serve the segment, and copy it to the named backups; report each as SYNCED when it has everything
    )
    COPY = "copy"  # be a backup: take STATE and FORWARD from the primary of that generation
    LEAVING = "leaving"  # refuse requests as STALE from now on; report HANDED once the backups have everything
    NONE = "none"  # drop it


class SegmentOrder(NamedTuple):
    """The whole state that a server is to reach for a segment: a row of ORDERS. A repeated order changes nothing."""

    segment: int
    role: Role
    generation: int
    copies: dict[str, str]  # of a primary: backup -> address
    lost: bool = False  # the segment's values were lost: the server serves none before a state is loaded

    @classmethod
    def of(cls, row: Sequence[Any]) -> SegmentOrder:
        """Return the order that JSON has as this row."""
        return cls(row[0], Role(row[1]), *row[2:])


class Event(enum.StrEnum):
    """A server's report about a segment."""

    READY = "ready"  # PRIMARY in that generation, and serving
    SYNCED = "synced"  # backup `name` has everything, and every later answer waits for this backup
    HANDED = "handed"  # LEAVING, and all backups have everything
    COPY_LOST = "copy lost"  # the connection to backup `name` failed; answers wait until ORDERS name it no more
    ASKED = "asked"  # a COPY has no STATE, or lacks a forwarded change: the server needs a new STATE


def refusal(tag: int, error: Exception) -> tuple[Message, bytes]:
    """Return an error as the answer to a request."""
    body = {"kind": type(error).__name__, "message": str(error), "data": getattr(error, "data", {})}
    return Message(GroupMessage.ERROR, tag=tag), json.dumps(body).encode()


def error_of(reply: Message) -> RaypsError:
    """Return the error in an ERROR message."""
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
    """Return the head of a request: int64 n, then n rows of segment, generation, bytes of its piece."""
    rows = [[each.segment, each.generation, memoryview(each.data).nbytes] for each in pieces]
    return np.array([len(rows), *(value for row in rows for value in row)], np.int64).tobytes()


def pack(pieces: Sequence[SegmentPayload]) -> bytearray:
    """Return a request's payload: the head, then the pieces one after the other."""
    return bytearray().join(
        [
            pack_head(pieces),
            *(memoryview(each.data).cast("B") if memoryview(each.data).nbytes else b"" for each in pieces),
        ]
    )


def unpack(payload: Any) -> list[SegmentPayload]:
    """Return the pieces of a payload that `pack` made, as views. Raises ValueError: it is none."""
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
    """Return whole numbers as a payload."""
    return np.fromiter(values, np.int64).tobytes()


def read_numbers(payload: Any) -> list[int]:
    """Return the numbers in a payload that `numbers` made."""
    found: list[int] = np.frombuffer(payload, np.int64).tolist() if len(payload) else []
    return found
