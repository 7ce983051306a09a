"""Change the workers of a running job in step: start newcomers, stop all workers after one round, and regroup.

`ElasticRun.find_change` is called after each poll. It carries out the decisions of `rayps.runtime.size.decide_size`,
and returns a `Regroup` when all workers have stopped. The driver then calls `regroup`, whose result is how the next
generation continues from the workers' memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from rayps_client.errors import CheckpointError, ClusterError
from rayps_client.values import JsonObject

from rayps.cluster.local import ActorReply
from rayps.cluster.members import GroupMember
from rayps.core.job.continuation import Continuation
from rayps.core.rows.phase_rounds import Calendar, PhaseSpan
from rayps.core.rows.row_shares import RowShares
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.core.strategy.elastic_support import hands_over
from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.topology import compression_in, servers_of
from rayps.runtime.driver.decide_recovery import Regroup
from rayps.runtime.driver.hold_workers import hold_workers
from rayps.runtime.records.journal import Journal
from rayps.runtime.size.decide_size import assign_ranks
from rayps.runtime.size.gather_workers import GatheredWorkers, GatherWorkers
from rayps.runtime.size.job_size import Allowance
from rayps.runtime.size.membership import Membership
from rayps.runtime.size.worker_changes import ChangingWorkers
from rayps.worker.plan import ElasticPlan, Orders, WorkerFacts

if TYPE_CHECKING:
    from rayps.runtime.driver.worker_group import WorkerGroup
    from rayps.tensors.snapshot import Snapshot

TAKEN_SECONDS = 60.0  # seconds for the driver to take the state of the round in which all workers have stopped
HALT_SECONDS = 30.0  # seconds for a worker to end its generation; a step of the user's code cannot be interrupted


@dataclass(slots=True)
class _Change:
    """A change of the workers that is under way, or whose first new round is awaited."""

    reason: str
    leavers: tuple[int, ...] = ()
    joiners: int = 0
    lost: tuple[str, ...] = ()
    began: float = field(default_factory=time.monotonic)  # when the workers were told to stop, or the loss was seen
    round: int = 0  # the round from which the new generation continues
    size: tuple[int, int] = (0, 0)  # workers before and after
    paused: float = 0.0  # when all workers had stopped, as time.monotonic; 0 before
    in_memory: bool = False  # whether workers that stay have the state of this round in memory
    silent: bool = False  # whether it is reported only if later rounds have another number of workers


class _Pace:
    """The samples per second of all workers in one generation, after its first round."""

    def __init__(self) -> None:
        self._generation = -1
        self._began, self._first, self._seconds, self._rounds, self._block = 0.0, 0, 0.0, 0, 0

    def add(self, generation: int, position: int, block: int) -> None:
        """Add the round that all workers have reached; a round has `block` rows."""
        now = time.monotonic()
        if generation != self._generation:
            self._generation, self._first, self._began = generation, position, 0.0
        if not self._began:
            if position > self._first:  # the first round also prepares memory and data
                self._began, self._first = now, position
            self._seconds, self._rounds = 0.0, 0
            return
        self._seconds, self._rounds, self._block = now - self._began, position - self._first, block

    @property
    def speed(self) -> float | None:
        """The samples per second; None before a second has been measured."""
        return self._rounds * self._block / self._seconds if self._seconds >= 1 and self._rounds else None


class ElasticRun(ChangingWorkers):
    """The driver's part of an elastic job whose workers run in step."""

    regroups: ClassVar[bool] = True

    def __init__(
        self,
        elastic: ElasticWorkers,
        least: int,
        membership: Membership,
        calendar: Calendar,
        journal: Journal,
        allowance: Allowance,
        *,
        timeout: float,
    ) -> None:
        """Prepare. `begin` is called when the workers have started. `timeout`: the job's option, in seconds."""
        super().__init__(elastic, least, calendar, journal, allowance)
        self.membership = membership
        self._elastic = elastic
        self._change: _Change | None = None  # the workers stop for this change
        self._formed: _Change | None = None  # its first new round is awaited
        self._pace = _Pace()
        self._gatherer = GatherWorkers(self.size, timeout)
        self._begun = False  # whether a generation has begun
        self._compresses = False
        self._hands_over, self._margin = True, 0  # of the strategy of the current phase

    # ---- a generation

    def gather(
        self, group: WorkerGroup, continues: Continuation | None, collected: int, *, stops: bool
    ) -> GatheredWorkers:
        """Drop the dead, and let newcomers join until the next generation can begin. Call it again while it waits.

        `continues`: how the generation continues; None if it starts from the newest snapshot, which is of round
        `collected`. `stops`: whether the run is to end.

        Raises:
            NoResources: see `GatherWorkers.look`.
        """
        replay = None
        if not self._begun and self._elastic.replay is not None:
            replay = collected, self.membership.replayed_at(collected)
        found = self._gatherer.look(group, continues, replay=replay, stops=stops)
        before, after = found.size
        if found.lost:
            formed = self._formed or _Change(found.reason, silent=True, size=found.size)
            formed.lost = (*formed.lost, *found.lost)
            self._formed = formed
        if self._formed is not None and before != after:
            self._formed.size = self._formed.size[0], after
        if not found.waits and not found.ends:
            self._gatherer.ready()
            self._begun = True
            if self._formed is not None:
                self._formed.round = collected if found.continues is None else found.continues.round
                self._formed.in_memory = found.continues is not None
        return found

    def begin_generation(
        self, strategy: StrategyView, snapshot: Snapshot, group: WorkerGroup, continues: Continuation | None
    ) -> None:
        """Count rounds and deal rows for the next generation, and adapt the newest `snapshot` to it.

        `continues`: how it continues from the workers' states; None if it starts from the snapshot.
        """
        self._change = None  # a generation that began for another reason has not stopped for it
        self._hands_over, self._compresses = hands_over(strategy), compression_in(strategy) is not None
        # the next round is the earliest of which servers can still retain the state
        self._margin = 0 if servers_of(strategy) is None else 1
        if self._journal.cost_report is not None:
            self._journal.cost_report.change_workers(group.size)
        if continues is None:
            self.restart(snapshot, group.size)
            return
        self.count_from(continues.round, group.size)
        self.continue_from(snapshot)

    def amend(self, orders: Orders, continues: Continuation | None) -> Orders:
        """Return the orders with how rows are dealt, and with the round after which workers pause."""
        rows, stop = self.membership, self.stop_round
        handover = None if continues is None or continues.keeps_places else continues
        boundary = replace(orders.snapshots.boundary, also=stop)
        return replace(
            orders,
            snapshots=replace(orders.snapshots, boundary=boundary),
            elastic=ElasticPlan(rows.current, rows.lr_factor, self._hands_over, handover, stop),
        )

    @property
    def stop_round(self) -> int | None:
        """The round after which the next generation pauses, because a replay changes the workers there."""
        following = self.membership.next_replay(self.membership.current.begin)
        return None if following is None else following[0]

    def count_from(self, at: int, workers: int) -> None:
        """Deal rows to so many workers from round `at` on, and count epochs accordingly."""
        rows, total = self.membership.change(at, workers), self.membership.rows
        if at < self._calendar.rounds:
            self._calendar.recount(at, rows.origin(total), rows.rounds(total), workers)

    def enter_phase(self, snapshot: Snapshot, span: PhaseSpan) -> None:
        """Begin a phase, if `snapshot` is its first state, with the first round of its epoch."""
        if snapshot.round == span.begin:
            self.membership.enter_phase(snapshot.round, span.epoch)

    def restart(self, snapshot: Snapshot, workers: int) -> None:
        """Continue with so many workers from a snapshot: deal rows behind those that it has consumed."""
        at = snapshot.round
        self.count_from(at, workers)
        self._adapt(snapshot, workers)

    def resume(self, snapshot: Snapshot) -> None:
        """Continue from a checkpoint, of an elastic job or of another one whose workers ran in step.

        Raises:
            CheckpointError: the workers were not in step, and the rows that they had consumed are not known.
        """
        calendar = self._calendar
        snapshot.ended = [(planned, at) for planned, at in snapshot.ended if calendar.cut(planned, at)]
        saved = snapshot.row_shares
        if saved is None:
            saved = self._find_shares_of_fixed(snapshot)
        self.membership.resume(saved)
        self.restart(snapshot, self.size.least)

    def _find_shares_of_fixed(self, snapshot: Snapshot) -> RowShares:
        """Return how rows were dealt in a job with a fixed number of workers, which has written `snapshot`."""
        began, epoch = snapshot.origin
        total, workers = self.membership.rows, len(snapshot.positions)
        shares = (self.membership.each,) * workers
        found = RowShares(began, epoch, 0, shares, self.membership.current.drop_last)
        if len(set(snapshot.positions)) > 1 or found.rounds(total) != snapshot.steps_per_epoch:
            raise CheckpointError(
                f"the checkpoint was written by {workers} workers that were not in step, or had another batch size, "
                "and which rows they had consumed is not known:\nresume with a fixed number of workers, or start a new "
                "run from its parameters with start_from="
            )
        return found

    def _adapt(self, snapshot: Snapshot, workers: int) -> None:
        """Adapt a snapshot to the current calendar and workers."""
        span = self._calendar.at(snapshot.round)
        snapshot.align()
        snapshot.rng, snapshot.ring = {}, None
        snapshot.enter_phase(span)
        snapshot.positions = [snapshot.round] * workers
        if len(snapshot.own) != workers:
            snapshot.own = {}
        snapshot.row_shares = self.membership.current

    def continue_from(self, snapshot: Snapshot) -> None:
        """Let the next state, which is assembled on the older `snapshot`, have the current calendar and shares."""
        span = self._calendar.at(self.membership.current.begin)
        snapshot.steps_per_epoch, snapshot.origin, snapshot.ring = span.steps, span.origin, None
        snapshot.row_shares = self.membership.current

    # ---- after each poll

    def balance(self, group: WorkerGroup) -> None:
        """Deal the rows of later rounds by the workers' speeds, if the job has asked for that."""
        self._shares.balance(group.workers, self.membership)

    def find_change(self, group: WorkerGroup, generation: int, collected: int) -> Regroup | None:
        """Carry out what follows from the poll. Return a `Regroup` if all workers have stopped for a change.

        `collected` is the round of the newest state that the driver has. Call it only if no member is dead and no
        worker has failed.
        """
        facts = [w.facts for w in group.workers if isinstance(w.facts, WorkerFacts)]
        facts = [each for each in facts if each.generation == generation]
        if len(facts) < group.size:
            return None
        self._check_formed(facts)
        self._pace.add(generation, min(each.position for each in facts), self.membership.current.block)
        if self._change is not None:
            return self._finish_if_stopped(group, facts, collected)
        if any(each.status == "finished" for each in facts):
            return None
        if self._elastic.replay is not None:
            return self._replay(group, facts, collected)
        decision = self.size.decide(group.workers, speed=None if self._formed is not None else self._pace.speed)
        if decision.regroup:
            self._change = _Change(decision.reason, decision.leavers, decision.joiners)
            self._stop(group)
        return None

    def _replay(self, group: WorkerGroup, facts: Sequence[WorkerFacts], collected: int) -> Regroup | None:
        """Prepare the next change of a replay, and return it when all workers have reached its round."""
        following = self.membership.next_replay(self.membership.current.begin)
        if following is None:
            return None
        at, count = following
        self.size.check_newcomers()
        newcomers = self.size.newcomers
        held = group.size + newcomers.ready + newcomers.starting
        if held < count and newcomers.may_start:
            newcomers.start(count - held, held)
        if not all(each.status == "paused" and each.position == at for each in facts):
            return None
        if group.size + newcomers.ready < count:
            self._gatherer.lacks(group, following)
            return None
        self._gatherer.ready()
        leavers = tuple(range(count, group.size))
        self._change = _Change("replay", leavers, max(0, count - group.size), round=at)
        return self._finish_if_stopped(group, facts, collected)

    def _stop(self, group: WorkerGroup) -> None:
        """Let all workers end after the same round."""
        begun = hold_workers(group.workers)
        if self._change is None or begun is None:
            self._change = None  # a worker has died, or has no plan yet: the next poll decides again
            return
        self._change.round = last = begun + self._margin
        if not self._hands_over:
            group.take_at(last)
        for worker in group.workers:
            worker.await_reply(worker.handle.call("stop_after", last))

    def _finish_if_stopped(self, group: WorkerGroup, facts: Sequence[WorkerFacts], collected: int) -> Regroup | None:
        """Return the change if all workers have stopped for it. Give it up if the plan has ended first."""
        change = self._change
        assert change is not None, "a change is under way"
        if any(each.status == "finished" for each in facts):
            self._change = None
            for worker in group.workers:
                worker.await_reply(worker.handle.call("resume"))
            return None
        if any(each.status != "paused" for each in facts):
            return None
        if not self._hands_over and collected < change.round:
            change.paused = change.paused or time.monotonic()
            if time.monotonic() - change.paused < TAKEN_SECONDS:
                return None
            self._journal.event(
                "warning",
                f"the state of round {change.round}, in which the workers stopped to change their number, was not "
                f"taken within {TAKEN_SECONDS:g} s: they continue from round {collected}",
            )
        return Regroup((), change.leavers, change.joiners, change.reason)

    @property
    def is_stopping(self) -> bool:
        """Whether the workers stop for a change: the driver then polls more often."""
        return self._change is not None

    # ---- the change

    def regroup(self, group: WorkerGroup, decision: Regroup, collected: int) -> Continuation | None:
        """Form the new group from the living workers and newcomers, and return how it continues.

        The result is None if the group continues from the newest snapshot, which is of round `collected`: because no
        worker holds the whole state in memory, or because all are lost. Workers that are lost or leave are ended. If
        fewer than the least number remain, `gather` waits for others.
        """
        planned, self._change = self._change, None
        change = planned if planned is not None and not decision.lost else _Change(decision.reason, lost=decision.lost)
        gone = {rank for rank, worker in enumerate(group.workers) if worker.dead or worker.name in decision.lost}
        living = [rank for rank in range(group.size) if rank not in gone]
        kept = self._collect_kept_rounds(group, living) if self._hands_over else {}
        gone |= {rank for rank in living if group.workers[rank].dead}
        leaving = gone | set(decision.leavers)
        stay = [rank for rank in range(group.size) if rank not in leaving]
        if not stay:  # those that were to stay have died: the others leave when newcomers have their state
            leaving = gone
            stay = [rank for rank in range(group.size) if rank not in leaving]
        newest = max((kept[rank] for rank in kept if rank in stay), default=None)
        holders = {rank for rank in kept if rank in stay and kept[rank] == newest}
        if not stay:
            return None
        change.round = collected if newest is None else newest
        joined = self.size.newcomers.take(max(decision.joiners, self.size.least - len(stay)))
        order = assign_ranks(group.size, leaving, len(joined))
        change.size = group.size, len(order)
        self.size.changed(group.size, len(order), None if decision.lost else self._pace.speed)
        group.change_workers(order, joined)
        self._formed = change
        if newest is None:
            return None
        return Continuation(change.round, tuple(rank for rank, old in enumerate(order) if old in holders))

    def _collect_kept_rounds(self, group: WorkerGroup, ranks: Sequence[int]) -> dict[int, int]:
        """End the generation on these workers, and return the rounds of the states that they have in memory."""
        replies = [(rank, group.workers[rank].handle.call("kept_round")) for rank in ranks]
        found = {rank: _answer(group.workers[rank], reply, HALT_SECONDS) for rank, reply in replies}
        return {rank: kept for rank, kept in found.items() if kept is not None}

    def _check_formed(self, facts: Sequence[WorkerFacts]) -> None:
        """Report a change when its first new round is complete."""
        change = self._formed
        if change is None or not all(each.position > change.round or each.status == "finished" for each in facts):
            return
        self._formed = None
        self.size.settled()
        before, after = change.size
        if change.silent and (before == after or change.round >= self._calendar.rounds):
            return
        seconds = time.monotonic() - change.began
        event: JsonObject = {
            "from": before,
            "to": after,
            "round": change.round,
            "seconds": seconds,
            "reason": change.reason,
            "lost": list(change.lost),
        }
        self._journal.event("resized", self._describe_change(change, seconds), **event)

    def _describe_change(self, change: _Change, seconds: float) -> str:
        """Return what the event of a change says; `seconds`: from its begin to the end of the first new round."""
        before, after = change.size
        if change.lost:
            origin = "which they had in memory" if change.in_memory else "that of the newest snapshot"
            text = (
                f"{change.reason}: {after} workers continued from round {change.round}, {origin}; their first round "
                f"ended {seconds:.2f} s after the failure was detected"
            )
        else:
            text = (
                f"{change.reason}: the job has {after} workers instead of {before}, from round {change.round} on; the "
                f"first round of the new group ended {seconds:.2f} s after the workers were told to stop"
            )
        return f"{text}; the error feedback of the compression was dropped" if self._compresses else text


def _answer(worker: GroupMember, reply: ActorReply, seconds: float = HALT_SECONDS) -> int | None:
    """Return the answer of a worker. If there is none in time, the worker counts as dead."""
    try:
        found: int | None = reply.result(seconds)
        return found
    except ClusterError as error:
        worker.dead = str(error.data.get("reason", error))
    except TimeoutError:
        worker.dead = f"it did not answer within {seconds:g} s"
    return None
