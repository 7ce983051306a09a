"""An asyncio loop on the virtual clock, for the service's process."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import events
from collections.abc import Callable
from typing import Any

from simulation.kernel import Killed, Waiters, simulation
from simulation.substitutes import SimRLock, SimTime


class SimExecutor:
    """Stands in for `ThreadPoolExecutor`: its calls run one after the other, in tasks."""

    def __init__(self, workers: int = 1, thread_name_prefix: str = "") -> None:
        self.turn = SimRLock()

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        pass


class SimLoop(asyncio.BaseEventLoop):
    """The event loop of one simulated process."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._process = simulation().alive().process
        self._wakers = Waiters()

    def time(self) -> float:
        return SimTime.monotonic()

    def select(self, timeout: float | None) -> list[Any]:
        """Wait for the next timer, or for a call of another task."""
        if timeout is None or timeout > 0:
            events._set_running_loop(None)
            try:
                self._wakers.wait(timeout)
            finally:
                events._set_running_loop(self)
        return []

    def _process_events(self, _: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._wakers.wake_all()

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def call() -> None:
            sim = simulation()
            if executor is not None:
                executor.turn.acquire()
            try:
                sim.park(sim.rng.random() * 0.002)
                try:
                    value = work(*args)
                except Killed:
                    raise
                except BaseException as raised:
                    error = raised
                    self.call_soon_threadsafe(lambda: future.cancelled() or future.set_exception(error))
                else:
                    self.call_soon_threadsafe(lambda: future.cancelled() or future.set_result(value))
            finally:
                if executor is not None:
                    executor.turn.release()

        self._process.start("executor", call)
        return future


def run(main: Any) -> None:
    """Run a coroutine in the running task until it ends."""
    loop = SimLoop()
    try:
        loop.run_until_complete(main(loop))
    finally:
        events._set_running_loop(None)
        for task in sorted(asyncio.all_tasks(loop), key=lambda task: int(task.get_name().rpartition("-")[2])):
            task._log_destroy_pending = False  # its process was killed
            with contextlib.suppress(Killed, RuntimeError):  # it must not end in a later simulation, with the garbage
                task.get_coro().close()
