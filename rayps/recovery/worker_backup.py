"""One worker's part of recovery: commits, backups of other workers, and the state to continue from.

`Committer` commits the worker's state after each step and measures the cost. `WorkerBackup` holds the states of other
workers, and finds the state from which the worker continues after a failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from rayps.comm.link import memory
from rayps.core import failpoint
from rayps.core.costs import amount
from rayps.core.errors import LinkError, PeerLost
from rayps.core.records import Point
from rayps.core.values import JsonObject
from rayps.recovery.backup_assignment import Bond, HeldRounds
from rayps.recovery.peer_replication import Mirror, PeerReplication, fetch, fetch_rest
from rayps.recovery.state_slots import CommittedState, StateFacts, tensors_of
from rayps.tensors.flat import FlatModel
from rayps.tensors.optim import with_edits
from rayps.tensors.snapshot import Snapshot
from rayps.workload.model_part import ModelPart

log = logging.getLogger(__name__)


class CommittedWorker(Protocol):
    """A worker between two rounds: the state that its backup reads."""

    @property
    def position(self) -> int:
        """The number of batches that the worker has taken."""

    @property
    def flat(self) -> FlatModel:
        """The parameters."""

    @property
    def part(self) -> ModelPart:
        """The buffers and frozen parameters."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer with its moments; None if only servers step."""


@dataclass(frozen=True, slots=True)
class CommitCost:
    """Cost of one worker's backup: bytes and seconds per round, and the share of the round that this takes."""

    kept: int = 0  # bytes copied into shared memory of this host
    sent: int = 0  # bytes sent to another host
    seconds: float = 0.0
    share: float = 0.0

    @classmethod
    def most(cls, costs: Iterable[CommitCost]) -> CommitCost | None:
        """Return the cost with the largest share of a round; None if there are no costs."""
        return max(costs, key=lambda cost: (cost.share, cost.kept), default=None)

    def __str__(self) -> str:
        travel = f" and send {amount(self.sent)} to another host" if self.sent else ""
        took = f"{self.seconds * 1e3:.2f} ms, {self.share:.1%} of the round"
        return f"copy {amount(self.kept)}{travel} per round ({took})"

    def to_dict(self) -> JsonObject:
        """Return the cost as JSON-ready facts."""
        return {"kept_bytes": self.kept, "sent_bytes": self.sent, "seconds": self.seconds, "share": self.share}


class Committer:
    """Commits one worker's state after each round of one generation, and measures the cost."""

    def __init__(self, mirror: Mirror, writer: int, points: Callable[[], list[Point]]) -> None:
        """Prepare the commits of generation `writer`; `points` returns the points to be stored with each state."""
        self._mirror, self._writer, self._points = mirror, writer, points
        self._frozen: set[str] | None = None  # names of the parameters that need no gradient: they never change
        self._rounds = 0
        self._seconds, self._began = 0.0, 0.0
        self._over = False

    def commit(self, worker: CommittedWorker) -> None:
        """Commit the worker's current state. If the commit fails, the run continues without a backup."""
        if self._over:
            return
        began = time.perf_counter()
        failpoint.passing("vault: before a commit")
        try:
            kept = self._state_of(worker)
            if self._mirror.vault.commit(self._writer, worker.position, *kept):
                self._mirror.committed(worker.position)
        except (LinkError, TypeError, ValueError) as error:
            self._over = True
            self._mirror.vault.shut()
            log.warning(
                "this worker has no backup any more, so a failure returns all workers to the snapshot: %s", error
            )
        failpoint.passing("vault: after a commit")
        ended = time.perf_counter()
        if self._rounds == 0:
            self._began = ended  # the first commit allocates the memory, so it is not counted as part of a round
        else:
            self._seconds += ended - began
        self._rounds += 1

    def _state_of(self, worker: CommittedWorker) -> tuple[dict[str, Tensor], StateFacts]:
        """Return the worker's state without a copy."""
        if self._frozen is None:
            self._frozen = {name for name, p in worker.part.module.named_parameters() if not p.requires_grad}
        optimizer = worker.optimizer
        assert optimizer is not None, "a worker whose state is committed has an optimizer"
        named = zip(worker.flat.layout.entries, worker.flat.parameters, strict=True)
        moments = {entry.name: optimizer.state.get(p, {}) for entry, p in named}
        moments = with_edits(moments, optimizer, worker.flat.layout, worker.flat.parameters)
        buffers = {name: value for name, value in worker.part.beside.items() if name not in self._frozen}
        return tensors_of(worker.flat.vector, moments, buffers, torch.get_rng_state(), self._points())

    @property
    def cost(self) -> CommitCost | None:
        """The cost so far; None before the first round has ended."""
        rounds = self._rounds - 1
        if rounds < 1:
            return None
        lasted = max(time.perf_counter() - self._began, 1e-9)
        return CommitCost(
            self._mirror.vault.bytes, self._mirror.bytes, self._seconds / rounds, min(1.0, self._seconds / lasted)
        )

    def close(self) -> None:
        """Close the connection to the worker that holds the backup; that worker keeps the states it has received."""
        self._mirror.close()


def overlaid(snapshot: Snapshot, rank: int, state: CommittedState, rest: CommittedState | None = None) -> Snapshot:
    """Return a column's snapshot in which the state of worker `rank` is replaced by its newer `state`.

    If `state` is that of a twin, `rest` is the part of the worker's own state that the twin lacks.
    """
    rng = rest.rng if rest is not None else state.rng
    return replace(
        snapshot,
        params=state.tensors["params"],
        moments=state.moments,
        buffers=snapshot.buffers | state.buffers | ({} if rest is None else rest.buffers),
        rng={} if rng is None else {rank: rng},
        positions=[state.round] * len(snapshot.positions),
    )


