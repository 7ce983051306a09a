"""A trace of a few rounds of one worker, by torch.profiler.

The trace is in Chrome's format: open it in https://ui.perfetto.dev or chrome://tracing. It has the rounds of the
strategy with all that they contain: data, loss, backward, transfer and the optimizer's step. Of a user's own loop it
has the loop's steps. The worker delivers the trace with its answers to the driver's polls, so that no folder needs to
be shared.
"""

from __future__ import annotations

import gzip
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

_profiling = threading.Lock()  # torch has one profiler in a process; workers that are threads share it


class TracedRounds(NamedTuple):
    """How many rounds are left out, are run with the profiler to warm it up, and are traced."""

    wait: int
    warmup: int
    active: int

    @classmethod
    def of(cls, rounds: int) -> TracedRounds:
        """Return the rounds for a run of `rounds`: 2 left out, 1 to warm up and 3 traced, or fewer in a short run."""
        active = max(1, min(3, rounds - 1))
        warmup = 1 if rounds > active else 0
        return cls(max(0, min(2, rounds - active - warmup)), warmup, active)


class RoundTrace:
    """Traces some rounds of this worker, and passes the trace to `deliver` as compressed JSON, once."""

    def __init__(self, rounds: int, deliver: Callable[[bytes], None], *, all_threads: bool = False) -> None:
        """Prepare the trace for a run of `rounds` more rounds; `started` is False if this process has another one.

        `all_threads`: what other threads do belongs to the rounds, too.
        """
        self._deliver = deliver
        self.started = _profiling.acquire(blocking=False)
        self._open = self.started
        if not self.started:
            return
        plan = TracedRounds.of(rounds)
        self._rounds, self._before = 0, plan.wait + plan.warmup  # rounds that are over, and those that are not traced
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run of one round cannot warm up
            self._profile = profile(
                activities=activities,
                schedule=schedule(wait=plan.wait, warmup=plan.warmup, active=plan.active, repeat=1),
                on_trace_ready=self._deliver_trace,
                experimental_config=_ExperimentalConfig(profile_all_threads=all_threads),
            )
            self._profile.start()

    def round_over(self) -> None:
        """Count a round. After the last traced round, the trace is delivered and the profiler ends."""
        if self._open:
            self._rounds += 1
            self._profile.step()

    def close(self) -> None:
        """End the profiler. If the run ended early, the traced rounds so far are delivered, if there are any."""
        if not self._open:
            return
        self._profile.stop()
        self._end()

    def _deliver_trace(self, found: profile) -> None:
        if self._rounds > self._before:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                found.export_chrome_trace(str(path))
                self._deliver(gzip.compress(path.read_bytes(), 1))
        self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            _profiling.release()
