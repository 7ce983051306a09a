"""The connections of servers and workers to a manager.

One thread waits and reads; any thread that holds the manager's lock may send.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any

from rayps.comm.link import Link, Listener, Message
from rayps.core.errors import LinkError


class ManagerConnection:
    """One connection."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.server: str | None = None  # the server that it registered as
        self.watching: set[int] = set()  # spaces whose map it is told
        self.lost = False

    def say(self, message: Message, payload: Any = b"") -> None:
        """Send what leaves at once, and the rest when it can. A connection that fails is found when it is read."""
        if not self.lost:
            try:
                self.link.queue(message, payload)
            except LinkError:
                self.lost = True


class ManagerConnections:
    """All connections, and a bell for the thread that waits on them."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._callers: dict[int, ManagerConnection] = {}  # by descriptor
        self._theirs, self._bell = socket.socketpair()
        self._theirs.setblocking(False)
        self._bell.setblocking(False)
        self._poll = select.poll()
        for descriptor in (listener.fileno(), self._theirs.fileno()):
            self._poll.register(descriptor, select.POLLIN)

    @property
    def callers(self) -> list[ManagerConnection]:
        """Everyone who is connected."""
        return list(self._callers.values())

    def ring(self) -> None:
        """End the wait; any thread."""
        with contextlib.suppress(OSError):  # full: it was rung already; closed: nobody waits
            self._bell.send(b"!")

    def arm(self) -> None:
        """Before a wait, under the lock: note whose words have not all left."""
        for descriptor, caller in self._callers.items():
            events = caller.link.interest if caller.link.queued else 0
            self._poll.register(descriptor, select.POLLIN | events)

    def wait(self, seconds: float) -> list[int]:
        """The descriptors where something happened; without the lock."""
        return [descriptor for descriptor, _ in self._poll.poll(int(seconds * 1000))]

    def take(self, ready: list[int]) -> list[tuple[ManagerConnection, list[Message] | None]]:
        """Under the lock: what was said, and None by whom is gone."""
        found: list[tuple[ManagerConnection, list[Message] | None]] = []
        with contextlib.suppress(BlockingIOError):
            self._theirs.recv(4096)
        news = set(ready) & self._callers.keys()
        while (link := self._listener.accept_ready()) is not None:
            self._callers[link.fileno()] = ManagerConnection(link)
            news.add(link.fileno())  # its first words may have come along with the handshake
        for descriptor, caller in list(self._callers.items()):
            if descriptor not in news and not caller.lost:
                continue
            try:
                caller.link.absorb()
                messages = caller.link.feed()  # last: what is absorbed after it would wait unheard
                caller.link.flush()
                if caller.lost and not messages:
                    raise LinkError("lost")
                found.append((caller, messages))
            except LinkError:
                self.drop(caller)
                found.append((caller, None))
        return found

    def drop(self, caller: ManagerConnection) -> None:
        """Hang up."""
        for descriptor, other in list(self._callers.items()):
            if other is caller:
                del self._callers[descriptor]
                with contextlib.suppress(KeyError):  # nobody has waited on it yet
                    self._poll.unregister(descriptor)
        caller.lost = True
        caller.link.close()

    def close(self) -> None:
        """Hang up on everyone."""
        for caller in self.callers:
            with contextlib.suppress(LinkError):
                caller.link.flush()
            self.drop(caller)
        self._theirs.close()
        self._bell.close()
