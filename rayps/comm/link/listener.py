"""Establish connections: a listener with two sockets (unix and TCP), and `connect`.

Two peers count as being on one host if the handshake over an abstract unix socket succeeds. The name of such a socket
is valid within one network namespace, and the socket leaves no file behind. `rayps.comm.link.socket_link` defines the
messages.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from rayps_client.errors import ConfigError, LinkError, PeerLost, PeerTimeout, StaleGeneration

from rayps.comm.link import handshake as link_hello
from rayps.comm.link import memory as link_memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.comm.link.socket_link import Link, Message, SocketLink, measure_time_left

__all__ = ["Link", "Listener", "ListenerAddress", "Message", "connect", "parse_address"]

GREETING_SECONDS = 10.0  # seconds after which a connection without a complete handshake is closed
_ABSTRACT = sys.platform == "linux"
_RETRY = (0.005, 0.2)  # first and longest pause between two attempts, in seconds
_CHECK_SECONDS = 0.05  # seconds between two calls of `check`, while `accept` or `connect` waits

Prefer = Literal["auto", "shm", "unix", "tcp"]


class ListenerAddress(NamedTuple):
    """A parsed address: the listener's name, TCP host and port, and the name of its unix socket ("" for none)."""

    name: str
    host: str
    port: int
    unix: str


def parse_address(address: str) -> ListenerAddress:
    """Parse a listener's address, `name@host:port/unix`. Raises ConfigError if it has another form."""
    try:
        name, rest = address.rsplit("@", 1)
        tcp, unix = rest.split("/", 1)
        host, port = tcp.rsplit(":", 1)
        return ListenerAddress(name, host, int(port), unix)
    except ValueError as error:
        raise ConfigError(
            f"{address!r} is not the address of a listener; pass `listener.address`", address=address
        ) from error


class _PendingHandshake:
    """A connection whose handshake is not complete."""

    def __init__(self, sock: socket.socket, steps: link_hello.Steps, transport: str) -> None:
        self.sock = sock
        self.steps = steps
        self.transport = transport
        self.deadline = time.monotonic() + GREETING_SECONDS
        self.need = 0
        self.got = bytearray()
        self.next(None)

    def next(self, data: bytes | None) -> link_hello.Greeted | None:
        """Advance the handshake with `data`. Return the result, or None if the handshake needs more bytes."""
        try:
            step = next(self.steps) if data is None else self.steps.send(data)
            while isinstance(step, bytes):
                if self.sock.send(step) != len(step):
                    raise ConnectionError("the caller does not read the handshake")
                step = next(self.steps)
        except StopIteration as end:
            greeted: link_hello.Greeted = end.value
            return greeted
        self.need = step
        return None

    def read(self) -> link_hello.Greeted | None:
        """Advance the handshake with the bytes that have arrived. Return the result, or None if it needs more bytes.

        Raises OSError or LinkError if the handshake has failed.
        """
        data = self.sock.recv(self.need - len(self.got))
        if not data:
            raise ConnectionError("the caller closed the connection during the handshake")
        self.got += data
        if len(self.got) < self.need:
            return None
        whole, self.got = bytes(self.got), bytearray()
        return self.next(whole)


