"""One connection between two peers: shared memory on one host, TCP between hosts; deadlines, generation."""

from rayps.link.listener import Listener, Prefer, connect, parse_address
from rayps.link.wire import Link, Message

__all__ = ["Link", "Listener", "Message", "Prefer", "connect", "parse_address"]
