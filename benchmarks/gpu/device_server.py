"""Measure the parameter server with one worker on a device, beside plain copies of the same bytes.

The servers are plain processes of this host, so no Ray is needed. On "cpu" the worker pushes and pulls as a worker
without a device does, and the plain copy is a copy in the host's memory. The functions return rows and print nothing.
"""

from __future__ import annotations

import functools
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from rayps_client.errors import ConfigError
from torch import Tensor, nn

from rayps.bench.plain_processes import PlainActor
from rayps.bench.table import BenchRow
from rayps.core.job.user_module import pack
from rayps.ps.client.client import GroupServer
from rayps.ps.client.connections import take_rank
from rayps.ps.client.device_server import DeviceServer
from rayps.ps.client.session import Session
from rayps.ps.protocol.rows import cut_shards
from rayps.ps.protocol.segment_map import StaticMap
from rayps.ps.protocol.space import Space
from rayps.ps.server.shard_actor import ShardActor, ShardPlan
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.device import Device
from rayps.tensors.flat import FlatModel, Gradient
from rayps.tensors.snapshot import Snapshot
from rayps.worker.exchange.early_push import EarlyPush

TIMEOUT = 60.0  # seconds for servers to start and to answer
WIDTH = 1024  # features of each layer of the model
HIDES = 2.0  # the computation of a step takes about this many times the time of its push and pull


@dataclass(frozen=True, slots=True)
class ServerTransferRow(BenchRow):
    """One operation of one worker with `shards` servers on `servers` ("cpu" or "cuda"). Times are medians."""

    columns: ClassVar[str] = (
        "device | servers | shards | operation | bytes | ms | gb_s: gb s | of_copy: of copy | hidden"
    )

    device: str
    servers: str
    shards: int
    operation: str
    bytes: int
    ms: float
    gb_s: float | None  # 10^9 bytes per second, in one direction
    of_copy: float | None  # gb_s / gb_s of the plain copy in the same direction
    hidden: float | None  # of a step: the part of its push and pull that computation hides


class _Transfers(Protocol):
    """What is measured with one worker. Each method returns when its work is done."""

    @property
    def place(self) -> torch.device:
        """The device of the model."""

    def copy_down(self) -> None:
        """Copy the gradient to the host."""

    def copy_up(self) -> None:
        """Copy the parameters from the host."""

    def push(self) -> float:
        """Push a gradient until it is acknowledged; return the seconds until it has left."""

    def pull(self) -> None:
        """Pull the parameters."""

    def turn(self) -> None:
        """Push and pull, as a step does it."""

    def step(self, x: Tensor) -> None:
        """Pull, compute and push, as a step does it."""

    def compute(self, x: Tensor) -> None:
        """Compute a gradient."""

    def close(self) -> None:
        """Release the pinned memory."""


def bench_device_server(
    device: str = "cuda", *, servers: str = "cpu", megabytes: float = 100.0, shards: int = 8, repeats: int = 9
) -> list[ServerTransferRow]:
    """Measure pushes and pulls of `megabytes` (10^6 bytes) in step, with servers on `servers`, and a step with both.

    The rows are: the plain copies; a push until it has left the device, and until it is acknowledged; a pull; a push
    and the pull after it; the computation alone; and a step, with `hidden`.

    Raises:
        ConfigError: there is no such device, or an argument is below 1.
    """
    if min(megabytes, shards, repeats) < 1:
        raise ConfigError(f"megabytes={megabytes}, shards={shards}, repeats={repeats}: give numbers of at least 1")
    place = None if device == "cpu" else Device.of(device)
    torch.manual_seed(0)
    layers = max(1, round(megabytes * 1e6 / (4 * WIDTH * (WIDTH + 1))))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))
    model.to("cpu" if place is None else place.place)
    with _Servers(model, shards, servers) as site:
        server = site.join()
        try:
            work: _Transfers = _OnCpu(server, model) if place is None else _OnDevice(server, place, model)
            try:
                return _measure(work, device, servers, shards, 4 * server.size, repeats)
            finally:
                work.close()
        finally:
            server.close()


def _measure(
    work: _Transfers, device: str, servers: str, shards: int, size: int, repeats: int
) -> list[ServerTransferRow]:
    def row(
        operation: str, ms: float, copy: float | None = None, hidden: float | None = None, *, moves: bool = True
    ) -> ServerTransferRow:
        rate = size / ms / 1e6 if moves else None
        of_copy = None if copy is None else copy / ms
        return ServerTransferRow(device, servers, shards, operation, size, ms, rate, of_copy, hidden)

    down, up = measure_median(work.copy_down, repeats), measure_median(work.copy_up, repeats)
    left: list[float] = []
    pushed = measure_median(lambda: left.append(1000 * work.push()), repeats)
    pulled = measure_median(work.pull, repeats)
    turn = measure_median(work.turn, repeats)
    x = _make_sized_input(work, HIDES * turn)
    compute = measure_median(lambda: work.compute(x), repeats)
    step = measure_median(lambda: work.step(x), repeats)
    return [
        row("copy to the host", down),
        row("copy from the host", up),
        row("push, until it has left", statistics.median(left[2:]), down),
        row("push, acknowledged", pushed, down),
        row("pull", pulled, up),
        row("push and pull", turn, moves=False),
        row("compute", compute, moves=False),
        row("step", step, hidden=1 - (step - compute) / turn, moves=False),
    ]


