"""What a worker measures of the steps of its loop: where their time went, their rate, and a trace of a few of them.

A step is one of a wrapped optimizer; of a loop that wraps none, a call of `rayps.log`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rayps.core.job.records import WorkerLine
from rayps.core.time.time_account import Seconds, TimeAccount
from rayps.worker.profile import RoundTrace

NEWEST = 50  # the number of newest steps from which shares and rates are computed

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class StepRates:
    """Shares of the time of a worker's newest steps, which add up to 1, its rate, and the newest logged step."""

    compute: float = 0.0
    wait: float = 0.0  # for peers
    move: float = 0.0  # sending and receiving
    data: float = 0.0  # waiting for batches
    samples_per_second: float | None = None  # None if the loop logs no samples
    logged: int = -1  # -1: none

    def added_to(self, line: WorkerLine) -> WorkerLine:
        """Return a worker's line with these values, as far as they are known."""
        found: WorkerLine = {**line, "round": line["round"] or max(0, self.logged)}
        if self.compute or self.wait or self.move or self.data:
            found |= {"compute": self.compute, "wait": self.wait, "move": self.move, "data": self.data}
        if self.samples_per_second is not None:
            found["samples_per_second"] = self.samples_per_second
        return found


class StepMeasure:
    """Measures the steps of one worker's loop. The loop's thread writes, and any thread may read `rates`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.account = TimeAccount(clock=clock)  # of the time of this process
        self._clock, self._logged_at = clock, clock()  # the time of the last logged point
        self._lock = threading.Lock()
        self._spent: deque[Seconds] = deque([{}], maxlen=NEWEST + 1)  # the account at the end of each newest step
        self._logged: deque[tuple[float, float]] = deque(maxlen=NEWEST)  # (samples, seconds) of the newest points
        self._trace: RoundTrace | None = None
        self._found: bytes | None = None  # the trace, until it is taken
        self._is_delivered = False

    def end_step(self, held: Mapping[str, float] | None = None) -> None:
        """Count a step, which was `held` up for so many seconds by part of the account."""
        self.account.divide(held or {})
        self.account.enter("compute")  # what the next step is held up is taken from the time that begins here
        with self._lock:
            self._spent.append(self.account.seconds())
        if self._trace is not None:
            self._trace.round_over()

    def add_logged(self, samples: float | None) -> float:
        """Take over a logged point of so many samples, and return the seconds since the point before."""
        now = self._clock()
        seconds, self._logged_at = now - self._logged_at, now
        if samples is not None:
            with self._lock:
                self._logged.append((samples, seconds))
        return seconds

    def rates(self, logged: int) -> StepRates:
        """Return the rates of the newest steps; of a loop without steps, the shares of its time so far."""
        with self._lock:
            spent, points = list(self._spent), list(self._logged)
        first, last = spent[0], spent[-1] if len(spent) > 1 else self.account.seconds()
        parts = ("compute", "waiting", "communication", "data")
        seconds = [max(0.0, _seconds_of(last, part) - _seconds_of(first, part)) for part in parts]
        compute, wait, move, data = (each / (sum(seconds) or 1.0) for each in seconds)
        points = points[1:] or points  # the time before the first point has the start of the process
        passed = sum(each for _, each in points)
        rate = sum(samples for samples, _ in points) / passed if passed > 0 else None
        return StepRates(compute, wait, move, data, rate, logged)

    # ---- waits for data

    def timed(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items, and count the waits for them as waits for data."""
        source = iter(items)
        while True:
            with self.account.span("data"):
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item

    # ---- the trace

    def begin_trace(self, steps: int | None) -> bool:
        """Trace some of the next steps, of which there are `steps` (None: not known). The loop's thread calls it.

        Only the first call has an effect. Return False if it finds that another worker of this process is traced.
        """
        if self._trace is not None:
            return True
        self._trace = RoundTrace(sys.maxsize if steps is None else steps, self._deliver, all_threads=True)
        return self._trace.started

    def end_trace(self) -> bool:
        """End the trace. Return whether the loop has taken too few steps for one."""
        if self._trace is None:
            return True
        self._trace.close()
        return self._trace.started and not self._is_delivered

    def take_trace(self) -> bytes | None:
        """Return the trace once, when it is complete."""
        found, self._found = self._found, None
        return found

    def _deliver(self, trace: bytes) -> None:
        self._found, self._is_delivered = trace, True


def _seconds_of(spent: Seconds, part: str) -> float:
    return sum(seconds for (name, _), seconds in spent.items() if name == part)
