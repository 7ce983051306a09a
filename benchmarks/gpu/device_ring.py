"""Measure the sum of a vector among workers of one device, beside the copies that it needs. No Ray: plain processes.

The copies are measured in the same run, by the same processes at the same time, and move as many bytes:

- ipc: each rank reads 1/N of N vectors and writes 1/N of the sum. For a vector outside of the ring's memory, it also
  copies the vector to it and the sum back.
- staging: each rank copies its vector to pinned memory, and the sum back, in both directions at once. The CPUs also
  have to add: `adds_ms` is the time in which each rank, with one thread, adds 1/N of N vectors in pinned memory. Copies
  and additions of different chunks run at the same time, so that the longer of the two bounds the sum.
- nccl: each rank sends and receives 2(N-1)/N of the vector; measured as copies on the device.
- own: the ring's own way for tensors of the CPU; the copies are those of ipc.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from rayps_client.errors import ConfigError, first_line
from torch import Tensor

from rayps.bench.plain_processes import PlainActor
from rayps.bench.table import BenchRow
from rayps.comm.link import Listener
from rayps.comm.ring import Ring
from rayps.comm.ring.device.choose_gpu_transport import GpuTransport
from rayps.tensors.device import Device

SUMS = ("resident", "plain")  # a vector in memory of the ring (as a gradient is), and any other vector
_START_SECONDS = 120.0  # longest time to start a process and to form a ring
_MOST_TURNS = 25


@dataclass(frozen=True, slots=True)
class DeviceSumRow(BenchRow):
    """One transport. Times are medians over turns of the slowest rank's milliseconds."""

    columns: ClassVar[str] = (
        "device | transport | workers | vector | turns | ms | copies_ms: copies ms | "
        "times_copies: times copies | adds_ms: adds ms | error"
    )

    device: str
    transport: str
    workers: int
    vector: str  # one of SUMS
    bytes: int
    turns: int
    ms: float | None
    copies_ms: float | None  # the copies that the sum needs
    times_copies: float | None  # ms / copies_ms
    adds_ms: float | None = None  # the additions of the CPUs that the sum needs; None if the device adds
    error: str = ""


class SumRank:
    """One rank, in its own process."""

    def __init__(self, rank: int, secret: bytes, device: str) -> None:
        torch.set_num_threads(1)
        self._rank, self._secret = rank, secret
        self._device = Device.of(device)
        self._listener = Listener(f"rank-{rank}", secret, 0)

    def address(self) -> str:
        """Return the address at which this rank listens."""
        return self._listener.address

    def form(self, addresses: list[str], transport: GpuTransport | None, elements: int) -> None:
        """Form the ring, and make the vectors of `elements` float32."""
        self._ring = Ring.form(
            self._rank,
            addresses,
            self._listener,
            secret=self._secret,
            generation=0,
            timeout=60.0,
            streams=1,
            device=self._device,
            device_transport=transport,
        )
        self._name = transport or "own"
        place = self._device.place
        self._resident = self._ring.buffer(elements)
        self._plain = torch.ones(elements, device=place)
        self._from, self._to = torch.ones(elements, device=place), torch.ones(elements, device=place)
        self._hosts = [self._device.pinned(elements, torch.float32) for _ in range(2)]
        self._streams = [self._device.stream() for _ in range(2)]

    def turn(self, vector: str) -> tuple[float, float, float]:
        """Return the seconds of one sum, of the copies that it needs, and of the additions of the CPU; 0 for none."""
        resident = vector == "resident"
        x = self._resident if resident else self._plain
        adds = self._time(self._adds) if self._name == "staging" else 0.0
        return self._time(lambda: self._sum(x, resident)), self._time(lambda: self._copy_both_ways(vector)), adds

    def _sum(self, x: Tensor, resident: bool) -> Tensor:
        return self._ring.total(x) if resident else self._ring.sum(x)

    def _time(self, work: Callable[[], object]) -> float:
        self._plain.fill_(1.0)
        self._device.current().wait()
        self._ring.barrier()
        start = time.perf_counter()
        work()
        self._device.current().wait()
        return time.perf_counter() - start

    def _copy_both_ways(self, vector: str) -> None:
        n, ranks = self._plain.numel(), self._ring.size
        if self._name == "staging":
            down, up = self._streams
            events = [down.copy(self._hosts[0], self._from), up.copy(self._to, self._hosts[1])]
            for event in events:
                event.wait()
            return
        # a copy reads and writes each element: it moves twice its bytes
        elements = n * (1 + 1 / ranks) / 2 if self._name in ("ipc", "own") else 2 * n * (ranks - 1) / ranks
        if vector == "plain" and self._name in ("ipc", "own"):
            elements += 2 * n
        while elements > 0:
            part = min(n, int(elements) or 1)
            self._to[:part].copy_(self._from[:part])
            elements -= part

    def _adds(self) -> None:
        ranks = self._ring.size
        share = self._plain.numel() // ranks
        first, *rest = torch.split(self._hosts[0][: share * ranks], share)
        out = self._hosts[1][:share]
        torch.add(first, rest[0], out=out)
        for each in rest[1:]:
            out.add_(each)

    def close(self) -> None:
        """Close the ring."""
        self._ring.close()
        self._listener.close()


