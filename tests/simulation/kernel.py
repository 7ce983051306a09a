"""The virtual clock, the processes and their tasks.

A *task* is a thread of the product. It runs in a greenlet until it waits, and then another event runs: at every moment
exactly one task runs. Time moves only from event to event. A killed process has no effect any more: each of its tasks
gets `Killed` at its next wait, and `finally` blocks that run because of this cannot wait, write or send either.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet

EPOCH = 1.7e9  # the wall clock at the start of a simulation, in seconds since 1970
STEP = 1e-6  # seconds by which each event moves the clock at least, so that a loop that polls comes to an end


MOST_CALLS = 20_000  # calls by which a task that never waits is known


class Killed(BaseException):
    """The process of the running task was killed."""


class Broken(BaseException):
    """An invariant does not hold, or the simulation does not come to an end.

    The running simulation ends with the first of these errors, even if code of the product has caught it.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        if _running and _running[-1].broken is None:
            _running[-1].broken = self


class Task:
    """A thread of a simulated process."""

    __slots__ = ("done", "greenlet", "ident", "joiners", "name", "process", "token", "value")

    def __init__(self, process: Process, name: str, work: Callable[[], Any], ident: int) -> None:
        self.process, self.name, self.ident = process, name, ident
        self.token = 0  # number of waits so far: a wakeup of an earlier wait has no effect
        self.done = False
        self.joiners: list[tuple[Task, int]] = []
        self.greenlet = greenlet.greenlet(lambda _: self._run(work), parent=process.sim.hub)

    def _run(self, work: Callable[[], Any]) -> None:
        sim = self.process.sim
        try:
            work()
        except Killed:
            pass
        except BaseException as error:
            if not self.process.dead:
                sim.thread_ended(self, error)
        finally:
            self.done = True
            self.process.tasks.pop(self.ident, None)
            for task, token in self.joiners:
                sim.wake(task, token, True)


class Process:
    """A simulated process on a host. `root`: it belongs to the test, and no fault hits it."""

    def __init__(self, sim: Simulation, name: str, host: str, *, root: bool = False) -> None:
        self.sim, self.name, self.host, self.root = sim, name, host, root
        self.pid = sim.number()
        self.dead: str | None = None  # why it was killed
        self.frozen_until = 0.0  # a stopped process (SIGSTOP) runs nothing before this time
        self.began = sim.now
        self.owner: Process | None = None  # the process that has started this one as an actor
        self.wall_offset = 0.0  # seconds by which the wall clock of this process is wrong
        self.tasks: dict[int, Task] = {}
        self.on_death: list[Callable[[], None]] = []
        sim.processes.append(self)

    def start(self, name: str, work: Callable[[], Any], delay: float = 0.0) -> Task:
        """Run `work` in a new task."""
        task = Task(self, name, work, self.sim.number())
        self.tasks[task.ident] = task
        self.sim.wake(task, 0, True, delay)
        return task

    def kill(self, why: str) -> None:
        """End the process at once, as SIGKILL does."""
        if self.dead is not None:
            return
        self.dead = why
        self.sim.log("killed", f"{self.name} is killed: {why}")
        self.sim.after(0.0, self._reap)
        if self.sim.current is not None and self.sim.current.process is self:
            raise Killed

    def end(self) -> None:
        """End the process by itself (`os._exit`)."""
        self.kill("it ended by itself")

    def _reap(self) -> None:
        for task in list(self.tasks.values()):
            self.sim.switch(task, None)
        for work in self.on_death:
            work()


