"""The last lines that a process wrote, from the files in which Ray keeps the output of each of its processes."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOST_LINES = 24  # of each file; a worker's stdout and stderr are one file
MOST_LETTERS = 300  # of a line
_TAIL_BYTES = 16_384  # read from the end of a file
# Ray's own marks, and what its handler of fatal signals adds to the name of the signal: addresses without names
_NOISE = re.compile(r":|\[[^]]*\] logging\.cc:|(PC: |\s+)@ +0x|Extension modules: ")


def last_output(folder: Path, pid: int) -> str:
    """Return the last lines of stdout, then of stderr, of the process `pid`; "" if it wrote nothing.

    `folder` has Ray's log files `worker-...-PID.out` and `.err`. If an earlier process had this id, its files are older
    and are not read.
    """
    lines: list[str] = []
    for kind in ("out", "err"):
        files = sorted(folder.glob(f"worker-*-{pid}.{kind}"), key=lambda path: path.stat().st_mtime)
        lines += _tail(files[-1]) if files else []
    return "\n".join(lines)


def exception_of(traceback: str) -> str:
    """Return the exception at the end of a traceback, without the calls that led to it."""
    lines = traceback.rstrip().splitlines()
    began = max((at for at, line in enumerate(lines) if line.startswith(" ")), default=-1)
    return "\n".join(lines[began + 1 :]) or "no reason given"


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    lines = [line.rstrip()[:MOST_LETTERS] for line in text.splitlines() if line.strip()]
    return [line for line in lines if not _NOISE.match(line)][-MOST_LINES:]
