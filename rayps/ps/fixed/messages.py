"""What workers and shards say to each other."""

from __future__ import annotations

import enum
import json

from rayps.comm.link import Message
from rayps.core import errors
from rayps.core.errors import LinkError, RaypsError


class ShardMessage(enum.IntEnum):
    """What a message says. Fields: a, b, weight, payload.

    An answer has the shard's version as a, and as weight the rank's step below which all are durable.
    """

    JOIN = 1  # a = rank, b = its step or -1 to ask, weight = seconds its pulls may wait -> ACK a = its next step here
    PUSH = 2  # a = step, b = offset, weight = samples, payload = slice -> ACK a = version
    PULL = 3  # a, b = elements lo, hi                                  -> VALUE a = version, b = lead, payload
    PUSH_PULL = 8  # a = step, weight = samples, payload = whole slice   -> VALUE of the whole slice
    READ = 4  # a, b = elements lo, hi, outside the clock               -> VALUE
    IDS = 9  # a = number, b = parameter, payload = row ids (int64)     -> ACK; the number now stands for these rows
    PUSH_ROWS = 10  # a = step, b = number, weight = samples, payload   -> ACK
    PULL_ROWS = 11  # a = number                                        -> VALUE of these rows
    HOLD = 12  # a = 1: once the clock lets this rank pull              -> VALUE, payload = steps by rank (int64)
    AIM = 13  # payload = steps by rank (int64)                         -> ACK once all of these are applied
    RELEASE = 14  # what was held back is applied; no answer
    REACHED = 15  # a = rank                                             -> ACK a = its next step here
    ACK = 5
    VALUE = 6
    PUSH_CODED = 20  # as PUSH, payload = an encoded slice (`rayps.ps.fixed.coded`)
    PUSH_PULL_CODED = 21  # as PUSH_PULL, likewise
    ERROR = 7  # payload = {"kind", "message", "data"} as JSON


CODED = {ShardMessage.PUSH: ShardMessage.PUSH_CODED, ShardMessage.PUSH_PULL: ShardMessage.PUSH_PULL_CODED}
PULLING = {ShardMessage.PUSH: ShardMessage.PUSH_PULL, ShardMessage.PUSH_CODED: ShardMessage.PUSH_PULL_CODED}
PUSHES = frozenset(CODED) | frozenset(CODED.values()) | {ShardMessage.PUSH_ROWS}


def refusal(tag: int, error: Exception) -> tuple[Message, bytes]:
    """An error as the answer to a request."""
    body = {"kind": type(error).__name__, "message": str(error), "data": getattr(error, "data", {})}
    return Message(ShardMessage.ERROR, tag=tag), json.dumps(body).encode()


def error_of(reply: Message) -> RaypsError:
    """The error that an ERROR message carries."""
    body = json.loads(bytes(reply.payload))
    kind = getattr(errors, body["kind"], LinkError)
    return kind(body["message"], **body["data"])
