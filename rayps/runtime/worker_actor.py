"""The shell around `Worker`: what a driver starts, orders, asks and ends.

It answers at once; training goes on in a thread of its own. A new generation's `begin` ends the
thread of the one before.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rayps.cluster.actor_host import ActorHost, enter
from rayps.cluster.local import host_address
from rayps.comm.link import Listener
from rayps.core import thread_ends
from rayps.core.errors import PeerLost, RaypsError, StaleGeneration, UserError
from rayps.core.logs import LogBuffer
from rayps.core.retained_parts import RetainedParts
from rayps.core.user_code import Call, lacks_memory, placed, too_large, under_way, user_code
from rayps.federated.client_states import ClientStates, Row
from rayps.recovery.backup_assignment import HeldRounds
from rayps.recovery.worker_backup import CommitCost, WorkerBackup
from rayps.tensors.local_state import LocalState
from rayps.tensors.snapshot import Snapshot
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Worker
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.workload.base import Workload, unpack
from rayps.workload.model import drawn

log = logging.getLogger(__name__)

MOST_ENDS = 10  # of threads, that are told at a time
JOIN_SECONDS = 5.0  # for a thread to notice that its plan has ended


@dataclass(slots=True)
class WorkerFacts:
    """What a worker is asked about while it runs."""

    rank: int
    generation: int
    status: str  # idle, running, finished, failed
    position: int = 0
    error: Exception | None = None
    points: list[dict[str, Any]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    kept_since: int = 0  # pushes below this step are not kept, and are not known to be durable
    cost: CommitCost | None = None  # of keeping its state for a death
    met: str | None = None  # why the phase is over before its end, as its strategy's stop rule says
    call: Call | None = None  # of the user's code, which has not returned yet
    ends: list[str] = field(default_factory=list)  # what threads of its process ended by


@dataclass(frozen=True, slots=True)
class OpenCalls:
    """The calls of the user's code that have not returned in a worker, and what threads of its process ended by."""

    calls: tuple[Call, ...]
    ends: list[str]


