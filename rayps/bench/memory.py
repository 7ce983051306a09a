"""Measure the memory of a training step: the proportional set size of worker processes while they train.

A page that N processes share counts 1/N in each (/proc/PID/smaps_rollup, Linux): memory that a ring's ranks share is
counted once. Each contender trains in its own actors, which train a tiny model before the measurement.
"""

from __future__ import annotations

import ctypes
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayps.bench.contender import plain_steps
from rayps.bench.mlp import Mlp
from rayps.bench.parallel_calls import together
from rayps.bench.step import CONTENDERS, StepBench
from rayps.cluster.local import ActorHandle, Cluster
from rayps.core.errors import ClusterError, ConfigError

_ROLLUP = Path("/proc/self/smaps_rollup")
_LOOK_SECONDS = 0.002
_STEPS = 30


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One contender. Sizes are bytes of the worker whose memory grew most."""

    contender: str
    workers: int
    model_bytes: int  # bytes of the parameters; a gradient has as many
    grown: int  # peak proportional set size while training, less the size before the model was made
    extra: int | None  # grown, less the `grown` of workers that do not communicate
    extra_gradients: float | None  # extra / model_bytes


class MemoryBench(StepBench):
    """An actor: one worker of one contender, which measures the memory of its own process."""

    def before(self) -> int:
        """Train a tiny model, so that torch is loaded; return the proportional set size, before the model is made."""
        work = Mlp(8, 1)
        plain_steps(work, work.model())(3)
        return resident()

    def peak(self, contender: str) -> int:
        """Train with one contender; return the peak of the proportional set size."""
        self.turn(contender, 3)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)  # return freed memory to the system: what making the model needed for a moment does not count
        sizes, done = [resident()], threading.Event()

        def look() -> None:
            while not done.wait(_LOOK_SECONDS):
                sizes.append(resident())

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        self.turn(contender, _STEPS)
        done.set()
        watcher.join()
        return max(sizes)


def resident() -> int:
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
    cluster: Cluster, workers: int, contenders: Sequence[str], *, hidden: int = 2048, timeout: float = 120.0
) -> list[MemoryRow]:
    """Measure a training step of an MLP with the widths 64, `hidden`, `hidden`, 10: a row for each contender.

    Raises ConfigError, ClusterError, LinkError.
    """
    known = [name for name in CONTENDERS if name != "ray_train"]
    for contender in contenders:
        if contender not in known:
            raise ConfigError(f"no contender {contender!r}; use some of {', '.join(known)}", contender=contender)
    grown = {name: _grown(cluster, workers, name, hidden, timeout) for name in contenders}
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


def _grown(cluster: Cluster, workers: int, contender: str, hidden: int, timeout: float) -> int:
    actors: list[ActorHandle] = []
    try:
        for rank in range(workers):
            actors.append(cluster.spawn("rayps.bench.memory:MemoryBench", rank, workers, hidden))
        port = actors[0].call("port").result(timeout)
        before = together(actors, "before", timeout=timeout)
        together(actors, "prepare", f"memory-{secrets.token_hex(4)}", [contender], port, timeout=timeout)
        peaks = together(actors, "peak", contender, timeout=timeout)
        together(actors, "close", timeout=timeout)
    finally:
        for actor in actors:
            cluster.kill(actor)
    grown: list[int] = [peak - at for peak, at in zip(peaks, before, strict=True)]
    return max(grown)
