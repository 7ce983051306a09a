"""Measure a pipeline's overhead over its stages' compute: rayps' engine and torch.distributed.pipelining on gloo.

Both run the same layers, micro-batches and schedule in the same actors, alternately in one run. The overhead is a
step's time minus the ideal time of the schedule. With p stages, m micro-batches and v chunks per stage, the ideal time
is the time that one process needs for all micro-batches, times (m + p - 1) / (m p), or under `interleaved` times
(v m + p - 1) / (v m p). The function returns rows and prints nothing.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
from rayps_client.errors import ConfigError
from torch import Tensor, nn
from torch.distributed import pipelining

from rayps.bench.parallel_calls import call_all
from rayps.bench.table import BenchRow, Opt
from rayps.cluster.local import Cluster
from rayps.comm.ring import Ring
from rayps.core.pipeline.schedule import make_table
from rayps.data.base import Nested
from rayps.parallel.pipeline import cut
from rayps.parallel.pipeline.engine import PipelineEngine

CONTENDERS = ("own", "torch")
_TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class PipelineRow(BenchRow):
    """One contender. Times are milliseconds per step on the slowest stage, as medians of the turns."""

    columns: ClassVar[str] = (
        "contender | schedule | stages | micro_batches: micro-batches | step: ms a step | ideal | beyond | "
        "times_torch: torch's beyond / own"
    )

    contender: str
    schedule: str
    stages: int
    micro_batches: int
    width: int
    step: float
    ideal: float  # the ideal time of the schedule, from the time of one process
    beyond: float  # the overhead: step - ideal
    times_torch: float | None  # torch's overhead / this contender's overhead; None if torch did not take part


class PipelineBench:
    """An actor: one pipeline stage, which takes part in the measurement of every contender."""

    def __init__(self, rank: int, stages: int, micros: int, schedule: str, width: int, batch: int) -> None:
        torch.set_num_threads(1)
        self._rank, self._stages, self._micros, self._schedule = rank, stages, micros, schedule
        self._chunks = 2 if schedule == "interleaved" else 1
        self._layers = _make_layers(width, stages * self._chunks)
        generator = torch.Generator().manual_seed(1)
        self._x, self._y = (torch.randn(batch, width, generator=generator) for _ in range(2))
        self._steps: dict[str, Step] = {"alone": self._compute_alone}
        self._ring: Ring | None = None

    def port(self) -> int:
        """Open the store through which torch's ranks find each other; return its port."""
        self._store: Any = dist.TCPStore("127.0.0.1", 0, self._stages, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return int(self._store.port)

    def prepare(self, name: str, contenders: list[str], port: int) -> None:
        """Make the stage and the connections of each contender."""
        self._ring = Ring.join(name, self._rank, self._stages)
        if "own" in contenders:
            self._steps["own"] = self._make_own_step(self._ring)
        if "torch" in contenders:
            self._steps["torch"] = self._make_torch_step(port)

    def turn(self, contender: str, steps: int) -> float:
        """Make `steps` steps of one contender, each after a barrier; return milliseconds per step."""
        assert self._ring is not None
        step, total = self._steps[contender], 0.0
        for _ in range(steps):
            self._ring.barrier()
            start = time.perf_counter()
            for layer in self._layers:
                layer.zero_grad()
            step()
            total += time.perf_counter() - start
        return 1000 * total / steps

    def close(self) -> None:
        """Close the ring and torch's process group."""
        if self._ring is not None:
            self._ring.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _compute_alone(self) -> None:
        """Compute all layers and micro-batches in this process, if this is the first rank."""
        if self._rank:
            return
        for x, y in zip(self._x.chunk(self._micros), self._y.chunk(self._micros), strict=True):
            (_compute_loss(nn.Sequential(*self._layers)(x), y) / self._micros).backward()  # type: ignore[no-untyped-call]

    def _make_own_step(self, ring: Ring) -> Step:
        layers = [cut.Layer(str(i), layer) for i, layer in enumerate(self._layers)]
        actions = make_table(self._schedule, self._stages, self._micros, self._chunks)[self._rank]
        engine = PipelineEngine(layers, range(1, len(layers)), actions, ring)
        xs, ys = self._x.chunk(self._micros), self._y.chunk(self._micros)
        weights, count = [1 / self._micros] * self._micros, iter(range(1 << 62))
        return lambda: _discard(
            engine.backward(
                next(count),
                weights,
                lambda i: ((xs[i],), {}),
                lambda i, out: _compute_loss(_require_tensor(out), ys[i]),
            )
        )

    def _make_torch_step(self, port: int) -> Step:
        store = self._store if self._rank == 0 else dist.TCPStore("127.0.0.1", port, self._stages)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._stages)
        numbers = range(self._rank, len(self._layers), self._stages)
        stages = [pipelining.PipelineStage(self._layers[i], i, len(self._layers), torch.device("cpu")) for i in numbers]
        schedule: Any = _TORCH[self._schedule](
            stages if self._chunks > 1 else stages[0], self._micros, loss_fn=_compute_loss
        )
        given = (self._x,) if self._rank == 0 else ()
        target = {"target": self._y} if self._rank == self._stages - 1 else {}
        return lambda: _discard(schedule.step(*given, **target))


