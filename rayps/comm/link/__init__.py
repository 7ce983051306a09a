"""One connection between two peers: shared memory on one host, TCP between hosts; deadlines, generation."""

from rayps.comm.link.listener import Listener, Prefer, connect, parse_address
from rayps.comm.link.socket_link import Link, Message

__all__ = ["Link", "Listener", "Message", "Prefer", "connect", "parse_address"]