class Simulation:
    """The clock, the events that are due, the random choices, and the trace."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.hub = greenlet.getcurrent()
        self.now = 0.0
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.events = 0
        self.lines: list[tuple[float, str, str]] | None = [] if keep_trace else None
        self.last: deque[tuple[float, str, str]] = deque(maxlen=40)
        self.checks: list[Callable[[], None]] = []  # the invariants, checked after an event that has changed something
        self.changed = False
        self.pace = 1.0  # factor of the seconds of a round of a job
        self.crash_at_places = 0.0  # probability that a visit of a failpoint kills the process
        self.may_crash: Callable[[Process, str], bool] = lambda process, place: False
        # whether a thread may end with this error because of a fault
        self.expects: Callable[[BaseException], bool] = lambda error: False
        self.unexpected: list[str] = []  # threads of the product that ended with an error
        self.broken: Broken | None = None
        self._calls = 0  # calls of the running task since it last waited
        self._digest = hashlib.sha256()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    # ---- numbers and the trace

    def number(self) -> int:
        """Return the next number: of a process, a task, a descriptor or an event."""
        self._number += 1
        return self._number

    def log(self, kind: str, text: str) -> None:
        """Add an event to the trace."""
        line = (self.now, kind, text)
        self._digest.update(f"{self.now:.6f} {kind} {text}\n".encode())
        self.last.append(line)
        if self.lines is not None:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        """The hash of the trace."""
        return self._digest.hexdigest()

    def thread_ended(self, task: Task, error: BaseException) -> None:
        """Record that a thread of the product ended with an error."""
        if isinstance(error, Broken):
            return  # `run` raises it
        text = "".join(traceback.format_exception(error))
        self.log("thread", f"{task.process.name}: thread {task.name} ended with {type(error).__name__}: {error}")
        if task.process.root:
            raise error
        if self.expects(error):
            return
        self.unexpected.append(f"{task.process.name}, thread {task.name}:\n{text}")

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    # ---- events

    def after(self, delay: float, work: Callable[[], None]) -> None:
        """Run `work` after `delay` seconds. It must not wait."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + delay, self._number, work))

    def wake(self, task: Task, token: int, value: Any, delay: float = 0.0) -> None:
        """Continue a task that waits, unless it does not wait any more with this token."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + delay, self._number, lambda: self._wake(task, token, value)))

    def _wake(self, task: Task, token: int, value: Any) -> None:
        if task.token != token or task.done:
            return
        process = task.process
        if process.frozen_until > self.now and process.dead is None:
            self._number += 1
            again = (process.frozen_until, self._number, lambda: self._wake(task, token, value))
            heapq.heappush(self._heap, again)
            return
        self.switch(task, value)

    def switch(self, task: Task, value: Any) -> None:
        """Run a task until it waits. Called from an event only."""
        if task.done:
            return
        task.token += 1
        self.current = task
        self._calls = 0
        try:
            if task.process.dead is None:
                task.greenlet.switch(value)
            elif task.greenlet:  # it has started
                task.greenlet.throw(Killed())
            else:
                task.done = True
        finally:
            self.current = None

    def park(self, timeout: float | None = None) -> Any:
        """Wait in the running task until `wake`, or for `timeout` seconds; return the value of `wake`, or False."""
        task = self.alive()
        if timeout is not None:
            self.wake(task, task.token, False, max(0.0, timeout))
        value = self.hub.switch()
        if task.process.dead is not None:
            raise Killed
        return value

    def alive(self) -> Task:
        """Return the running task. Raises Killed if its process was killed: a dead process has no effect."""
        task = self.current
        assert task is not None, "only a task can wait, write or send"
        self._calls += 1
        if self._calls > MOST_CALLS:
            self._calls = 0
            raise Broken(f"I8: thread {task.name} of {task.process.name} does not wait any more, it spins")
        if task.process.dead is not None:
            raise Killed
        return task

    def run(self, done: Callable[[], bool], limit: float) -> bool:
        """Run events until `done()` or until `limit` seconds of virtual time; return whether `done()`."""
        while self._heap:
            when, _, work = heapq.heappop(self._heap)
            if when > limit:
                self.now = limit
                return False
            self.now = max(self.now + STEP, when)
            self.events += 1
            work()
            if self.broken is not None:
                raise self.broken
            if self.changed:
                self.changed = False
                for check in self.checks:
                    check()
                if done():
                    return True
        return done()

    def close(self) -> None:
        """Kill what still runs, so that no greenlet is left."""
        self.checks = []
        for process in self.processes:
            if process.dead is None:
                process.dead = "the simulation has ended"
        for process in self.processes:
            for task in list(process.tasks.values()):
                self.switch(task, None)
        self._heap.clear()

    def place(self, name: str) -> None:
        """Pass a failpoint of the product: with a small probability the process is killed here."""
        if self.crash_at_places and self.current is not None and self.rng.random() < self.crash_at_places:
            process = self.alive().process
            if self.may_crash(process, name):
                process.kill(f"a crash at the place {name!r}")


_running: list[Simulation] = []


def simulation() -> Simulation:
    """Return the simulation that runs in this thread."""
    return _running[-1]


def enter(sim: Simulation) -> None:
    """Make `sim` the running simulation."""
    _running.append(sim)


def leave() -> None:
    """End the running simulation."""
    _running.pop().close()


def inside() -> bool:
    """Return whether code of a simulated process runs now."""
    return bool(_running) and _running[-1].current is not None


# ---- what tasks wait for


class Waiters:
    """Tasks that wait for one thing."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: dict[Task, int] = {}  # from a task to its token, in the order in which they wait

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `wake_all` or `wake_one`; return False after `timeout` seconds."""
        sim = simulation()
        task = sim.alive()
        self.add(task)
        found = bool(sim.park(timeout))
        if not found:
            self.discard(task)
        return found

    def add(self, task: Task) -> None:
        """Wake this task too; it waits by itself."""
        self._tasks.pop(task, None)
        self._tasks[task] = task.token

    def discard(self, task: Task) -> None:
        """Remove a task."""
        self._tasks.pop(task, None)

    def wake_all(self) -> None:
        """Wake all tasks."""
        if self._tasks:
            sim, tasks, self._tasks = simulation(), self._tasks, {}
            for task, token in tasks.items():
                sim.wake(task, token, True)

    def wake_one(self) -> None:
        """Wake the task that has waited longest."""
        if self._tasks:
            task = next(iter(self._tasks))
            simulation().wake(task, self._tasks.pop(task), True)