class WorkerActor:
    """One worker's process: holds the workload, and runs one generation's plan after another."""

    def __init__(
        self,
        rank: int,
        secret: bytes,
        workload: bytes,
        *,
        working_dir: str | None = None,
        threads: int | None = None,
        device: str = "cpu",
        capture: bool = False,
    ) -> None:
        self.logs = LogBuffer()
        if capture:
            self.logs.capture()
            logging.getLogger("rayps").setLevel(logging.INFO)
        if threads is not None:
            torch.set_num_threads(threads)
        enter(working_dir)
        self._device = device
        self._packed = workload
        self._workload: Workload | None = None
        self._listener = Listener(f"worker-{rank}", secret, host=host_address())
        self._secret = secret
        self._facts = WorkerFacts(rank, 0, "idle")
        self._parts: RetainedParts[WorkerPart] = RetainedParts()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ending, self._closed = threading.RLock(), False
        self._stop = threading.Event()
        self._ties = WorkerConnections([], [])
        self._worker: Worker | None = None
        self._states: ClientStates | None = None  # of clients, for the next plan
        self._standby = WorkerBackup(rank, secret, host_address())
        self._evaluating: int | None = None  # the thread that evaluates for the driver
        thread_ends.listen()
        self._ends = self._ends_told = len(thread_ends.ended())  # of threads: before this worker was, and told

    # ---- states of clients, see `rayps.federated.client_states_backup`

    def client_sizes(self) -> Any:
        """The samples of each client of the data."""
        with user_code("data"):
            return self._load().data().clients.sizes

    def take_states(self, rows: list[Row] | None, round: int) -> None:
        """Clients that live here have these states after `round`; None begins, with none of them."""
        if rows is None:
            self._states = ClientStates()
            self._states.saved = round
        if self._states is not None:
            self._states.file(rows or ())
            self._states.end()

    def give_states(self, since: int, upto: int, after: int) -> list[Row]:
        """What changed above `since` and up to `upto`, of clients above `after`: see `ClientStates.rows`."""
        states = self._worker.clients.states if self._worker is not None and self._worker.clients is not None else None
        if states is None:
            return []
        states.saved = since
        rows: list[Row] = states.rows(since, upto, after)
        return rows

    # ---- where it is, and its end

    def place(self) -> ActorHost:
        """Where this worker runs and how peers reach it."""
        return ActorHost(socket.gethostname(), os.getpid(), self._listener.address)

    def door(self) -> str:
        """Where others may ask for the states that are kept here."""
        return self._standby.door()

    def halt(self, line: int) -> dict[int, HeldRounds]:
        """End the running plan where it stands; what is kept here, by rank, of its own and of others."""
        with self._ending:
            self._standby.shut()
            self.abort()
            return self._standby.holdings(line)

    def initial(self, seed: int) -> Snapshot:
        """The state before the first round: parameters drawn from the seed alone, whatever the strategy or size."""
        try:
            return drawn(self._load(), seed)
        except Exception as error:
            if lacks_memory(error):
                raise too_large("worker-0", error) from error
            raise

    def begin(self, plan: WorkerPlan, snapshot: Snapshot, own: LocalState | None = None) -> None:
        """End what runs, and start this plan; returns at once. `own` is what this worker alone has of the state.

        Raises PeerLost when this worker has been closed.
        """
        if own is not None:
            snapshot = replace(snapshot, own={plan.rank: own})
        with self._ending:
            self.abort()
            if self._closed:
                raise PeerLost(f"worker-{plan.rank} has been closed", peer=f"worker-{plan.rank}")
            with self._lock:
                self._facts = WorkerFacts(plan.rank, plan.generation, "running", max(plan.start, 0))
                recalls = plan.bond is not None and plan.bond.recalls
                self._facts.points = self._standby.unheard(plan.start if recalls else 0)
                self._parts = RetainedParts()
            self._stop = threading.Event()
            self._ties = WorkerConnections(
                [address for address, _, _ in plan.shards], [(lo, hi) for _, lo, hi in plan.shards]
            )
            self._listener.generation = plan.generation
            orders = (plan, [snapshot], self._stop, self._ties)
            self._thread = threading.Thread(target=self._run, args=orders, daemon=True, name=f"worker-{plan.rank}")
            self._thread.start()

    def poll(self, wanted: int) -> WorkerFacts:
        """What happened since the last poll; points and lines are handed over once. The part of `wanted` is kept."""
        with self._lock:
            facts = self._facts
            self._parts.wanted = wanted
            if self._worker is not None:
                self._worker.wanted = wanted
            answer = WorkerFacts(
                facts.rank,
                facts.generation,
                facts.status,
                facts.position,
                facts.error,
                facts.points,
                sorted(self._parts),
                self.logs.drain(),
                0 if self._ties.talk is None else self._ties.talk.kept.since,
                self._standby.cost,
                facts.met,
                under_way(self._thread.ident) if self._thread is not None else None,
                thread_ends.ended(self._ends),
            )
            answer.points += self._ended_threads(answer.ends)
            facts.points = []
            self._standby.asked()
        return answer

    def _ended_threads(self, ends: list[str]) -> list[dict[str, Any]]:
        """Events of the threads that ended since the last call; some of many."""
        told = self._ends_told - self._ends
        new, self._ends_told = ends[told : told + MOST_ENDS], self._ends + len(ends)
        words = f"in worker-{self._facts.rank}"
        return [{"kind": "event", "event": {"kind": "warning", "message": f"{words}: {text}"}} for text in new]

    def calls(self) -> OpenCalls:
        """What is under way in this worker, also while it evaluates for the driver."""
        threads = (self._evaluating, self._thread.ident if self._thread is not None else None)
        found = (under_way(thread) for thread in threads)
        return OpenCalls(tuple(call for call in found if call is not None), thread_ends.ended(self._ends))

    def part(self, rounds: int | None) -> WorkerPart | None:
        """This worker's share of the checkpoint after `rounds`, or its newest one, if it is still kept."""
        with self._lock:
            return self._parts.get(max(self._parts, default=0) if rounds is None else rounds)

    def rewire(self, shard: int, address: str) -> None:
        """Tell that a shard has been replaced and where it is now; what it lacks of this worker is said again."""
        self._ties.rewire(shard, address)

    def evaluate(self, vector: Tensor | None, buffers: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
        """Sums and sample counts of every metric over this worker's share, at the given parameters."""
        assert self._worker is not None, "evaluate comes after a plan has run"
        with torch.no_grad():
            for name, value in self._worker.held.beside.items():
                if name in buffers:
                    value.copy_(buffers[name])
        self._evaluating = threading.get_ident()
        try:
            return self._worker.evaluate(vector)
        except UserError as error:
            raise at_worker(error, self._facts.rank, self._worker.position) from error
        finally:
            self._evaluating = None

    def abort(self) -> None:
        """End the running plan; its peers see this worker leave."""
        with self._ending:
            self._stop.set()
            self._standby.part()
            self._ties.part()
            if self._thread is not None:
                # a long step of the user's cannot be cut short: it ends at its next exchange
                self._thread.join(JOIN_SECONDS)
                if not self._thread.is_alive():
                    self._ties.close()

    def close(self) -> None:
        """End the plan and stop listening."""
        with self._ending:
            self._closed = True
            self.abort()
            self._listener.close()
            self._standby.close()

    def _load(self) -> Workload:
        if self._workload is None:
            self._workload = unpack(self._packed)
        return self._workload

    def _run(self, plan: WorkerPlan, given: list[Snapshot], stop: threading.Event, ties: WorkerConnections) -> None:
        status, error = "finished", None
        try:
            worker = self._prepare(plan, given.pop(), stop, ties)  # it is as large as the model: not kept meanwhile
            worker.run(lambda point: self._report(point, stop), lambda part: self._keep(part, stop), stop.is_set)
        except UserError as raised:
            status, error = "failed", at_worker(raised, plan.rank, self._facts.position)
        except RaypsError as raised:
            status, error = "failed", raised
        except BaseException as raised:  # a fault of ours or of a library: the driver must see it, not a hung worker
            status, error = "failed", _failure(f"worker-{plan.rank}", raised)
        with self._lock:
            if not stop.is_set():  # before the peers can notice that this worker has gone
                self._facts.status, self._facts.error = status, error
                if self._worker is not None and self._worker.done and error is None:
                    self._facts.met = self._worker.reason or "it is done"
        if error is not None:
            ties.part()
            ties.close()

    def _prepare(self, plan: WorkerPlan, snapshot: Snapshot, stop: threading.Event, ties: WorkerConnections) -> Worker:
        workload = self._load()
        snapshot, missed = self._standby.recall(plan, snapshot)
        with self._lock:  # before the others are waited for: they may never come, and this be asked meanwhile
            if missed is not None and not stop.is_set():
                self._facts.points += self._standby.inherit(missed, plan.start)
        ties.form(plan, snapshot, self._listener)
        if stop.is_set():
            raise StaleGeneration(f"generation {plan.generation} was ended before it began", peer="driver")
        self._worker = Worker(workload, plan, snapshot, ties.ring, ties.server, self._device, ties.talk, ties.rings)
        if self._worker.clients is not None and self._states is not None:
            self._worker.clients.adopt(self._states)
        upkeep = self._standby.begin(plan)
        if upkeep is not None:
            self._worker.commit = upkeep.commit
        return self._worker

    def _report(self, point: dict[str, Any], stop: threading.Event) -> None:
        with self._lock:
            if stop.is_set():
                return  # the facts are another generation's by now
            self._facts.points.append(point)
            self._standby.said(point)
            if point["kind"] == "round":
                self._facts.position = point["round"] + 1

    def _keep(self, part: WorkerPart, stop: threading.Event) -> None:
        with self._lock:
            if stop.is_set():
                return
            self._parts.keep(part.round, part)


def at_worker(error: UserError, rank: int, round: int) -> RaypsError:
    """The same error, which says on which worker and at which round it was raised, where it does not yet."""
    if "rank" in error.data:
        return error
    return type(error)(
        placed(error.message, f"on worker-{rank} at round {round}"), **error.data | {"rank": rank, "round": round}
    )


def _failure(name: str, error: BaseException) -> RaypsError:
    if lacks_memory(error):
        return too_large(name, error)
    log.exception("%s failed", name)
    return RaypsError(f"{name} failed: {type(error).__name__}: {error}")
