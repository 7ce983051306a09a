"""A generation of workers and shards: start, begin, poll, shut down, as one.

Polling never blocks: each member has at most one question open, and one that leaves its question
unanswered past the deadline counts as dead. Which members to replace is decided by the driver.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rayps import optim
from rayps.actors import Place, ShardPlan, WorkerFacts
from rayps.cluster import Bundle, Cluster, Gang, Handle, Reply
from rayps.errors import ActorDied, ClusterError
from rayps.meeting import Meeting
from rayps.metrics import means
from rayps.server.rows import cuts
from rayps.server.shard import Boundary, ShardFacts
from rayps.snapshot import Snapshot
from rayps.strategy import Strategy
from rayps.worker import WorkerPlan

START_SECONDS = 180.0  # a process has this long to start and to import torch


@dataclass(slots=True)
class Member:
    """One actor of the group as the driver sees it."""

    name: str
    handle: Handle
    place: Place | None = None
    facts: Any = None  # WorkerFacts or ShardFacts of the last poll
    dead: str | None = None  # why it counts as dead
    question: Reply | None = None
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Orders:
    """What every member of a generation is told."""

    generation: int
    strategy: Strategy
    seed: int
    end: int
    boundary: Boundary
    evaluated: int  # the last round whose evaluation is filed
    timeout: float


@dataclass(slots=True)
class Group:
    """The workers and shards of one job."""

    cluster: Cluster
    packed: bytes  # the workload
    size: int
    resources: Bundle
    working_dir: str | None = None
    capture: bool = True
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    workers: list[Member] = field(default_factory=list)
    shards: list[Member] = field(default_factory=list)
    _gang: Gang | None = None
    _orders: Orders | None = None
    _meeting: Meeting | None = None
    _collected: int = 0  # the round of the newest state
    _evaluated: list[int] = field(default_factory=list)  # the last round after which each rank was heard to evaluate

    # ---- starting and ending

    def start(self, timeout: float) -> None:
        """Reserve the workers' resources together and start them, or leave nothing behind.

        Raises:
            NoResources: the cluster cannot hold them.
            ClusterError: an actor did not start.
        """
        self._gang = self.cluster.reserve([self.resources] * self.size, timeout)
        try:
            self.workers = [self._spawn_worker(rank) for rank in range(self.size)]
            self._place(self.workers)
            for worker in self.workers:
                if worker.dead:
                    raise ClusterError(f"{worker.name} did not start: {worker.dead}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every member and give the resources back."""
        for member in [*self.workers, *self.shards]:
            self._kill(member)
        self.workers, self.shards = [], []
        if self._gang is not None:
            self._gang.release()
            self._gang = None

    def _spawn_worker(self, rank: int) -> Member:
        cpus, gpus = self.resources.get("cpu", 1.0), self.resources.get("gpu", 0.0)
        handle = self.cluster.spawn(
            "rayps.actors:WorkerActor",
            rank,
            self.secret,
            self.packed,
            working_dir=self.working_dir,
            threads=max(1, int(cpus)),
            device="cuda" if gpus else "cpu",
            capture=self.capture,
            cpus=cpus,
            gpus=gpus,
            gang=self._gang,
            index=rank,
        )
        return Member(f"worker-{rank}", handle)

    def _spawn_shard(self, index: int) -> Member:
        handle = self.cluster.spawn(
            "rayps.actors:ShardActor", index, self.secret, self.packed, working_dir=self.working_dir, threads=1
        )
        return Member(f"shard-{index}", handle)

    def _place(self, members: list[Member]) -> None:
        """Learn where new members are; one that did not start counts as dead."""
        for member, reply in [(member, member.handle.call("place")) for member in members]:
            try:
                member.place = reply.result(START_SECONDS)
            except TimeoutError:
                member.dead = (
                    f"it did not start within {START_SECONDS:g} s: is the cluster overloaded? "
                    "`rayps doctor` shows memory and cores"
                )
            except ClusterError as error:
                member.dead = str(error.data.get("reason", error))

    def _kill(self, member: Member) -> None:
        self.cluster.kill(member.handle)

    # ---- a generation

    def initial(self, seed: int) -> Snapshot:
        """The state before the first round, drawn by rank 0 from the seed."""
        snapshot: Snapshot = self.workers[0].handle.call("initial", seed).result(START_SECONDS)
        return snapshot

    def begin(self, orders: Orders, snapshot: Snapshot) -> None:
        """Start a generation from a snapshot: dead members are replaced, living ones begin anew."""
        self._orders, self._meeting = orders, Meeting(orders.boundary)
        self._collected, self._evaluated = snapshot.round, [orders.evaluated] * self.size
        for member in [m for m in [*self.workers, *self.shards] if m.dead]:
            self._kill(member)
        wanted = orders.strategy.shards
        for extra in self.shards[wanted:]:
            self._kill(extra)
        self.workers = [self._spawn_worker(i) if m.dead else m for i, m in enumerate(self.workers)]
        kept = self.shards[:wanted]
        self.shards = [self._spawn_shard(i) if i >= len(kept) or kept[i].dead else kept[i] for i in range(wanted)]
        self._place([m for m in [*self.workers, *self.shards] if m.place is None])
        if any(member.dead for member in [*self.workers, *self.shards]):
            return  # the next poll says so, and the driver decides
        shared = self.cluster.share(snapshot)
        self._settle(
            [shard.handle.call("begin", self._shard_plan(i, snapshot), shared) for i, shard in enumerate(self.shards)],
            self.shards,
        )
        self._settle(
            [
                worker.handle.call("begin", self._worker_plan(rank, snapshot.positions[rank], snapshot), shared)
                for rank, worker in enumerate(self.workers)
            ],
            self.workers,
        )

    def replace_worker(self, rank: int, snapshot: Snapshot) -> None:
        """Start a worker anew while the others go on; it asks the shards which step is its next."""
        if self.workers[rank].dead:
            self._kill(self.workers[rank])
            self.workers[rank] = self._spawn_worker(rank)
            self._place([self.workers[rank]])
        if self.workers[rank].dead:
            return  # the next poll says so
        reply = self.workers[rank].handle.call(
            "begin", self._worker_plan(rank, -1, snapshot), self.cluster.share(snapshot)
        )
        self._settle([reply], [self.workers[rank]])

    def replace_shard(self, index: int, snapshot: Snapshot) -> None:
        """Restore a shard from a snapshot and tell the workers, who say again what they pushed to it since."""
        self._kill(self.shards[index])
        self.shards[index] = shard = self._spawn_shard(index)
        self._place([shard])
        if shard.dead:
            return
        reply = shard.handle.call("begin", self._shard_plan(index, snapshot), self.cluster.share(snapshot))
        self._settle([reply], [shard])
        assert shard.place is not None
        for worker in [w for w in self.workers if not w.dead]:
            self._heard(worker, worker.handle.call("rewire", index, shard.place.address))

    def _settle(self, replies: Sequence[Reply], members: list[Member]) -> None:
        for reply, member in zip(replies, members, strict=True):
            member.question, member.facts = None, None
            self._heard(member, reply)

    def _heard(self, member: Member, reply: Reply) -> None:
        """Wait for an order to be taken; a member that does not take it counts as dead."""
        try:
            reply.result(START_SECONDS)
        except ClusterError as error:
            member.dead = str(error.data.get("reason", error))
        except TimeoutError as error:
            member.dead = str(error)

    def _worker_plan(self, rank: int, start: int, snapshot: Snapshot) -> WorkerPlan:
        orders = self._known()
        ranges = self._ranges(snapshot)
        shards = [(_address(m), lo, hi) for m, (lo, hi) in zip(self.shards, ranges, strict=True)]
        return WorkerPlan(
            orders.generation,
            rank,
            self.size,
            orders.strategy,
            [] if shards else [_address(w) for w in self.workers],
            shards,
            self.secret,
            orders.seed,
            start,
            orders.end,
            orders.boundary,
            self._evaluated[rank],
            orders.timeout,
        )

    def _shard_plan(self, index: int, snapshot: Snapshot) -> ShardPlan:
        orders = self._known()
        lo, hi = self._ranges(snapshot)[index]
        return ShardPlan(orders.generation, index, lo, hi, orders.strategy, orders.boundary)

    def _ranges(self, snapshot: Snapshot) -> list[tuple[int, int]]:
        return cuts(snapshot.layout, len(self.shards)) if self.shards else []

    def _known(self) -> Orders:
        assert self._orders is not None, "begin() comes first"
        return self._orders

    # ---- asking

    def poll(self) -> list[dict[str, Any]]:
        """Take in the answers that have come, ask again, and return the new metric points (with their rank)."""
        orders, wanted = self._known(), self._wanted()
        points: list[dict[str, Any]] = []
        for rank, worker in enumerate(self.workers):
            facts = self._ask(worker, orders, wanted)
            if isinstance(facts, WorkerFacts) and facts.generation == orders.generation:
                points += [{**point, "rank": rank} for point in facts.points]
        for point in points:
            if point["kind"] == "evaluation":
                self._evaluated[point["rank"]] = point["round"]
        for shard in self.shards:
            self._ask(shard, orders, wanted)
        return points

    def _ask(self, member: Member, orders: Orders, wanted: int) -> Any:
        """The member's new facts, or None while it has not answered."""
        if member.dead:
            return None
        if member.question is None:
            member.question, member.asked_at = member.handle.call("poll", wanted), time.monotonic()
            return None
        silent = time.monotonic() - member.asked_at
        if not member.question.done():
            if silent > orders.timeout:
                member.dead = f"{member.name} was silent for {silent:.0f} s (timeout {orders.timeout:g} s)"
            return None
        question, member.question = member.question, None
        try:
            member.facts = question.result(0)
        except ClusterError as error:
            member.dead = str(error.data.get("reason", error))
            return None
        return member.facts

    def hurry(self) -> None:
        """Let every member keep its share of the next round that all can still hear of, for a checkpoint now."""
        if self._meeting is not None:
            self._meeting.hurry()

    def _wanted(self) -> int:
        """The round whose share every member is to keep; 0 while it is not known how far all have come."""
        facts = [member.facts for member in self._concerned()]
        if self._meeting is None or not all(facts):
            return 0
        return self._meeting.look([_holds(f) for f in facts], self._collected)

    def lines(self) -> list[tuple[float, str, str]]:
        """The log lines that the last polls brought: time, who, text."""
        found = []
        for member in self.workers:
            if isinstance(member.facts, WorkerFacts) and member.facts.lines:
                found += [(at, member.name, text) for at, text in member.facts.lines]
                member.facts.lines = []
        return sorted(found)

    def collect(self, snapshot: Snapshot) -> Snapshot | None:
        """The newest state of which every member still keeps its share; None when there is none newer.

        `snapshot` is the state that the generation began from.
        """
        if any(member.dead for member in [*self.workers, *self.shards]):
            return None
        in_step = self._known().strategy.lockstep
        held = [_holds(member.facts)[1] if member.facts else [] for member in self._concerned()]
        common = set.intersection(*map(set, held))
        for newest in sorted((r for r in common if r > snapshot.round), reverse=True):
            parts = [worker.handle.call("part", newest if in_step else None) for worker in self.workers]
            parts += [shard.handle.call("part", newest) for shard in self.shards]
            try:
                given = [part.result(self._known().timeout) for part in parts]
            except (ClusterError, TimeoutError):
                return None  # somebody died or is silent: the next polls say who
            if all(part is not None for part in (given if in_step else given[self.size :])):
                found = assemble(snapshot, given[: self.size], given[self.size :])
                self._collected = found.round
                return found
        return None

    def saved(self, rounds: int) -> None:
        """Tell the shards that the driver has the state after `rounds`: what it holds need not be said again."""
        for shard in [shard for shard in self.shards if not shard.dead]:
            shard.handle.call("saved", rounds)  # where it is not heard, workers keep their pushes for longer

    def _concerned(self) -> list[Member]:
        """The members who must give their shares of one and the same round.

        In step that is everyone. Out of step a round is that of the slowest worker, which only shards know; what a
        worker adds (its random state, the buffers) belongs to no round of the others.
        """
        loose = self.shards and not self._known().strategy.lockstep
        return self.shards if loose else [*self.workers, *self.shards]

    def evaluate(self, snapshot: Snapshot, timeout: float) -> dict[str, float] | None:
        """Every metric at the snapshot's parameters, as means over all samples of the evaluation data.

        None when a worker was lost meanwhile: it counts as dead.
        """
        shared = self.cluster.share(snapshot.params)
        replies = [w.handle.call("evaluate", shared, snapshot.buffers) for w in self.workers]
        found = []
        for worker, reply in zip(self.workers, replies, strict=True):
            try:
                found.append(reply.result(timeout))
            except ActorDied as error:
                worker.dead = str(error.data.get("reason", error))
            except TimeoutError:
                worker.dead = f"it did not evaluate within {timeout:g} s"
        return means(found) if len(found) == self.size else None


