"""Inject one fault into one process, and take it back.

Each injector is a context manager, whose end takes the fault back. A killed process stays dead: the fault `kill` has
nothing to take back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayps_client.errors import ClusterError

from rayps.cluster.local import until
from rayps_chaos import lines
from rayps_chaos.faults import KINDS, NEWBORN, SLOW_BYTES, THROTTLED_SHARE, FaultOn, FaultRole
from rayps_chaos.plan import PlannedFault
from rayps_chaos.targets import ChaosProcess

_THROTTLE_SECONDS = 0.05  # seconds of one turn of a throttled process
_REPEAT_SECONDS = 0.1  # seconds between two looks for new connections
_DEATH_SECONDS = 10.0  # for which a killed process is awaited
_BURN = "while True: pass"


@dataclass(frozen=True, slots=True)
class ChaosMeans:
    """What this run of chaos owns, and can use for faults.

    `disk`: the folder of a small file system that holds the whole state directory; `set_clock` shifts the wall clock of
    a service that this run has started by a number of seconds. None: there is none.
    """

    disk: Path | None = None
    set_clock: Callable[[float], None] | None = None

    def cannot(self) -> dict[FaultOn, str]:
        """Return why faults cannot be injected here."""
        return cannot_inject(own_service=self.set_clock is not None)


def cannot_inject(*, own_service: bool) -> dict[FaultOn, str]:
    """Return why faults cannot be injected on this machine. `own_service`: whether this run starts the service."""
    found = {}
    if not own_service:
        found[FaultOn("clock", FaultRole.SERVICE)] = (
            "only the clock of a service that this command has started can be shifted: give a job file"
        )
        words = "only a job that this command submits has processes in their first seconds: give a job file"
        found |= {FaultOn(NEWBORN, role): words for role in KINDS[NEWBORN].roles}
    if reason := lines.cannot_change():
        for role in (FaultRole.WORKER, FaultRole.SERVER):
            found |= {FaultOn(kind, role): reason for kind in ("slow_line", "cut_line")}
    return found


@contextlib.contextmanager
def injected(
    planned: PlannedFault, target: ChaosProcess, others: Sequence[ChaosProcess], means: ChaosMeans
) -> Iterator[str]:
    """Inject a fault into `target` for the time of the block; yield what was done, in a few words.

    `others`: the job's other processes, the other ends of the target's lines.

    Raises:
        ClusterError: the process has ended, or the system refuses.
    """
    if not target.alive:
        raise ClusterError(f"process {target.pid} ({planned.target}) has ended", pid=target.pid)
    match planned.fault.kind:
        case "kill" | "newborn":
            _signal(target, signal.SIGKILL)
            until(lambda: not target.alive, _DEATH_SECONDS)  # else the service would be found alive, and not restarted
            yield f"SIGKILL to process {target.pid}"
        case "stop":
            with _stopped(target):
                yield f"SIGSTOP to process {target.pid}"
        case "throttle":
            with _repeated(_THROTTLE_SECONDS, lambda: _turn(target)), _continued(target):
                yield f"process {target.pid} runs {THROTTLED_SHARE:.0%} of the time"
        case "burn":
            with _burning(cores := os.cpu_count() or 1):
                yield f"{cores} processes compute"
        case "slow_line":
            with _slow(target, others) as count:
                yield f"{count} connections of process {target.pid} send {SLOW_BYTES} bytes/s"
        case "cut_line":
            done = lines.cut(_ends_of(target, others))
            if not done:
                raise ClusterError(f"process {target.pid} has no connection to the job's processes", pid=target.pid)
            with _repeated(_REPEAT_SECONDS, lambda: _cut_again(target, others)):
                yield f"{done} connections of process {target.pid} are shut down, and those that it opens again"
        case "full_disk":
            with _filled(means.disk) if means.disk is not None else _forbidden_to_write(target) as words:
                yield words
        case "clock":
            assert means.set_clock is not None
            means.set_clock(planned.amount)
            try:
                yield f"time.time() of process {target.pid} is shifted by {planned.amount:+g} s"
            finally:
                means.set_clock(0.0)


def _signal(target: ChaosProcess, number: int) -> None:
    """Send a signal. Raises ClusterError if the process has ended or belongs to another user."""
    try:
        pidfd = os.pidfd_open(target.pid)
    except OSError as error:
        raise ClusterError(f"process {target.pid} has ended", pid=target.pid) from error
    try:
        if not target.alive:  # the id was given to another process before pidfd_open
            raise ClusterError(f"process {target.pid} has ended", pid=target.pid)
        signal.pidfd_send_signal(pidfd, number)
    except OSError as error:
        raise ClusterError(f"process {target.pid} takes no signal: {error.strerror}", pid=target.pid) from error
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def _continued(target: ChaosProcess) -> Iterator[None]:
    """Let the process continue at the end of the block."""
    try:
        yield
    finally:
        with contextlib.suppress(ClusterError):  # it was killed meanwhile
            _signal(target, signal.SIGCONT)


@contextlib.contextmanager
def _stopped(target: ChaosProcess) -> Iterator[None]:
    with _continued(target):
        _signal(target, signal.SIGSTOP)
        yield


@contextlib.contextmanager
def _repeated(pause: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` again and again in a thread, with pauses, until the block ends or the target has ended."""
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(ClusterError):
            while not over.wait(pause):
                act()

    thread = threading.Thread(target=run, name="chaos", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _turn(target: ChaosProcess) -> None:
    """Stop the process for a part of a turn."""
    with _stopped(target):
        threading.Event().wait(_THROTTLE_SECONDS * (1 / THROTTLED_SHARE - 1))


@contextlib.contextmanager
def _burning(count: int) -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-S", "-c", _BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def _ends_of(target: ChaosProcess, others: Sequence[ChaosProcess]) -> list[lines.SocketEnd]:
    """Return the target's ends of its connections to the job's other processes."""
    pids = dict.fromkeys([target.pid, *(other.pid for other in others if other.alive)])
    return [end for end in lines.connections_among(pids) if end.pid == target.pid]


def _cut_again(target: ChaosProcess, others: Sequence[ChaosProcess]) -> None:
    lines.cut(_ends_of(target, others))


@contextlib.contextmanager
def _slow(target: ChaosProcess, others: Sequence[ChaosProcess]) -> Iterator[int]:
    """Limit the rate of the target's connections, also of those that it opens during the block."""

    def act() -> None:
        lines.limit(_ends_of(target, others), SLOW_BYTES)

    try:
        count = lines.limit(_ends_of(target, others), SLOW_BYTES)
        if not count:
            raise ClusterError(
                f"process {target.pid} has no TCP connection to the job's processes: on one host they share memory",
                pid=target.pid,
            )
        with _repeated(_REPEAT_SECONDS, act):
            yield count
    finally:
        lines.limit(_ends_of(target, others), lines.UNLIMITED)


@contextlib.contextmanager
def _filled(disk: Path) -> Iterator[str]:
    """Fill the file system of `disk`, which this run has made, with one file; remove the file at the end."""
    filler = disk / "chaos-filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for block in (1 << 20, 4096, 512):
                with contextlib.suppress(OSError):
                    while file.write(bytes(block)) == block:
                        pass
        yield f"{filler.stat().st_size} bytes fill the disk of {disk}"
    finally:
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def _forbidden_to_write(target: ChaosProcess) -> Iterator[str]:
    """Let no file of the process grow: a write fails with EFBIG (RLIMIT_FSIZE; Python ignores SIGXFSZ)."""
    try:
        before = resource.prlimit(target.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(target.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    except OSError as error:
        why = errno.errorcode.get(error.errno or 0, "")
        raise ClusterError(f"the limit of process {target.pid} cannot be set: {why}", pid=target.pid) from error
    try:
        yield f"process {target.pid} may write no byte to a file (RLIMIT_FSIZE)"
    finally:
        with contextlib.suppress(OSError):
            if target.alive:
                resource.prlimit(target.pid, resource.RLIMIT_FSIZE, before)
