"""The connections between the processes of a job: find them, limit their rate, cut them.

A connection is changed through a copy of its descriptor (pidfd_getfd, Linux 5.6). Therefore only connections whose two
ends both belong to the named processes are touched, in whichever network namespace they are. Processes of one host may
also exchange vectors in shared memory, beside connections of unix sockets that carry the small messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rayps_client.errors import ClusterError

_PIDFD_GETFD = 438  # the system call's number, on all architectures
_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)
_ESTABLISHED, _CONNECTED = "01", "03"  # states in /proc/net/tcp and /proc/net/unix
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_DENIED = {
    errno.EPERM: "the system allows it only to root (kernel.yama.ptrace_scope): run the command as root",
    errno.ENOSYS: "the kernel has no pidfd_getfd (Linux 5.6): leave slow_line and cut_line out of --faults",
}
UNLIMITED = (1 << 32) - 1  # bytes per second


@dataclass(frozen=True, slots=True)
class SocketEnd:
    """One end of a connection: the process, its descriptor, and the addresses as the kernel prints them (TCP).

    The addresses of a unix socket are empty; `peer` is then the process at the other end.
    """

    pid: int
    descriptor: int
    local: str = ""
    remote: str = ""
    peer: int = 0

    @property
    def tcp(self) -> bool:
        """Whether this is an end of a TCP connection."""
        return bool(self.local)


def connections_among(pids: Iterable[int]) -> list[SocketEnd]:
    """Return the ends of the connections whose both ends are in these processes.

    Raises:
        ClusterError: the system does not allow to look into these processes.
    """
    inside = set(pids)
    ends = [end for pid in inside for end in _ends(pid)]
    known = {(end.local, end.remote) for end in ends if end.tcp}
    return [end for end in ends if ((end.remote, end.local) in known if end.tcp else end.peer in inside)]


def _ends(pid: int) -> Iterator[SocketEnd]:
    """Yield the connected TCP and unix sockets of a process."""
    tcp: Mapping[str, tuple[str, str]] = {
        fields[9]: (_plain(fields[1]), _plain(fields[2]))
        for fields in _table(pid, ("tcp", "tcp6"))
        if fields[3] == _ESTABLISHED
    }
    unix = {fields[6] for fields in _table(pid, ("unix",)) if fields[5] == _CONNECTED}
    with contextlib.suppress(OSError):  # the process has ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor was closed
                kind, _, inode = str(link.readlink()).partition(":")
                inode = inode.strip("[]")
                if kind != "socket":
                    continue
                if inode in tcp:
                    yield SocketEnd(pid, int(link.name), *tcp[inode])
                elif inode in unix and (peer := _peer(pid, int(link.name))):
                    yield SocketEnd(pid, int(link.name), peer=peer)


def _table(pid: int, names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the fields of each line of tables in /proc/PID/net."""
    for name in names:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                yield line.split()


def _plain(address: str) -> str:
    """Return an address of /proc/net/tcp6 that is an IPv4 address in the form of /proc/net/tcp."""
    host, _, port = address.partition(":")
    return f"{host[-8:]}:{port}" if host.startswith("0000000000000000FFFF0000") else address


def _peer(pid: int, descriptor: int) -> int:
    """Return the id of the process at the other end of a unix socket; 0 if it is not known."""
    found = [0]

    def ask(copy: socket.socket) -> None:
        found[0] = _CREDENTIALS.unpack(copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]

    _with_copy(SocketEnd(pid, descriptor), ask)
    return found[0]


def limit(ends: Iterable[SocketEnd], rate: int) -> int:
    """Let each TCP connection send at most `rate` bytes per second; return the number of changed connections."""

    def change(copy: socket.socket) -> None:
        copy.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("=I", rate))

    return sum(_with_copy(end, change) for end in ends if end.tcp)


def cut(ends: Iterable[SocketEnd]) -> int:
    """Shut connections down in both directions; return the number of cut connections."""
    return sum(_with_copy(end, lambda copy: copy.shutdown(socket.SHUT_RDWR)) for end in ends)


def _with_copy(end: SocketEnd, change: Callable[[socket.socket], None]) -> bool:
    try:
        pidfd = os.pidfd_open(end.pid)
    except OSError:
        return False  # the process has ended
    try:
        number = _copy_of(pidfd, end.descriptor)
    finally:
        os.close(pidfd)
    if number is None:
        return False
    with socket.socket(fileno=number) as copy:
        try:
            change(copy)
        except OSError:
            return False  # the connection was closed
    return True


def _copy_of(pidfd: int, descriptor: int) -> int | None:
    """Return a copy of another process's descriptor, or None if that process has closed it."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = int(libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0))
    if number >= 0:
        return number
    if reason := _DENIED.get(ctypes.get_errno()):
        raise ClusterError(f"a connection of another process cannot be changed: {reason}")
    return None


def cannot_change() -> str | None:
    """Return why this process cannot change connections of other processes, or None if it can."""
    if not hasattr(os, "pidfd_open"):
        return "the system has no pidfd_open (Linux 5.3)"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        pidfd = os.pidfd_open(other.pid)
        try:
            copy = _copy_of(pidfd, 0)
        except ClusterError as error:
            return error.message
        finally:
            os.close(pidfd)
            other.kill()
    if copy is not None:
        os.close(copy)
    return None