def assemble(base: Snapshot, workers: list[Any], shards: list[Any]) -> Snapshot:
    """One snapshot from everyone's parts of the same round; out of step a worker may have none yet."""
    from_shards = bool(shards)
    params = torch.cat([part.params for part in shards]) if from_shards else workers[0].params
    moments = optim.join([part.moments for part in shards], base.layout) if from_shards else workers[0].moments
    # shards at a round boundary know how far each worker's pushes got; the slowest shard counts
    positions = (
        [min(marks) for marks in zip(*(part.ledger.marks.values() for part in shards), strict=True)]
        if from_shards
        else [part.round for part in workers]
    )
    return Snapshot(
        base.layout,
        params,
        moments,
        base.buffers if workers[0] is None else workers[0].buffers,
        {r: p.rng for r, p in enumerate(workers) if p is not None},
        positions,
        base.steps_per_epoch,
        ring=base.ring,
        ledgers=[(part.lo, part.lo + part.params.numel(), part.ledger) for part in shards],
    )


def _holds(facts: WorkerFacts | ShardFacts) -> tuple[int, list[int]]:
    """How far a member has come, and the rounds whose shares it holds."""
    if isinstance(facts, ShardFacts):
        return facts.reached, facts.snapshots
    return facts.position, facts.parts


def _address(member: Member) -> str:
    assert member.place is not None
    return member.place.address
