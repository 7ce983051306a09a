"""What processes use over time: memory, descriptors, threads; read from /proc, and judged by the slopes."""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rayps.service import processes

WARM_SHARE = 0.25  # of a curve's time, at its beginning, that is not judged: caches fill
FEWEST, SHORTEST = 8, 600.0  # samples, and seconds; a shorter part is not judged
_MOST_SAMPLES = 200  # of a curve, from which the slope is computed
LIMITS = {"memory_mb": 60.0, "descriptors": 12.0, "threads": 12.0}  # the largest growth in an hour, of a process
FILES = 240.0  # the largest growth of a place's number of files in an hour: those of two jobs are not alike
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class UseSample:
    """What one process, or one place, uses at one moment. `at` is in seconds since the begin of the measurement."""

    at: float
    name: str  # such as service, gcs, raylet, /dev/shm
    pid: int  # 0 for a place
    memory_mb: float  # resident memory, or the bytes of a place's files; in 10^6 bytes
    descriptors: int  # open descriptors, or the number of a place's files
    threads: int


@dataclass(frozen=True, slots=True)
class CurveVerdict:
    """The slope of one quantity of one process, per hour. `judged`: whether the curve is long enough for a verdict."""

    name: str
    pid: int
    quantity: str
    seconds: float  # of the judged part
    first: float
    last: float
    slope: float  # growth in an hour
    limit: float
    judged: bool

    @property
    def good(self) -> bool:
        """Whether the curve is flat, or too short to be judged."""
        return not self.judged or self.slope <= self.limit


def sample_process(at: float, name: str, pid: int) -> UseSample | None:
    """Return what a process uses now, or None if it has ended."""
    home = Path(f"/proc/{pid}")
    try:
        pages = int((home / "statm").read_text().split()[1])
        threads = int((home / "stat").read_text().rpartition(")")[2].split()[17])
        descriptors = sum(1 for _ in (home / "fd").iterdir())
    except (OSError, IndexError, ValueError):
        return None
    return UseSample(round(at, 1), name, pid, round(pages * _PAGE / 1e6, 3), descriptors, threads)


def sample_place(at: float, name: str, files: Iterable[Path]) -> UseSample:
    """Return how many bytes and files a place has now."""
    count = size = 0
    for path in files:
        try:
            size += path.lstat().st_blocks * 512
            count += 1
        except OSError:
            continue  # it was removed
    return UseSample(round(at, 1), name, 0, round(size / 1e6, 3), count, 0)


def own_shared_memory(pids: Iterable[int]) -> list[Path]:
    """Return the files in /dev/shm that these processes have open or mapped."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        found |= {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return [Path(text) for text in sorted(found) if "(deleted)" not in text]


def tree_of(root: int) -> dict[str, int]:
    """Return a dict from name to process id: `root`, the daemon, and the lasting processes of Ray below it."""
    found = {"daemon": root}
    for pid in processes.list_descendants(root):
        title = " ".join(processes.read_command(pid)[:4])
        for name, part in (("gcs", "gcs_server"), ("raylet", "raylet/raylet"), ("agent", "DashboardAgent")):
            if part in title:
                found[name] = pid
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope between all pairs of points (Theil 1950; Sen 1968), robust against single outliers."""
    step = max(1, -(-len(points) // _MOST_SAMPLES))
    chosen = points[::step]
    slopes = [
        (later - earlier) / (after - before)
        for number, (before, earlier) in enumerate(chosen)
        for after, later in chosen[number + 1 :]
        if after > before
    ]
    return statistics.median(slopes) if slopes else 0.0


def judge(samples: Sequence[UseSample], limits: dict[str, float] = LIMITS) -> list[CurveVerdict]:
    """Return a verdict for each quantity of each process, and of each place, in the order of their names."""
    curves: dict[tuple[str, int], list[UseSample]] = {}
    for sample in samples:
        curves.setdefault((sample.name, sample.pid), []).append(sample)
    found = []
    for (name, pid), curve in sorted(curves.items()):
        begin = curve[0].at + WARM_SHARE * (curve[-1].at - curve[0].at)
        part = [sample for sample in curve if sample.at >= begin]
        own = limits if pid else limits | {"descriptors": FILES}
        for quantity, limit in own.items():
            points = [(sample.at, float(getattr(sample, quantity))) for sample in part]
            found.append(
                CurveVerdict(
                    name,
                    pid,
                    quantity,
                    points[-1][0] - points[0][0],
                    points[0][1],
                    points[-1][1],
                    3600 * slope(points),
                    limit,
                    len(points) >= FEWEST and points[-1][0] - points[0][0] >= SHORTEST,
                )
            )
    return found


def write_samples(path: Path, samples: Iterable[UseSample]) -> None:
    """Write samples as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(UseSample)])
        writer.writeheader()
        writer.writerows(asdict(sample) for sample in samples)


def read_samples(path: Path) -> list[UseSample]:
    """Read samples that `write_samples` wrote."""
    kinds = {"name": str, "pid": int, "descriptors": int, "threads": int}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            UseSample(**{key: kinds.get(key, float)(text) for key, text in row.items()}) for row in csv.DictReader(file)
        ]
