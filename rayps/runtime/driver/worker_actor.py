"""The actor of a worker, which the driver starts, polls and ends.

Calls return at once, and training runs in a thread (`rayps.worker.run`). `begin` starts a generation and ends the
previous one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rayps_client.errors import PeerLost
from torch import Tensor

from rayps.cluster.code_folder import JobCode, enter_code
from rayps.cluster.local import host_address
from rayps.cluster.members import ActorHost
from rayps.cluster.scratch import close_shared
from rayps.comm.link import Listener
from rayps.core.job.records import Point
from rayps.core.job.user_code import Call, find_call, lacks_memory, list_ended_threads, record_thread_ends, too_large
from rayps.core.job.user_module import unpack
from rayps.core.logs import LogBuffer
from rayps.core.metrics import Totals
from rayps.core.rooms import load
from rayps.core.rows.leases import RowLease
from rayps.core.rows.row_shares import RowShares
from rayps.core.time.member_times import MemberTimes
from rayps.ps.protocol.segment_map import SpaceMap
from rayps.recovery.backup_assignment import HeldRounds
from rayps.recovery.worker_backup import WorkerBackup
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.training_state import TrainingState
from rayps.worker.loops.loop import Companions
from rayps.worker.plan import WorkerFacts, WorkerPart, WorkerPlan
from rayps.worker.run import GenerationRun
from rayps.worker.times import WorkerTimes
from rayps.workload.base import Workload
from rayps.workload.blank_model import blank
from rayps.workload.model import drawn

MOST_ENDS = 10  # the largest number of ended threads that one poll reports
KEPT_SECONDS = 25.0  # the same if the state that the plan holds is needed; the driver waits longer
JOIN_SECONDS = 5.0  # seconds for a thread to notice that its plan has ended


@dataclass(frozen=True, slots=True)
class OpenCalls:
    """The calls of the user's code in a worker that have not returned, and the exceptions that ended its threads."""

    calls: tuple[Call, ...]
    ends: list[str]


