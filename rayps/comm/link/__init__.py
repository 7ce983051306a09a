"""One connection between two peers: over shared memory on one host, over TCP between hosts.

Every wait has a deadline, and every message carries a generation.
"""

from rayps.comm.link.listener import Listener, Prefer, connect, parse_address
from rayps.comm.link.socket_link import Link, Message

__all__ = ["Link", "Listener", "Message", "Prefer", "connect", "parse_address"]
