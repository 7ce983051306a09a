"""A worker's report of its time: the account, the machine's waits of the thread that trains, connections, peers."""

from __future__ import annotations

import threading
import time

from rayps.core.time.machine_waits import MachineWaits, ThreadWaits
from rayps.core.time.member_times import LineFacts, MemberTimes
from rayps.core.time.time_account import AccountTurn, TimeAccount, name_waits
from rayps.worker.connections import WorkerConnections
from rayps.worker.plan import WorkerPlan

REPORT_SECONDS = 1.0  # seconds between two reports


class WorkerTimes:
    """The account of one worker's process, over all its generations. Any thread may call its methods.

    Totals of waits, of machine waits and of connections belong to the rounds of a generation. Those of earlier
    generations are kept as they were at the last report.
    """

    def __init__(self) -> None:
        self.account = TimeAccount()
        self._lock = threading.Lock()
        self._plan: WorkerPlan | None = None
        self._connections: WorkerConnections | None = None
        self._thread: ThreadWaits | None = None
        self._rounds = 0
        self._machine = MachineWaits()  # of the threads of earlier generations
        self._lines: dict[str, LineFacts] = {}  # of the connections of earlier generations
        self._begin: dict[str, LineFacts] = {}  # of the connections of this generation before its first round
        self._raw: dict[str, float] = {}  # seconds waited for each peer at the last report, in this generation
        self._waits: dict[str, float] = {}  # seconds waited for each peer, over all generations
        self._newest = MemberTimes()
        self._due = 0.0

    def begin(self, plan: WorkerPlan, connections: WorkerConnections) -> AccountTurn:
        """Begin a generation. Return the account for its thread, which the next generation's `begin` ends."""
        with self._lock:
            self._read()
            self._machine, self._lines = self._newest.machine, self._newest.lines
            self._plan, self._connections, self._thread = plan, connections, None
            self._begin, self._raw = {}, {}
        turn = self.account.turn()
        if plan.times.recovers:
            self.account.rename("start", "recovery")  # of a process that was started because of the failure
        # a worker that has survived a failure, or a change of the workers, is in `recovery` already
        turn.enter("recovery" if plan.times.recovers or self.account.part == "recovery" else "start")
        return turn

    def trains_here(self) -> None:
        """Measure the machine's waits of the calling thread, the connections and the peers from now on.

        What the start has sent and waited for, such as to choose an algorithm, says nothing about the rounds.
        """
        with self._lock:
            self._thread = ThreadWaits(threading.get_native_id())
            if self._connections is not None and self._plan is not None:
                self._begin = self._connections.lines(self._plan)
                self._raw = self._connections.waits(self._plan)

    def round_over(self) -> None:
        """Count a round."""
        self._rounds += 1

    def look(self) -> MemberTimes | None:
        """Look at the thread's state. Return a report if one is due, else None."""
        with self._lock:
            if self._thread is not None:
                self._thread.read()
            if time.monotonic() < self._due:
                return None
            return self._read()

    def report(self) -> MemberTimes:
        """Return a report now."""
        with self._lock:
            return self._read()

    def _read(self) -> MemberTimes:
        self._due = time.monotonic() + REPORT_SECONDS
        machine, lines = self._machine, dict(self._lines)
        if self._thread is not None:
            machine = machine.plus(self._thread.read())
        if self._connections is not None and self._plan is not None:
            raw = self._connections.waits(self._plan)
            for peer, seconds in raw.items():
                self._waits[peer] = self._waits.get(peer, 0.0) + max(0.0, seconds - self._raw.get(peer, 0.0))
            self._raw = raw
            for peer, line in self._connections.lines(self._plan).items():
                here = line.since(self._begin.get(peer, LineFacts()))
                lines[peer] = here.after(self._lines.get(peer, LineFacts()))
        found = MemberTimes.of(name_waits(self.account.seconds(), self._waits), machine, lines)
        self._newest = MemberTimes(found.parts, found.waits, machine, lines, self._rounds)
        return self._newest
