"""Store backups of workers' states on other workers.

On one host, the holder of the backup receives descriptors of the worker's shared memory, and nothing is copied. To
another host, the state is sent over a separate connection during the worker's next step. The worker waits only if the
state of the previous round has not arrived yet. If the worker has a counterpart (the worker at the same place in
another replica), only the part of the state that the counterpart lacks is sent.
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

from rayps_client.errors import LinkError, PeerLost, PeerTimeout

from rayps.comm.link import Link, Listener, Message, Prefer, connect
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.core.job.continuation import Source
from rayps.recovery.backup_assignment import HeldRounds
from rayps.recovery.state_slots import OWN, SLOTS, CommittedState, StateSlots, pack, parse, read_position, read_state
from rayps.tensors.training_state import RANDOM

log = logging.getLogger(__name__)

SLOTS_ELSEWHERE = 3  # slots if the backup is on another host: one more than SLOTS, because one state may be in transit
_KEPT_ROUNDS = 3  # newest rounds whose states are stored for a worker on another host
_WAIT_SECONDS = 1.0  # seconds for one wait of the thread, and for a confirmation to be sent
_GENERATION = 0  # the generation number of these connections, which continue when the job starts a new generation


class ReplicationMessage(IntEnum):
    """Messages between a worker and the holder of its backup. `a` is the rank of the state's worker, `b` a round."""

    OFFER = 1  # the descriptors sent before are those of worker `a`'s slots; no payload
    STATE = 2  # payload: the state of worker `a`; tag 1: complete, tag 0: only the part that a counterpart lacks
    STORED = 3  # answers OFFER and STATE: the descriptors or the state are stored
    # requests the state of worker `a` after round `b` with base generation `tag`; weight 1: only the part that a
    # counterpart lacks
    ASK = 4
    ANSWER = 5  # answers ASK; payload: the state; no payload if the sender does not have the state


@dataclass(slots=True)
class _HeldBackup:
    descriptors: list[int] = field(default_factory=list)
    # from (base generation, round) to the state's bytes, and whether the state is complete
    states: dict[tuple[int, int], tuple[memoryview, bool]] = field(default_factory=dict)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors, self.states = [], {}


