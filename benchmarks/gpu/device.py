"""Measure which layers are faster on a GPU: convolution and fully connected layers, forward and backward.

`benchmarks.gpu.device_ring` measures sums among workers of one device, `benchmarks.gpu.device_step` a training step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ConfigError
from torch import Tensor, nn

from benchmarks.gpu.device_ring import bench_device_sums
from benchmarks.gpu.device_server import bench_device_server
from benchmarks.gpu.device_step import bench_device_step
from rayps.bench.table import BenchRow, Opt
from rayps.core.rooms import load

ROWS = "benchmarks.tables.device_rows:bench_device_rows"  # of sparse tables


@dataclass(frozen=True, slots=True)
class DeviceRow(BenchRow):
    """One layer at one batch size. Times are median milliseconds of a forward and a backward pass together."""

    columns: ClassVar[str] = "layer | batch | parameters | cpu: cpu ms | gpu: gpu ms | times | copy: copy ms"

    layer: str
    batch: int
    parameters: int
    cpu: float
    gpu: float | None  # None if there is no GPU
    times: float | None  # CPU time / GPU time
    copy: float | None  # milliseconds to copy the input to the GPU


_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear 1024 to 1024": (lambda: nn.Linear(1024, 1024), (1024,)),
    "linear 4096 to 4096": (lambda: nn.Linear(4096, 4096), (4096,)),
    "conv 3x3, 3 to 64, 64x64": (lambda: nn.Conv2d(3, 64, 3, padding=1), (3, 64, 64)),
    "conv 3x3, 64 to 64, 32x32": (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 32, 32)),
    "conv 5x5, 16 to 32, 28x28": (lambda: nn.Conv2d(16, 32, 5, padding=2), (16, 28, 28)),
}


def bench_device(batches: Sequence[int] = (1, 32, 128), *, repeats: int = 9) -> list[DeviceRow]:
    """Measure every layer at every batch size, on the CPU with all of torch's threads, and on the GPU if there is one.

    Raises ConfigError if a batch size is below 1.
    """
    if any(batch < 1 for batch in batches):
        raise ConfigError(f"batches are {list(batches)}: give whole numbers of at least 1", batches=list(batches))
    gpu = "cuda" if torch.cuda.is_available() else None
    rows = []
    for name, (make, shape) in _LAYERS.items():
        torch.manual_seed(0)
        layer = make()
        for batch in batches:
            x = torch.randn(batch, *shape)
            cpu = _time_step(layer.to("cpu"), x, repeats)
            there = _time_step(layer.to(gpu), x.to(gpu), repeats) if gpu else None
            copy = _time_median(partial(x.to, "cuda"), repeats) if gpu else None
            count = sum(p.numel() for p in layer.parameters())
            rows.append(DeviceRow(name, batch, count, cpu, there, cpu / there if there else None, copy))
    return rows


def list_devices() -> list[str]:
    """Return the kinds of devices that this machine has."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _time_step(layer: nn.Module, x: Tensor, repeats: int) -> float:
    x = x.clone().requires_grad_()

    def step() -> None:
        layer.zero_grad()
        found: Tensor = layer(x)
        found.sum().backward()  # type: ignore[no-untyped-call]

    return _time_median(step, repeats)


def _time_median(work: Callable[[], object], repeats: int) -> float:
    times = []
    for turn in range(repeats + 2):
        _wait()
        start = time.perf_counter()
        work()
        _wait()
        if turn >= 2:  # warm-up: chooses algorithms, touches new pages
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


PARTS = ("layers", "sum", "step", "server", "rows")


def bench_parts(
    what: Annotated[Sequence[str], Opt("Parts to measure: layers, sum, step, server, rows.")] = PARTS[:3],
    devices: Annotated[
        Sequence[str] | None, Opt("Devices of the parts sum and step; those that exist by default.")
    ] = None,
    workers: Annotated[Sequence[int], Opt("Numbers of workers of one device that sum a vector.")] = (2, 4),
    megabytes: Annotated[float, Opt("The size of the vector to sum, in 10^6 bytes.")] = 100.0,
    seconds: Annotated[float, Opt("Longest time of each part on each device, without starts.")] = 60.0,
    batches: Annotated[Sequence[int], Opt("Batch sizes of the layers, in rows.")] = (1, 32, 128),
    repeats: Annotated[int, Opt("Number of measurements of each layer and batch size.")] = 9,
) -> dict[str, Sequence[BenchRow]]:
    """Measure each part; return its rows. Raises ConfigError if there is no such part."""
    unknown = [name for name in what if name not in PARTS]
    if unknown:
        raise ConfigError(f"there is no part {unknown[0]!r}: use some of {', '.join(PARTS)}", field="what")
    places = devices or list_devices()
    measure: dict[str, Callable[[], Sequence[BenchRow]]] = {
        "layers": lambda: bench_device(batches, repeats=repeats),
        "sum": lambda: [
            row for each in places for row in bench_device_sums(each, workers, megabytes=megabytes, seconds=seconds)
        ],
        "step": lambda: [row for each in places for row in bench_device_step(each, seconds=seconds)],
        "server": lambda: [row for each in places for row in bench_device_server(each, megabytes=megabytes)],
        "rows": lambda: [row for each in places for row in load(ROWS)(each)],
    }
    return {name: measure[name]() for name in what}
