"""Measure two layers split among workers by rayps and by torch's DTensor styles on gloo, and unsplit layers.

The layers are Linear(d, 4d), ReLU, Linear(4d, d); the first is split by its output and the second by its input (torch's
ColwiseParallel and RowwiseParallel). Contenders alternate in the same actors. A step is a forward and a backward pass.
The function returns rows and prints nothing.
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rayps.bench.parallel_calls import call_all
from rayps.bench.table import BenchRow, Opt
from rayps.cluster.local import Cluster
from rayps.comm.ring import Ring
from rayps.parallel.tensor import TensorCommunicator, plan, split

CONTENDERS = ("own", "dtensor", "alone")


@dataclass(frozen=True, slots=True)
class TensorRow(BenchRow):
    """One contender at one width. `step` is the median microseconds of a step on the slowest worker."""

    columns: ClassVar[str] = (
        "contender | width | batch | step: µs a step | times_dtensor: x dtensor | times_alone: x alone"
    )

    contender: str
    workers: int
    width: int
    batch: int
    step: float
    times_dtensor: float | None  # DTensor's step / step; None if DTensor did not take part
    times_alone: float | None  # `step` of both layers on one worker / step; None if `alone` did not take part


class TensorBench:
    """An actor: one worker, which takes part in the measurement of every contender."""

    def __init__(self, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        self._rank, self._size = rank, size
        self._nets: dict[str, nn.Module] = {}
        self._ring: Ring | None = None
        self._mesh: DeviceMesh | None = None

    def port(self) -> int:
        """Open the store through which torch's ranks find each other; return its port."""
        self._store: Any = dist.TCPStore("127.0.0.1", 0, self._size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return int(self._store.port)

    def connect(self, name: str, contenders: list[str], port: int) -> None:
        """Connect the workers by a ring, and also by a device mesh if DTensor takes part."""
        self._ring = Ring.join(name, self._rank, self._size)
        if "dtensor" in contenders:
            store = self._store if self._rank == 0 else dist.TCPStore("127.0.0.1", port, self._size)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size)
            self._mesh = DeviceMesh("cpu", list(range(self._size)))

    def prepare(self, contenders: list[str], width: int, batch: int) -> None:
        """Make the two layers of each contender."""
        assert self._ring is not None
        self._x = torch.randn(batch, width, generator=torch.Generator().manual_seed(1))
        for name in contenders:
            net = _make_pair(width)
            if name == "own":
                net = split(net, plan(net, self._size), self._rank, self._size, TensorCommunicator(self._ring))
            elif name == "dtensor" and self._mesh is not None:
                styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                net = parallelize_module(net, self._mesh, styles)
            self._nets[name] = net

    def turn(self, contender: str, steps: int) -> float:
        """Make `steps` steps of one contender; return microseconds per step."""
        net, x = self._nets[contender], self._x.clone().requires_grad_()
        parameters = list(net.parameters())
        start = time.perf_counter()
        for _ in range(steps):
            for p in parameters:
                p.grad = None
            net(x).sum().backward()
        return 1e6 * (time.perf_counter() - start) / steps

    def close(self) -> None:
        """Close the ring and torch's process group."""
        if self._ring is not None:
            self._ring.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def bench_tensor(
    cluster: Cluster,
    workers: Annotated[int, Opt("Workers that share the layers.")] = 2,
    contenders: Annotated[
        Sequence[str], Opt("Contenders: own (rayps), dtensor, alone (both layers on one worker).")
    ] = CONTENDERS,
    *,
    widths: Annotated[Sequence[int], Opt("Widths d of Linear(d, 4d), ReLU, Linear(4d, d).")] = (64, 256, 1024),
    batch: Annotated[int, Opt("Rows of a batch.")] = 32,
    steps: int = 50,
    repeats: Annotated[int, Opt("Number of measurements of each contender, of 50 steps each.")] = 9,
    timeout: float = 120.0,
) -> list[TensorRow]:
    """Measure steps of two split layers, with one thread per worker; return a row for each contender and width.

    Each contender makes `repeats` turns of `steps` steps. The order of the contenders changes with each turn.

    Raises:
        ConfigError: there is no such contender.
        ClusterError: an actor died.
        LinkError: a worker did not answer the others.
    """
    for each in contenders:
        if each not in CONTENDERS:
            raise ConfigError(f"no contender {each!r}; use some of {', '.join(CONTENDERS)}", contender=each)
    name, names = f"tensor-{secrets.token_hex(4)}", list(contenders)
    actors = [cluster.spawn("benchmarks.parallel.tensor:TensorBench", rank, workers) for rank in range(workers)]
    rows: list[TensorRow] = []
    try:
        port = actors[0].call("port").result(timeout)
        call_all(actors, "connect", name, names, port, timeout=timeout)
        for width in widths:
            call_all(actors, "prepare", names, width, batch, timeout=timeout)
            medians = _take_turns(
                lambda each: max(call_all(actors, "turn", each, steps, timeout=timeout)), names, repeats
            )
            rows += _make_rows(medians, workers, width, batch)
        call_all(actors, "close", timeout=timeout)
    finally:
        for actor in actors:
            cluster.kill(actor)
    return rows


def _take_turns(turn: Callable[[str], float], names: list[str], repeats: int) -> dict[str, float]:
    found: dict[str, list[float]] = {each: [] for each in names}
    for number in range(repeats + 1):
        for each in names[number % len(names) :] + names[: number % len(names)]:
            took = turn(each)
            if number:  # turn 0 is the warm-up: it touches new pages
                found[each].append(took)
    return {each: statistics.median(times) for each, times in found.items()}


def _make_rows(medians: dict[str, float], workers: int, width: int, batch: int) -> list[TensorRow]:
    theirs, alone = medians.get("dtensor"), medians.get("alone")
    return [
        TensorRow(name, workers, width, batch, step, theirs / step if theirs else None, alone / step if alone else None)
        for name, step in medians.items()
    ]


def _make_pair(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