class PeerReplication:
    """One worker's own state slots, and the backups that it holds of other workers' states.

    A thread receives backups from other workers and answers their requests for states. `address` is its address.
    """

    def __init__(self, rank: int, secret: bytes, host: str = "127.0.0.1") -> None:
        self.rank = rank
        self._slots: StateSlots | None = None
        self._listener = Listener(f"backups-of-worker-{rank}", secret, _GENERATION, host=host)
        self.address = self._listener.address
        self._held: dict[int, _HeldBackup] = {}
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"backups-of-worker-{rank}")
        self._thread.start()

    def ensure_slots(self, slots: int) -> StateSlots:
        """Return this worker's state slots. If it has fewer than `slots`, replace them by `slots` new empty ones.

        Raises LinkError if the system has no shared memory.
        """
        if self._slots is None or len(self._slots.descriptors) < slots:
            if self._slots is not None:
                self._slots.close()
            self._slots = StateSlots(slots)
        return self._slots

    def refuse_commits(self) -> None:
        """Refuse further commits to this worker's slots."""
        if self._slots is not None:
            self._slots.refuse_commits()

    def held_rounds(self, base_generation: int) -> dict[int, HeldRounds]:
        """Return a dict from each worker's rank to the rounds of its states with `base_generation` held here."""
        found: dict[int, HeldRounds] = {}
        with self._lock:
            for owner, backup in self._held.items():
                sealed = [read_position(descriptor) for descriptor in backup.descriptors]
                rounds = sorted(at[1] for at in sealed if at is not None and at[0] == base_generation)
                states = {at[1]: whole for at, (_, whole) in backup.states.items() if at[0] == base_generation}
                found[owner] = HeldRounds(tuple(rounds or sorted(states)), not states or all(states.values()))
        if self._slots is not None:
            found[self.rank] = HeldRounds(tuple(self._slots.rounds()))
        return found

    def drop_states(self, base_generation: int, upto: int) -> None:
        """Drop the states of other base generations and of rounds above `upto`, which cannot be used any more."""
        with self._lock:
            for backup in self._held.values():
                backup.states = {
                    at: held for at, held in backup.states.items() if at[0] == base_generation and at[1] <= upto
                }

    def state(self, owner: int, base_generation: int, rounds: int) -> CommittedState | None:
        """Return a copy of the state of worker `owner` after `rounds` rounds, or None if this worker has no copy."""
        if owner == self.rank:
            state = None if self._slots is None else self._slots.read(rounds)
            return state if state is not None and state.base_generation == base_generation else None
        with self._lock:
            backup = self._held.get(owner, _HeldBackup())
            for descriptor in backup.descriptors:
                if read_position(descriptor) == (base_generation, rounds):
                    return read_state(descriptor)
            held = backup.states.get((base_generation, rounds))
        return None if held is None else parse(bytes(held[0]))

    def close(self) -> None:
        """Stop the thread, then release this worker's slots and all backups. Safe to call twice."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._wake_sender.send(b"x")
            self._thread.join(_WAIT_SECONDS)
            if self._slots is not None:
                self._slots.close()

    # ---- the thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                for key in self._find_readable():
                    self._serve_descriptor(key)
        except Exception:  # a bug of rayps: the run continues, but this worker holds no more backups
            log.exception("worker-%d holds no backups any more, because its replication thread failed", self.rank)
        finally:
            self._listener.close()
            for link in self._links.values():
                link.close()
            with self._lock:
                for backup in self._held.values():
                    backup.close()
                self._held.clear()
            self._wake_receiver.close()
            self._wake_sender.close()

    def _find_readable(self) -> list[int]:
        with selectors.DefaultSelector() as selector:
            for fd in (self._wake_receiver.fileno(), self._listener.fileno(), *self._links):
                selector.register(fd, selectors.EVENT_READ)
            return [key.fd for key, _ in selector.select(_WAIT_SECONDS)]

    def _serve_descriptor(self, fd: int) -> None:
        link = self._links.get(fd)
        if link is None:
            while fd == self._listener.fileno() and (new := self._listener.accept_ready()) is not None:
                self._links[new.fileno()] = new
            return
        try:
            for message in link.feed():
                self._answer(link, message)
        except LinkError:  # the peer died; its backup is not dropped, because recovery needs it now
            del self._links[fd]
            link.close()

    def _answer(self, link: Link, message: Message) -> None:
        if message.kind == ReplicationMessage.OFFER and isinstance(link, SharedLink):
            with self._lock:
                self._held.setdefault(message.a, _HeldBackup()).close()
                self._held[message.a].descriptors = [link.descriptors.pop(key) for key in sorted(link.descriptors)]
            link.send(Message(ReplicationMessage.STORED, a=message.a), timeout=_WAIT_SECONDS)
        elif message.kind == ReplicationMessage.STATE:
            self._store(message)
            link.send(Message(ReplicationMessage.STORED, a=message.a, b=message.b), timeout=_WAIT_SECONDS)
        elif message.kind == ReplicationMessage.ASK:
            state = self.state(message.a, message.tag, message.b)
            payload = b"" if state is None else pack(state, OWN if message.weight else None)
            link.send(Message(ReplicationMessage.ANSWER, a=message.a, b=message.b), payload, timeout=10 * _WAIT_SECONDS)

    def _store(self, message: Message) -> None:
        blob = memoryview(message.payload)
        state = parse(blob)
        if state is None:
            return
        with self._lock:
            backup = self._held.setdefault(message.a, _HeldBackup())
            backup.states[state.base_generation, state.round] = (blob, bool(message.tag))
            for at in sorted(backup.states)[:-_KEPT_ROUNDS]:
                del backup.states[at]


def fetch_state(
    source: Source, addresses: list[str], secret: bytes, base_generation: int, rounds: int, timeout: float
) -> CommittedState:
    """Return the state of a dead worker after `rounds` rounds, from its counterpart or the holder of its backup.

    `addresses` are the backup addresses of all workers, one for each rank. `timeout` is in seconds.

    Raises:
        PeerLost: the worker that should have the state has died too, or no longer has the state.
        PeerTimeout: that worker did not answer within `timeout`.
        LinkError: the connection failed, or the state's bytes are damaged.
    """
    state = _request_state(addresses[source.holder], source.owner, secret, (base_generation, rounds), timeout)
    if state is None:
        raise PeerLost(
            f"worker-{source.holder} no longer has the state of worker-{source.owner} after round {rounds}",
            peer=f"worker-{source.holder}",
        )
    if source.counterpart:
        state.tensors.pop(RANDOM, None)  # the random state is the counterpart's, not the dead worker's
    return state


def fetch_missing_part(
    source: Source, rank: int, addresses: list[str], secret: bytes, base_generation: int, rounds: int, timeout: float
) -> CommittedState | None:
    """Return the part of the state of worker `rank` that its counterpart lacks, or None if no worker has this part."""
    if source.rest is None:
        return None
    with contextlib.suppress(LinkError):
        return _request_state(addresses[source.rest], rank, secret, (base_generation, rounds), timeout, rest=True)
    return None


def _request_state(
    address: str, owner: int, secret: bytes, at: tuple[int, int], timeout: float, rest: bool = False
) -> CommittedState | None:
    base_generation, rounds = at
    with connect(address, name="state-request", secret=secret, generation=_GENERATION, timeout=timeout) as link:
        link.send(
            Message(ReplicationMessage.ASK, tag=base_generation, a=owner, b=rounds, weight=float(rest)), timeout=timeout
        )
        answer = link.recv(timeout)
    return parse(answer.payload) if len(answer.payload) else None


class BackupConnection:
    """A worker's connection to the worker that holds its backup."""

    def __init__(
        self,
        replication: PeerReplication,
        address: str,
        secret: bytes,
        *,
        timeout: float,
        has_counterpart: bool = False,
        prefer: Prefer = "auto",
    ) -> None:
        """Connect to the worker at `address`, which holds this worker's backup.

        `replication` has this worker's own slots. `has_counterpart`: whether this worker has a counterpart. If so, only
        the part of the state that the counterpart lacks is sent to another host. `timeout` is in seconds.

        Raises:
            PeerTimeout, PeerLost: the worker at `address` does not answer, or has died.
            LinkError: the system has no shared memory.
        """
        rank = self.rank = replication.rank
        self._timeout, self._has_counterpart = timeout, has_counterpart
        self._link = connect(
            address,
            name=f"backup-of-worker-{rank}",
            secret=secret,
            generation=_GENERATION,
            timeout=timeout,
            prefer=prefer,
        )
        self.same_host = isinstance(self._link, SharedLink)
        slots = self.slots = replication.ensure_slots(SLOTS if self.same_host or has_counterpart else SLOTS_ELSEWHERE)
        self.bytes = 0  # bytes sent for the latest round
        self.seconds_waiting = 0.0
        self._changed = threading.Condition()
        self._rounds: deque[int] = deque()  # rounds that are committed and not sent yet
        # the newest round that this worker has committed, and the newest that the holder has stored
        self._newest, self._stored = -1, -1
        self._error: LinkError | None = None
        self._thread: threading.Thread | None = None
        if isinstance(self._link, SharedLink):
            for key, descriptor in enumerate(slots.descriptors, start=1):
                self._link.offer_descriptor(key, descriptor)
            self._link.send(Message(ReplicationMessage.OFFER, a=rank), timeout=timeout)
            self._link.recv(timeout)
        else:
            self._thread = threading.Thread(target=self._send_states, daemon=True, name=f"backup-of-worker-{rank}")
            self._thread.start()

    def send_committed(self, rounds: int) -> None:
        """Send the state after `rounds` rounds, which the worker has just committed.

        Wait first while the state of the previous round is still in transit. On one host, nothing is sent.
        """
        if self.same_host or self._error is not None:
            return
        began = time.perf_counter()
        with self._changed:
            before, self._newest = self._newest, rounds
            self._rounds.append(rounds)
            self._changed.notify_all()
            arrived = self._changed.wait_for(
                lambda: self._stored >= before or self._error is not None, timeout=self._timeout
            )
            if not arrived:
                self._error = PeerTimeout(
                    f"{self._link.peer} did not confirm the backup of round {before} within {self._timeout:g} s",
                    peer=self._link.peer,
                )
        self.seconds_waiting += time.perf_counter() - began
        if self._error is not None:
            log.warning("worker-%d has no backup any more: %s", self.rank, self._error)

    @property
    def loss(self) -> str:
        """The reason why the worker has no backup any more; empty while it has one."""
        return "" if self._error is None else str(self._error)

    def close(self) -> None:
        """Close the connection. The holder keeps the states that it has received. Safe to call twice."""
        with self._changed:
            self._error = self._error or LinkError(
                "the backup's connection was closed on this side", peer=self._link.peer
            )
            self._changed.notify_all()
        self._link.hang_up()
        if self._thread is not None:
            self._thread.join(self._timeout)
        self._link.close()

    def _send_states(self) -> None:
        try:
            for rounds in self._yield_committed_rounds():
                blob = self.slots.blob(rounds)
                if blob is None:
                    continue  # the slot of this round was overwritten
                if self._has_counterpart:
                    state = parse(blob)
                    blob = memoryview(pack(state, OWN)) if state is not None else blob
                self.bytes = len(blob)
                message = Message(ReplicationMessage.STATE, a=self.rank, b=rounds, tag=int(not self._has_counterpart))
                self._link.send(message, blob, timeout=self._timeout)
                self._link.recv(self._timeout)
                with self._changed:
                    self._stored = rounds
                    self._changed.notify_all()
        except LinkError as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _yield_committed_rounds(self) -> Iterator[int]:
        """Yield every committed round in order, because recovery may need either of the newest two."""
        while True:
            with self._changed:
                while not self._changed.wait_for(lambda: bool(self._rounds) or self._error is not None, timeout=60.0):
                    pass
                if self._error is not None:
                    return
                rounds = self._rounds.popleft()
            yield rounds
