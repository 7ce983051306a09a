"""Run the plan of one generation on a worker: its thread, its connections, and the facts that the driver polls."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from rayps_client.errors import PeerTimeout, RaypsError, StaleGeneration, UserError
from torch import Tensor

from rayps.comm.link import Listener
from rayps.core.job.records import Point
from rayps.core.job.user_code import Call, add_place, find_call, lacks_memory, too_large
from rayps.core.metrics import Totals
from rayps.core.rows.leases import RowLease
from rayps.core.rows.row_shares import RowShares
from rayps.core.time.time_account import TimeAccount
from rayps.ps.protocol.segment_map import SpaceMap
from rayps.recovery.worker_backup import WorkerBackup
from rayps.tensors.snapshot import RetainedParts, Snapshot
from rayps.worker.connections import WorkerConnections
from rayps.worker.exchange.round_gate import RoundGate
from rayps.worker.handover import HeldState, hand_over
from rayps.worker.loops.loop import Companions, Loop
from rayps.worker.loops.loop_of_family import loop_class
from rayps.worker.plan import WorkerFacts, WorkerPart, WorkerPlan
from rayps.worker.profile import RoundTrace
from rayps.worker.rows.lease_book import LeaseBook
from rayps.worker.rows.make_stream import deal_shares
from rayps.worker.times import WorkerTimes
from rayps.workload.base import Workload

log = logging.getLogger(__name__)

HELD_SECONDS = 0.001  # a shorter time between two rounds is no wait for the driver
TAKEN_SECONDS = 600.0  # the longest wait, in seconds, until the driver has taken the state of an earlier boundary


class GenerationRun:
    """The run of one plan, from `start` to `end`. Any thread may call its methods.

    After `end` the run reports nothing, although its thread may still be running.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        backup: WorkerBackup | None,
        points: list[Point],
        lock: threading.RLock,
        times: WorkerTimes,
    ) -> None:
        """Prepare a run of one generation.

        `backup` is this worker's backup; None if workers do not hold backups of each other's states. `points` are those
        of an earlier generation that the driver may not have received. `lock` guards the fields that the driver reads.
        `times` is the account of this worker's process.
        """
        self.plan = plan
        self._facts = WorkerFacts(plan.rank, plan.generation, "running", max(plan.start, 0), points=points)
        self._parts: RetainedParts[WorkerPart] = RetainedParts()
        self._backup, self._lock = backup, lock
        self._stop = threading.Event()
        self._connections = WorkerConnections(plan.peers.seat)
        self._times, self._account = times, times.begin(plan, self._connections)
        self._thread: threading.Thread | None = None
        self._run: PlanRun | None = None
        # the state of the generation before, from which this one continues, until the first round is complete
        self._held: HeldState | None = None
        self._gate = RoundGate(max(plan.start, 0), None if plan.elastic is None else plan.elastic.stop)

    def start(
        self,
        load: Callable[[], Workload],
        snapshot: Snapshot,
        held: HeldState | None,
        listener: Listener,
        device: str,
        companions: Companions,
    ) -> None:
        """Start the thread.

        `held` is this worker's own state of the generation before, if its plan continues from the workers' memory.
        `companions` are the objects that families of strategies store between generations: see
        `rayps.worker.loops.loop`.
        """
        self._held = held
        given = [(snapshot, held)]  # these are as large as the model: the thread removes them from the list

        def prepare() -> PlanRun:
            return self._prepare(load(), given, listener, device, companions)

        name = f"worker-{self.plan.rank}"
        self._thread = threading.Thread(target=self._main, args=(prepare,), daemon=True, name=name)
        self._thread.start()

    # ---- called by the driver

    def poll(self, wanted: int, taken: int) -> WorkerFacts:
        """Return the facts since the last poll. Each point is returned once.

        The worker will retain its part of round `wanted`. The driver has the state after round `taken`.
        """
        with self._lock:
            facts, session = self._facts, self._connections.session
            self._parts.wanted = wanted
            if taken >= self._parts.pinned:
                self._parts.pinned = 0
            waits_at = None
            if self._run is not None:
                self._run.wanted, self._run.taken = wanted, taken
                if (leased := self._leased) is not None:
                    leased.heard()
                    waits_at = leased.waits_at
            answer = WorkerFacts(
                facts.rank,
                facts.generation,
                facts.status,
                facts.position,
                facts.error,
                facts.points,
                sorted(at for at, part in self._parts.items() if part.is_complete),
                kept_since=0 if session is None else session.replay_buffer.since,
                cost=None if self._backup is None else self._backup.cost,
                met=facts.met,
                call=self.call,
                trace=facts.trace,
                waits_at=waits_at,
            )
            facts.points, facts.trace = [], None
            if self._backup is not None:
                self._backup.confirm_points()
        return answer

    @property
    def call(self) -> Call | None:
        """The call of the user's code in the run's thread that has not returned, or None if there is none."""
        return None if self._thread is None else find_call(self._thread.ident)

    @property
    def position(self) -> int:
        """The number of rounds that are reported."""
        return self._facts.position

    def part(self, rounds: int | None) -> WorkerPart | None:
        """Return this worker's part of the checkpoint after `rounds` rounds, or None if it is not retained.

        If `rounds` is None, return the newest part. Raises CheckpointError or TrainingError if the worker has failed to
        write it.
        """
        with self._lock:
            at = max(self._parts, default=0) if rounds is None else rounds
            part = self._parts.get(at)
            if part is None:
                return None
            try:
                return part.delivered()
            except RaypsError:
                del self._parts[at]  # the driver then asks for the part of a later round
                raise

    # ---- leases

    @property
    def _leased(self) -> LeaseBook | None:
        return None if self._run is None else self._run.loop.w.batches.leases

    def extend(self, leases: Sequence[RowLease], begin: int | None) -> None:
        """Add leases of rows, for which the worker waits: see `LeaseBook.extend`."""
        if self._leased is not None:
            self._leased.extend(leases, begin)

    def end_leases(self, push_at: int | None) -> None:
        """End the run after the present round.

        `push_at`: the step as which the worker then pushes the rest of its compressed gradients; None if it does not.
        """
        if self._run is None or self._leased is None:
            self._stop.set()  # it has not begun: it has nothing to push
            return
        self._run.loop.push_rest_at = push_at
        self._leased.end()

    # ---- a change of the workers

    def hold(self) -> int:
        """Let no further round begin until the driver says more. Return the number of rounds that were begun."""
        return self._gate.hold()

    def stop_after(self, rounds: int) -> None:
        """End the run after `rounds` rounds: its status is then `paused`, and its state stays in memory."""
        self._gate.stop_after(rounds)

    def train_until(self, rounds: int, retained: int) -> None:
        """Hold the run after `rounds` rounds, and retain its part of the checkpoint after the round `retained`."""
        self._gate.train_until(rounds, retained)

    def deal(self, after: int, rows: RowShares) -> None:
        """Undo `hold`, and deal rows in this way from the round after `after` rounds on."""
        self._gate.deal(after, rows)

    def resume(self) -> None:
        """Undo `hold`."""
        self._gate.resume()

    @property
    def kept_round(self) -> int | None:
        """The round of the state that `held_state` returns, after `end`; None if no state is known.

        It is not known before the plan has started, and while a call of the user's code has not returned.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        kept = None if self._run is None else self._run.loop.kept_round
        return kept if kept is not None or self._held is None else self._held.round

    def held_state(self) -> HeldState | None:
        """Return the state after the newest complete round, after `end`; None if it is not known."""
        if self.kept_round is None:
            return None
        own = None if self._run is None or self._run.loop.kept_round is None else self._run.loop.held_state()
        return self._held if own is None else own

    def rewire(self, found: SpaceMap) -> None:
        """Use the map `found`, in which a shard is replaced, and repeat the pushes that the new shard lacks."""
        self._connections.rewire(found)

    def evaluate(
        self, vector: Tensor | None, buffers: dict[str, Tensor], share: tuple[int, int] | None = None
    ) -> Totals:
        """Evaluate the model over this worker's share of the data, at the given parameters and buffers.

        `share` = (i, n) is the i-th of n shares; None means the share of the worker's rank.
        Return a dict from a metric's name to its `Total`. Raises UserError if the user's code fails.
        """
        assert self._run is not None, "evaluate is called after a plan has run"
        loop = self._run.loop
        if share is not None:
            loop.w.batches.rank, loop.w.batches.size = share
        try:
            with self._account.span("evaluation"):
                loop.load_buffers(buffers)
                return loop.evaluate(vector)
        except UserError as error:
            raise at_worker(error, self.plan.rank, loop.w.position) from error

    def frozen_values(self) -> dict[str, Tensor]:
        """Return the model's frozen parameters without a copy, or {} if this run has none or has changed one."""
        return {} if self._run is None else self._run.loop.frozen_values()

    def end(self, timeout: float) -> None:
        """End the run and break its connections. Peers that wait for this worker get PeerLost.

        Wait at most `timeout` seconds for the thread. If a step of the user's code takes longer, the thread ends at its
        next exchange with a peer.
        """
        self._stop.set()
        if self._facts.status != "finished":
            self._account.enter("recovery")
        if self._run is not None:
            self._run.loop.abandon()
        if self._backup is not None:
            self._backup.end_commits()
        self._connections.abort()
        if self._thread is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._connections.close()

    # ---- the thread

    def _main(self, prepare: Callable[[], PlanRun]) -> None:
        plan, status, error = self.plan, "finished", None
        try:
            run = prepare()
            run.run()
        except UserError as raised:
            status, error = "failed", at_worker(raised, plan.rank, self._facts.position)
        except RaypsError as raised:
            status, error = "failed", raised
        # a bug of rayps or a library: report the error to the driver instead of hanging
        except BaseException as raised:
            status, error = "failed", _explain_failure(f"worker-{plan.rank}", raised)
        if not self._stop.is_set():
            self._account.enter("idle" if error is None and not run.paused else "recovery")
        with self._lock:
            if not self._stop.is_set():  # set before peers can see that the connections break
                self._facts.status, self._facts.error = status, error
                if error is None and run.paused:
                    self._facts.status = "paused"
                if error is None and run.loop.w.done:
                    self._facts.met = run.loop.w.reason or "its stop rule is met"
        if error is not None:
            self._connections.abort()
            self._connections.close()

    def _prepare(
        self,
        workload: Workload,
        given: list[tuple[Snapshot, HeldState | None]],
        listener: Listener,
        device: str,
        companions: Companions,
    ) -> PlanRun:
        plan = self.plan
        snapshot, held = given.pop()
        if self._backup is not None:
            snapshot, missed = self._backup.restore(plan, snapshot)
            # set the points before the wait for peers, which may not connect at all, because the driver may poll then
            with self._lock:
                if missed is not None and not self._stop.is_set():
                    self._facts.points += self._backup.take_over_points(missed, plan.start)
        self._connections.form(plan, snapshot, listener, device)
        if self._stop.is_set():
            raise StaleGeneration(f"generation {plan.generation} was ended before it started", peer="driver")
        handover = None if plan.elastic is None else plan.elastic.handover
        if handover is not None and self._connections.ring is not None:
            snapshot = hand_over(handover, plan.rank, snapshot, held, self._connections.ring)
            held = None
        loop: Loop = loop_class(plan.strategy)(workload, plan, self._connections, device)
        loop.load_state_dict(snapshot)
        loop.join(companions)
        run = PlanRun(loop, self._report, self._retain, self._stop.is_set, self._gate)
        run.account, run.trains_here, run.round_over = self._account, self._times.trains_here, self._times.round_over
        if plan.times.traced:
            run.deliver_trace = self._deliver_trace
        committer = None if self._backup is None else self._backup.begin_commits(plan, self._stop.is_set)
        if committer is not None:
            run.commit = lambda: committer.commit(loop.w)
        self._run = run
        return run

    def _report(self, point: Point) -> bool:
        """Record a point for the driver's next poll, and return True. If the plan was ended, only return False."""
        with self._lock:
            if self._stop.is_set():
                return False
            self._facts.points.append(point)
            self._held = None  # the loop has a newer state
            if self._backup is not None:
                self._backup.add_point(point)
            if point["kind"] == "round":
                self._facts.position = point["round"] + 1
        return True

    def _deliver_trace(self, trace: bytes) -> None:
        with self._lock:
            self._facts.trace = trace

    def _retain(self, part: WorkerPart, pin: bool) -> None:
        with self._lock:
            if not self._stop.is_set():
                self._parts.retain(part.round, part)
                if pin:
                    self._parts.pinned = part.round


