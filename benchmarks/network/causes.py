"""Slow one worker of a job in a known way, and compare the verdict of the job's report with it.

The workers are processes on simulated hosts (`rayps.bench.netns`). The scenes:

- `none`: nothing is slowed.
- `cpu`: other processes use the core on which worker 1 runs. The other workers share another core, on which they come
  before all other processes of the machine: what else runs here must not slow them as much as worker 1.
- `blocked`: worker 1 sleeps in its loss.
- `disk`: worker 1 reads its rows from a disk whose rate the kernel limits (a blkio cgroup, version 1). All workers drop
  their rows from the page cache, as if the data were larger than the memory.
- `line`: the network line of worker 1's host has a low rate.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ClusterError, ConfigError, TrainingError
from torch import Tensor, nn

from benchmarks.network.host_cluster import HostCluster
from rayps.bench.netns import Hosts
from rayps.bench.table import BenchRow, Opt
from rayps.cli.report_page import write_page
from rayps.core.job.job_status import Status
from rayps.core.time.goodput import JobTime
from rayps.core.time.time_report import report_of
from rayps.core.time.time_verdict import TimeVerdict, reach_verdict
from rayps.data.base import Batch, Data
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec
from rayps.workload.base import Workload

SCENES = {  # what is slowed: the cause that the verdict must name
    "none": (),
    "cpu": ("cpu",),
    "blocked": ("blocked",),
    "disk": ("disk",),
    "line": ("network",),
}
SLOW = 1  # the rank that is slowed
RATE, SLOW_RATE = "1gbit", "40mbit"  # of the lines
DISK_BYTES = 2_000_000  # bytes per second of the slow disk
ROW_BYTES = 4096
WIDTH = 128
_BLKIO = Path("/sys/fs/cgroup/blkio")
_BURNERS = 12  # programs on the core of the slow worker
_FIRST = -15  # the priority of the other workers, 28 times the share of a usual process


@dataclass(frozen=True, slots=True)
class CauseRow(BenchRow):
    """One scene: what was slowed, and what the report says."""

    columns: ClassVar[str] = (
        "scene | strategy | right: found | cause | worker | lost: cost | useful: goodput | differs: parts / wall"
    )

    scene: str
    strategy: str
    cause: str
    guilty: tuple[str, ...]
    cost: float  # share of the workers' time
    goodput: float
    found: bool  # whether cause and worker are those of the scene
    off: float  # the largest difference between the sum of a member's parts and its wall time, as a share
    summary: str
    seconds: float

    @property
    def right(self) -> str:
        """Whether cause and worker are those of the scene, in a word."""
        return "yes" if self.found else "NO"

    @property
    def lost(self) -> str:
        """The cost in percent."""
        return f"{self.cost:.0%}"

    @property
    def useful(self) -> str:
        """The goodput in percent."""
        return f"{self.goodput:.0%}"

    @property
    def differs(self) -> str:
        """The largest difference between parts and wall time, in percent."""
        return f"{self.off:.2%} off"

    @property
    def worker(self) -> str:
        """The workers that the report names."""
        return " ".join(self.guilty)


class FileRows(Data):
    """Rows of `ROW_BYTES` bytes in a file, which are read from the disk each time."""

    def __init__(self, path: Path, rows: int, batch_size: int) -> None:
        self.path, self._rows, self.batch_size = path, rows, batch_size

    def check(self) -> None:
        """Check nothing: the measurement has written the file."""

    def rows(self) -> int:
        """Return the number of rows in an epoch, over all ranks."""
        return self._rows

    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches, which are contiguous in the file."""
        share, steps = self._rows // size, self.steps(size)
        file = os.open(self.path, os.O_RDONLY)
        try:
            for step in range(start, steps):
                first = rank * share + step * self.batch_size
                count = min(self.batch_size, share - step * self.batch_size)
                at, length = first * ROW_BYTES, count * ROW_BYTES
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # all: a page may be part of a large folio
                raw = torch.frombuffer(bytearray(os.pread(file, length, at)), dtype=torch.uint8)
                x = raw.view(count, ROW_BYTES)[:, :WIDTH].float() / 255
                yield Batch(x, x.sum(dim=1, keepdim=True), count)
        finally:
            os.close(file)


