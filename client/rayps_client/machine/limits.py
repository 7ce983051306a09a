"""What a client may use of its machine: processors, memory, bytes a day, and bytes a second."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path

from rayps_client.errors import ConfigError
from rayps_client.machine.client_folder import ClientFolder

MEGABYTE = 1_000_000
COPIES = 4  # of the parameters in a training: received, in the model, as the round's start, and as the update
_FILE = "traffic.json"
_SAVED_EVERY = 1 << 18  # bytes after which the day's traffic is saved again
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def use_cpus(count: int) -> None:
    """Let this process use `count` of its processors: call this before torch is imported, which counts them.

    Raises:
        ConfigError: `count` is not a number from 1 to that of the processors.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(allowed):
        raise ConfigError(f"cpus is {count}: give a number from 1 to {len(allowed)}", field="cpus")
    for name in _THREADS:
        os.environ[name] = str(count)
    for task in Path("/proc/self/task").iterdir():  # threads that numpy has started are in the limit too
        with contextlib.suppress(OSError):  # a thread that has ended since
            os.sched_setaffinity(int(task.name), allowed[:count])


def memory_refusal(limit: int, used: int, parameters: int) -> str | None:
    """Return why a training with `parameters` bytes of parameters does not fit, or None if it does. Pure.

    `limit`: the most bytes that this process may have. `used`: the bytes that it has before the training.
    """
    needed = used + COPIES * parameters
    if needed <= limit:
        return None
    return (
        f"this process has {used / MEGABYTE:.0f} MB, and a round with {parameters / MEGABYTE:.1f} MB of parameters "
        f"needs about {needed / MEGABYTE:.0f} MB, but --memory allows {limit / MEGABYTE:.0f} MB: raise --memory"
    )


def used_memory() -> tuple[int, int]:
    """Return the bytes of memory that this process has now, and the most that it has had."""
    facts = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            facts[name] = int(value.split()[0]) * 1024
    return facts["VmRSS"], facts["VmHWM"]


def traffic_refusal(limit: int, spent: int, wanted: int) -> str | None:
    """Return why `wanted` more bytes are not sent and received today, or None if they may be. Pure."""
    if spent + wanted <= limit:
        return None
    return f"{spent / MEGABYTE:.1f} MB of today's {limit / MEGABYTE:g} MB (--traffic) are used" + (
        f", and a round takes {wanted / MEGABYTE:.1f} MB" if wanted else ""
    )


class DailyTraffic:
    """Counts the bytes of each day (local time) in the client's folder, so that they survive a restart."""

    def __init__(self, folder: ClientFolder, limit: int | None, today: Callable[[], str] | None = None) -> None:
        """`limit`: the most bytes a day; None means that they are only counted. `today` returns the date."""
        self._folder, self._limit, self._today = folder, limit, today or _today
        facts = folder.read_facts(_FILE)
        self._day = str(facts.get("day", ""))
        self._spent = int(facts.get("bytes", 0))
        self._round = int(facts.get("round", 0))  # bytes of the newest round, there and back
        self._unsaved = 0

    @property
    def spent(self) -> int:
        """The bytes sent and received today."""
        self._turn()
        return self._spent

    def add(self, count: int) -> None:
        """Count bytes."""
        self._turn()
        self._spent += count
        self._unsaved += count
        if self._unsaved >= _SAVED_EVERY:
            self.save()

    def refusal(self) -> str | None:
        """Return why the client takes part in no more rounds today, or None."""
        return None if self._limit is None else traffic_refusal(self._limit, self.spent, self._round)

    def admit(self, wanted: int) -> str | None:
        """Return why a round in which `wanted` bytes are received and sent is too much for today, or None.

        Raises:
            ConfigError: it is too much for any day.
        """
        self._round = wanted
        self.save()
        if self._limit is not None and self._round > self._limit:
            raise ConfigError(
                f"a round takes {self._round / MEGABYTE:.1f} MB, but --traffic allows {self._limit / MEGABYTE:g} MB a "
                "day: raise --traffic",
                field="traffic",
            )
        return self.refusal()

    def save(self) -> None:
        """Write the day's count into the client's folder."""
        self._unsaved = 0
        self._folder.write_facts(_FILE, {"day": self._day, "bytes": self._spent, "round": self._round})

    def _turn(self) -> None:
        """Begin to count anew if the day has changed."""
        day = self._today()
        if day != self._day:
            self._day, self._spent = day, 0


class Pace:
    """Lets its caller wait so long that no more than `rate` bytes a second pass."""

    def __init__(
        self, rate: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free = clock()  # the time at which all bytes so far have passed

    def passed(self, count: int) -> None:
        """Wait until `count` more bytes may have passed."""
        now = self._clock()
        self._free = max(now, self._free) + count / self._rate
        if self._free > now:
            self._sleep(self._free - now)


class LineMeter:
    """The meter of a connection that counts a day's bytes, and keeps to a rate if there is one."""

    def __init__(self, traffic: DailyTraffic, pace: Pace | None) -> None:
        self._traffic, self._pace = traffic, pace

    def sent(self, count: int) -> None:
        """Count bytes that were sent, and wait if they were too fast."""
        self.received(count)

    def received(self, count: int) -> None:
        """Count bytes that were received, and wait if they were too fast."""
        self._traffic.add(count)
        if self._pace is not None:
            self._pace.passed(count)


def _today() -> str:
    return datetime.date.today().isoformat()
