"""Change the workers of a running job whose workers are not in step: no worker waits while others join or leave.

Each worker trains on leases of blocks of rows (`rayps.core.rows.leases`), which the driver gives it as it polls. The
ways of a worker:

- It *waits*: its plan has begun, it is connected to the servers, and it has no lease. If there are blocks to give, the
  driver lets the servers admit it, and it begins at the slowest clock.
- It *trains*: it has leases, and its clock counts.
- It *leaves*: it ends its round, pushes, and its plan ends. The driver removes it from the servers, and the blocks that
  it has not pushed come back.

A worker that dies is removed in the same way, and a newcomer takes its place when there is room. A worker without a
block to train on is removed too, so that no other worker waits for its clock. When all blocks are done, the driver ends
the phase at the servers, which retain the last state.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from rayps_client.errors import CheckpointError
from rayps_client.values import JsonObject

from rayps.cluster.members import GroupMember
from rayps.core.job.continuation import Continuation
from rayps.core.job.records import Point
from rayps.core.metrics import PushRounds
from rayps.core.rows.leases import Leases, Marks, RowLease, choose_lease_size
from rayps.core.rows.phase_rounds import OPEN, Boundary, Calendar
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.core.strategy.staleness_bound import PushCount
from rayps.core.strategy.strategy import StrategyView
from rayps.ps.client.member_requests import MemberRequests
from rayps.ps.protocol.members import MemberChange, MemberChangeKind
from rayps.runtime.driver.decide_recovery import Replace
from rayps.runtime.records.journal import Journal
from rayps.runtime.size.job_size import Allowance
from rayps.runtime.size.worker_changes import ChangingWorkers
from rayps.worker.plan import Orders, WorkerFacts

if TYPE_CHECKING:
    from rayps.runtime.driver.worker_group import WorkerGroup
    from rayps.tensors.snapshot import Snapshot

PACE_SECONDS = 0.2  # the least time over which the pace of a worker is measured
UNDISTURBED = ", and no other worker has waited"  # in the event of a change


class WorkerStage(enum.StrEnum):
    """What a worker does now."""

    WAITS = "waits"
    JOINS = "joins"  # the servers were asked to admit it
    TRAINS = "trains"
    LEAVES = "leaves"  # it was told to end its plan
    ENDS = "ends"  # the servers were asked to remove it; it then waits again, or has left
    ENDED = "ended"  # no row is left, and it was told to end its plan


@dataclass(frozen=True, slots=True)
class Departure:
    """Why the servers remove a worker. `waits`: it has no block to train on, and stays.

    `counted`: whether it had joined. `since`: when the change was decided, or the loss was seen.
    """

    reason: str
    lost: bool = False
    waits: bool = False
    counted: bool = True
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class LeasedWorker:
    """A worker as `LeasedRun` knows it."""

    member: GroupMember
    stage: WorkerStage = WorkerStage.WAITS
    first: int = 0  # its first step, since it trains
    # leases that are not sent yet, each with the servers' answer that must come before it
    outbox: deque[tuple[RowLease, Future[bool] | None]] = field(default_factory=deque)
    begins_at: int | None = None  # the step that it must be told with its next lease
    size: int = 1  # blocks of its last lease
    seconds: float | None = None  # of one of its rounds
    seen: tuple[float, int] = (0.0, -1)  # a time and the position then, from which its pace is measured
    joins_because: str = ""  # why it joined; "" for one of the first workers
    counted: bool = False  # whether it has joined, and is one of the workers that events count
    dismissed: str = ""  # why it leaves; "" if it stays
    rest: int | None = None  # the step as which it was told to push what compression has left out
    since: float = field(default_factory=time.monotonic)  # when its last change was decided: that it joins or leaves

    @property
    def incarnation(self) -> int:
        """With which it joins the servers."""
        return self.member.incarnation

    @property
    def dismissal(self) -> Departure:
        """Its departure, when it leaves."""
        return Departure(self.dismissed, counted=self.counted, since=self.since)

    @property
    def reported(self) -> int:
        """The step after the last one that it has reported since it trains."""
        facts = self.member.facts
        return max(self.first, facts.position) if isinstance(facts, WorkerFacts) else self.first

    def dismiss(self, reason: str) -> None:
        """Let it leave after its present round."""
        self.dismissed, self.since = reason, time.monotonic()

    def begin(self, first: int) -> None:
        """Train from step `first` on."""
        self.stage, self.first, self.begins_at = WorkerStage.TRAINS, first, first
        self.seen, self.size = (0.0, -1), 1

    def send(self) -> None:
        """Send the leases whose servers' answers have arrived, in order."""
        ready: list[RowLease] = []
        while self.outbox and (self.outbox[0][1] is None or self.outbox[0][1].done()):
            ready.append(self.outbox.popleft()[0])
        if ready:
            self.member.handle.call("extend", ready, self.begins_at)
            self.begins_at = None

    def end_plan(self, push_at: int | None) -> None:
        """Let its plan end after its present round: see `GenerationRun.end_leases`."""
        self.outbox.clear()
        self.rest = push_at
        if self.stage is WorkerStage.WAITS:
            self.stage = WorkerStage.ENDED
        self.member.handle.call("end_leases", push_at)

    def measure(self, position: int, now: float) -> None:
        """Measure the pace: the worker has reported `position` rounds by the time `now`."""
        began, before = self.seen
        if before < 0 or position < before:
            self.seen = now, position
        elif position > before and now - began >= PACE_SECONDS:
            self.seconds = (now - began) / (position - before)
            self.seen = now, position