class WorkerActor:
    """One worker's process, which holds the workload and runs one plan after the other, one for each generation."""

    def __init__(
        self,
        rank: int,
        secret: bytes,
        workload: bytes,
        *,
        code: JobCode | None = None,
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
        self._code = enter_code(code or JobCode(""))
        self._rank, self._secret, self._device = rank, secret, device
        self._packed = workload
        self._workload: Workload | None = None
        self._listener = Listener(f"worker-{rank}", secret, host=host_address())
        self._ending, self._closed = threading.RLock(), False
        self._lock = threading.RLock()  # guards the fields that the driver reads
        self._times = WorkerTimes()
        self._current: GenerationRun | None = None
        self._companions: Companions = {}
        self._backup: WorkerBackup | None = None  # set if workers hold backups of each other's states
        self._evaluating: int | None = None  # the thread that evaluates for the driver
        record_thread_ends()
        # the number of threads that ended before this worker started, and the number that is reported so far
        self._ends = self._ends_reported = len(list_ended_threads())

    def companion(self, target: str, method: str, *args: Any) -> Any:
        """Call a method of this worker's object of class `target` ("module:Class"), which is created at the first call.

        The object exists as long as this worker, and holds the state that a family stores between generations, such as
        clients' states. Its constructor receives a function that returns the workload.
        """
        if target not in self._companions:
            self._companions[target] = load(target)(self._load)
        return getattr(self._companions[target], method)(*args)

    # ---- place and end

    def place(self) -> ActorHost:
        """Return this worker's host, its process id, and the address at which peers connect."""
        return ActorHost.own(self._listener.address)

    def backup_address(self) -> str:
        """Return the address at which other workers store and request states, or "" without shared memory."""
        with self._ending:
            return self._make_backup().backup_address()

    def halt(self, base_generation: int) -> dict[int, HeldRounds]:
        """End the running plan now. Return a dict from rank to the rounds of that worker's states held here.

        This worker's own states are included. Only states with `base_generation` are returned: see
        `rayps.recovery.state_slots.StateSlots`.
        """
        with self._ending:
            if self._backup is not None:
                self._backup.refuse_commits()
            self.abort()
            return {} if self._backup is None else self._backup.held_rounds(base_generation)

    def initial(self, seed: int) -> Snapshot:
        """Return the state before the first round, with parameters drawn from the seed."""
        try:
            return drawn(self._load(), seed)
        except Exception as error:
            if lacks_memory(error):
                raise too_large("worker-0", error) from error
            raise

    def layout(self) -> Layout:
        """Return the layout of the model's vector. The model takes no memory if it can be built on the meta device."""
        model = blank(self._load())
        return Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)

    def begin(self, plan: WorkerPlan, snapshot: Snapshot, own: TrainingState | None = None) -> bool:
        """End the running plan, start `plan`, and return True at once.

        `own`: the state of this worker that differs from other workers' states; None if there is none. If `snapshot`
        lacks frozen parameters that the last plan of this worker does not have either, return False and start nothing.
        Raises PeerLost if this worker has been closed.
        """
        if own is not None:
            snapshot = replace(snapshot, own={plan.rank: own})
        with self._ending:
            self._listener.begin_generation(plan.generation)  # first: the ending plan may be waiting for a peer
            self.abort()
            if self._closed:
                raise PeerLost(f"worker-{plan.rank} was closed", peer=f"worker-{plan.rank}")
            self._rank = plan.rank  # another one if workers with lower ranks have left
            missing = snapshot.frozen - snapshot.buffers.keys()
            held = {} if self._current is None or not missing else self._current.frozen_values()
            if not missing <= held.keys():
                return False
            snapshot = replace(snapshot, buffers=snapshot.buffers | {name: held[name] for name in missing})
            with (
                self._lock
            ):  # no poll may be answered in between: its points would count as received without being sent
                points = []
                if plan.backup_assignment is not None:
                    points = self._make_backup().unconfirmed_points(
                        plan.start if plan.backup_assignment.restores_state else 0
                    )
                continues = plan.elastic is not None and plan.elastic.handover is not None
                state = self._current.held_state() if continues and self._current is not None else None
                self._current = GenerationRun(plan, self._backup, points, self._lock, self._times)
            self._current.start(self._load, snapshot, state, self._listener, self._device, self._companions)
            return True

    # ---- a change of the workers

    def prepare(self) -> Layout:
        """Import the workload and build its model once, before this worker joins. Return the layout."""
        return self.layout()

    def hold(self) -> int | None:
        """Let the plan begin no further round, and return the number of rounds that were begun; None without a plan."""
        return None if self._current is None else self._current.hold()

    def stop_after(self, rounds: int) -> None:
        """End the plan after `rounds` rounds. Its state stays in memory."""
        assert self._current is not None, "the worker has a plan"
        self._current.stop_after(rounds)

    def train_until(self, rounds: int, retained: int) -> None:
        """Hold the plan after `rounds` rounds, and retain this worker's part of the checkpoint after `retained`."""
        assert self._current is not None, "the worker has a plan"
        self._current.train_until(rounds, retained)

    def deal(self, after: int, rows: RowShares) -> None:
        """Undo `hold`, and deal rows in this way from the round after `after` rounds on."""
        assert self._current is not None, "the worker has a plan"
        self._current.deal(after, rows)

    def resume(self) -> None:
        """Undo `hold`."""
        if self._current is not None:
            self._current.resume()

    def kept_round(self) -> int | None:
        """End the plan, and return the round of the newest complete state in memory; None if there is none."""
        with self._ending:
            if self._current is None:
                return None
            self._current.end(KEPT_SECONDS)
            return self._current.kept_round

    def poll(self, wanted: int, taken: int = 0) -> WorkerFacts:
        """Return the facts since the last poll. Each point and each log line is returned once.

        The worker will retain its part of round `wanted`. The driver has the state after round `taken`.
        """
        ends = list_ended_threads(self._ends)
        with self._lock:
            run = self._current
            answer = WorkerFacts(self._rank, 0, "idle") if run is None else run.poll(wanted, taken)
        answer.lines, answer.ends, answer.times = self.logs.drain(), ends, self._times.look()
        answer.points += self._collect_ended_threads(ends)
        return answer

    def _collect_ended_threads(self, ends: list[str]) -> list[Point]:
        """Return events for the threads that ended since the last call, at most `MOST_ENDS` of them."""
        reported = self._ends_reported - self._ends
        new, self._ends_reported = ends[reported : reported + MOST_ENDS], self._ends + len(ends)
        words = f"in worker-{self._rank}"
        return [{"kind": "event", "event": {"kind": "warning", "message": f"{words}: {text}"}} for text in new]

    def last_lines(self) -> list[tuple[float, str]]:
        """Return the log lines since the last poll, also the text after the last newline: the process will end."""
        self.logs.release()
        return self.logs.drain()

    def times(self) -> MemberTimes:
        """Return where the time of this process went until now."""
        return self._times.report()

    def calls(self) -> OpenCalls:
        """Return the calls of the user's code that run in this worker: in its plan, and in the driver's evaluation."""
        found = [find_call(self._evaluating), None if self._current is None else self._current.call]
        return OpenCalls(tuple(call for call in found if call is not None), list_ended_threads(self._ends))

    def part(self, rounds: int | None) -> WorkerPart | None:
        """Return this worker's part of the checkpoint after `rounds` rounds, or None if it is not retained.

        If `rounds` is None, return the newest part.
        """
        return None if self._current is None else self._current.part(rounds)

    def rewire(self, found: SpaceMap) -> None:
        """Use the map `found`, in which a shard is replaced, and repeat the pushes that the new shard lacks."""
        if self._current is not None:
            self._current.rewire(found)

    def extend(self, leases: Sequence[RowLease], begin: int | None = None) -> None:
        """Add leases of rows, after the worker has waited for one: see `LeaseBook.extend`."""
        if self._current is not None:
            self._current.extend(leases, begin)

    def end_leases(self, push_at: int | None = None) -> None:
        """End the plan after the present round, although there may be leases: see `GenerationRun.end_leases`."""
        if self._current is not None:
            self._current.end_leases(push_at)

    def evaluate(
        self, vector: Tensor | None, buffers: dict[str, Tensor], share: tuple[int, int] | None = None
    ) -> Totals:
        """Return a dict from each metric's name to its `Total` over this worker's share of the data.

        `vector`: the parameters to evaluate; None means the worker's own. `share`: see `GenerationRun.evaluate`.
        """
        assert self._current is not None, "evaluate is called after a plan has run"
        self._evaluating = threading.get_ident()
        try:
            return self._current.evaluate(vector, buffers, share)
        finally:
            self._evaluating = None

    def abort(self) -> None:
        """End the running plan. Peers that wait for this worker get PeerLost."""
        with self._ending:
            if self._current is not None:
                self._current.end(JOIN_SECONDS)

    def leave_code(self) -> None:
        """Remove the job's code from this host if no other process uses it. The driver then ends this process."""
        self._code.close()

    def release_files(self) -> None:
        """Remove the shared files of this process, such as converted data, that no other process of the host uses.

        The driver then ends this process.
        """
        close_shared()

    def close(self) -> None:
        """End the plan and close the listener."""
        with self._ending:
            self._closed = True
            self.abort()
            self._listener.close()
            self._code.close()
            if self._backup is not None:
                self._backup.close()

    def _make_backup(self) -> WorkerBackup:
        if self._backup is None:
            self._backup = WorkerBackup(self._rank, self._secret, host_address())
            if self._closed:
                self._backup.close()
        return self._backup

    def _load(self) -> Workload:
        if self._workload is None:
            self._workload = unpack(self._packed, shared=True)
        return self._workload
