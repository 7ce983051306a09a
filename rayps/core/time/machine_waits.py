"""What the machine did to a thread: CPU time, time in the CPU's queue, and time waiting for a disk, from Linux's /proc.

Sources: `/proc/PID/task/TID/schedstat` has the nanoseconds on a CPU and in a run queue (Linux, Documentation/scheduler/
sched-stats.rst). The time for block devices is `delayacct_blkio_ticks` in `/proc/PID/task/TID/stat`, which is counted
only if `kernel.task_delayacct` is 1. Otherwise it is sampled: each call of `read` looks whether the thread is in an
uninterruptible sleep (state D), and counts the time since the last call as waiting for a disk if it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_SAMPLE_SECONDS = 1.0  # the longest time for which one look at a thread's state stands
_STATE, _BLOCK_TICKS = 0, 39  # fields of `stat` after the name: the state, and field 42 of proc(5)


@dataclass(frozen=True, slots=True)
class MachineWaits:
    """Seconds of one thread since it was first read, and bytes that its process has read from disks."""

    cpu: float = 0.0  # on a CPU
    cpu_wait: float = 0.0  # ready to run, while other threads had the CPU
    disk: float = 0.0  # waiting for a disk
    read_bytes: int = 0  # of the whole process
    sampled: bool = True  # whether `disk` is sampled; if False, the kernel has counted it

    def plus(self, other: MachineWaits) -> MachineWaits:
        """Return the sums of both."""
        return MachineWaits(
            self.cpu + other.cpu,
            self.cpu_wait + other.cpu_wait,
            self.disk + other.disk,
            self.read_bytes + other.read_bytes,
            self.sampled and other.sampled,
        )

    def since(self, begin: MachineWaits) -> MachineWaits:
        """Return what was counted after `begin`, of the same thread."""
        return MachineWaits(
            max(0.0, self.cpu - begin.cpu),
            max(0.0, self.cpu_wait - begin.cpu_wait),
            max(0.0, self.disk - begin.disk),
            max(0, self.read_bytes - begin.read_bytes),
            self.sampled,
        )


class ThreadWaits:
    """Reads the waits of one thread of this process, which other threads may do. Without /proc, all values are 0."""

    def __init__(
        self, thread: int, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic, pid: str = "self"
    ) -> None:
        """`thread` is the thread's native id, `proc` the folder /proc, and `pid` the process in it."""
        self._task = proc / pid / "task" / str(thread)
        self._io = proc / pid / "io"
        self._clock = clock
        self._counted = _read_text(proc / "sys/kernel/task_delayacct").strip() == "1"
        self._tick = 1.0 / os.sysconf("SC_CLK_TCK")
        self._looked = clock()
        self._sampled = 0.0
        self._first = self._read_waits()
        self._last = MachineWaits(sampled=not self._counted)

    def read(self) -> MachineWaits:
        """Return the waits so far. After the thread has ended, return those of the last call."""
        now = self._read_waits()
        if now is not None and self._first is not None:
            first = self._first
            self._last = MachineWaits(
                now.cpu - first.cpu,
                now.cpu_wait - first.cpu_wait,
                now.disk - first.disk if self._counted else self._sampled,
                now.read_bytes - first.read_bytes,
                not self._counted,
            )
        return self._last

    def _read_waits(self) -> MachineWaits | None:
        times = _read_text(self._task / "schedstat").split()
        state = _read_text(self._task / "stat").rpartition(")")[2].split()
        at = self._clock()
        passed, self._looked = min(at - self._looked, MOST_SAMPLE_SECONDS), at
        if len(times) < 2:
            return None
        ticks = int(state[_BLOCK_TICKS]) if len(state) > _BLOCK_TICKS else 0
        if state and state[_STATE] == "D":
            self._sampled += passed
        read = next((line for line in _read_text(self._io).splitlines() if line.startswith("read_bytes:")), "0 0")
        return MachineWaits(int(times[0]) / 1e9, int(times[1]) / 1e9, ticks * self._tick, int(read.split()[1]))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