@dataclass(slots=True)
class Visits:
    """The times at which workers can get leases. The driver also collects, saves, and calls callbacks in its thread."""

    longest: float = 0.0  # seconds between two visits
    _last: float | None = None

    def record(self, now: float) -> None:
        """Record a visit."""
        if self._last is not None:
            self.longest = max(self.longest, now - self._last)
        self._last = now

    def interrupt(self) -> None:
        """Do not count the time until the next visit, because no worker trains."""
        self._last = None


@dataclass(slots=True)
class DueCheckpoints:
    """When a checkpoint is due: after the rounds of `boundary`, as soon as their pushes were reported."""

    boundary: Boundary
    _requested: int = 0  # the newest of these rounds after which one was requested

    def take(self, saved: int, reached: int) -> bool:
        """Return whether to request a checkpoint now. The newest state is of round `saved`."""
        due = self.boundary.following(max(saved, self._requested) + 1)
        if due > reached or self._requested > saved:  # the state that was requested last has not arrived
            return False
        self._requested = due
        return True


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The blocks of an epoch, and the block (epoch, number) before which the job ends. `least`: workers of the job.

    `compresses`: whether pushes are compressed, so that a worker holds a rest of its gradients. A round is `least`
    blocks, whichever workers push them: the job has as many rounds as with the least number of workers all the time.
    """

    blocks: int
    end: tuple[int, int]
    least: int
    compresses: bool = False

    @property
    def pushes(self) -> int:
        """The number of all blocks."""
        epochs, blocks = self.end
        return epochs * self.blocks + blocks


class LeasedRun(ChangingWorkers):
    """The driver's part of an elastic job whose workers are not in step."""

    evaluates_in_step: ClassVar[bool] = False
    slots: int
    pushes: PushRounds

    def __init__(
        self, elastic: ElasticWorkers, terms: LeaseTerms, calendar: Calendar, journal: Journal, allowance: Allowance
    ) -> None:
        """Prepare. `begin` is called when the workers have started."""
        super().__init__(elastic, terms.least, calendar, journal, allowance)
        self.slots, self._terms = elastic.most, terms
        self._requests: MemberRequests | None = None
        self._leases: Leases | None = None  # None if no rows are left to learn from
        self._workers: dict[int, LeasedWorker] = {}
        # of ranks that the servers remove
        self._removals: dict[int, tuple[Future[Marks], LeasedWorker, Departure]] = {}
        self._admissions: dict[int, Future[int]] = {}
        self._end: Future[int] | None = None
        self._took_last = False  # whether the state after the end was requested
        self._count = 0  # workers that have joined
        self._visits = Visits()
        self._repeats: list[MemberChange] = []  # since the newest snapshot
        self.pushes = self._make_pushes_after(0)  # counts the pushes of the generation
        self._due = DueCheckpoints(Boundary(0, OPEN))

    def _make_pushes_after(self, done: int) -> PushRounds:
        return PushRounds(self._terms.least, self._terms.blocks, done, self._terms.pushes)

    def close(self) -> None:
        """End newcomers and requests, and stop looking for room."""
        super().close()
        if self._requests is not None:
            self._requests.close()

    # ---- a generation

    def resume(self, snapshot: Snapshot) -> None:
        """Adapt a checkpoint to this job: of an asynchronous elastic job, or of another one at the end of an epoch.

        Raises:
            CheckpointError: which rows the checkpoint has learned from is not known.
        """
        snapshot.ended = [(planned, at) for planned, at in snapshot.ended if self._calendar.cut(planned, at)]
        at, span, terms = snapshot.clock, self._calendar.spans[0], self._terms
        if snapshot.leases is None:
            began, epoch = snapshot.origin
            epochs, rest = divmod(at - began, snapshot.steps_per_epoch)
            if rest or len(set(snapshot.positions)) > 1 or snapshot.row_shares is not None:
                raise CheckpointError(
                    "the checkpoint was written in the middle of an epoch by a job with a fixed number of workers, or "
                    "with workers in step, and its rows were divided otherwise:\nresume with that job's strategy and "
                    "workers, or start a new run from its parameters with start_from="
                )
            leases = Leases(terms.blocks, terms.end, (epoch + epochs, 0))
        elif snapshot.leases.get("blocks") != terms.blocks:
            raise CheckpointError(
                f"an epoch of the checkpoint has {snapshot.leases.get('blocks')} blocks of rows, and one of this job "
                f"{terms.blocks}:\nresume with the same data, batch_size and accumulate, or start a new run from "
                "its parameters with start_from="
            )
        else:
            leases = Leases.from_json(snapshot.leases, terms.end, ranks=self.slots)
        snapshot.leases = leases.to_json({}, terms.least)  # this job's rounds may have more or fewer blocks
        if len(snapshot.positions) != self.slots:
            ledgers = [(lo, hi, ledger.with_ranks(self.slots, at)) for lo, hi, ledger in snapshot.ledgers]
            snapshot.positions = [at] * self.slots
            snapshot.enter_phase(span)
            snapshot.ledgers = ledgers
        snapshot.enter_phase(span)

    def begin_generation(
        self, strategy: StrategyView, snapshot: Snapshot, group: WorkerGroup, continues: Continuation | None
    ) -> None:
        """Prepare the next generation, which begins with `snapshot`. Call it before the group begins.

        The dead are dropped, unless all workers have died: these start again.
        """
        if self._requests is not None:
            self._requests.close()
        if any(not member.dead for member in group.workers):  # newcomers take the places of the dead when there is room
            for member in [each for each in group.workers if each.dead]:
                group.drop(member)
        self._workers, self._removals, self._admissions = {}, {}, {}
        self._requests, self._end, self._took_last = None, None, False
        self._repeats = []
        self._visits.interrupt()
        saved = snapshot.leases
        if saved is None:
            self._leases = Leases(self._terms.blocks, self._terms.end)
        else:
            self._leases = Leases.from_json(saved, self._terms.end, ranks=self.slots)
        self.pushes = self._make_pushes_after(self._leases.done({}))
        if snapshot.round >= self._calendar.rounds or self._leases.finished:
            self._leases = None
        self._tell_servers(group, snapshot.clock)

    def begun(self, group: WorkerGroup) -> None:
        """Take over the workers of a generation that has begun."""
        self._requests = MemberRequests(group.opener)
        for member in group.workers:
            self._workers[member.rank] = LeasedWorker(member, counted=True)
        self._count = len(self._workers)

    def _tell_servers(self, group: WorkerGroup, floor: int) -> None:
        """Set which ranks take part in a state, of the clock `floor`, that is loaded into a server from now on."""
        pushes = PushCount(self._terms.least, self._terms.pushes, self.pushes.begun)
        joined = [
            MemberChange(MemberChangeKind.RESUME, rank, each.first)
            for rank, each in sorted(self._workers.items())
            if each.stage in (WorkerStage.TRAINS, WorkerStage.LEAVES)
        ]
        group.set_members([MemberChange.begin(floor, pushes), *joined, *self._repeats])

    # ---- snapshots

    def collected(self, snapshot: Snapshot) -> None:
        """Add to a new snapshot which blocks are not done in it."""
        if self._leases is not None:
            snapshot.leases, snapshot.rng = self._leases.to_json(marks_of(snapshot), self._terms.least), {}
        if snapshot.clock == self.end_clock:
            snapshot.ended = [*snapshot.ended, (self._calendar.rounds, snapshot.round)]

    def saved(self, snapshot: Snapshot, group: WorkerGroup) -> None:
        """Drop the history of leases before a snapshot that the driver has saved."""
        if self._leases is None:
            return
        marks = marks_of(snapshot)
        self._leases.saved(marks)
        self._repeats = [each for each in self._repeats if each.step >= marks[each.rank].low]
        self._tell_servers(group, snapshot.clock)

    def amend(self, orders: Orders, continues: Continuation | None) -> Orders:
        """Take over after which rounds a checkpoint is due, because the members cannot count rounds."""
        boundary = orders.snapshots.boundary
        self._due = DueCheckpoints(boundary)
        snapshots = replace(orders.snapshots, boundary=Boundary(0, boundary.end))
        return replace(orders, snapshots=snapshots, leased=True)

    @property
    def end_clock(self) -> int | None:
        """The clock of the last state, when all blocks are done and the servers have ended the phase; else None."""
        return self._end.result() if self._end is not None and self._end.done() else None

    @property
    def joined(self) -> dict[int, int]:
        """From each rank that takes part to its first step."""
        return {rank: each.first for rank, each in self._workers.items() if each.stage is WorkerStage.TRAINS}

    def has_ended(self, snapshot: Snapshot) -> bool:
        """Return whether all blocks are done, and `snapshot` is the last state."""
        return snapshot.clock == self.end_clock

    @property
    def servers_end(self) -> bool:
        """Whether the servers were told to end the phase."""
        return self._end is not None

    # ---- after each poll

    def look(self, group: WorkerGroup, generation: int, snapshot: Snapshot, points: Iterable[Point]) -> None:
        """Carry out what follows from the poll: joins, leases, leaves, and the end of the phase.

        Newcomers begin with the buffers of `snapshot`, the newest one.
        """
        if self._requests is None:
            return
        self._visits.record(time.monotonic())
        self._take_answers(group, snapshot)
        for rank, worker in list(self._workers.items()):
            facts = worker.member.facts
            if isinstance(facts, WorkerFacts) and facts.generation == generation and not worker.member.dead:
                self._advance(group, rank, worker, facts)
        self._end_phase()
        if self.end_clock is not None and not self._took_last:
            self._took_last = True
            group.take_at(self.end_clock)
        elif self.end_clock is None and self._due.take(snapshot.round, self.pushes.reached):
            group.snapshot_once()
        if self._end is None or not self._workers:
            self._change_size(group, snapshot)

    def lose(self, group: WorkerGroup, ranks: Iterable[int], reason: str) -> None:
        """Remove workers that have died or failed; newcomers take their place when there is room."""
        for rank in ranks:
            worker = self._workers.pop(rank, None)
            if worker is not None:
                self._depart(rank, worker, Departure(reason, lost=True, counted=worker.counted))
                group.drop(worker.member)

    def lose_dead(self, group: WorkerGroup) -> None:
        """Remove the workers that have died: the others go on."""
        self.lose(group, [worker.rank for worker in group.workers if worker.dead], "a worker died")

    def before_replace(self, group: WorkerGroup, decision: Replace, snapshot: Snapshot) -> Replace:
        """Remove the lost workers, which are not replaced in their places. Return which servers are replaced.

        They will be restored from `snapshot`, the newest one.
        """
        lost = [member.rank for member in group.workers if member.name in decision.lost]
        self.lose(group, lost, decision.reason)
        servers = tuple(name for name in decision.lost if name.startswith("shard-"))
        if servers:
            self._tell_servers(group, snapshot.clock)
        return replace(decision, lost=servers)

    def replaced(self, snapshot: Snapshot) -> None:
        """Lease again what no worker will push again to servers that were restored from `snapshot`, the newest one.

        Repeat the requests whose answers were not processed, because the servers have forgotten them.
        """
        requests = self._requests
        assert requests is not None, "a generation has begun"
        if self._leases is not None:
            self.pushes.settle(-sum(map(len, self._leases.restore(marks_of(snapshot)))))
        for rank in self._admissions.keys() & self._workers.keys():  # the others have died
            self._admissions[rank] = self._admit(rank, self._workers[rank])
        for rank, (_, worker, departure) in self._removals.items():
            self._removals[rank] = requests.remove(rank), worker, departure

    def _advance(self, group: WorkerGroup, rank: int, worker: LeasedWorker, facts: WorkerFacts) -> None:
        """Take the next step on the way of one worker."""
        leases, requests = self._leases, self._requests
        assert requests is not None, "a generation has begun"
        if worker.stage is WorkerStage.WAITS and worker.dismissed:
            self._depart(rank, worker, worker.dismissal)
            del self._workers[rank]
            group.drop(worker.member)
        elif worker.stage is WorkerStage.WAITS and facts.waits_at is not None:
            if leases is None or self._end is not None:
                worker.end_plan(None)
            elif leases.unleased:
                worker.stage = WorkerStage.JOINS
                self._admissions[rank] = self._admit(rank, worker)
        elif worker.stage is WorkerStage.TRAINS and worker.dismissed:
            assert leases is not None, "it has joined"
            worker.stage = WorkerStage.LEAVES
            worker.end_plan(leases.end_of(rank))
        elif worker.stage is WorkerStage.TRAINS:
            self._supply(rank, worker, facts)
        elif worker.stage is WorkerStage.LEAVES and facts.status == "finished":
            self._depart(rank, worker, worker.dismissal)

    def _admit(self, rank: int, worker: LeasedWorker) -> Future[int]:
        assert self._leases is not None, "there are blocks to give"
        assert self._requests is not None, "a generation has begun"
        return self._requests.admit(rank, worker.incarnation, self._leases.least_first(rank))

    def _supply(self, rank: int, worker: LeasedWorker, facts: WorkerFacts) -> None:
        """Give a worker its next lease. If there is no block for it, remove it, so that no clock waits for it."""
        leases, requests = self._leases, self._requests
        assert leases is not None, "the worker has joined"
        assert requests is not None, "a generation has begun"
        worker.measure(facts.position, time.monotonic())
        starved = facts.waits_at is not None and not worker.outbox
        if facts.waits_at is not None:
            leases.advance(rank, facts.waits_at)
        held = leases.held(rank, facts.position)
        if starved and not held and not leases.unleased:
            self._depart(rank, worker, Departure("", waits=True))
            return
        share = -(-leases.unleased // (2 * max(1, len(self.joined))))
        size = choose_lease_size(worker.seconds, leases.unleased, len(self.joined), self._visits.longest)
        if starved:  # its pace was measured while it waited for leases
            size = max(size, min(2 * worker.size, share))
        if held < max(1, size // 2):
            worker.size = size
            for lease in leases.lease(rank, size):
                worker.outbox.append((lease, self._announce_repeated(rank, lease)))
        worker.send()

    def _announce_repeated(self, rank: int, lease: RowLease) -> Future[bool] | None:
        """Tell the servers which pushes the lease's push repeats. Return their answer, or None if there are none."""
        assert self._requests is not None, "a generation has begun"
        pushes = lease.blocks.earlier
        if not pushes:
            return None
        self._repeats.append(MemberChange(MemberChangeKind.REPEAT, rank, lease.first, pushes))
        return self._requests.repeat(rank, lease.first, pushes)

    def _depart(self, rank: int, worker: LeasedWorker, departure: Departure) -> None:
        """Let the servers remove a worker, if they have been asked to admit it."""
        assert self._requests is not None, "a generation has begun"
        worker.outbox.clear()
        if worker.stage is WorkerStage.WAITS:
            self._report_leaver(departure, rank)
        else:
            worker.stage = WorkerStage.ENDS
            self._removals[rank] = self._requests.remove(rank), worker, departure

    def _take_answers(self, group: WorkerGroup, snapshot: Snapshot) -> None:
        """Process the servers' answers."""
        changed = False
        for rank in [rank for rank, each in self._admissions.items() if each.done()]:
            self._note_admitted(rank, self._admissions.pop(rank).result())
            changed = True
        for rank, (removal, leaver, departure) in list(self._removals.items()):
            if removal.done() and rank not in self._admissions:
                del self._removals[rank]
                self._repeats = [each for each in self._repeats if each.rank != rank]  # no push of them will come
                if self._leases is not None and rank in self._leases.ranks:
                    marks = removal.result()
                    applied = min(marks.low, self._leases.end_of(rank))
                    self.pushes.settle(applied - leaver.reported)
                    self._leases.leave(rank, marks, leaver.rest)
                self._note_removed(group, rank, departure)
                changed = True
        if changed:
            self._tell_servers(group, snapshot.clock)

    def _note_admitted(self, rank: int, first: int) -> None:
        worker = self._workers.get(rank)
        if worker is not None and worker.stage is WorkerStage.JOINS and self._leases is not None:
            self._leases.join(rank, first)
            worker.begin(first)
            if not worker.counted:
                worker.counted = True
                self._report_resize(1, worker.joins_because, worker.since, UNDISTURBED)

    def _note_removed(self, group: WorkerGroup, rank: int, departure: Departure) -> None:
        worker = self._workers.get(rank)
        if worker is not None and departure.waits:
            worker.stage = WorkerStage.WAITS
            return
        if worker is not None:
            del self._workers[rank]
            group.drop(worker.member)
        self._report_leaver(departure, rank)

    def _end_phase(self) -> None:
        """End the phase at the servers when all blocks are done and no worker trains."""
        leases, requests = self._leases, self._requests
        assert requests is not None, "a generation has begun"
        if leases is None or self._end is not None or not leases.finished or self._removals or self._admissions:
            return
        if all(each.stage is WorkerStage.WAITS for each in self._workers.values()):
            self._end = requests.end()

    # ---- the number of workers

    def _change_size(self, group: WorkerGroup, snapshot: Snapshot) -> None:
        """Start newcomers, let those join that are ready, and dismiss workers, as `decide_size` decides."""
        leases = self._leases
        useful = not self._workers or (leases is not None and leases.unleased > 0)
        staying = [rank for rank, each in sorted(self._workers.items()) if not each.dismissed]
        taken = {*self._workers, *self._removals, *self._admissions}
        free = [rank for rank in range(self.slots) if rank not in taken]
        members = [self._workers[rank].member for rank in staying]
        decision = self.size.decide(members, most_more=len(free), useful=useful, speed=self._measure_speed())
        if decision.joiners and not free:  # those under notice leave first: servers have the state
            for member in self.size.noticed(members):
                self._workers[member.rank].dismiss(decision.reason)
        for at in decision.leavers:
            self._workers[staying[at]].dismiss(decision.reason)
        joiners = self.size.newcomers.take(min(decision.joiners, len(free)))
        joining = dict(zip(free, joiners, strict=False))
        group.join(joining, snapshot)
        for rank, newcomer in joining.items():
            self._workers[rank] = LeasedWorker(newcomer, joins_because=decision.reason)

    def _measure_speed(self) -> float | None:
        """Return the rounds per second of all workers that have joined; None if that of one is not known."""
        paces = [self._workers[rank].seconds for rank in self.joined if rank in self._workers]
        known = [pace for pace in paces if pace]
        return sum(1 / pace for pace in known) if known and len(known) == len(paces) else None

    def _report_leaver(self, departure: Departure, rank: int) -> None:
        """Report that the worker of a rank has left, if it had joined."""
        if not departure.counted or departure.waits:
            return
        # at the staleness bound, others may have waited for a worker that has died, until the servers removed its clock
        rest = "" if departure.lost else UNDISTURBED
        if self._terms.compresses:
            fate = "is lost" if departure.lost else "was pushed"
            rest += f"; what the compression of its gradients had left out {fate}"
        lost = [f"worker-{rank}"] if departure.lost else []
        self._report_resize(-1, departure.reason, departure.since, rest, lost)

    def _report_resize(self, by: int, reason: str, since: float, rest: str, lost: Sequence[str] = ()) -> None:
        """Report that the number of workers has changed, unless `reason` is "", as for the first workers.

        `lost`: the names of workers that have died.
        """
        before, self._count = self._count, self._count + by
        if not reason:
            return
        self.size.changed(before, self._count, self._measure_speed())
        event: JsonObject = {
            "from": before,
            "to": self._count,
            "round": self.pushes.reached,
            "seconds": time.monotonic() - since,
            "reason": reason,
            "lost": list(lost),
        }
        text = f"{reason}: the job has {self._count} workers instead of {before}{rest}"
        self._journal.event("resized", text, **event)


def marks_of(snapshot: Snapshot) -> dict[int, Marks]:
    """Return for each rank its lowest and highest next step in a snapshot."""
    if not snapshot.ledgers:  # no server has written it
        return {rank: Marks(at, at) for rank, at in enumerate(snapshot.positions)}
    ledgers = [ledger for _, _, ledger in snapshot.ledgers]
    found: dict[int, Sequence[int]] = {rank: [each.marks[rank] for each in ledgers] for rank in ledgers[0].marks}
    return {rank: Marks(min(marks), max(marks)) for rank, marks in found.items()}