def _make_sized_input(work: _Transfers, ms: float) -> Tensor:
    """Return an input with so many rows that `compute` takes about `ms` milliseconds."""
    rows = 16
    while True:
        x = torch.randn(rows, WIDTH, device=work.place)
        found = measure_median(functools.partial(work.compute, x), 3)
        if found >= ms or rows >= 1 << 20:
            return x
        rows = max(2 * rows, min(8 * rows, int(rows * ms / found)))


def measure_median(work: Callable[[], object], repeats: int) -> float:
    """Return the median of milliseconds over `repeats` calls, after two calls that are not counted."""
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[2:])


class _OnDevice:
    """One worker on a device, with a `DeviceServer` and an `EarlyPush`."""

    def __init__(self, server: GroupServer, device: Device, model: nn.Module) -> None:
        self._device, self._model = device, model
        self._flat = FlatModel(model)
        self._again = True
        self._server = DeviceServer(server, device, self._flat.vector, lambda: self._again)
        self._early = EarlyPush(self._flat, self._server)
        self._host = device.pinned(server.size, server.dtype)
        self._stream = device.stream()
        self.place = device.place

    def close(self) -> None:
        self._server.close()

    def copy_down(self) -> None:
        self._stream.copy(self._host, self._flat.packed[:-1]).wait()

    def copy_up(self) -> None:
        self._stream.copy(self._flat.packed[:-1], self._host).wait()

    def push(self) -> float:
        self._again = False  # the pull is measured by itself
        began = time.perf_counter()
        self._server.begin(self._flat.packed[:-1], 1.0)
        for event in [self._server.send(segment) for segment in reversed(range(len(self._server.cuts)))]:
            event.wait()
        left = time.perf_counter() - began
        self._server.end()
        self._server.settle()
        self._again = True
        return left

    def pull(self) -> None:
        self._server.pull()
        self._device.current().record().wait()

    def turn(self) -> None:
        self._server.begin(self._flat.packed[:-1], 1.0)
        for segment in reversed(range(len(self._server.cuts))):
            self._server.send(segment)
        self._server.end()
        self.pull()

    def step(self, x: Tensor) -> None:
        self._flat.drop_grad()
        loss = self._model(x).square().mean()
        self._early.begin(float(len(x)))
        loss.backward()
        self._early.collect()
        self._early.end()
        self.pull()

    def compute(self, x: Tensor) -> None:
        self._flat.drop_grad()
        self._model(x).square().mean().backward()
        self._flat.collect_grad()
        self._device.current().record().wait()


class _OnCpu:
    """One worker on the CPU, with the pushes and pulls of a worker without a device."""

    def __init__(self, server: GroupServer, model: nn.Module) -> None:
        self._server, self._model = server, model
        self._flat = FlatModel(model, server.buffer)
        server.home = self._flat.vector
        self._host = torch.zeros(server.size)
        self.place = torch.device("cpu")

    def close(self) -> None:
        pass

    def copy_down(self) -> None:
        self._host.copy_(self._flat.packed[:-1])

    def copy_up(self) -> None:
        self._flat.packed[:-1].copy_(self._host)

    def push(self) -> float:
        began = time.perf_counter()
        self._server.push(Gradient(self._flat.packed, 1))
        self._server.settle()
        return time.perf_counter() - began

    def pull(self) -> None:
        self._server.pull()

    def turn(self) -> None:
        self._server.push(Gradient(self._flat.packed, 1))
        self._server.pull()

    def step(self, x: Tensor) -> None:
        self.compute(x)
        self.turn()

    def compute(self, x: Tensor) -> None:
        self._flat.drop_grad()
        self._model(x).square().mean().backward()
        self._flat.collect_grad()


def _make_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-6)


class _Servers:
    """The servers of a model, as processes of this host, from `__enter__` to `__exit__`."""

    def __init__(self, model: nn.Module, shards: int, device: str) -> None:
        flat = FlatModel(model)
        self._layout, self._start = flat.layout, flat.vector.detach().cpu()
        ranges = tuple(cut_shards(self._layout, shards))
        self._space = Space("bench", 1, 1, ParameterServer(shards=shards), self._layout, ranges)
        self._secret, self._device = secrets.token_bytes(32), device
        self._actors: list[PlainActor] = []

    def __enter__(self) -> _Servers:
        make = functools.partial(ShardActor, threads=1, device=self._device)
        self._actors = [PlainActor(make, i, self._secret, pack(_make_sgd)) for i in range(len(self._space.cuts))]
        snapshot = Snapshot(self._layout, self._start, positions=[0])
        try:
            begun = [actor.call("begin", ShardPlan(self._space, i), snapshot) for i, actor in enumerate(self._actors)]
            for each in begun:
                each.result(TIMEOUT)
        except BaseException:
            self.__exit__()
            raise
        return self

    def join(self) -> GroupServer:
        """Connect the worker."""
        places = [actor.call("place").result(TIMEOUT) for actor in self._actors]
        found = StaticMap.of({f"shard-{i}": each.address for i, each in enumerate(places)}, self._secret)
        incarnation = take_rank(found, self._space, 0, TIMEOUT)
        session = Session(found, self._space, 0, incarnation=incarnation, timeout=TIMEOUT, keep=0)
        return GroupServer(session)

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            actor.kill()
        self._actors = []