def bench_pipeline(
    cluster: Cluster,
    stages: Annotated[int, Opt("Stages; each is one worker.")] = 2,
    contenders: Annotated[Sequence[str], Opt("Contenders: own (rayps), torch.")] = CONTENDERS,
    *,
    schedules: Annotated[Sequence[str], Opt("Schedules to measure: gpipe, 1f1b, interleaved.")] = ("gpipe", "1f1b"),
    micros: Annotated[int, Opt("Micro-batches of a step.", "--micro-batches")] = 8,
    width: Annotated[int, Opt("Width of the layers.")] = 64,
    batch: Annotated[int, Opt("Rows of a batch.")] = 64,
    steps: int = 20,
    repeats: Annotated[int, Opt("Number of measurements of each contender, of 20 steps each.")] = 9,
    timeout: float = 120.0,
) -> list[PipelineRow]:
    """Measure a training step of an MLP with 3 equal layers per chunk; each stage is an actor with one thread.

    Return a row for each schedule and contender. Each contender makes `repeats` turns of `steps` steps. The order of
    the contenders changes with each turn.

    Raises:
        ConfigError: there is no such contender or schedule.
        ClusterError: an actor died.
        LinkError: a stage did not answer the others.
    """
    for given, known in ((contenders, CONTENDERS), (schedules, tuple(_TORCH))):
        for each in given:
            if each not in known:
                what = "contender" if known is CONTENDERS else "schedule"
                raise ConfigError(f"no {what} {each!r}; use some of {', '.join(known)}", given=each)
    rows: list[PipelineRow] = []
    for schedule in schedules:
        found = _measure(cluster, (stages, micros, schedule, width, batch), list(contenders), steps, repeats, timeout)
        chunks = 2 if schedule == "interleaved" else 1
        ideal = found["alone"] * (chunks * micros + stages - 1) / (chunks * micros * stages)
        theirs = found["torch"] - ideal if "torch" in found else None
        rows += [
            PipelineRow(
                name,
                schedule,
                stages,
                micros,
                width,
                found[name],
                ideal,
                found[name] - ideal,
                theirs / (found[name] - ideal) if theirs is not None and found[name] > ideal else None,
            )
            for name in contenders
        ]
    return rows


def _measure(
    cluster: Cluster,
    what: tuple[int, int, str, int, int],
    contenders: list[str],
    steps: int,
    repeats: int,
    timeout: float,
) -> dict[str, float]:
    name, names = f"pipeline-{secrets.token_hex(4)}", [*contenders, "alone"]
    actors = [cluster.spawn("benchmarks.parallel.pipeline:PipelineBench", rank, *what) for rank in range(what[0])]
    found: dict[str, list[float]] = {each: [] for each in names}
    try:
        port = actors[0].call("port").result(timeout)
        call_all(actors, "prepare", name, contenders, port, timeout=timeout)
        for turn in range(repeats + 1):
            for each in names[turn % len(names) :] + names[: turn % len(names)]:
                slowest = max(call_all(actors, "turn", each, steps, timeout=timeout))
                if turn:  # turn 0 is the warm-up: it touches new pages
                    found[each].append(slowest)
        call_all(actors, "close", timeout=timeout)
    finally:
        for actor in actors:
            cluster.kill(actor)
    return {each: statistics.median(turns) for each, turns in found.items()}


def _make_layers(width: int, parts: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3))) for _ in range(parts)]


def _compute_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def _require_tensor(output: Nested) -> Tensor:
    assert isinstance(output, Tensor)
    return output


def _discard(_: Any) -> None:
    """Discard a step's result."""
