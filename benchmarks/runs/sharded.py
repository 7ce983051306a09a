"""Measure sharded state: the memory of workers and of the driver, and what a checkpoint in the background costs a step.

Every run is a new process that calls `rayps.train` with a private Ray, as a user's script does. The workers record
when each of their steps begins. Memory is the proportional set size (/proc/PID/smaps_rollup, Linux): a page that N
processes share counts 1/N in each of them. The functions return rows and print nothing.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar

from rayps_client.errors import ClusterError, ConfigError
from rayps_client.values import JsonObject

from benchmarks.runs.recorded_layers import StepBegin, read_recorded
from rayps.bench.table import BenchRow, Opt, Workers, read_sizes
from rayps.core.strategy.costs import estimate_costs
from rayps.core.strategy.traffic import Sizes
from rayps.service.processes import die_with_parent, kill_all, list_descendants
from rayps.strategies.catalogue import parse

STRATEGIES = (
    "all_reduce",
    "all_reduce:shard=optimizer",
    "all_reduce:shard=gradients",
    "all_reduce:shard=gradients,slice_backup=true",
)
_ADAM_STATES = 2  # numbers in Adam's state for each element
_WARM = 2  # steps in which memory is made that later steps use again
_SAMPLE_SECONDS = 0.01
_RUN_SECONDS = 600.0
_WIDTH = 4  # bytes of a parameter


@dataclass(frozen=True, slots=True)
class ShardedMemoryRow(BenchRow):
    """A strategy: bytes of a worker, mean over workers, above those of the same run with a tiny model."""

    columns: ClassVar[str] = "strategy | model: bytes | formula | steady | peak | of_formula: steady of formula"

    strategy: str
    workers: int
    model: int  # bytes of the parameters
    formula: float  # `rayps.core.strategy.costs`, without activations
    steady: float  # median over samples after the second step
    peak: float  # of the same samples, the most
    of_formula: float  # steady / formula


@dataclass(frozen=True, slots=True)
class DriverMemoryRow(BenchRow):
    """A size of the model: the most memory that the driver's process has had in the run."""

    columns: ClassVar[str] = "strategy | model: bytes | peak: driver's peak | grown"

    strategy: str
    workers: int
    model: int  # bytes of the parameters
    peak: int  # VmHWM in bytes
    grown: int  # peak minus that of the smallest model


@dataclass(frozen=True, slots=True)
class BackgroundWriteRow(BenchRow):
    """Steps while parts of a checkpoint are written, and other steps. Times are medians in seconds."""

    columns: ClassVar[str] = (
        "strategy | checkpoint: bytes | writes | seconds | otherwise: s of a step | writing: while written | "
        "ratio | begin: at the begin"
    )

    strategy: str
    workers: int
    checkpoint: int  # bytes of a checkpoint: the parameters and the state of Adam
    writes: int  # the number of checkpoints
    seconds: float  # from the begin of a write until all workers have written
    otherwise: float  # a step during which no part is written
    writing: float  # a step during which a part is written all the time
    ratio: float  # writing / otherwise
    begin: float  # a step at whose begin the state is copied


def bench_memory_of_workers(
    workers: int = 2, size: int = 100_000_000, strategies: Sequence[str] = STRATEGIES, steps: int = 12
) -> list[ShardedMemoryRow]:
    """Measure the memory of a worker while it trains a model of `size` bytes of parameters, for each strategy.

    Raises:
        ConfigError: a number is too small.
        ClusterError: a run failed.
    """
    _must_be_positive(workers=workers, size=size, steps=steps - _WARM)
    rows = []
    for strategy in strategies:
        steady, peak = _measure_memory(strategy, workers, size, steps)
        tiny, tiny_peak = _measure_memory(strategy, workers, 1, steps)
        expected = compute_formula(strategy, workers, size)
        grown = steady - tiny
        rows.append(ShardedMemoryRow(strategy, workers, size, expected, grown, peak - tiny_peak, grown / expected))
    return rows