def bench_device_sums(
    device: str = "cuda", workers: Sequence[int] = (2, 4), *, megabytes: float = 100.0, seconds: float = 60.0
) -> list[DeviceSumRow]:
    """Measure the sum of a vector of `megabytes` times 10^6 bytes: a row for each transport, count and kind of vector.

    A row that fails has its error, and the others are measured. The turns take at most `seconds` in all, without the
    start of processes. Raises ConfigError if a number is not valid or there is no such device.
    """
    if any(each < 2 for each in workers):
        raise ConfigError(f"workers are {list(workers)}: a sum needs at least 2", workers=list(workers))
    if megabytes <= 0 or seconds <= 0:
        raise ConfigError(f"megabytes is {megabytes:g} and seconds is {seconds:g}: give numbers above 0")
    kind = Device.of(device).kind
    names: list[GpuTransport | None] = ["ipc", "staging", "nccl"]
    if kind == "cpu":
        names.append(None)
    rows: list[DeviceSumRow] = []
    for count in workers:
        for name in names:
            if name == "nccl" and kind == "cuda" and torch.cuda.device_count() < count:
                rows += [_make_failed_row(device, name, count, each, f"NCCL needs {count} GPUs") for each in SUMS]
            else:
                rows += _measure(device, name, count, int(1e6 * megabytes), seconds / len(workers) / len(names))
    return rows


def _measure(
    device: str, transport: GpuTransport | None, workers: int, size: int, seconds: float
) -> list[DeviceSumRow]:
    secret, actors = secrets.token_bytes(32), list[PlainActor]()
    name = transport or "own"
    try:
        for rank in range(workers):
            # each rank has a GPU of its own for NCCL; otherwise all share the first one
            place = f"{device}:{rank}" if transport == "nccl" and Device.of(device).kind == "cuda" else device
            actors.append(PlainActor(SumRank, rank, secret, place))
        addresses = _call_all(actors, "address")
        _call_all(actors, "form", addresses, transport, size // 4)
        return [_make_row(device, name, workers, vector, size, actors, seconds / len(SUMS)) for vector in SUMS]
    except Exception as error:
        return [_make_failed_row(device, name, workers, vector, first_line(error)[:200]) for vector in SUMS]
    finally:
        for actor in actors:
            actor.kill()


def _make_row(
    device: str, name: str, workers: int, vector: str, size: int, actors: Sequence[PlainActor], seconds: float
) -> DeviceSumRow:
    turns: list[tuple[float, float, float]] = []
    _call_all(actors, "turn", vector)  # warm-up: new pages, new memory of the device
    end = time.monotonic() + seconds
    while len(turns) < 3 or (time.monotonic() < end and len(turns) < _MOST_TURNS):
        found = _call_all(actors, "turn", vector)
        turns.append((max(each[0] for each in found), max(each[1] for each in found), max(each[2] for each in found)))
    ms, copies, adds = (1000 * statistics.median(each) for each in zip(*turns, strict=True))
    return DeviceSumRow(device, name, workers, vector, size, len(turns), ms, copies, ms / copies, adds or None)


def _make_failed_row(device: str, name: str, workers: int, vector: str, error: str) -> DeviceSumRow:
    return DeviceSumRow(device, name, workers, vector, 0, 0, None, None, None, None, error)


def _call_all(actors: Sequence[PlainActor], method: str, *args: object) -> list[Any]:
    calls = [actor.call(method, *args) for actor in actors]
    return [call.result(_START_SECONDS) for call in calls]