class SlowedWork(Workload):
    """A regression with a few milliseconds of computing in each round; `asleep` is the rank that sleeps in its loss."""

    def __init__(self, path: Path, rows: int, batch: int, asleep: int, pace: float) -> None:
        self.path, self.count, self.batch, self.asleep, self.pace = path, rows, batch, asleep, pace

    def model(self) -> nn.Module:
        """Return a network of about 200,000 parameters."""
        return nn.Sequential(nn.Linear(WIDTH, 768), nn.Tanh(), nn.Linear(768, 128), nn.Tanh(), nn.Linear(128, 1))

    def data(self) -> Data:
        """Return the rows of the file."""
        return FileRows(self.path, self.count, self.batch)

    def evaluation_data(self) -> Data:
        """Return few rows, so that the evaluation at the end is short."""
        return FileRows(self.path, 64, 16)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared error, after `pace` seconds of computing, and of sleep on the rank `asleep`."""
        if threading.current_thread().name == f"worker-{self.asleep}":
            time.sleep(4 * self.pace)
        end = time.thread_time() + self.pace
        while time.thread_time() < end:
            torch.mm(_SQUARE, _SQUARE)
        found: Tensor = ((model(batch.x) - batch.y) ** 2).mean()
        return found

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=1e-4)


_SQUARE = torch.ones(64, 64)


def bench_causes(
    scenes: Annotated[Sequence[str], Opt("What is slowed: none, cpu, blocked, disk, line.")] = tuple(SCENES),
    strategies: Annotated[Sequence[str], Opt("Strategies, separated by spaces.", split=" ")] = ("all_reduce",),
    *,
    workers: Annotated[int, Opt("Workers, each on a simulated host of its own.")] = 3,
    rounds: Annotated[int, Opt("Rounds of each job.")] = 150,
    pace: float = 0.01,
    html: Annotated[Path | None, Opt("Write the report of each job into this folder.")] = None,
) -> list[CauseRow]:
    """Run a job for each scene and strategy; return a row for each, and write the reports into the folder `html`.

    `pace` is the computing of a worker in a round, in seconds of CPU.

    Raises:
        ConfigError: there is no such scene.
        ClusterError: this machine has no network namespaces, or for `disk` no blkio cgroup of version 1.
        TrainingError: a job has failed.
    """
    for scene in scenes:
        if scene not in SCENES:
            raise ConfigError(f"no scene {scene!r}; use some of {', '.join(SCENES)}", field="scenes")
    found = []
    with tempfile.TemporaryDirectory(prefix="rayps-causes-", dir="/var/tmp") as folder:  # on a disk, not in memory
        path = Path(folder) / "rows"
        batch = 16
        count = workers * batch * rounds
        _write_rows(path, count)
        for strategy in strategies:
            for scene in scenes:
                work = SlowedWork(path, count, batch, SLOW if scene == "blocked" else -1, pace)
                row, times = _measure(scene, strategy, work, workers, rounds)
                found.append(row)
                if html is not None:
                    html.mkdir(parents=True, exist_ok=True)
                    name = f"{scene}-{strategy.partition(':')[0]}"
                    (html / f"{name}.html").write_text(write_page(report_of(times, name)), encoding="utf-8")
    return found


def _write_rows(path: Path, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        for _ in range(rows // 256 + 1):
            numbers = torch.randint(0, 256, (256 * ROW_BYTES,), dtype=torch.uint8, generator=generator)
            file.write(numbers.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())


def _measure(scene: str, strategy: str, work: SlowedWork, workers: int, rounds: int) -> tuple[CauseRow, JobTime]:
    phases = parse(strategy, Path.cwd())
    target = f"{SlowedWork.__module__}:{SlowedWork.__name__}"
    spec = JobSpec(target, wire(phases), workers, None, rounds, working_dir=str(Path.cwd())).check()
    slow = {SLOW: SLOW_RATE} if scene == "line" else None
    cores: dict[int, Sequence[int]] = {
        rank: [0] if rank != SLOW else [(os.cpu_count() or 2) - 1] for rank in range(workers)
    }
    with Hosts(workers + 1, RATE, slow=slow) as hosts, contextlib.ExitStack() as stack:
        crowded = scene == "cpu"
        first = {rank: _FIRST for rank in range(workers) if rank != SLOW}
        cluster = HostCluster(hosts, workers, cores if crowded else None, first if crowded else None)
        stack.callback(cluster.close)
        driver = Driver(WorkloadJob(work, spec, Journal(), phases=phases, capture=False))
        if scene == "cpu":
            stack.enter_context(_burn_core(cores[SLOW][0], lambda: driver.status is Status.RUNNING))
        elif scene == "disk":
            stack.enter_context(_slow_down_disk(cluster, work.path))
        began = time.monotonic()
        outcome = driver.run(cluster)
        seconds = time.monotonic() - began
    if outcome.status is not Status.SUCCEEDED:
        raise TrainingError(f"the job of the scene {scene} has failed: {outcome.message}")
    time_of_job = driver.job_time()
    return _make_row(scene, strategy, time_of_job, reach_verdict(time_of_job), seconds), time_of_job


def _make_row(scene: str, strategy: str, time_of_job: JobTime, result: TimeVerdict, seconds: float) -> CauseRow:
    expected = SCENES[scene]
    right = result.cause in expected and result.guilty == (f"worker-{SLOW}",)
    off = max(abs(each.counted - each.wall) / each.wall for each in time_of_job.members)
    return CauseRow(
        scene,
        strategy,
        result.cause,
        result.guilty,
        result.findings[0].cost if result.findings else 0.0,
        time_of_job.goodput or 0.0,
        right if expected else not result.guilty,
        off,
        result.summary,
        seconds,
    )


@contextlib.contextmanager
def _burn_core(core: int, begun: Callable[[], bool]) -> Iterator[None]:
    """Run programs that use a core, from when `begun()` returns True until the end of the block."""
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile os.getppid() == {os.getpid()}:\n  sum(range(100000))"
    running: list[subprocess.Popen[bytes]] = []
    done = threading.Event()

    def start() -> None:
        while not done.wait(0.05):
            if begun():
                running.extend(subprocess.Popen([sys.executable, "-c", code]) for _ in range(_BURNERS))
                return

    starter = threading.Thread(target=start, daemon=True)
    starter.start()
    try:
        yield
    finally:
        done.set()
        starter.join()
        for process in running:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _slow_down_disk(cluster: HostCluster, path: Path) -> Iterator[None]:
    """Limit how fast the process of the slow worker reads from the disk of `path`. Raises ClusterError if it cannot."""
    device = path.stat().st_dev
    group = _BLKIO / f"rayps-causes-{os.getpid()}"
    try:
        group.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {DISK_BYTES}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
    except OSError as error:
        raise ClusterError(f"this machine cannot limit a disk's rate (blkio cgroup, version 1): {error}") from error
    done = threading.Event()

    def move() -> None:
        while not done.wait(0.05):
            pids = [handle.pid for handle in list(cluster.handles) if handle.name == f"WorkerActor-{SLOW}"]
            for pid in pids:
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(str(pid))

    mover = threading.Thread(target=move, daemon=True)
    mover.start()
    try:
        yield
    finally:
        done.set()
        mover.join()
        cluster.close()
        for _ in range(100):  # a group can be removed when its processes have ended
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)
