"""A small workload that records when its first steps take place: what `python -m benchmarks start` trains."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rayps import data
from rayps.data import Batch, Data
from rayps.workload.base import Workload

BATCH = 32  # rows of a batch; the trial of the preflight has fewer rows, and is not recorded
STEPS = 3  # steps of a run: the second loss shows that the first step has ended
_RECORDED = 2  # losses that a worker records


class FirstSteps(Workload):
    """A workload: an MLP on random rows, whose workers append the time of their first two losses to files."""

    folder: str = ""  # one file for each process, with a line for each recorded loss: the wall clock in seconds
    width: int = 64

    def model(self) -> nn.Module:
        """Make the model, with 64 inputs and ten classes."""
        return nn.Sequential(nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, 10))

    def data(self) -> Data:
        """Return random rows, enough for 16 workers."""
        generator = torch.Generator().manual_seed(1)
        rows = BATCH * STEPS * 16
        x = torch.randn(rows, 64, generator=generator)
        return data.tensors(x, torch.randint(0, 10, (rows,), generator=generator), batch_size=BATCH)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy, and record the time at which it was called."""
        if self.folder and model.training and batch.size == BATCH:
            record(Path(self.folder))
        return nn.functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=0.01)


_recorded: dict[Path, int] = defaultdict(int)


def record(folder: Path) -> None:
    """Append the wall clock to this process's file, unless the first losses have been recorded."""
    if _recorded[folder] < _RECORDED:
        now = time.time()
        _recorded[folder] += 1
        with (folder / str(os.getpid())).open("a") as file:
            file.write(f"{now!r}\n")


def read_first_times(folder: Path, workers: int) -> tuple[float, float] | None:
    """Return the times at which the last of the workers called its first loss, and its second, or None if too early."""
    found = [[float(line) for line in path.read_text().split()] for path in folder.iterdir()]
    if len(found) != workers or any(len(times) < _RECORDED for times in found):
        return None
    return max(times[0] for times in found), max(times[1] for times in found)
