"""One batch is tried in a process of its own while workers start.

A mistake in shapes, labels or dtypes is known before the first worker is there. The process draws, learns and keeps for
itself alone: the job's numbers are the same with and without it. What is wrong with that process only (it exits, hangs,
lacks memory or a file) is no verdict on the job, which goes on.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch import Tensor, nn

from rayps.data.base import Data, map_tensors
from rayps.runtime.journal import Journal
from rayps.runtime.trial_process import TrialRequest, Verdict

MOST_BYTES = 256 << 20  # of parameters, of a packed workload, and of data in memory, which the process has once more
_MAIN = "from rayps.runtime.trial_process import main; main()"


class TrialFacts(NamedTuple):
    """What decides whether a batch can be tried in the driver."""

    remote: bool = False  # clients are real
    divided: bool = False
    gpus: float = 0.0  # of a worker
    model: int = 0  # bytes of its parameters and buffers
    packed: int = 0  # bytes of the workload
    data: int = 0  # bytes of its tensors


def untried(facts: TrialFacts) -> str | None:
    """Why no batch is tried before the workers start; None where one is."""
    if facts.remote:
        return "the clients have the data"
    if facts.divided:
        return "the model is divided among workers"
    if facts.gpus:
        return "the workers have GPUs, and the driver has none"
    sizes = {"model": facts.model, "workload": facts.packed, "data in memory": facts.data}
    for what, size in sizes.items():
        if size > MOST_BYTES:
            return f"the {what} takes {size / 2**20:.0f} MiB, and up to {MOST_BYTES >> 20} MiB are tried"
    return None


def bytes_of(value: Any) -> int:
    """The memory of the tensors in a module, a data set or nested values."""
    if isinstance(value, nn.Module):
        return sum(tensor.nbytes for tensor in [*value.parameters(), *value.buffers()])
    found: list[int] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor.nbytes)
        return tensor

    map_tensors(dict(vars(value)) if isinstance(value, Data) else value, add)
    return sum(found)


class Trial:
    """The process, as the driver sees it; none before `begin`."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None  # once it is known
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, facts: TrialFacts, request: TrialRequest) -> None:
        """Start it, where a batch can be tried; returns at once."""
        reason = untried(facts)
        if reason is not None:
            self.verdict = Verdict(skipped=reason)
            return
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        more = {
            "PYTHONPATH": os.pathsep.join(request.path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_ENABLE_AUTO_CONNECT": "0",
        }  # the process is in no Ray, and the user's code must not start one
        cwd = request.working_dir if request.working_dir and Path(request.working_dir).is_dir() else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN], env=os.environ | more, cwd=cwd, start_new_session=True, **options
            )
        except OSError as error:
            self.verdict = Verdict(skipped=f"no process could be started: {error}")
            return
        self._thread = threading.Thread(
            target=self._talk, args=(self._process, request), daemon=True, name="rayps-trial"
        )
        self._thread.start()

    def check(self) -> None:
        """Raises WorkloadError, DataError: what the process found, if it has found anything yet."""
        if self.verdict is not None and self.verdict.error is not None:
            raise self.verdict.error

    def wait(self, seconds: float) -> None:
        """Return once there is a verdict, or after `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def end(self, journal: Journal) -> None:
        """End it: the workers are there. Raises as `check`; a batch that was not tried is filed with the reason."""
        self.check()
        verdict, begun = self.verdict, self._process is not None
        self.close()
        if verdict is None and begun:
            verdict = Verdict(skipped="the workers were there first")
        if verdict is not None and verdict.skipped is not None:
            journal.event("choice", f"no batch was tried before the workers started: {verdict.skipped}")

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and self._thread is not None:
            if process.returncode is None:  # with what the user's code has started there
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            self._thread.join()
            process.wait()

    def _talk(self, process: subprocess.Popen[bytes], request: TrialRequest) -> None:
        given, taken = process.stdin, process.stdout
        assert given is not None
        assert taken is not None
        self.verdict = _answer(process, given, taken, request)


def _answer(process: subprocess.Popen[bytes], given: IO[bytes], taken: IO[bytes], request: TrialRequest) -> Verdict:
    """Give the request, which stays open until there is an answer: the process ends with its parent."""
    with contextlib.suppress(OSError), given, taken:
        try:
            pickle.dump(request, given)
            given.flush()
            found: Verdict = pickle.load(taken)
            return found
        except (OSError, EOFError, pickle.UnpicklingError):
            pass
    return Verdict(skipped=f"its process ended with exit code {process.wait()}")
