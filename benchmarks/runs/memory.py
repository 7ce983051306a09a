"""Measure the memory of a training step: the proportional set size of worker processes while they train.

A page that N processes share counts 1/N in each of them (/proc/PID/smaps_rollup, Linux), so memory that a ring's ranks
share is counted once. Each contender trains in its own actors, which train a tiny model before the measurement.
"""

from __future__ import annotations

import ctypes
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rayps_client.errors import ClusterError, ConfigError

from rayps.bench.contender import plain_steps
from rayps.bench.mlp import Mlp
from rayps.bench.parallel_calls import call_all
from rayps.bench.step import CONTENDERS, StepBench
from rayps.bench.table import BenchRow, Opt, Workers
from rayps.cluster.local import ActorHandle, Cluster

_ROLLUP = Path("/proc/self/smaps_rollup")
_SAMPLE_SECONDS = 0.002
_STEPS = 30


@dataclass(frozen=True, slots=True)
class MemoryRow(BenchRow):
    """One contender. Sizes are bytes of the worker whose memory grew most."""

    columns: ClassVar[str] = (
        "contender | model_bytes: bytes of the model | grown: grown by | extra: beyond alone | "
        "extra_gradients: in gradients"
    )

    contender: str
    workers: int
    model_bytes: int  # bytes of the parameters; a gradient has the same size
    grown: int  # peak of the proportional set size while training, minus its value before the model was made
    extra: int | None  # grown, minus the `grown` of workers that do not communicate (`alone`), if these took part
    extra_gradients: float | None  # extra / model_bytes


class MemoryBench(StepBench):
    """An actor: one worker of one contender, which measures the memory of its own process."""

    def before(self) -> int:
        """Train a tiny model, which loads torch's modules; return the proportional set size in bytes."""
        work = Mlp(8, 1)
        plain_steps(work, work.model())(3)
        return read_resident()

    def peak(self, contender: str) -> int:
        """Train with one contender; return the peak of the proportional set size in bytes."""
        self.turn(contender, 3)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(
                0
            )  # return freed memory to the system: memory that only the construction of the model needed does not count
        sizes, done = [read_resident()], threading.Event()

        def sample() -> None:
            while not done.wait(_SAMPLE_SECONDS):
                sizes.append(read_resident())

        watcher = threading.Thread(target=sample, daemon=True)
        watcher.start()
        self.turn(contender, _STEPS)
        done.set()
        watcher.join()
        return max(sizes)


def read_resident() -> int:
    """Return this process's proportional set size in bytes. Raises ClusterError if the system does not report it."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", _ROLLUP.read_text(), re.MULTILINE)
    except OSError as error:
        raise ClusterError(
            f"{_ROLLUP} cannot be read ({error.strerror}): memory can be measured on Linux only"
        ) from error
    if found is None:
        raise ClusterError(f"{_ROLLUP} has no line Pss: memory can be measured on Linux 4.14 and later")
    return 1024 * int(found[1])


def bench_memory(
    cluster: Cluster,
    workers: Workers = 2,
    contenders: Annotated[
        Sequence[str],
        Opt(
            "Contenders: own (AllReduce), one_bucket (AllReduce without overlap), alone (no communication), "
            "ddp, ddp_plain (DDP in plain processes)."
        ),
    ] = ("own", "one_bucket", "alone", "ddp"),
    *,
    hidden: Annotated[int, Opt("Width of the layers: 2048 means 4.3 million parameters.")] = 2048,
    timeout: float = 120.0,
) -> list[MemoryRow]:
    """Measure the memory of a training step of an MLP with the widths 64, `hidden`, `hidden`, 10, for each contender.

    Raises:
        ConfigError: there is no such contender.
        ClusterError: an actor died, or the system does not report the memory.
        LinkError: a worker did not answer the others within `timeout` seconds.
    """
    known = [name for name in CONTENDERS if name != "ray_train"]
    for contender in contenders:
        if contender not in known:
            raise ConfigError(f"no contender {contender!r}; use some of {', '.join(known)}", contender=contender)
    grown = {name: _measure_growth(cluster, workers, name, hidden, timeout) for name in contenders}
    size = sum(p.nbytes for p in Mlp(hidden, 1).model().parameters())
    alone = grown.get("alone")
    return [
        MemoryRow(
            name,
            workers,
            size,
            bytes_,
            None if alone is None else bytes_ - alone,
            None if alone is None else (bytes_ - alone) / size,
        )
        for name, bytes_ in grown.items()
    ]


def _measure_growth(cluster: Cluster, workers: int, contender: str, hidden: int, timeout: float) -> int:
    actors: list[ActorHandle] = []
    try:
        for rank in range(workers):
            actors.append(cluster.spawn("benchmarks.runs.memory:MemoryBench", rank, workers, hidden))
        port = actors[0].call("port").result(timeout)
        before = call_all(actors, "before", timeout=timeout)
        call_all(actors, "prepare", f"memory-{secrets.token_hex(4)}", [contender], port, timeout=timeout)
        peaks = call_all(actors, "peak", contender, timeout=timeout)
        call_all(actors, "close", timeout=timeout)
    finally:
        for actor in actors:
            cluster.kill(actor)
    grown: list[int] = [peak - at for peak, at in zip(peaks, before, strict=True)]
    return max(grown)
