"""Read what the Linux kernel counts for a TCP connection: bytes, busy time, retransmissions, the round trip's time.

The layout is that of `struct tcp_info` in Linux's include/uapi/linux/tcp.h, whose fields only grow at the end.
"""

from __future__ import annotations

import socket
import struct
import sys

from rayps.core.time.member_times import LineFacts

_RTT, _RETRANSMITS = struct.Struct("<I"), struct.Struct("<I")
_RTT_AT, _RETRANSMITS_AT, _ACKED_AT, _BUSY_AT, _RECEIVER_AT = 68, 100, 120, 168, 176  # offsets in bytes
_LONG = struct.Struct("<Q")
_SIZE = 184  # bytes up to the end of the time for which the receiver's window limited the sender
_MICRO = 1e-6


def read_tcp_facts(sock: socket.socket) -> LineFacts | None:
    """Return the facts of a connected TCP socket. Return None if it is closed, or if the system does not count them."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
    return parse(raw)


def parse(raw: bytes) -> LineFacts | None:
    """Return the facts in a `struct tcp_info`, or None if the kernel's struct is too short for them."""
    if len(raw) < _SIZE:
        return None
    busy, receiver = _LONG.unpack_from(raw, _BUSY_AT)[0], _LONG.unpack_from(raw, _RECEIVER_AT)[0]
    return LineFacts(
        _LONG.unpack_from(raw, _ACKED_AT)[0],
        max(0, busy - receiver) * _MICRO,
        _RETRANSMITS.unpack_from(raw, _RETRANSMITS_AT)[0],
        _RTT.unpack_from(raw, _RTT_AT)[0] * _MICRO,
    )
