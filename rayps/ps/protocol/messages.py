"""The messages between workers, servers and the manager of a server group.

A worker's request is applied to all of its segments or to none. A request names the generation that each segment has in
the worker's map. If the server does not serve one of the segments in that generation, it applies nothing, and answers
STALE. The payload of a request begins with a head (`pack_head`): for each segment its number, its generation, and the
size of its piece in bytes. The pieces follow the head. The pieces of the answer are in the same order.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rayps_client import errors
from rayps_client.errors import LinkError, RaypsError

from rayps.comm.link import Message

JOIN_PAYLOAD = struct.Struct("<dq")


@enum.unique
class GroupMessage(enum.IntEnum):
    """The kind of a message, with the meaning of a, b, weight and payload. An answer has its request's tag."""

    # worker -> server (one connection for each worker, server and space)
    # JOIN: payload = JOIN_PAYLOAD of the seconds that pulls may wait, and the first step that this rank can repeat. The
    # server counts missing pushes below this step as lost; with -1 it counts none
    JOIN = 1  # a = space, b = rank (-1: only reads, or loads states), weight = incarnation -> JOINED
    PUSH = 2  # a = step, weight = samples, payload = head + pieces -> ACK
    PULL = 3  # payload = head + pieces that name what to pull -> VALUE, once the clocks of all segments allow it
    PUSH_PULL = 4  # as PUSH, dense segments only -> VALUE of the same segments, as for PULL
    READ = 5  # as PULL, without waiting for the clock -> VALUE
    # LOAD: only rank -1 may send it; a state is the result of `ServedSegment.dump`
    LOAD = 6  # payload = head + a state for each segment -> ACK, once the backups have the states
    # PART: request the segments' states after a round; the server answers when it closes the round
    PART = 7  # a = round (-1: now), payload = head -> VALUE: a state for each segment; ERROR if it is not retained
    SAVED = 8  # a = round: the state after this round is stored elsewhere; no answer
    FLUSH = 9  # payload = head -> ACK, once all pushes of this rank are durable
    CHANGES = 10  # tables only; payload = head + versions (int64) -> VALUE: changes since these, as Arrow streams
    MARKS = 11  # payload = head -> VALUE: for each segment, the next step of each rank (int64)
    # HOLD begins a consistent pull: from the answer on, pushes to these segments wait. With a > 0 the answer waits
    # until the clock lets this rank pull, which counts a - 1 pushes of its own
    HOLD = 12  # payload = head -> VALUE: for each segment, the number of applied steps of each rank (int64)
    # AIM: during a HOLD, apply the pushes below these steps nevertheless
    AIM = 13  # payload = head + a step for each rank (int64) -> ACK, once all these pushes are applied
    RELEASE = 14  # end a consistent pull: apply the pushes that have waited since HOLD; no answer
    TAKE_RANK = 15  # where there is no manager: a = space, b = rank -> ACK: the incarnation for the next JOIN (int64)
    # ARRIVE, with backup workers: ask for the members of round a (`ArrivalKind` says what for); weight = their number
    ARRIVE = 16  # payload = head + `ArrivalKind` (int64) -> VALUE: members of rounds from a on (`pack_members`)
    # MEMBERS: only rank -1 may send it; weight = the incarnation of the worker that joins, if one does
    MEMBERS = 17  # payload = head + a `MemberChange` for each segment -> VALUE: as MARKS, once the backups have it
    # server -> worker. In every answer, weight = the step of this rank below which all pushes to the request's segments
    # are durable
    JOINED = 20  # payload = int64 pairs (segment, this rank's next step) of all segments that this server is primary of
    ACK = 21
    # VALUE: the version is the least number of optimizer steps of the segments
    VALUE = 22  # a = version, b = this rank's lead in rounds, payload = pieces
    STALE = 23  # payload = int64: the segments that are not served in the requested generation; nothing was applied
    ERROR = 24  # payload = JSON of an error, see `make_refusal`
    # primary -> backup, answered by COPIED in the order of sending
    STATE = 40  # a = space, b = segment, weight = generation, payload = the backup's first state (`ServedSegment.dump`)
    FORWARD = 41  # a = space, b = segment, weight = generation, payload = a change (`ServedSegment.push`) to replay
    COPIED = 42  # tag = the tag of the last message that the backup applied
    # server <-> manager. Payloads are JSON, except that of SPACE
    REGISTER = 60  # {"name", "address", "host", "pid", "holds": {space: [[segment, role, generation], ...]}} -> WELCOME
    WELCOME = 61  # {"heartbeat": seconds}
    HEARTBEAT = 62  # the server's load (`rayps.ps.server.outbound`); tag = the number of the heartbeat
    SPACE = 63  # payload = a pickled Space: sent before the first orders about it
    ORDERS = 64  # {"space", "holdings": [a `SegmentOrder`, ...]}
    REPORT = 65  # {"space", "events": [[an `Event`, segment, generation, name of a backup], ...]}
    FORGET = 66  # a = space: the space is closed; free its memory
    # BRANCH: begin these segments of a space with the values of the same segments of its parent
    BRANCH = 67  # a = space, b = parent space, payload = {"segments": [[segment, generation], ...]}
    # worker <-> manager
    WATCH = 80  # a = space -> MAP now, and each time the map changes
    MAP = 81  # `SpaceMap.to_json`