class PlanRun:
    """The run of a loop under its plan.

    `wanted` is a round whose part of a snapshot the driver waits for, and `taken` the round of the newest state that
    the driver has. `commit` is called between rounds, and copies the state that a replacement of this worker would
    need; None if there are no backups.
    """

    def __init__(
        self,
        loop: Loop,
        report: Callable[[Point], bool],
        retain: Callable[[WorkerPart, bool], None],
        stopped: Callable[[], bool],
        gate: RoundGate | None = None,
    ) -> None:
        """Prepare the run.

        `report(point)` returns whether the driver will receive the point. `retain` receives parts of checkpoints, and
        whether a part must stay until the driver has it. `stopped()` returns whether the plan was ended from outside.
        `gate` lets the driver end the run between two rounds.
        """
        self.paused = False  # whether the gate has ended the run
        self._gate = gate or RoundGate(loop.w.position)
        self.loop, self.wanted, self.taken = loop, 0, 0
        self.account = TimeAccount().turn()  # replaced by that of the worker's process
        self.trains_here: Callable[[], None] = lambda: None  # called in the thread of the rounds, before the first
        self.round_over: Callable[[], None] = lambda: None  # called after each round
        self._due = 0  # the round of the last part that must stay until the driver has it
        self.commit: Callable[[], None] | None = None
        self.deliver_trace: Callable[[bytes], None] | None = None  # set if some rounds are traced
        self._trace: RoundTrace | None = None
        self._report, self._retain, self._stopped = report, retain, stopped

    def run(self) -> None:
        """Run until the plan's end, the strategy's stop rule, or `stopped()`.

        Raises:
            UserError: the user's code failed.
            TrainingError: a loss or a gradient is not finite.
            LinkError: a connection to a peer failed.
        """
        try:
            self._run()
        finally:
            if self._trace is not None:
                self._trace.close()
            self.loop.close()

    def _run(self) -> None:
        loop, w, plan = self.loop, self.loop.w, self.loop.w.plan
        when = plan.snapshots
        for choice in w.log.choices:
            self._report(choice)
        loop.waits_for = partial(self.account.span, "waiting")
        loop.begin(self._stopped)
        keeps = plan.elastic is not None and plan.elastic.hands_over
        if keeps:
            loop.keep_round()
        self._commit()
        self._evaluate()  # repeat an evaluation that a failure before this generation interrupted
        self._begin_trace()
        self.trains_here()
        while self._continues():
            if plan.leased:
                self.account.enter("waiting", "driver")  # no time at all, unless there is no lease
            if not loop.await_batch(self._stopped):
                break
            if self._gate.holds(w.position):
                loop.settle()  # the servers' state of this round has this worker's push
            if not self._may_begin():
                self.paused = not self._stopped()
                break
            self.account.enter("compute" if w.position >= plan.times.reached else "again")
            if (rows := self._gate.dealt(w.position)) is not None:
                deal_shares(w.batches, rows)
            w.meter.begin()
            loop.begin_round()
            loop.run_round()
            loop.end_round()
            if plan.private is not None:  # how many random numbers a round has used depends on its secret draws
                loop.seed_after(w.position)
            if self._trace is not None:
                self._trace.round_over()
            loop.average_weights()
            if keeps:
                loop.keep_round()
            for event in w.log.take_events():
                self._report({"kind": "event", "event": event})
            point = loop.point()
            self.account.divide(shares_of(point))
            self.round_over()
            # without this check, a later generation could continue after this round although its point is lost
            if self._report(point):
                self._commit()
            at, due = w.position, when.each_epoch and self._evaluation_is_due()
            if due:
                self._await_epoch()
                self._due = at
            together = due or (at in when.boundary and (loop.retains_unasked or when.each_boundary))
            if together or at in (self.wanted, self._gate.retained):
                with self.account.span("checkpoint"):
                    loop.retain(at)
                    if not (w.done or at >= plan.end):  # at the end, the part is taken after `finish`
                        self._retain(loop.state_dict(together=together), due)
            self._evaluate()
            self._await_boundaries()
        if self.paused:
            elastic = plan.elastic
            if elastic is not None and (not elastic.hands_over or w.position == elastic.stop):
                with self.account.span("checkpoint"):
                    loop.settle()
                    loop.retain(w.position)
                    self._retain(loop.state_dict(together=True), True)
        elif not self._stopped():
            with self.account.span("checkpoint"):
                loop.finish()
                self._retain(loop.state_dict(together=True), False)

    def _may_begin(self) -> bool:
        """Return whether the next round may begin; wait while the driver changes the workers."""
        began = time.perf_counter()
        free = self._gate.begin(self.loop.w.position, self._stopped)
        held = time.perf_counter() - began
        if held > HELD_SECONDS:
            self.account.divide({"waiting": held}, "driver")
        return free

    def _begin_trace(self) -> None:
        w = self.loop.w
        if self.deliver_trace is None or not self._continues():
            return
        self._trace = RoundTrace(w.plan.end - w.position, self.deliver_trace)
        if not self._trace.started:
            message = f"worker-{w.plan.rank} has no trace: another worker of its process is traced"
            self._report({"kind": "event", "event": {"kind": "warning", "message": message}})

    def _continues(self) -> bool:
        w = self.loop.w
        return w.position < w.plan.end and not w.done and not self._stopped()

    def _await_boundaries(self) -> None:
        """At a boundary of a plan with `each_boundary`, wait until the driver has the states of earlier boundaries.

        Two parts are retained: the driver may take that of this boundary while the next rounds run.
        """
        plan, at = self.loop.w.plan, self.loop.w.position
        if plan.snapshots.each_boundary and at in plan.snapshots.boundary and at < plan.end:
            self._await_driver(lambda: self.wanted >= at)

    def _await_epoch(self) -> None:
        """At the end of an epoch of a plan with `each_epoch`, wait until the driver has the state of the epoch before.

        Its part is then retained no longer, and that of this epoch takes its place.
        """
        self._await_driver(lambda: self.taken >= self._due)

    def _await_driver(self, has: Callable[[], bool]) -> None:
        """Wait until the driver has the earlier states. Raises PeerTimeout if it does not take them in time."""
        at, deadline = self.loop.w.position, time.monotonic() + TAKEN_SECONDS
        with self.account.span("checkpoint"):
            while not has() and not self._stopped():
                if time.monotonic() > deadline:
                    message = f"the driver has not saved the state before round {at} within {TAKEN_SECONDS:g} s"
                    raise PeerTimeout(message, peer="driver", seconds=TAKEN_SECONDS)
                time.sleep(0.005)

    def _commit(self) -> None:
        if self.commit is not None:
            with self.account.span("checkpoint"):
                self.commit()

    def _evaluation_is_due(self) -> bool:
        """Return whether an evaluation is due after this round.

        It is due after each epoch (or after several, as the strategy says), or after every `evaluation.every` rounds.
        At the end of the plan nothing is evaluated here, because the driver requests that evaluation.
        """
        w, plan = self.loop.w, self.loop.w.plan
        at, (epoch, index) = w.position, w.batches.epoch_of(w.position)
        every = plan.evaluation.every
        due = at % every == 0 if every is not None else index == 0 and epoch % plan.strategy.evaluate_every == 0
        if w.done or not due or at >= plan.end or plan.leased:
            return False
        return w.batches.pass_ is None or not w.batches.pass_.alone  # alone: the epochs end in different rounds

    def _evaluate(self) -> None:
        """Evaluate if an evaluation is due after this round and the driver does not have it yet."""
        w, plan = self.loop.w, self.loop.w.plan
        at = w.position
        if at <= plan.evaluation.done or not self._evaluation_is_due():
            return
        with self.account.span("evaluation"):
            held, buffers = self.loop.evaluated_state()
            own = None if held is None or held.data_ptr() == w.params.data_ptr() else w.params.clone()
            replaced = self.loop.exchange_buffers(buffers)
            self._report({"kind": "evaluation", "round": at, "sums": self.loop.evaluate(held)})
            if own is not None:
                w.params = own  # restore the worker's own parameters, which differ from the consensus
            self.loop.load_buffers(replaced)


def shares_of(point: Point) -> dict[str, float]:
    """Return the seconds of a round that are not computing, by part of the time account, from the round's point."""
    pulled = point.get("pull", 0.0) - point.get("pull_hidden", 0.0)  # of rows of sparse tables
    return {"data": point["data"], "waiting": point["wait"] + pulled, "communication": point["move"]}


def at_worker(error: UserError, rank: int, round: int) -> RaypsError:
    """Return the error with the rank and the round at which it was raised, unless the error has them already."""
    if "rank" in error.data:
        return error
    return type(error)(
        add_place(error.message, f"on worker-{rank} at round {round}"), **error.data | {"rank": rank, "round": round}
    )


def _explain_failure(name: str, error: BaseException) -> RaypsError:
    if lacks_memory(error):
        return too_large(name, error)
    log.exception("%s failed", name)
    return RaypsError(f"{name} failed: {type(error).__name__}: {error}")
