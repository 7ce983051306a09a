"""The driver's handle of the child process that tries one batch while the workers start: see `tried_batch`.

A mistake in shapes, labels or dtypes is then reported early.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from rayps.runtime.checks.tried_batch import TrialRequest, Verdict
from rayps.runtime.records.journal import Journal
from rayps.runtime.results.early_stopping import MetricWatch

MOST_BYTES = 256 << 20
PRIVATE_SECONDS = 60.0  # for which workers wait until the loss of private rows was tried
WATCHED_SECONDS = 10.0  # for which workers wait until it is known whether evaluations have a metric
# the collector is off while modules are loaded, as in `rayps_client.machine.loading`
_MAIN = "import gc; gc.disable(); from rayps.runtime.checks.tried_batch import main; gc.enable(); main()"
_NICENESS = 5  # of the child: it has a third of a worker's share of a core, since workers and Ray start meanwhile


class TrialFacts(NamedTuple):
    """The facts that decide whether a batch can be tried."""

    remote: bool = False  # clients are real processes
    divided: bool = False
    gpus: float = 0.0  # GPUs of a worker
    model: int = 0  # bytes of the model's parameters and buffers
    packed: int = 0  # bytes of the packed workload
    data: int = 0  # bytes of the data's tensors


def reason_not_to_try(facts: TrialFacts) -> str | None:
    """Return why no batch is tried before the workers start, or None if a batch is tried."""
    if facts.remote:
        return "real clients have the data, and the driver has none"
    if facts.divided:
        return "the model is divided among workers"
    if facts.gpus:
        return "the workers have GPUs, and the driver has none"
    sizes = {"model": facts.model, "workload": facts.packed, "data in memory": facts.data}
    for what, size in sizes.items():
        if size > MOST_BYTES:
            return f"the {what} takes {size / 2**20:.0f} MiB, and the limit for a trial is {MOST_BYTES >> 20} MiB"
    return None


class Trial:
    """The driver's handle of the child process that tries a batch. `begin` starts the process."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None  # None until it is known
        self._patience = 0.0  # seconds for which `end` waits for the verdict
        self._watches: Sequence[MetricWatch] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, facts: TrialFacts, request: TrialRequest, watches: Sequence[MetricWatch] = ()) -> None:
        """Start the process if a batch can be tried, and return at once. `watches`: what the callbacks watch."""
        reason, self._watches = reason_not_to_try(facts), watches
        self._patience = PRIVATE_SECONDS if request.private else WATCHED_SECONDS if request.watched else 0.0
        if reason is not None:
            self.verdict = Verdict(skipped=reason)
            return
        more = {
            "PYTHONPATH": os.pathsep.join(request.path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_ENABLE_AUTO_CONNECT": "0",
        }  # the process has not joined Ray, and the user's code must not start one
        cwd = request.working_dir if request.working_dir and Path(request.working_dir).is_dir() else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | more,
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            self.verdict = Verdict(skipped=f"no process could be started: {error}")
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
        self._thread = threading.Thread(
            target=self._exchange, args=(self._process, request), daemon=True, name="rayps-trial"
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the WorkloadError or DataError that the process has found, if any so far.

        Raises ConfigError if the name of a metric that a callback watches is misspelt.
        """
        if self.verdict is not None and self.verdict.error is not None:
            raise self.verdict.error
        self._missing()

    def _missing(self) -> list[str]:
        """Return a warning for each watched metric that the tried batch does not have."""
        names = () if self.verdict is None else self.verdict.metrics
        found = [watch.check_soon(names) for watch in self._watches if names]
        return [each for each in found if each is not None]

    def wait(self, seconds: float) -> None:
        """Wait until there is a verdict, but at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def end(self, journal: Journal) -> None:
        """End the child process, because the workers have started. If no batch was tried, write the reason as an event.

        If rows are private, first wait for the verdict: a loss that does not suit them would learn only noise. Also
        wait, for a shorter time, if a callback watches a metric: the first evaluation may be hours away.

        Raises the WorkloadError or DataError that the process has found, and ConfigError as `check` does.
        """
        self.wait(self._patience)
        self.check()
        verdict, begun = self.verdict, self._process is not None
        self.close()
        if verdict is None and begun:
            verdict = Verdict(skipped="the workers started first")
        if verdict is not None and verdict.skipped is not None:
            journal.event("choice", f"no batch was tried before the workers started: {verdict.skipped}")
        if verdict is not None and verdict.warning is not None:
            journal.event("warning", verdict.warning)
        for warning in self._missing():
            journal.event("warning", warning)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and self._thread is not None:
            if process.returncode is None:  # also end the processes that the user's code started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            self._thread.join()
            process.wait()

    def _exchange(self, process: subprocess.Popen[bytes], request: TrialRequest) -> None:
        given, taken = process.stdin, process.stdout
        assert given is not None
        assert taken is not None
        self.verdict = _answer(process, given, taken, request)


def _answer(process: subprocess.Popen[bytes], given: IO[bytes], taken: IO[bytes], request: TrialRequest) -> Verdict:
    """Send the request to the child process, and return the verdict that it sends.

    The child's stdin stays open until then, because the child ends itself when its stdin is closed.
    """
    with contextlib.suppress(OSError), given, taken:
        try:
            pickle.dump(request, given)
            given.flush()
            found: Verdict = pickle.load(taken)
            return found
        except (OSError, EOFError, pickle.UnpicklingError):
            pass
    return Verdict(skipped=f"the child process ended with exit code {process.wait()}")