class ArrivalKind(enum.IntEnum):
    """What a worker asks by ARRIVE, in a space with backup workers."""

    LOOK = 0  # answer at once, with the members of the rounds that are decided
    WAIT = 1  # answer when the round's members are decided; this worker has no rows
    READY = 2  # the same; this worker's gradient of the round is complete
    MEET = 3  # answer, without members, when so many workers have asked this before the round


class Role(enum.StrEnum):
    """The role of a server for a segment."""

    # PRIMARY: serve the segment, and send its state and changes to the named backups; report a backup as SYNCED when it
    # has every acknowledged push
    PRIMARY = "primary"
    COPY = "copy"  # be a backup: apply STATE and FORWARD of the primary of that generation
    LEAVING = "leaving"  # answer STALE from now on; report HANDED once the backups have applied all changes
    NONE = "none"  # drop the segment


class SegmentOrder(NamedTuple):
    """An order of the manager about one segment: the role that the server must have. It is one row of ORDERS.

    A repeated order changes nothing.
    """

    segment: int
    role: Role
    generation: int
    copies: dict[str, str]  # server of a backup -> its address; {} if the role is not PRIMARY or LEAVING
    lost: bool = False  # the segment's values were lost: the server serves it only after a state is loaded

    @classmethod
    def of(cls, row: Sequence[Any]) -> SegmentOrder:
        """Return the order in a row of ORDERS, as decoded from JSON."""
        return cls(row[0], Role(row[1]), *row[2:])


class Event(enum.StrEnum):
    """What a server reports to the manager about a segment."""

    READY = "ready"  # the server is PRIMARY in that generation, and serves requests
    SYNCED = "synced"  # backup `name` has every acknowledged push, and every later answer waits for this backup
    HANDED = "handed"  # the server is LEAVING, and all backups have applied all changes
    COPY_LOST = "copy lost"  # the connection to backup `name` failed; answers wait until ORDERS no longer name it
    DROPPED = "dropped"  # the server holds nothing of the segment, as its order NONE requires
    ASKED = "asked"  # the server is ordered to be PRIMARY, but has no state of the segment


def make_refusal(tag: int, error: Exception) -> tuple[Message, bytes]:
    """Return the message that answers the request `tag` with an error, and the message's payload."""
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
    data: Any  # a buffer; a memoryview if `unpack` returned it


def pack_head(pieces: Sequence[SegmentPayload]) -> bytes:
    """Return the head of a request, in int64: the number of segments, then for each its number, generation and size."""
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
    """Return the pieces of a payload that `pack` made, as views. Raises ValueError if `pack` cannot have made it."""
    view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
    if len(view) < 8:
        raise ValueError(f"a request of {len(view)} bytes is shorter than the 8 bytes that count its segments")
    count = int(np.frombuffer(view[:8], np.int64)[0])
    at = 8 + 24 * count
    if not 0 <= count <= (len(view) - 8) // 24:
        raise ValueError(
            f"a request of {len(view)} bytes is not valid: its head names {count} segments, and each takes 24 bytes"
        )
    found = []
    for segment, generation, size in np.frombuffer(view[8:at], np.int64).reshape(count, 3).tolist():
        if size < 0 or at + size > len(view):
            raise ValueError(
                f"the head of a request gives segment {segment} a piece of {size} bytes, and the request has only "
                f"{len(view) - at} bytes left"
            )
        found.append(SegmentPayload(segment, generation, view[at : at + size]))
        at += size
    return found


def pack_members(rounds: Iterable[Sequence[int]]) -> bytes:
    """Encode the members of rounds as a payload of int64: for each round their number, then their ranks."""
    return pack_numbers(value for members in rounds for value in (len(members), *members))


def unpack_members(payload: Any) -> list[tuple[int, ...]]:
    """Return the members of rounds that `pack_members` encoded."""
    values, found = read_numbers(payload), list[tuple[int, ...]]()
    while values:
        found.append(tuple(values[1 : 1 + values[0]]))
        values = values[1 + values[0] :]
    return found


def pack_numbers(values: Iterable[int]) -> bytes:
    """Encode whole numbers as a payload of int64."""
    return np.fromiter(values, np.int64).tobytes()


def read_numbers(payload: Any) -> list[int]:
    """Return the numbers in a payload that `pack_numbers` made."""
    found: list[int] = np.frombuffer(payload, np.int64).tolist() if len(payload) else []
    return found
