"""How two peers find each other: a listener with two doors (unix socket and TCP), and `connect`.

Two peers share a host when the handshake over the abstract unix socket succeeds; such names are scoped by
network namespace, and no path is left behind. The messages themselves are `rayps.comm.link.socket_link`'s.
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
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from rayps.comm.link import handshake as link_hello
from rayps.comm.link import memory as link_memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.comm.link.socket_link import Link, Message, SocketLink, deadline_left
from rayps.core.errors import ConfigError, LinkError, PeerLost, PeerTimeout, StaleGeneration

__all__ = ["Door", "Link", "Listener", "Message", "connect", "parse_address"]

GREETING_SECONDS = 10.0  # a stranger that connects and stays silent is dropped after this
_ABSTRACT = sys.platform == "linux"
_RETRY = (0.005, 0.2)  # first and longest pause between two tries, in seconds

Prefer = Literal["auto", "shm", "unix", "tcp"]


class Door(NamedTuple):
    """An address taken apart: the listener's name, its TCP door, and its unix door ("" where it has none)."""

    name: str
    host: str
    port: int
    unix: str


def parse_address(address: str) -> Door:
    """Take apart `name@host:port/unix`. Raises ConfigError."""
    try:
        name, rest = address.rsplit("@", 1)
        tcp, unix = rest.split("/", 1)
        host, port = tcp.rsplit(":", 1)
        return Door(name, host, int(port), unix)
    except ValueError as error:
        raise ConfigError(
            f"{address!r} is not the address of a listener; pass `listener.address`", address=address
        ) from error


class _Guest:
    """A connection whose handshake is under way."""

    def __init__(self, sock: socket.socket, steps: link_hello.Steps, transport: str) -> None:
        self.sock = sock
        self.steps = steps
        self.transport = transport
        self.deadline = time.monotonic() + GREETING_SECONDS
        self.need = 0
        self.got = bytearray()
        self.next(None)

    def next(self, data: bytes | None) -> link_hello.Greeted | None:
        """Run the handshake until it needs more bytes (None) or ends."""
        try:
            step = next(self.steps) if data is None else self.steps.send(data)
            while isinstance(step, bytes):
                if self.sock.send(step) != len(step):
                    raise ConnectionError("a stranger does not read")
                step = next(self.steps)
        except StopIteration as end:
            greeted: link_hello.Greeted = end.value
            return greeted
        self.need = step
        return None

    def read(self) -> link_hello.Greeted | None:
        """Take what has arrived. Raises OSError, LinkError for a bad handshake."""
        data = self.sock.recv(self.need - len(self.got))
        if not data:
            raise ConnectionError("gone during the handshake")
        self.got += data
        if len(self.got) < self.need:
            return None
        whole, self.got = bytes(self.got), bytearray()
        return self.next(whole)


class Listener:
    """Where an actor can be called. Only peers that know the secret get in. `port` 0 is any that is free."""

    def __init__(self, name: str, secret: bytes, generation: int = 0, host: str = "127.0.0.1", port: int = 0) -> None:
        self.name = name
        self.generation = generation
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._ready: list[Link] = []
        self.sockets: list[socket.socket] = []
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # a descriptor to turn callers away with
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        tcp = self._open(family, (host, port))
        unix = ""
        if _ABSTRACT:
            unix = f"rayps-{secrets.token_hex(16)}"
            self._open(socket.AF_UNIX, f"\0{unix}")
        self.address = f"{name}@{host}:{tcp.getsockname()[1]}/{unix}"

    def _open(self, family: int, where: tuple[str, int] | str) -> socket.socket:
        door = socket.socket(family, socket.SOCK_STREAM)
        if not isinstance(where, str) and where[1]:  # a port that was one's own before, perhaps a moment ago
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(where)
        except OSError as error:
            door.close()
            self.close()
            raise LinkError(f"{self.name!r} cannot listen on {where!r}: {error.strerror}", peer=self.name) from error
        door.listen(512)
        door.setblocking(False)
        self.sockets.append(door)
        self._selector.register(door, selectors.EVENT_READ)
        return door

    def fileno(self) -> int:
        """Readable when `accept_ready` has something to do; made for another selector."""
        return -1 if self._selector.get_map() is None else self._selector.fileno()

    def accept(self, timeout: float, want: Callable[[str], bool] | None = None) -> Link:
        """The next peer whose handshake succeeds; bad ones are dropped. Raises PeerTimeout.

        With `want`, only a peer whose name it accepts; the others stay for later calls.
        """
        deadline = time.monotonic() + timeout
        while True:
            link = self.accept_ready(want)
            if link is not None:
                return link
            left = deadline_left(deadline)
            if not left:
                raise PeerTimeout(
                    f"nobody connected to {self.name!r} within {timeout:g} s (the knob is `timeout`)",
                    peer="anyone",
                    seconds=timeout,
                )
            self._selector.select(min(left, 1.0))

    def accept_ready(self, want: Callable[[str], bool] | None = None) -> Link | None:
        """As `accept`, without waiting: None while no handshake is complete."""
        if self.fileno() < 0:
            raise PeerLost(f"the listener of {self.name!r} has been closed", peer=self.name)
        self._progress()
        for i, link in enumerate(self._ready):
            if link.generation != self.generation:
                link.close()
            elif want is None or want(link.peer):
                self._ready = [other for other in self._ready[:i] + self._ready[i + 1 :] if not other.closed]
                return link
        self._ready = [link for link in self._ready if not link.closed]
        return None

    def _progress(self) -> None:
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._greet(key.fileobj)  # type: ignore[arg-type]
            else:
                self._listen_to(key.data)
        now = time.monotonic()
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data.deadline < now:
                self._drop(key.data)

    def _greet(self, door: socket.socket) -> None:
        try:
            sock, _ = door.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._turn_away(door)
            return  # otherwise the caller left before it was greeted
        sock.setblocking(False)
        unix = sock.family == socket.AF_UNIX
        if unix and not _same_user(sock):
            sock.close()
            return
        steps = link_hello.listener(self.name, self._secret, lambda: self.generation)
        guest = _Guest(sock, steps, "unix" if unix else "tcp")
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _turn_away(self, door: socket.socket) -> None:
        """Accept and close one caller for which there is no descriptor, with the descriptor held in reserve.

        Otherwise the listening socket would stay readable for ever. The caller tries again until its own deadline.
        """
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
            with contextlib.suppress(OSError):
                door.accept()[0].close()
        else:
            time.sleep(_RETRY[1])  # no reserve could be had again: at least not at full speed
        with contextlib.suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _listen_to(self, guest: _Guest) -> None:
        try:
            greeted = guest.read()
        except BlockingIOError:
            return
        except (OSError, LinkError):
            self._drop(guest)
            return
        if greeted is not None:
            self._selector.unregister(guest.sock)
            transport = "shm" if greeted.shared and guest.transport == "unix" else guest.transport
            self._ready.append(_make_link(guest.sock, greeted.peer, greeted.generation, transport))

    def _drop(self, guest: _Guest) -> None:
        self._selector.unregister(guest.sock)
        guest.sock.close()

    def close(self) -> None:
        """Close the doors and every link nobody accepted. Safe to call twice."""
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