class Listener:
    """The two sockets, unix and TCP, at which an actor accepts connections from peers that know the secret.

    With `port` 0 the system chooses a free TCP port. Several threads may accept, each for the generation that it names.
    """

    def __init__(self, name: str, secret: bytes, generation: int = 0, host: str = "127.0.0.1", port: int = 0) -> None:
        self.name = name
        self._generation = generation
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._ready: list[Link] = []
        self._lock = threading.RLock()  # guards the pending and the ready connections
        self.sockets: list[socket.socket] = []
        self._reserve = os.open(
            os.devnull, os.O_RDONLY | os.O_CLOEXEC
        )  # a spare descriptor, with which callers are rejected when the process has no other descriptor left
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        tcp = self._open(family, (host, port))
        unix = ""
        if _ABSTRACT:
            unix = f"rayps-{secrets.token_hex(16)}"
            self._open(socket.AF_UNIX, f"\0{unix}")
        self.address = f"{name}@{host}:{tcp.getsockname()[1]}/{unix}"

    def _open(self, family: int, where: tuple[str, int] | str) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        if not isinstance(where, str) and where[1]:  # a given port, which this process may have used just before
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(where)
        except OSError as error:
            sock.close()
            self.close()
            raise LinkError(f"{self.name!r} cannot listen on {where!r}: {error.strerror}", peer=self.name) from error
        sock.listen(512)
        sock.setblocking(False)
        self.sockets.append(sock)
        self._selector.register(sock, selectors.EVENT_READ)
        return sock

    def fileno(self) -> int:
        """Return a descriptor for a selector, or -1 once closed. It is readable if `accept_ready` has work to do."""
        return -1 if self._selector.get_map() is None else self._selector.fileno()

    def accept(
        self,
        generation: int,
        timeout: float,
        want: Callable[[str], bool] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Link:
        """Wait for the next peer of this generation whose handshake succeeds, and return its connection.

        `generation` is that of the caller when it began, not that of the listener now: a caller of an ended generation
        gets no connection of a later one. A peer whose handshake fails is dropped. With `want`, only the connection of
        a peer for whose name `want` returns True is returned. The connections of other peers are kept for a later call.
        `check` is called while the wait lasts, and ends it by an error.

        Raises:
            PeerTimeout: there is none within `timeout` seconds.
            StaleGeneration: another generation has begun.
        """
        deadline = time.monotonic() + timeout
        while True:
            check()
            link = self._accept_of(generation, want)
            if link is not None:
                return link
            left = measure_time_left(deadline)
            if not left:
                raise PeerTimeout(
                    f"no peer connected to {self.name!r} within {timeout:g} s (the knob is `timeout`)",
                    peer="anyone",
                    seconds=timeout,
                )
            self._selector.select(min(left, _CHECK_SECONDS))

    def accept_ready(self) -> Link | None:
        """Return the next connection of generation 0, or None, without waiting, if no handshake is complete.

        It is for listeners whose generation is always 0, such as those of servers.
        """
        return self._accept_of(0, None)

    def begin_generation(self, generation: int) -> None:
        """Accept connections of this generation only from now on. Raises StaleGeneration if a later one has begun."""
        with self._lock:
            if generation < self._generation:
                raise self._explain_stale(generation)
            self._generation = generation

    def _explain_stale(self, generation: int) -> StaleGeneration:
        return StaleGeneration(
            f"{self.name!r} accepts no connection of generation {generation}: it is at generation {self._generation}",
            peer=self.name,
            generation=generation,
            expected=self._generation,
        )

    def _accept_of(self, generation: int, want: Callable[[str], bool] | None) -> Link | None:
        with self._lock:
            if self.fileno() < 0:
                raise PeerLost(f"the listener of {self.name!r} has been closed", peer=self.name)
            if generation != self._generation:
                raise self._explain_stale(generation)
            self._advance_all()
            for i, link in enumerate(self._ready):
                if link.generation != generation:
                    link.close()
                elif want is None or want(link.peer):
                    self._ready = [other for other in self._ready[:i] + self._ready[i + 1 :] if not other.closed]
                    return link
            self._ready = [link for link in self._ready if not link.closed]
            return None

    def _advance_all(self) -> None:
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept_on(key.fileobj)  # type: ignore[arg-type]
            else:
                self._advance(key.data)
        now = time.monotonic()
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data.deadline < now:
                self._drop(key.data)

    def _accept_on(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._reject(listening)
            return  # after any other error the caller has closed its connection
        sock.setblocking(False)
        unix = listening.family == socket.AF_UNIX
        if unix and not _is_same_user(sock):
            sock.close()
            return
        steps = link_hello.listener(self.name, self._secret, lambda: self._generation)
        pending = _PendingHandshake(sock, steps, "unix" if unix else "tcp")
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _reject(self, listening: socket.socket) -> None:
        """Accept one caller and close its connection, because the process has no file descriptor left.

        The spare descriptor makes this possible. If the caller were not accepted, the listening socket would stay
        readable. The rejected caller repeats its attempts until its deadline.
        """
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
            with contextlib.suppress(OSError):
                listening.accept()[0].close()
        else:
            time.sleep(_RETRY[1])  # the spare descriptor is gone too: sleep, because the socket stays readable
        with contextlib.suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _advance(self, pending: _PendingHandshake) -> None:
        try:
            greeted = pending.read()
        except BlockingIOError:
            return
        except (OSError, LinkError):
            self._drop(pending)
            return
        if greeted is not None:
            self._selector.unregister(pending.sock)
            transport = "shm" if greeted.shared and pending.transport == "unix" else pending.transport
            self._ready.append(_make_link(pending.sock, greeted.peer, greeted.generation, transport))

    def _drop(self, pending: _PendingHandshake) -> None:
        self._selector.unregister(pending.sock)
        pending.sock.close()

    def close(self) -> None:
        """Close the sockets and every connection that `accept` has not returned. Safe to call twice."""
        with self._lock:
            if self._selector.get_map() is None:
                return
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            for link in self._ready:
                link.close()
            self._ready.clear()
            self._selector.close()
            if self._reserve >= 0:
                os.close(self._reserve)
                self._reserve = -1

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_same_user(sock: socket.socket) -> bool:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return bool(uid == os.getuid())


def _make_link(sock: socket.socket, peer: str, generation: int, transport: str) -> Link:
    if transport == "shm":
        return SharedLink(sock, peer, generation)
    if transport == "tcp":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return SocketLink(sock, peer, generation, transport)


def connect(
    address: str,
    *,
    name: str,
    secret: bytes,
    generation: int,
    timeout: float,
    prefer: Prefer = "auto",
    check: Callable[[], None] = lambda: None,
) -> Link:
    """Connect to the listener at `address`. Failed attempts are repeated for `timeout` seconds.

    `prefer` is a transport or "auto", which selects shared memory if both peers are on one host, else TCP. "unix" sends
    headers and payloads on the unix socket. `check` is called while the wait lasts, and ends it by an error.

    Raises:
        PeerLost: there is no listener at the address.
        PeerTimeout: the listener does not answer.
        StaleGeneration: the listener has another generation.
        LinkError: the listener has another secret.
    """
    target = parse_address(address)
    transports = _list_transports(target, prefer)
    deadline = time.monotonic() + timeout
    pause = _RETRY[0]
    while True:
        for transport in transports:
            check()
            try:
                return _call(target, transport, (name, secret, generation), deadline, check)
            except TimeoutError as error:
                raise _explain_silence(target, timeout) from error
            except StaleGeneration as error:
                if error.data["expected"] > generation or not measure_time_left(deadline):
                    raise
            except OSError as error:
                if not measure_time_left(deadline):
                    raise PeerLost(
                        f"no listener of {target.name!r} at {target.host}:{target.port} "
                        f"({error.strerror or error}); tried for {timeout:g} s (the knob is `timeout`)",
                        peer=target.name,
                        seconds=timeout,
                    ) from error
        time.sleep(min(pause, measure_time_left(deadline)))
        pause = min(2 * pause, _RETRY[1])


def _list_transports(target: ListenerAddress, prefer: Prefer) -> list[str]:
    unix = ["unix"] if target.unix and _ABSTRACT else []
    shm = ["shm"] if unix and link_memory.AVAILABLE else []
    transports = {"auto": [*(shm or unix), "tcp"], "shm": shm, "unix": unix, "tcp": ["tcp"]}.get(prefer, [])
    if not transports:
        raise ConfigError(
            f"cannot connect to {target.name!r} with prefer={prefer!r}: use auto or tcp (shm and unix work only "
            "between two processes of one Linux host)",
            prefer=prefer,
            peer=target.name,
        )
    return transports


def _explain_silence(target: ListenerAddress, timeout: float) -> PeerTimeout:
    return PeerTimeout(
        f"{target.name!r} at {target.host}:{target.port} did not answer within {timeout:g} s (the knob is `timeout`)",
        peer=target.name,
        seconds=timeout,
    )


def _call(
    target: ListenerAddress, transport: str, who: tuple[str, bytes, int], deadline: float, check: Callable[[], None]
) -> Link:
    sock = _dial(target, transport, deadline)
    try:
        name, secret, generation = who
        hello = link_hello.caller(name, secret, generation, transport == "shm")
        greeted = _drive(sock, hello, deadline, check)
        if not greeted.accepted:
            raise StaleGeneration(
                f"{greeted.peer!r} is at generation {greeted.generation} and refused generation {generation}",
                peer=greeted.peer,
                generation=generation,
                expected=greeted.generation,
            )
        return _make_link(sock, greeted.peer, generation, transport)
    except BaseException:
        sock.close()
        raise


def _dial(target: ListenerAddress, transport: str, deadline: float) -> socket.socket:
    if transport == "tcp":
        return socket.create_connection((target.host, target.port), timeout=max(0.001, measure_time_left(deadline)))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, measure_time_left(deadline)))
        sock.connect(f"\0{target.unix}")
    except BaseException:
        sock.close()
        raise
    return sock


def _drive(
    sock: socket.socket, steps: link_hello.Steps, deadline: float, check: Callable[[], None]
) -> link_hello.Greeted:
    data: bytes | None = None
    while True:
        try:
            step = next(steps) if data is None else steps.send(data)
        except StopIteration as end:
            greeted: link_hello.Greeted = end.value
            return greeted
        if isinstance(step, bytes):
            sock.settimeout(max(0.001, measure_time_left(deadline)))
            sock.sendall(step)
            data = None
            continue
        data = b""
        while len(data) < step:
            part = _receive(sock, step - len(data), deadline, check)
            if not part:
                raise ConnectionResetError("the connection was closed during the handshake")
            data += part


def _receive(sock: socket.socket, size: int, deadline: float, check: Callable[[], None]) -> bytes:
    while True:
        left = measure_time_left(deadline)
        sock.settimeout(max(0.001, min(left, _CHECK_SECONDS)))
        try:
            return sock.recv(size)
        except TimeoutError:
            if left <= _CHECK_SECONDS:
                raise
            check()
