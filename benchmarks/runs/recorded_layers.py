"""A workload of a chosen size that records the begin of each step: what `python -m benchmarks sharded` trains."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rayps import data
from rayps.data import Batch, Data
from rayps.tensors.checkpoints.background_write import THREAD
from rayps.workload.base import Workload

WIDTH = 1024  # of a layer: 4.2 * 10^6 bytes of parameters
_TINY = 64  # the width of the only layer of a model that is smaller than a layer of WIDTH


class StepBegin(NamedTuple):
    """A worker begins a step: the wall clock, and whether a part of a checkpoint is being written by its process."""

    time: float
    writing: bool


class RecordedLayer(nn.Module):
    """A linear layer whose result is added to its input, scaled so that any number of layers keeps its size."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self._scale = 1 / layers

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, width] for an input [b, width]."""
        return x + torch.tanh(self.linear(x)) * self._scale


class RecordedLayers(Workload):
    """A workload: equal linear layers under Adam, on random rows. Each worker appends its steps to a file."""

    folder: str = ""  # one file for each process, with a line for each step
    bytes_: int = 0  # bytes of the parameters, about
    batch: int = 32  # rows of a worker's batch
    rows: int = 0  # rows of an epoch

    @property
    def width(self) -> int:
        """The width of a layer."""
        return WIDTH if self.bytes_ >= 4 * WIDTH**2 else _TINY

    def model(self) -> nn.Module:
        """Make the model: as many layers as have `bytes_` bytes, at least one."""
        layers = max(1, round(self.bytes_ / (4 * self.width**2)))
        return nn.Sequential(*(RecordedLayer(self.width, layers) for _ in range(layers)))

    def data(self) -> Data:
        """Return random rows."""
        x = torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(1))
        return data.tensors(x, batch_size=self.batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean square of the result, and record the time at which it was called."""
        if self.folder and model.training and batch.size == self.batch:
            record(Path(self.folder))
        return torch.as_tensor(model(batch.x)).square().mean()

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(params, lr=1e-5)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Return nothing: only the time and memory of training matter."""
        return {}


def record(folder: Path) -> None:
    """Append a step to this process's file: the wall clock, and 1 if a part of a checkpoint is being written."""
    writing = any(thread.name == THREAD for thread in threading.enumerate())
    with (folder / str(os.getpid())).open("a") as file:
        file.write(f"{time.time()!r} {writing:d}\n")


def read_recorded(folder: Path) -> dict[int, list[StepBegin]]:
    """Return the steps that each process has recorded so far, by process id."""
    found = {}
    for path in folder.iterdir():
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name)] = [StepBegin(float(at), writing == "1") for at, writing in lines]
    return found