def compute_formula(strategy: str, workers: int, size: int) -> float:
    """Return the memory in bytes of a worker under Adam, without activations, for `size` bytes of parameters."""
    [phase] = parse(strategy)
    return estimate_costs(phase.strategy, workers, Sizes(size // _WIDTH, _WIDTH, states=_ADAM_STATES)).memory[0]["all"]


def bench_memory_of_driver(
    workers: int = 2,
    sizes: Sequence[int] = (10_000_000, 100_000_000, 1_000_000_000),
    strategy: str = "all_reduce:shard=gradients",
) -> list[DriverMemoryRow]:
    """Measure the most memory of the driver's process, for each number of bytes of parameters.

    Raises:
        ConfigError: a number is too small.
        ClusterError: a run failed.
    """
    _must_be_positive(workers=workers, sizes=min(sizes, default=0))
    peaks = {}
    for size in sorted(sizes):
        with _run(strategy, workers, size, steps=2, batch=1) as run:
            peaks[size] = run.end()
    least = min(peaks.values())
    return [DriverMemoryRow(strategy, workers, size, peak, peak - least) for size, peak in peaks.items()]


def bench_background_write(
    workers: int = 2,
    checkpoint: int = 1_000_000_000,
    strategy: str = "all_reduce:shard=gradients",
    *,
    steps: int = 100,
    every: int = 25,
    batch: int = 64,
    folder: Path | None = None,
) -> list[BackgroundWriteRow]:
    """Measure the steps of a run that writes a checkpoint of `checkpoint` bytes after every `every` of its `steps`.

    `batch` is the number of rows of a worker's step. The checkpoints are written below `folder`, by default where
    temporary files are.

    Raises:
        ConfigError: a number is too small, or no checkpoint is written before the last step.
        ClusterError: a run failed.
    """
    _must_be_positive(workers=workers, checkpoint=checkpoint, every=every, batch=batch, steps=steps - every)
    size = checkpoint // (1 + _ADAM_STATES)
    with tempfile.TemporaryDirectory(prefix="rayps-bench-", dir=folder) as place:
        train: JsonObject = {"checkpoint": place, "checkpoint_every": every, "keep_checkpoints": 1}
        with _run(strategy, workers, size, steps, batch, train) as run:
            run.end()
            found = list(read_recorded(run.folder).values())
    times = [step for steps_ in found for step in read_step_times(steps_)]
    kinds = {kind: [seconds for each, seconds in times if each == kind] for kind in ("otherwise", "writing", "begin")}
    if not all(kinds.values()):
        missing = ", ".join(kind for kind, seconds in kinds.items() if not seconds)
        raise ConfigError(
            f"no step was of the kind {missing} of {steps} steps with a checkpoint every {every}: give more steps, a "
            "larger checkpoint, or a smaller batch",
            field="steps",
        )
    medians = {kind: statistics.median(seconds) for kind, seconds in kinds.items()}
    spans = [span for steps_ in found for span in writes(steps_)]
    return [
        BackgroundWriteRow(
            strategy,
            workers,
            checkpoint,
            len(spans) // workers,
            statistics.median(spans),
            medians["otherwise"],
            medians["writing"],
            medians["writing"] / medians["otherwise"],
            medians["begin"],
        )
    ]


def read_step_times(steps: Sequence[StepBegin]) -> list[tuple[str, float]]:
    """Return the kind and the seconds of each step of a worker after the first ones.

    The kind is "begin" if a write begins between this step and the next, which includes the copy of the state,
    "writing" if a part is written from the step's begin to its end, "end" if a write ends in it, or "otherwise".
    """
    kinds = {(False, False): "otherwise", (False, True): "begin", (True, True): "writing", (True, False): "end"}
    return [(kinds[a.writing, b.writing], b.time - a.time) for a, b in pairwise(steps[_WARM:])]


def writes(steps: Sequence[StepBegin]) -> list[float]:
    """Return the seconds of each write of a worker, from step to step, that ended before the last step."""
    found, since = [], None
    for a, b in pairwise(steps):
        if b.writing and not a.writing:
            since = b.time
        elif a.writing and not b.writing and since is not None:
            found.append(b.time - since)
    return found


# ---------------------------------------------------------------------------------------------- runs


class _ShardedRun:
    """A run in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], place: Path) -> None:
        self._process, self._place = process, place
        self.folder = place / "steps"

    @property
    def over(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def end(self) -> int:
        """Wait until the process has ended; return its peak of memory in bytes. Raises ClusterError if it failed."""
        try:
            code: int | None = self._process.wait(_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        out = self._place / "out.json"
        if code != 0 or not out.is_file():
            tail = "\n".join((self._place / "log").read_text(errors="replace").splitlines()[-12:])
            raise ClusterError(f"a run failed (exit code {code}):\n{tail}")
        return int(json.loads(out.read_text())["peak"])


@contextmanager
def _run(
    strategy: str, workers: int, size: int, steps: int, batch: int = 32, train: JsonObject | None = None
) -> Iterator[_ShardedRun]:
    """Start a run in a new process. At the end of the block the process and its descendants have ended."""
    with tempfile.TemporaryDirectory(prefix="rayps-bench-") as name:
        place = Path(name)
        (place / "steps").mkdir()
        config = {
            "work": {"folder": str(place / "steps"), "bytes_": size, "batch": batch, "rows": batch * workers * steps},
            "train": {"strategy": strategy, "workers": workers, "steps": steps, "timeout": 300.0} | (train or {}),
        }
        command = [sys.executable, "-m", "benchmarks.runs.sharded_script", json.dumps(config), str(place / "out.json")]
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
            try:
                yield _ShardedRun(process, place)
            finally:
                if process.poll() is None:
                    kill_all(list_descendants(process.pid))
                process.kill()
                process.wait()


def _measure_memory(strategy: str, workers: int, size: int, steps: int) -> tuple[float, float]:
    """Return the median and the peak of the memory of a worker in bytes, mean over workers, after the first steps."""
    with _run(strategy, workers, size, steps) as run:
        samples = list(_yield_samples(run, workers, steps))
        run.end()
    if not samples:
        raise ClusterError(f"the run of {strategy} ended before its memory could be read: give more steps")
    return statistics.median(samples), max(samples)


def _yield_samples(run: _ShardedRun, workers: int, steps: int) -> Iterator[float]:
    """Yield the memory of a worker, mean over workers, from the second to the last step of all workers."""
    while not run.over:
        found = read_recorded(run.folder)
        begun = [len(each) for each in found.values()]
        if len(begun) == workers and min(begun) > _WARM:
            if max(begun) >= steps:
                return
            yield sum(resident_of(pid) for pid in found) / workers
        time.sleep(_SAMPLE_SECONDS)


def resident_of(pid: int) -> int:
    """Return a process's proportional set size in bytes; 0 if it has ended."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 0 if found is None else 1024 * int(found[1])


def _must_be_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name} is {number} or too small: give more", field=name)


def bench_sharded(
    what: Annotated[
        str,
        Opt(
            "memory (of a worker, beside the formula), driver (its peak, by the size of the model), or write "
            "(steps while a checkpoint is written).",
            argument=True,
        ),
    ] = "memory",
    workers: Workers = 2,
    strategies: Annotated[
        Sequence[str] | None, Opt("Strategies, separated by spaces. By default all_reduce and its shards.", split=" ")
    ] = None,
    sizes: Annotated[
        Sequence[int] | None,
        Opt(
            "Bytes of parameters, e.g. 100MB; several for driver, e.g. 10MB,1GB. For write: of a checkpoint.",
            read=read_sizes,
        ),
    ] = None,
    steps: Annotated[int | None, Opt("Steps of a run.")] = None,
    every: Annotated[int, Opt("write: rounds from a checkpoint to the next.")] = 25,
    batch: Annotated[int, Opt("write: rows of a worker's step.")] = 64,
    folder: Annotated[Path | None, Opt("write: where checkpoints are written.")] = None,
) -> Sequence[BenchRow]:
    """Measure one of the three.

    Raises:
        ConfigError: there is no such measurement, or a number is too small.
        ClusterError: a run failed.
    """
    if what == "memory":
        return bench_memory_of_workers(workers, (sizes or [100_000_000])[0], strategies or STRATEGIES, steps or 12)
    name = "all_reduce:shard=gradients" if not strategies else strategies[0]
    if what == "driver":
        return bench_memory_of_driver(workers, sizes or (10_000_000, 100_000_000, 1_000_000_000), name)
    if what == "write":
        checkpoint = (sizes or [1_000_000_000])[0]
        return bench_background_write(
            workers, checkpoint, name, steps=steps or 100, every=every, batch=batch, folder=folder
        )
    raise ConfigError(f"there is no measurement {what!r}: use one of memory, driver, write", field="what")