MOST_SAID = 200  # most points that are stored with a worker's state because the driver may not have received them
_HEARD_LATE = ("round", "evaluation")  # kinds of points that are stored


class BackedPlan(Protocol):
    """A worker's plan, as far as its backup uses it."""

    @property
    def generation(self) -> int:
        """The generation's number."""

    @property
    def rank(self) -> int:
        """The worker's rank."""

    @property
    def start(self) -> int:
        """The position (number of batches taken) from which the generation starts."""

    @property
    def timeout(self) -> float:
        """Seconds to wait for a peer."""

    @property
    def bond(self) -> Bond | None:
        """How the worker's state is backed up; None = not at all."""


class WorkerBackup:
    """One worker's part of recovery, through all generations: its backup, and the backups of others that it holds."""

    def __init__(self, rank: int, secret: bytes, host: str) -> None:
        self._rank, self._secret, self._host = rank, secret, host
        self._keeper: PeerReplication | None = None
        self._upkeep: Committer | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._said: list[Point] = []  # the newest points, which the driver may not have received
        self._given = 0  # how many of these were in the answer to the driver's latest poll

    def backup_address(self) -> str:
        """Return the address at which other workers store and request states; "" if there is no shared memory."""
        with self._lock:
            if self._keeper is None and memory.AVAILABLE and not self._closed:
                self._keeper = PeerReplication(self._rank, self._secret, self._host)
            return "" if self._keeper is None else self._keeper.address

    def said(self, point: Point) -> None:
        """Record a point for the driver, until it is known that the driver has received it."""
        if point["kind"] in _HEARD_LATE:
            dropped = max(0, len(self._said) + 1 - MOST_SAID)
            self._said = [*self._said[dropped:], point]
            self._given = max(0, self._given - dropped)

    def asked(self) -> None:
        """Record a poll, which shows that the driver has received the answer to the previous poll."""
        self._said = self._said[self._given :]
        self._given = len(self._said)

    def unheard(self, before: int) -> list[Point]:
        """Return the points that the driver may not have received, to be sent again.

        A generation continues from round `before`: points of that round and later ones are dropped.
        """
        self._said = [point for point in self._said if point["round"] < before]
        self._given = 0
        return [point | {"again": True} for point in self._said]

    def inherit(self, points: list[Point], before: int) -> list[Point]:
        """Take over the points of the worker that this one replaces; return those that the next poll must receive.

        No poll may be answered between this call and that answer: the points would count as received without having
        been sent.
        """
        self._said = points
        return self.unheard(before)

    def shut(self) -> None:
        """Refuse further commits of this worker's state."""
        if self._keeper is not None:
            self._keeper.shut()

    def holdings(self, line: int) -> dict[int, HeldRounds]:
        """Return the rounds of each worker's states on `line` that this worker holds, its own states included."""
        return {} if self._keeper is None else self._keeper.holdings(line)

    def recall(self, plan: BackedPlan, snapshot: Snapshot) -> tuple[Snapshot, list[Point] | None]:
        """Return the snapshot from which this worker continues, updated with the newer state of its rank.

        That state is this worker's own, or that of the worker that it replaces. The second value is the points that the
        replaced worker had reported, for `inherit`; None if the state is this worker's own. Raises LinkError: no worker
        holds the state any more.
        """
        bond, rest, missed = plan.bond, None, None
        if bond is None or not bond.recalls:
            return snapshot, missed
        if bond.source is None:
            state = None if self._keeper is None else self._keeper.state(plan.rank, bond.line, plan.start)
            if state is None:
                raise PeerLost(f"worker-{plan.rank} no longer has its state after round {plan.start}", peer="")
        else:
            where = list(bond.addresses), self._secret, bond.line, plan.start, plan.timeout
            state = fetch(bond.source, *where)
            rest = fetch_rest(bond.source, plan.rank, *where) if bond.source.twin else None
            own = rest if bond.source.twin else state
            missed = [] if own is None else list(own.facts.get("points", []))
        return overlaid(snapshot, plan.rank, state, rest), missed

    def begin(self, plan: BackedPlan) -> Committer | None:
        """Return the committer of the worker's state; None if the plan asks for no backups. Raises LinkError."""
        bond = plan.bond
        if bond is None or self._keeper is None:
            return None
        self._keeper.forget(bond.line, plan.start)
        mirror = Mirror(self._keeper, bond.addresses[bond.keeper], self._secret, timeout=plan.timeout, twin=bond.twin)
        mirror.vault.open(bond.line, plan.start, plan.generation)
        self._upkeep = Committer(mirror, plan.generation, lambda: self._said)
        return self._upkeep

    @property
    def cost(self) -> CommitCost | None:
        """The cost of this worker's commits in the current generation so far; None if there are none."""
        return None if self._upkeep is None else self._upkeep.cost

    def part(self) -> None:
        """End the generation's commits. Any thread may call it."""
        upkeep, self._upkeep = self._upkeep, None
        if upkeep is not None:
            upkeep.close()

    def close(self) -> None:
        """Release all backups, of this worker and of others."""
        with self._lock:
            self._closed = True
        self.part()
        if self._keeper is not None:
            self._keeper.close()
