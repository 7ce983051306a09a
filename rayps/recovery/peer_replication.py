"""Backups of workers' states on other workers.

On one host the holder of the backup has descriptors of the worker's shared memory: nothing is copied. To another host
the state is sent over a separate connection during the worker's next step; the worker waits only if the state of the
previous round has not arrived yet. If the worker has a twin (a worker at the same place in another replica), only the
part of the state that the twin lacks is sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from rayps.comm.link import Link, Listener, Message, Prefer, connect
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.core.errors import LinkError, PeerLost, PeerTimeout
from rayps.recovery.backup_assignment import HeldRounds, Source
from rayps.recovery.state_slots import OWN, SLOTS, CommittedState, StateSlots, glance, look, pack, parse

log = logging.getLogger(__name__)

SLOTS_ELSEWHERE = 3  # slots of a worker with a backup on another host: one more, as a round may be in transit
_KEPT_ROUNDS = 3  # newest rounds whose states are stored for a worker on another host
_LOOK_SECONDS = 1.0
_GENERATION = 0  # the generation number of these connections, which outlive the job's generations


class ReplicationMessage(IntEnum):
    """Messages between a worker and the holder of its backup. `a` is the rank of the state's worker, `b` a round."""

    OFFER = 1  # the descriptors sent before are those of worker `a`'s slots; no payload
    STATE = 2  # payload: the state of worker `a`; tag 1 = the complete state, 0 = only what a twin lacks
    KEPT = 3  # answers OFFER and STATE: the descriptors or the state are stored
    ASK = 4  # requests the state of worker `a` after round `b`, on the line `tag`; weight 1 = only what a twin lacks
    GIVEN = 5  # answers ASK; payload: the state; no payload = the sender does not have the state


@dataclass(slots=True)
class _Kept:
    descriptors: list[int] = field(default_factory=list)
    blobs: dict[tuple[int, int], tuple[memoryview, bool]] = field(default_factory=dict)  # (line, round): state, whole

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors, self.blobs = [], {}