def _same_user(sock: socket.socket) -> bool:
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
    address: str, *, name: str, secret: bytes, generation: int, timeout: float, prefer: Prefer = "auto"
) -> Link:
    """Call the listener at `address` and prove who we are; refused calls are repeated for `timeout` seconds.

    `prefer="auto"` takes shared memory where both are on one host, else TCP; `unix` keeps payloads on the socket.
    Raises PeerLost (nobody listens), PeerTimeout (no answer), StaleGeneration (it is of another generation),
    LinkError (it does not know the secret).
    """
    door = parse_address(address)
    ways = _ways(door, prefer)
    deadline = time.monotonic() + timeout
    pause = _RETRY[0]
    while True:
        for transport in ways:
            try:
                return _call(door, transport, (name, secret, generation), deadline)
            except TimeoutError as error:
                raise _silent(door, timeout) from error
            except StaleGeneration as error:
                if error.data["expected"] > generation or not deadline_left(deadline):
                    raise
            except OSError as error:
                if not deadline_left(deadline):
                    raise PeerLost(
                        f"nobody answers for {door.name!r} at {door.host}:{door.port} "
                        f"({error.strerror or error}); tried for {timeout:g} s (the knob is `timeout`)",
                        peer=door.name,
                        seconds=timeout,
                    ) from error
        time.sleep(min(pause, deadline_left(deadline)))
        pause = min(2 * pause, _RETRY[1])


def _ways(door: Door, prefer: Prefer) -> list[str]:
    unix = ["unix"] if door.unix and _ABSTRACT else []
    shm = ["shm"] if unix and link_memory.AVAILABLE else []
    ways = {"auto": [*(shm or unix), "tcp"], "shm": shm, "unix": unix, "tcp": ["tcp"]}.get(prefer, [])
    if not ways:
        raise ConfigError(
            f"no way to {door.name!r} with prefer={prefer!r}; use auto, tcp, or on one Linux host shm, unix",
            prefer=prefer,
            peer=door.name,
        )
    return ways


def _silent(door: Door, timeout: float) -> PeerTimeout:
    return PeerTimeout(
        f"{door.name!r} at {door.host}:{door.port} did not answer within {timeout:g} s (the knob is `timeout`)",
        peer=door.name,
        seconds=timeout,
    )


def _call(door: Door, transport: str, who: tuple[str, bytes, int], deadline: float) -> Link:
    sock = _dial(door, transport, deadline)
    try:
        name, secret, generation = who
        hello = link_hello.caller(name, secret, generation, transport == "shm")
        greeted = _drive(sock, hello, deadline)
        if not greeted.welcome:
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


def _dial(door: Door, transport: str, deadline: float) -> socket.socket:
    if transport == "tcp":
        return socket.create_connection((door.host, door.port), timeout=max(0.001, deadline_left(deadline)))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline_left(deadline)))
        sock.connect(f"\0{door.unix}")
    except BaseException:
        sock.close()
        raise
    return sock


def _drive(sock: socket.socket, steps: link_hello.Steps, deadline: float) -> link_hello.Greeted:
    data: bytes | None = None
    while True:
        try:
            step = next(steps) if data is None else steps.send(data)
        except StopIteration as end:
            greeted: link_hello.Greeted = end.value
            return greeted
        sock.settimeout(max(0.001, deadline_left(deadline)))
        if isinstance(step, bytes):
            sock.sendall(step)
            data = None
            continue
        data = b""
        while len(data) < step:
            sock.settimeout(max(0.001, deadline_left(deadline)))
            part = sock.recv(step - len(data))
            if not part:
                raise ConnectionResetError("the connection was closed during the handshake")
            data += part
