"""Run `rayps serve` with a wall clock that another process can shift.

    python -m rayps_chaos.shifted_service CLOCK serve --state-dir DIR ...

CLOCK is a file of eight bytes: the number of seconds, a double in the machine's byte order, by which `time.time()` of
this process differs from the system's clock. Child processes, among them Ray's, have the system's clock.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

_DOUBLE = struct.Struct("=d")


def create_clock(path: Path) -> None:
    """Create a file with a shift of 0 seconds."""
    path.write_bytes(_DOUBLE.pack(0.0))


def set_clock(path: Path, seconds: float) -> None:
    """Shift the clock of the process that runs with this file."""
    with path.open("r+b") as file:
        file.write(_DOUBLE.pack(seconds))


def shifted(path: Path, real: Callable[[], float]) -> Callable[[], float]:
    """Return a function that returns `real()` plus the seconds in the file."""
    with path.open("r+b") as file:
        shift = mmap.mmap(file.fileno(), _DOUBLE.size, prot=mmap.PROT_READ)

    def now() -> float:
        return real() + float(_DOUBLE.unpack(shift)[0])

    return now


def main() -> None:
    """Shift this process's clock, and run the command line with the remaining arguments."""
    clock, *arguments = sys.argv[1:]
    time.time = shifted(Path(clock), time.time)
    sys.argv = ["rayps", *arguments]
    runpy.run_module("rayps.cli", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
