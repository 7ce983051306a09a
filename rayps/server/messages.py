"""What workers and shards say to each other."""

from __future__ import annotations

import enum
import json

from rayps import errors
from rayps.errors import LinkError, RaypsError
from rayps.link import Message


class Kind(enum.IntEnum):
    """What a message says. Fields: a, b, weight, payload."""

    JOIN = 1  # a = rank, b = its step or -1 to ask, weight = seconds its pulls may wait -> ACK a = its next step here
    PUSH = 2  # a = step, b = offset, weight = samples, payload = slice -> ACK a = version
    PULL = 3  # a, b = elements lo, hi                                  -> VALUE a = version, b = lead, payload
    PUSH_PULL = 8  # a = step, weight = samples, payload = whole slice   -> VALUE of the whole slice
    READ = 4  # a, b = elements lo, hi, outside the clock               -> VALUE
    ACK = 5
    VALUE = 6
    PUSH_CODED = 20  # as PUSH, payload = an encoded slice (`rayps.server.coded`)
    PUSH_PULL_CODED = 21  # as PUSH_PULL, likewise
    ERROR = 7  # payload = {"kind", "message", "data"} as JSON


CODED = {Kind.PUSH: Kind.PUSH_CODED, Kind.PUSH_PULL: Kind.PUSH_PULL_CODED}
PUSHES = frozenset(CODED) | frozenset(CODED.values())


def refusal(tag: int, error: Exception) -> tuple[Message, bytes]:
    """An error as the answer to a request."""
    body = {"kind": type(error).__name__, "message": str(error), "data": getattr(error, "data", {})}
    return Message(Kind.ERROR, tag=tag), json.dumps(body).encode()


def error_of(reply: Message) -> RaypsError:
    """The error that an ERROR message carries."""
    body = json.loads(bytes(reply.payload))
    kind = getattr(errors, body["kind"], LinkError)
    return kind(body["message"], **body["data"])
