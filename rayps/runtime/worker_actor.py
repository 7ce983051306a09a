"""The actor of a worker: the driver starts it, polls it and ends it.

Calls return at once; training runs in a thread (`rayps.worker.run`). `begin` of a new generation ends the previous
generation.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rayps.cluster.local import host_address
from rayps.cluster.members import ActorHost, enter
from rayps.comm.link import Listener
from rayps.core.errors import PeerLost
from rayps.core.logs import LogBuffer
from rayps.core.records import Point
from rayps.core.user_code import Call, ended_threads, lacks_memory, record_thread_ends, too_large, under_way
from rayps.core.user_module import unpack
from rayps.ps.protocol.segment_map import SpaceMap
from rayps.recovery.backup_assignment import HeldRounds
from rayps.recovery.worker_backup import WorkerBackup
from rayps.tensors.local_state import LocalState
from rayps.tensors.snapshot import Snapshot
from rayps.worker.loop import Companions
from rayps.worker.loop_of_family import load
from rayps.worker.plan import WorkerFacts, WorkerPart, WorkerPlan
from rayps.worker.run import GenerationRun
from rayps.workload.base import Workload
from rayps.workload.model import drawn

MOST_ENDS = 10  # most ended threads that are reported at a time
JOIN_SECONDS = 5.0  # seconds for a thread to see that its plan has ended


@dataclass(frozen=True, slots=True)
class OpenCalls:
    """The calls of the user's code that have not returned in a worker, and the exceptions that ended its threads."""

    calls: tuple[Call, ...]
    ends: list[str]


class WorkerActor:
    """One worker's process: it holds the workload, and runs the plans of successive generations."""

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
        self._rank, self._secret, self._device = rank, secret, device
        self._packed = workload
        self._workload: Workload | None = None
        self._listener = Listener(f"worker-{rank}", secret, host=host_address())
        self._ending, self._closed = threading.RLock(), False
        self._lock = threading.RLock()  # guards the fields that the driver reads
        self._current: GenerationRun | None = None
        self._companions: Companions = {}
        self._backup: WorkerBackup | None = None  # set if workers hold backups of each other's states
        self._evaluating: int | None = None  # the thread that evaluates for the driver
        record_thread_ends()
        # numbers of ended threads: before this worker, and reported so far
        self._ends = self._ends_told = len(ended_threads())

    def companion(self, target: str, method: str, *args: Any) -> Any:
        """Call a method of the object of class `target` ("module:Class") that lives as long as this worker.

        The object holds the state that a family stores between generations, such as clients' states. Its constructor
        receives a function that returns the workload.
        """
        if target not in self._companions:
            self._companions[target] = load(target)(self._load)
        return getattr(self._companions[target], method)(*args)

    # ---- place and end

    def place(self) -> ActorHost:
        """Return where this worker runs and how peers reach it."""
        return ActorHost(socket.gethostname(), os.getpid(), self._listener.address)

    def backup_address(self) -> str:
        """Return the address at which other workers store and request states; "" if there is no shared memory."""
        with self._ending:
            return self._made_backup().backup_address()

    def halt(self, line: int) -> dict[int, HeldRounds]:
        """End the running plan now; return, by rank, the rounds of the states that this worker holds, its own included.

        Only states on `line` are returned: see `rayps.recovery.state_slots.StateSlots`.
        """
        with self._ending:
            if self._backup is not None:
                self._backup.shut()
            self.abort()
            return {} if self._backup is None else self._backup.holdings(line)

    def initial(self, seed: int) -> Snapshot:
        """Return the state before the first round, with parameters drawn from the seed."""
        try:
            return drawn(self._load(), seed)
        except Exception as error:
            if lacks_memory(error):
                raise too_large("worker-0", error) from error
            raise

    def begin(self, plan: WorkerPlan, snapshot: Snapshot, own: LocalState | None = None) -> None:
        """End the running plan, and start `plan`; return at once. `own` is this worker's separate state, if any.

        Raises PeerLost: this worker has been closed.
        """
        if own is not None:
            snapshot = replace(snapshot, own={plan.rank: own})
        with self._ending:
            self.abort()
            if self._closed:
                raise PeerLost(f"worker-{plan.rank} was closed", peer=f"worker-{plan.rank}")
            with self._lock:  # a poll answered between these calls would count points as received that were not sent
                points = []
                if plan.bond is not None:
                    points = self._made_backup().unheard(plan.start if plan.bond.recalls else 0)
                self._current = GenerationRun(plan, self._backup, points, self._lock)
            self._listener.generation = plan.generation
            self._current.start(self._load, snapshot, self._listener, self._device, self._companions)

    def poll(self, wanted: int) -> WorkerFacts:
        """Return the facts since the last poll; each point and line is returned once.

        The worker retains its part of round `wanted`.
        """
        ends = ended_threads(self._ends)
        with self._lock:
            run = self._current
            answer = WorkerFacts(self._rank, 0, "idle") if run is None else run.poll(wanted)
        answer.lines, answer.ends = self.logs.drain(), ends
        answer.points += self._ended_threads(ends)
        return answer

    def _ended_threads(self, ends: list[str]) -> list[Point]:
        """Return events for the threads that ended since the last call, at most `MOST_ENDS`."""
        told = self._ends_told - self._ends
        new, self._ends_told = ends[told : told + MOST_ENDS], self._ends + len(ends)
        words = f"in worker-{self._rank}"
        return [{"kind": "event", "event": {"kind": "warning", "message": f"{words}: {text}"}} for text in new]

    def calls(self) -> OpenCalls:
        """Return the running calls of the user's code in this worker: of its plan, and of the driver's evaluation."""
        found = [under_way(self._evaluating), None if self._current is None else self._current.call]
        return OpenCalls(tuple(call for call in found if call is not None), ended_threads(self._ends))

    def part(self, rounds: int | None) -> WorkerPart | None:
        """Return this worker's part of the checkpoint after `rounds` rounds; None if it is not retained.

        `rounds` None: return the newest part.
        """
        return None if self._current is None else self._current.part(rounds)

    def rewire(self, found: SpaceMap) -> None:
        """Use `found`, the map in which a shard is replaced, and push again to the new shard the pushes it lacks."""
        if self._current is not None:
            self._current.rewire(found)

    def evaluate(self, vector: Tensor | None, buffers: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
        """Return sum and number of samples of every metric over this worker's share, at the given parameters."""
        assert self._current is not None, "evaluate is called after a plan has run"
        self._evaluating = threading.get_ident()
        try:
            return self._current.evaluate(vector, buffers)
        finally:
            self._evaluating = None

    def abort(self) -> None:
        """End the running plan; its peers get PeerLost."""
        with self._ending:
            if self._current is not None:
                self._current.end(JOIN_SECONDS)

    def close(self) -> None:
        """End the plan and close the listener."""
        with self._ending:
            self._closed = True
            self.abort()
            self._listener.close()
            if self._backup is not None:
                self._backup.close()

    def _made_backup(self) -> WorkerBackup:
        if self._backup is None:
            self._backup = WorkerBackup(self._rank, self._secret, host_address())
            if self._closed:
                self._backup.close()
        return self._backup

    def _load(self) -> Workload:
        if self._workload is None:
            self._workload = unpack(self._packed)
        return self._workload
