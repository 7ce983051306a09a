"""A connection between two peers: by shared memory on one host, by TCP between hosts.

Every wait has a deadline, and every message contains a generation.
"""

from rayps.comm.link.listener import Listener, Prefer, connect, parse_address
from rayps.comm.link.socket_link import Link, Message

__all__ = ["Link", "Listener", "Message", "Prefer", "connect", "parse_address"]
