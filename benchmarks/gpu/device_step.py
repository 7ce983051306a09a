"""Measure a training step of one worker on a device beside the same step in plain torch. No Ray, no other process.

The worker is the real one, under AllReduce. The model is a transformer in bf16. Both make the same step: the batch is
copied to the device, the loss is read by the host, and AdamW is torch's fused one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from rayps_client.errors import ConfigError, first_line
from torch import Tensor, nn

from rayps import data
from rayps.bench.table import BenchRow
from rayps.bench.worker_steps import run_steps, worker_loop
from rayps.comm.link import Listener
from rayps.comm.ring import Ring
from rayps.core.job.records import Point
from rayps.data import Batch, Data
from rayps.tensors.device import Device
from rayps.worker.loops.sync_gradients import SyncGradients
from rayps.workload.base import Workload

_SECRET = b"device-step" * 3


@dataclass(frozen=True, slots=True)
class TransformerSize:
    """The size of a model: with its defaults on a GPU it has 98 million parameters."""

    layers: int
    width: int
    heads: int
    words: int
    length: int
    batch: int


SIZES = {
    "cuda": TransformerSize(layers=12, width=768, heads=12, words=16_384, length=512, batch=32),
    "cpu": TransformerSize(layers=4, width=256, heads=4, words=4_096, length=64, batch=4),
}


@dataclass(frozen=True, slots=True)
class DeviceStepRow(BenchRow):
    """One contender. Times are medians of milliseconds per step."""

    columns: ClassVar[str] = "device | contender | parameters | turns | ms | of_torch: of torch | error"

    device: str
    contender: str  # "own" or "torch"
    parameters: int
    turns: int
    ms: float | None
    of_torch: float | None  # torch's ms / ms
    error: str = ""


class Transformer(Workload):
    """A workload: predict each next word in sequences of random words."""

    precision = "bf16"

    def __init__(self, size: TransformerSize, fused: bool) -> None:
        self._size, self._fused = size, fused

    def model(self) -> nn.Module:
        """Make the model, with the same weights on each call."""
        torch.manual_seed(1)
        return _Decoder(self._size)

    def data(self) -> Data:
        """Return random words, because only the time of a step matters."""
        size, generator = self._size, torch.Generator().manual_seed(1)
        tokens = torch.randint(0, size.words, (64 * size.batch, size.length + 1), generator=generator)
        return data.tensors(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), batch_size=size.batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy, as the mean over all words."""
        return nn.functional.cross_entropy(model(batch.x).view(-1, self._size.words), batch.y.view(-1))

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(params, lr=1e-4, fused=self._fused)


class _Decoder(nn.Module):
    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(size.words, size.width), nn.Embedding(size.length, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return, for each position of `tokens` [sequences, length], a score of each word as the next word."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.words(tokens) + self.places.weight, mask=mask, is_causal=True)
        return nn.functional.linear(x, self.words.weight)


def bench_device_step(
    device: str = "cuda", *, seconds: float = 60.0, steps: int = 10, size: TransformerSize | None = None
) -> list[DeviceStepRow]:
    """Measure the worker's step and plain torch's, in turns of `steps` steps, for at most `seconds` in all.

    A contender that fails has its error in its row. Raises ConfigError if a number is not valid or there is no such
    device.
    """
    if seconds <= 0 or steps < 1:
        raise ConfigError(f"seconds is {seconds:g} and steps is {steps}: give numbers above 0")
    there = Device.of(device)
    work = Transformer(size or SIZES[there.kind], fused=there.kind == "cuda")
    count = sum(p.numel() for p in work.model().parameters())
    makers: dict[str, Callable[[], Callable[[int], None]]] = {
        "torch": lambda: _make_plain_steps(work, there),
        "own": lambda: _make_own_steps(work, there),
    }
    turns: dict[str, list[float]] = {name: [] for name in makers}
    errors: dict[str, str] = {}
    loops: dict[str, Callable[[int], None]] = {}
    for name, make in makers.items():
        try:
            loops[name] = make()
            loops[name](3)  # warm-up: memory, algorithms
        except Exception as error:
            errors[name] = first_line(error)[:200]
    end = time.monotonic() + seconds
    while set(loops) - set(errors) and (time.monotonic() < end or min(map(len, turns.values())) < 3):
        for name in [name for name in loops if name not in errors]:
            try:
                there.current().wait()
                start = time.perf_counter()
                loops[name](steps)
                there.current().wait()
                turns[name].append(1000 * (time.perf_counter() - start) / steps)
            except Exception as error:
                errors[name] = first_line(error)[:200]
        if errors and time.monotonic() > end:
            break
    medians = {name: statistics.median(found) if found else None for name, found in turns.items()}
    law = medians["torch"]
    return [
        DeviceStepRow(device, name, count, len(turns[name]), ms, law / ms if law and ms else None, errors.get(name, ""))
        for name, ms in medians.items()
    ]


def _make_plain_steps(work: Transformer, device: Device) -> Callable[[int], None]:
    model = work.model().to(device.place)
    optimizer = work.optimizer(list(model.parameters()))
    batches = _yield_endlessly(work)

    def turn(steps: int) -> None:
        for _ in range(steps):
            batch = next(batches).to(str(device.place))
            optimizer.zero_grad()
            with torch.autocast(device.kind, torch.bfloat16):
                loss = work.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()

    return turn


def _yield_endlessly(work: Workload) -> Iterator[Batch]:
    rows = work.data()
    while True:
        yield from rows.batches(rank=0, size=1, seed=0, epoch=0)


def _make_own_steps(work: Transformer, device: Device) -> Callable[[int], None]:
    with Listener("worker-0", _SECRET, 0) as listener:
        ring = Ring.form(0, [listener.address], listener, secret=_SECRET, generation=0, timeout=60.0, device=device)
    return make_worker_steps(work, ring, device.kind)[1]


def make_worker_steps(work: Workload, ring: Ring, device: str) -> tuple[SyncGradients, Callable[[int], None]]:
    """Build the worker of AllReduce over a ring; return its loop, and a function that makes a number of steps."""
    loop = worker_loop(work, ring, device=device)

    def report(point: Point) -> bool:
        return True

    def turn(steps: int) -> None:
        run_steps(loop, steps, report)

    return loop, turn
