"""One worker's half of mending: what it keeps of itself and of others, and where its state comes from after a death."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from rayps.comm.link import memory
from rayps.core.errors import PeerLost
from rayps.recovery.backup_assignment import Bond, HeldRounds
from rayps.recovery.commit import CommitCost, Committer, overlaid
from rayps.recovery.peer_replication import Mirror, PeerReplication, fetch, fetch_rest
from rayps.tensors.snapshot import Snapshot

MOST_SAID = 200  # points of a worker that are kept with its state; a driver that is busy may leave more unheard
_HEARD_LATE = ("round", "evaluation")  # kinds of points that are


class BackedPlan(Protocol):
    """A worker's plan, as far as its backup goes."""

    @property
    def generation(self) -> int:
        """Its number."""

    @property
    def rank(self) -> int:
        """The worker's."""

    @property
    def start(self) -> int:
        """The position that it starts at."""

    @property
    def timeout(self) -> float:
        """Seconds to wait for a peer."""

    @property
    def bond(self) -> Bond | None:
        """Where the worker's state is kept; None = nowhere."""


class WorkerBackup:
    """Of one worker's process, through all generations."""

    def __init__(self, rank: int, secret: bytes, host: str) -> None:
        self._rank, self._secret, self._host = rank, secret, host
        self._keeper: PeerReplication | None = None
        self._upkeep: Committer | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._said: list[dict[str, Any]] = []  # the newest points, which the driver may not have heard
        self._given = 0  # of these, how many were the answer to its latest question

    def door(self) -> str:
        """Where others may ask for what is kept here; empty where there is no shared memory."""
        with self._lock:
            if self._keeper is None and memory.AVAILABLE and not self._closed:
                self._keeper = PeerReplication(self._rank, self._secret, self._host)
            return "" if self._keeper is None else self._keeper.address

    def said(self, point: dict[str, Any]) -> None:
        """A point was given to the driver, who may not hear of it."""
        if point["kind"] in _HEARD_LATE:
            dropped = max(0, len(self._said) + 1 - MOST_SAID)
            self._said = [*self._said[dropped:], point]
            self._given = max(0, self._given - dropped)

    def asked(self) -> None:
        """The driver asks, so it has heard the answer to its question before."""
        self._said = self._said[self._given :]
        self._given = len(self._said)

    def unheard(self, before: int) -> list[dict[str, Any]]:
        """What may have to be said again when a generation goes on from round `before`."""
        self._said = [point for point in self._said if point["round"] < before]
        self._given = 0
        return [point | {"again": True} for point in self._said]

    def inherit(self, points: list[dict[str, Any]], before: int) -> list[dict[str, Any]]:
        """Another worker's points are this one's now; what of them is to be said again, in the next answer.

        Between the two no question may be answered: what was not in an answer would count as heard with the next.
        """
        self._said = points
        return self.unheard(before)

    def shut(self) -> None:
        """No more commits from now on."""
        if self._keeper is not None:
            self._keeper.shut()

    def holdings(self, line: int) -> dict[int, HeldRounds]:
        """What is kept here of this line, of this worker and of others."""
        return {} if self._keeper is None else self._keeper.holdings(line)

    def recall(self, plan: BackedPlan, snapshot: Snapshot) -> tuple[Snapshot, list[dict[str, Any]] | None]:
        """The state from which this worker goes on, its own or that of the one it replaces, and what that one had said
        (None: it is its own), which is to be taken over by `inherit`.

        Raises LinkError: it is nowhere any more.
        """
        bond, rest, missed = plan.bond, None, None
        if bond is None or not bond.recalls:
            return snapshot, missed
        if bond.source is None:
            state = None if self._keeper is None else self._keeper.state(plan.rank, bond.line, plan.start)
            if state is None:
                raise PeerLost(f"worker-{plan.rank} has its state after round {plan.start} no more", peer="")
        else:
            where = list(bond.doors), self._secret, bond.line, plan.start, plan.timeout
            state = fetch(bond.source, *where)
            rest = fetch_rest(bond.source, plan.rank, *where) if bond.source.twin else None
            own = rest if bond.source.twin else state
            missed = [] if own is None else list(own.facts.get("points", []))
        return overlaid(snapshot, plan.rank, state, rest), missed

    def begin(self, plan: BackedPlan) -> Committer | None:
        """Commits from now on, where the plan wants them. Raises LinkError."""
        bond = plan.bond
        if bond is None or self._keeper is None:
            return None
        self._keeper.forget(bond.line, plan.start)
        mirror = Mirror(self._keeper, bond.doors[bond.keeper], self._secret, timeout=plan.timeout, twin=bond.twin)
        mirror.vault.open(bond.line, plan.start, plan.generation)
        self._upkeep = Committer(mirror, plan.generation, lambda: self._said)
        return self._upkeep

    @property
    def cost(self) -> CommitCost | None:
        """Of the generation under way, so far."""
        return None if self._upkeep is None else self._upkeep.cost

    def part(self) -> None:
        """The generation has ended. Any thread may call it."""
        upkeep, self._upkeep = self._upkeep, None
        if upkeep is not None:
            upkeep.close()

    def close(self) -> None:
        """Give up what is kept, of this worker and of others."""
        with self._lock:
            self._closed = True
        self.part()
        if self._keeper is not None:
            self._keeper.close()
