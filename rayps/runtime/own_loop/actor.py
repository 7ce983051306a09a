"""One worker's process of a run: it calls the user's function, and sends what the function produces to the driver."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import torch
from rayps_client.errors import WorkloadError
from rayps_client.values import Buffer

from rayps.cluster.code_folder import JobCode, OpenCode, enter_code
from rayps.cluster.local import host_address
from rayps.cluster.members import ActorHost
from rayps.core.job.records import Event, Point
from rayps.core.job.user_code import add_place, user_code
from rayps.core.job.user_module import unpack
from rayps.core.logs import LogBuffer
from rayps.core.rows.rank_seed import derive_rank_seed
from rayps.core.time.member_times import MemberTimes
from rayps.runtime.own_loop.activity import Activity, activity_of
from rayps.runtime.own_loop.named import choose_arguments
from rayps.runtime.own_loop.state import SavedPart
from rayps.runtime.own_loop.step_measure import StepRates
from rayps.runtime.own_loop.world import LoopPlace, World, current

TIMES_SECONDS = 1.0  # seconds between two reports of the account of time
REPORT_SECONDS = 0.1  # the shortest time, in seconds, between two reports of a step


@dataclass(frozen=True, slots=True)
class LoopOutput:
    """What a worker has produced since the last call: lines (time, text), points, events, saves; and its progress."""

    lines: list[tuple[float, str]]
    steps: int  # optimizer steps that the worker has taken
    returned: bool  # whether the worker's function has returned without an error
    over: bool  # whether nothing more will follow
    points: list[Point] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    parts: list[SavedPart] = field(default_factory=list)
    activity: Activity | None = None  # what its function is doing; None if it does not run
    times: MemberTimes | None = None  # of its process since the start, if a report is due
    rates: StepRates | None = None  # of its newest steps, if a report is due
    inputs: str | None = None  # a digest of the first inputs of its model: see `rayps.runtime.own_loop.same_rows`
    trace: bytes | None = None  # a trace of some steps, once: see `rayps.worker.profile`
    is_free: bool = False  # whether another process can take the worker's place while the others continue


class _Discard:
    """A file that drops what is written to it."""

    def write(self, data: Buffer) -> int:
        return len(data)


def check_sendable(result: Any) -> None:
    """Raise WorkloadError if the result of the loop's function cannot be sent to the caller's process."""
    try:
        cloudpickle.Pickler(_Discard()).dump(result)
    except Exception as error:  # the user's objects may raise anything
        raise WorkloadError(
            f"the loop's function returned {type(result).__name__}, which cannot be sent to the caller:\n"
            f"{type(error).__name__}: {error}\nreturn data such as numbers, tensors or model.state_dict()"
        ) from error


class LoopActor:
    """One worker's process of a `run`."""

    def __init__(
        self,
        packed: bytes,
        place: LoopPlace,
        *,
        code: JobCode | None = None,
        capture: bool = False,
        sends: bool = True,
        recovers: bool = False,
        threads: int = 1,
    ) -> None:
        """Prepare the worker, whose operators use `threads` threads.

        `capture`: whether lines are sent to the driver. `sends`: whether the result is. `recovers`: whether the worker
        starts because of a failure.
        """
        self._packed, self._world, self._job_code = packed, World(place), code or JobCode("")
        self._code: OpenCode | None = None
        self._logs, self._returned, self._over = LogBuffer(), False, False
        self._sends, self._checks = sends, capture
        self._reported_at = 0.0  # the time of the last report of a step
        self._thread: int | None = None  # the thread in which the function runs
        self._stepped = 0, time.monotonic()  # the number of steps, and when it has last been another
        self._closing = threading.Lock()
        self._times_due = 0.0  # the time of the next report of the account
        if recovers:
            self._world.measure.account.enter("recovery")
        self._world.produced = self._report_produced
        if capture:
            self._logs.capture()
            logging.getLogger("rayps").setLevel(logging.WARNING)
        torch.set_num_threads(threads)

    def place(self) -> ActorHost:
        """Return where this worker runs."""
        return ActorHost.own(host_address())

    def run(self, own: SavedPart | None = None, first: SavedPart | None = None) -> Any:
        """Call the user's function in its `World`. `own` and `first` are this rank's and rank 0's saved state."""
        here = self._world
        current.set(here)
        self._thread, self._stepped = threading.get_ident(), (here.steps, time.monotonic())
        torch.manual_seed(derive_rank_seed(here.place.seed, here.rank))
        if own is not None and first is not None:
            here.restored, here.steps, here.saved = (own, first), own.steps, own.number
        failed = True
        try:
            self._code = enter_code(self._job_code)
            function = unpack(self._packed, shared=True)
            here.measure.account.enter("compute")
            with user_code(getattr(function, "__name__", "train_fn")):
                result = function(**choose_arguments(function, here.place.params))
            if not self._sends:
                result = None
            elif self._checks:
                check_sendable(result)
            self._returned, failed = True, False
        except WorkloadError as error:
            message = add_place(error.message, f"on worker-{here.rank}, after {here.steps} optimizer steps")
            raise WorkloadError(message, **error.data | {"rank": here.rank}) from error
        finally:
            try:
                try:
                    self._end_trace(failed)
                finally:
                    self._close(failed)
            finally:
                if self._code is not None:
                    self._code.close()
                self._logs.release()
                here.measure.account.enter("idle")
                self._over = True  # nothing more follows
                self._logs.release()
        return result

    def _end_trace(self, failed: bool) -> None:
        """End the trace, and warn if a loop that was to be traced has none."""
        here = self._world
        if here.place.traced and here.measure.end_trace() and not failed:
            here.warn(
                f"worker-{here.rank} has no trace: its loop has taken too few steps, of which the first three are left "
                "out: give their number, rayps.wrap(model, optimizer, steps=...), or take at least four; in a loop "
                "that wraps no optimizer, each call of rayps.log is a step"
            )

    def output(self, seconds: float) -> LoopOutput:
        """Return the output since the last call. If there is none, wait for a line or a step, at most `seconds`."""
        if not self._over:
            self._logs.wait(seconds)
        over, steps = self._over, self._world.steps
        if steps != self._stepped[0]:
            self._stepped = steps, time.monotonic()
        activity = None if over else activity_of(self._thread, time.monotonic() - self._stepped[1])
        times = rates = None
        if over or time.monotonic() >= self._times_due:
            self._times_due, times = time.monotonic() + TIMES_SECONDS, self.times()
            rates = self._world.measure.rates(self._world.last_logged)
        here = self._world
        lines, produced, trace = self._logs.drain(), here.take(), here.measure.take_trace()
        free = here.is_free and not self._returned  # at the end, worker-0 waits for the process that used its servers
        return LoopOutput(
            lines, steps, self._returned, over, *produced, activity, times, rates, here.inputs, trace, free
        )

    def times(self) -> MemberTimes:
        """Return where the time of this process went since its start."""
        return replace(MemberTimes.of(self._world.measure.account.seconds()), rounds=self._world.steps)

    def close(self) -> None:
        """End the connections of wrapped optimizers, so that no peer waits for this worker. A kill calls this."""
        self._world.ended.set()
        if not self._over:
            self._close(True)

    def _close(self, failed: bool) -> None:
        with self._closing:
            closing, self._world.closing = self._world.closing, []
        error: BaseException | None = None
        for close in reversed(closing):  # each one, so that no peer waits for it
            try:
                close(failed)
            except BaseException as raised:
                error, failed = error or raised, True
        if error is not None:
            raise error

    def _report_produced(self) -> None:
        """Report a step, a point or a save to the driver: steps and points at most every tenth of a second."""
        now = time.monotonic()
        if self._world.parts or now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self._logs.wake()