class PeerReplication:
    """One worker's own state slots, and the backups that it holds of other workers' states.

    A thread receives backups from other workers and answers their requests for states.
    """

    def __init__(self, rank: int, secret: bytes, host: str = "127.0.0.1") -> None:
        self.rank = rank
        self._vault: StateSlots | None = None
        self._listener = Listener(f"keeper-{rank}", secret, _GENERATION, host=host)
        self.address = self._listener.address
        self._kept: dict[int, _Kept] = {}
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self._wake, self._bell = socket.socketpair()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"keeper-{rank}")
        self._thread.start()

    def ensure_slots(self, slots: int) -> StateSlots:
        """Return this worker's state slots, at least `slots` of them; if there are fewer, new empty ones replace them.

        Raises LinkError.
        """
        if self._vault is None or len(self._vault.descriptors) < slots:
            if self._vault is not None:
                self._vault.close()
            self._vault = StateSlots(slots)
        return self._vault

    def shut(self) -> None:
        """Refuse further commits to this worker's slots."""
        if self._vault is not None:
            self._vault.shut()

    def holdings(self, line: int) -> dict[int, HeldRounds]:
        """Return, for each worker, the rounds of its states on `line` that this worker holds."""
        found: dict[int, HeldRounds] = {}
        with self._lock:
            for owner, kept in self._kept.items():
                sealed = [glance(descriptor) for descriptor in kept.descriptors]
                rounds = sorted(at[1] for at in sealed if at is not None and at[0] == line)
                blobs = {at[1]: whole for at, (_, whole) in kept.blobs.items() if at[0] == line}
                found[owner] = HeldRounds(tuple(rounds or sorted(blobs)), not blobs or all(blobs.values()))
        if self._vault is not None:
            found[self.rank] = HeldRounds(tuple(self._vault.rounds()))
        return found

    def forget(self, line: int, upto: int) -> None:
        """Drop stored states of other lines and of rounds above `upto`: they cannot be used any more."""
        with self._lock:
            for kept in self._kept.values():
                kept.blobs = {at: held for at, held in kept.blobs.items() if at[0] == line and at[1] <= upto}

    def state(self, owner: int, line: int, rounds: int) -> CommittedState | None:
        """Return a copy of the state of worker `owner` after `rounds` rounds; None if this worker does not hold it."""
        if owner == self.rank:
            state = None if self._vault is None else self._vault.read(rounds)
            return state if state is not None and state.line == line else None
        with self._lock:
            kept = self._kept.get(owner, _Kept())
            for descriptor in kept.descriptors:
                if glance(descriptor) == (line, rounds):
                    return look(descriptor)
            held = kept.blobs.get((line, rounds))
        return None if held is None else parse(bytes(held[0]))

    def close(self) -> None:
        """Stop the thread, and release this worker's slots and all backups. Safe to call twice."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._bell.send(b"x")
            self._thread.join(_LOOK_SECONDS)
            if self._vault is not None:
                self._vault.close()

    # ---- the thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                for key in self._stirred():
                    self._attend(key)
        except Exception:  # a bug of rayps: the run continues, but this worker holds no more backups
            log.exception("worker-%d holds no backups any more, because its replication thread failed", self.rank)
        finally:
            self._listener.close()
            for link in self._links.values():
                link.close()
            with self._lock:
                for kept in self._kept.values():
                    kept.close()
                self._kept.clear()
            self._wake.close()
            self._bell.close()

    def _stirred(self) -> list[int]:
        with selectors.DefaultSelector() as selector:
            for fd in (self._wake.fileno(), self._listener.fileno(), *self._links):
                selector.register(fd, selectors.EVENT_READ)
            return [key.fd for key, _ in selector.select(_LOOK_SECONDS)]

    def _attend(self, fd: int) -> None:
        link = self._links.get(fd)
        if link is None:
            while fd == self._listener.fileno() and (new := self._listener.accept_ready()) is not None:
                self._links[new.fileno()] = new
            return
        try:
            for message in link.feed():
                self._hear(link, message)
        except LinkError:  # the peer died: its backup is not dropped, as recovery needs it now
            del self._links[fd]
            link.close()

    def _hear(self, link: Link, message: Message) -> None:
        if message.kind == ReplicationMessage.OFFER and isinstance(link, SharedLink):
            with self._lock:
                self._kept.setdefault(message.a, _Kept()).close()
                self._kept[message.a].descriptors = [link.descriptors.pop(key) for key in sorted(link.descriptors)]
            link.send(Message(ReplicationMessage.KEPT, a=message.a), timeout=_LOOK_SECONDS)
        elif message.kind == ReplicationMessage.STATE:
            self._take(message)
            link.send(Message(ReplicationMessage.KEPT, a=message.a, b=message.b), timeout=_LOOK_SECONDS)
        elif message.kind == ReplicationMessage.ASK:
            state = self.state(message.a, message.tag, message.b)
            payload = b"" if state is None else pack(state, OWN if message.weight else None)
            link.send(Message(ReplicationMessage.GIVEN, a=message.a, b=message.b), payload, timeout=10 * _LOOK_SECONDS)

    def _take(self, message: Message) -> None:
        blob = memoryview(message.payload)
        state = parse(blob)
        if state is None:
            return
        with self._lock:
            kept = self._kept.setdefault(message.a, _Kept())
            kept.blobs[state.line, state.round] = (blob, bool(message.tag))
            for at in sorted(kept.blobs)[:-_KEPT_ROUNDS]:
                del kept.blobs[at]


def fetch(
    source: Source, addresses: list[str], secret: bytes, line: int, rounds: int, timeout: float
) -> CommittedState:
    """Return the state of a dead worker after `rounds` rounds, from its twin or from the holder of its backup.

    `addresses` are the backup addresses of all workers, by rank.

    Raises PeerTimeout, LinkError, PeerLost (the giver has died too, or no longer has the state).
    """
    state = _asked(addresses[source.giver], source.owner, secret, (line, rounds), timeout)
    if state is None:
        raise PeerLost(
            f"worker-{source.giver} no longer has the state of worker-{source.owner} after round {rounds}",
            peer=f"worker-{source.giver}",
        )
    if source.twin:
        state.tensors.pop("rng", None)  # the random state is the twin's, not the dead worker's
    return state


def fetch_rest(
    source: Source, rank: int, addresses: list[str], secret: bytes, line: int, rounds: int, timeout: float
) -> CommittedState | None:
    """Return the part of the state of `rank` that its twin lacks; None if no worker has it any more."""
    if source.rest is None:
        return None
    with contextlib.suppress(LinkError):
        return _asked(addresses[source.rest], rank, secret, (line, rounds), timeout, rest=True)
    return None


def _asked(
    address: str, owner: int, secret: bytes, at: tuple[int, int], timeout: float, rest: bool = False
) -> CommittedState | None:
    line, rounds = at
    with connect(address, name="asks", secret=secret, generation=_GENERATION, timeout=timeout) as link:
        link.send(Message(ReplicationMessage.ASK, tag=line, a=owner, b=rounds, weight=float(rest)), timeout=timeout)
        answer = link.recv(timeout)
    return parse(answer.payload) if len(answer.payload) else None


class Mirror:
    """A worker's connection to the worker that holds its backup."""

    def __init__(
        self,
        keeper: PeerReplication,
        address: str,
        secret: bytes,
        *,
        timeout: float,
        twin: bool = False,
        prefer: Prefer = "auto",
    ) -> None:
        """Connect to the worker at `address`, which holds this worker's backup; `keeper` holds this worker's own slots.

        `twin`: this worker has a twin, so only what the twin lacks is sent to another host. Raises PeerTimeout,
        PeerLost, LinkError.
        """
        rank = self.rank = keeper.rank
        self._timeout, self._twin = timeout, twin
        self._link = connect(
            address, name=f"mirror-{rank}", secret=secret, generation=_GENERATION, timeout=timeout, prefer=prefer
        )
        self.here = isinstance(self._link, SharedLink)
        vault = self.vault = keeper.ensure_slots(SLOTS if self.here or twin else SLOTS_ELSEWHERE)
        self.bytes = 0  # bytes sent for the latest round
        self.seconds_waiting = 0.0
        self._due = threading.Condition()
        self._rounds: deque[int] = deque()  # rounds that are committed and not sent yet
        self._newest, self._kept = -1, -1  # the newest committed round, and the newest round that the holder has stored
        self._over: LinkError | None = None
        self._thread: threading.Thread | None = None
        if isinstance(self._link, SharedLink):
            for key, descriptor in enumerate(vault.descriptors, start=1):
                self._link.offer_descriptor(key, descriptor)
            self._link.send(Message(ReplicationMessage.OFFER, a=rank), timeout=timeout)
            self._link.recv(timeout)
        else:
            self._thread = threading.Thread(target=self._post, daemon=True, name=f"mirror-{rank}")
            self._thread.start()

    def committed(self, rounds: int) -> None:
        """Send the state of round `rounds`, which the worker has just committed.

        Wait while the state of the previous round is still in transit.
        """
        if self.here or self._over is not None:
            return
        began = time.perf_counter()
        with self._due:
            before, self._newest = self._newest, rounds
            self._rounds.append(rounds)
            self._due.notify_all()
            arrived = self._due.wait_for(lambda: self._kept >= before or self._over is not None, timeout=self._timeout)
            if not arrived:
                self._over = PeerTimeout(
                    f"{self._link.peer} did not confirm the backup of round {before} within {self._timeout:g} s",
                    peer=self._link.peer,
                )
        self.seconds_waiting += time.perf_counter() - began
        if self._over is not None:
            log.warning("worker-%d has no backup any more: %s", self.rank, self._over)

    @property
    def lost(self) -> str:
        """Why the worker has no backup any more; empty while it has one."""
        return "" if self._over is None else str(self._over)

    def close(self) -> None:
        """Close the connection; the holder keeps the states that it has received. Safe to call twice."""
        with self._due:
            self._over = self._over or LinkError(
                "the backup's connection was closed on this side", peer=self._link.peer
            )
            self._due.notify_all()
        self._link.hang_up()
        if self._thread is not None:
            self._thread.join(self._timeout)
        self._link.close()

    def _post(self) -> None:
        try:
            for rounds in self._committed_rounds():
                blob = self.vault.blob(rounds)
                if blob is None:
                    continue  # the slot of this round was overwritten
                if self._twin:
                    state = parse(blob)
                    blob = memoryview(pack(state, OWN)) if state is not None else blob
                self.bytes = len(blob)
                message = Message(ReplicationMessage.STATE, a=self.rank, b=rounds, tag=int(not self._twin))
                self._link.send(message, blob, timeout=self._timeout)
                self._link.recv(self._timeout)
                with self._due:
                    self._kept = rounds
                    self._due.notify_all()
        except LinkError as error:
            with self._due:
                self._over = self._over or error
                self._due.notify_all()

    def _committed_rounds(self) -> Iterator[int]:
        """Yield every committed round in order: to find a common round, recovery may need either of the newest two."""
        while True:
            with self._due:
                while not self._due.wait_for(lambda: bool(self._rounds) or self._over is not None, timeout=60.0):
                    pass
                if self._over is not None:
                    return
                rounds = self._rounds.popleft()
            yield rounds
