"""The links that a server makes itself: to its manager, and to the servers that keep its copies.

To connect may take its time (and two servers may call each other at once), so it is done in threads; what comes of it
is the loop's business again.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable

from rayps.comm.link import Link, connect
from rayps.core.errors import LinkError, RaypsError
from rayps.ps.server.orders import Address, ManagerSession
from rayps.ps.server.replication import Peer, Replication

log = logging.getLogger(__name__)

DIAL_SECONDS = 2.0
AGAIN_SECONDS = 0.2  # between two calls for the manager

Later = Callable[[Callable[[], None]], None]


class Outbound:
    """Outgoing links of one server. All but the calls in threads belongs to its loop."""

    def __init__(
        self,
        name: str,
        secret: bytes,
        manager: Address | None,
        poll: select.poll,
        later: Later,
        copies: Replication,
        command: ManagerSession,
    ) -> None:
        """`later(work)` lets the loop do something; `poll` is the loop's. Without a manager none is looked for."""
        self._name, self._secret, self._manager = name, secret, manager
        self._poll, self._later, self._copies, self._command = poll, later, copies, command
        self._peers: dict[int, Peer] = {}
        self._closing = threading.Event()
        if manager is not None:
            self._look_for_manager()
            threading.Thread(target=self._beat, name=f"{name}-heart", daemon=True).start()

    def _beat(self) -> None:
        while not self._closing.wait(self._command.every):
            self._command.beat_for(time.monotonic())

    def attend(self, descriptor: int) -> bool:
        """Something has arrived, or may leave; False where the link is none of these."""
        peer = self._peers.get(descriptor)
        if peer is not None:
            self._attend_peer(peer)
            return True
        manager = self._command.link
        if manager is not None and descriptor == manager.fileno():
            self._attend_manager(manager)
            return True
        return False

    def close(self) -> None:
        """Hang up."""
        self._closing.set()
        for peer in list(self._peers.values()):
            self._copies.lost(peer, "this server is closing")
        with self._command.lock:
            if self._command.link is not None:
                self._command.link.close()
                self._command.left()

    def _call(self, address: str) -> Link:
        return connect(address, name=self._name, secret=self._secret, generation=0, timeout=DIAL_SECONDS)

    # ---- other servers

    def dial(self, peer: Peer) -> None:
        """Connect to another server, in a thread."""

        def call() -> None:
            try:
                link = self._call(peer.address)
            except RaypsError as error:
                reason = str(error)
                self._later(lambda: self._copies.lost(peer, reason))
            else:
                self._later(lambda: self._reached(peer, link))

        threading.Thread(target=call, name=f"{self._name}-dial", daemon=True).start()

    def _reached(self, peer: Peer, link: Link) -> None:
        if peer.lost:
            link.close()
            return
        self._peers[link.fileno()] = peer
        self._poll.register(link.fileno(), select.POLLIN)
        self._copies.connected(peer, link)
        self.flush_peer(peer)

    def hang_up(self, peer: Peer) -> None:
        """A link to another server is not needed any more, or failed."""
        if peer.link is not None and not peer.link.closed:
            descriptor = peer.link.fileno()
            if self._peers.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)
            peer.link.close()

    def _attend_peer(self, peer: Peer) -> None:
        assert peer.link is not None
        try:
            for message in peer.link.feed():
                self._copies.heard(peer, message)
        except LinkError as error:
            self._copies.lost(peer, str(error))
            return
        self.flush_peer(peer)

    def flush_peer(self, peer: Peer) -> None:
        """Send what leaves; then states that wait for room."""
        if peer.link is None:
            return
        try:
            if not peer.lost:
                peer.link.flush()
                self._copies.pump(peer)
            if not peer.lost:
                self._watch(peer.link)
        except LinkError as error:
            self._copies.lost(peer, str(error))

    def flush_peers(self) -> None:
        """The same for those that have something waiting."""
        for peer in list(self._peers.values()):
            if peer.link is not None and peer.link.queued:
                self.flush_peer(peer)

    def _watch(self, link: Link) -> None:
        full = bool(link.queued) and bool(link.interest & select.POLLOUT)
        self._poll.modify(link.fileno(), select.POLLIN | (select.POLLOUT if full else 0))

    # ---- the manager

    def _look_for_manager(self) -> None:
        def search() -> None:
            while not self._closing.is_set() and (manager := self._manager) is not None:
                try:
                    link = self._call(manager if isinstance(manager, str) else manager())
                except Exception as error:  # whoever is asked for the address may fail in ways of its own
                    log.info("%s: no manager yet: %s", self._name, error)
                    self._closing.wait(AGAIN_SECONDS)
                else:
                    self._later(lambda link=link: self._met(link))  # type: ignore[misc]
                    return

        threading.Thread(target=search, name=f"{self._name}-manager", daemon=True).start()

    def _met(self, link: Link) -> None:
        self._poll.register(link.fileno(), select.POLLIN)
        self._command.met(link)
        self.flush_manager()

    def _attend_manager(self, link: Link) -> None:
        try:
            with self._command.lock:
                messages = link.feed()
            for message in messages:
                self._command.hear(message)
        except LinkError as error:
            log.info("%s: lost the manager: %s", self._name, error)
            self._poll.unregister(link.fileno())
            self._command.left()
            link.close()
            self._look_for_manager()
            return
        self.flush_manager()

    def flush_manager(self) -> None:
        """Send what leaves."""
        link = self._command.link
        if link is not None:
            with self._command.lock, contextlib.suppress(LinkError):  # found again when it is read
                link.flush()
                self._watch(link)
