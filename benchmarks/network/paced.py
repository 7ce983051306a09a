"""Workloads whose backward takes a given time: layers that sleep, and layers that multiply matrices.

All layers have equal numbers of parameters, so the gradients become ready at equal distances in time.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayps import data
from rayps.data import Batch, Data
from rayps.workload.base import Workload

LAYERS = 16
_ROUNDS = 4096  # steps per epoch
NO_BATCH = Batch(None, None, 1)  # what the losses of this module may be called with, because they ignore their batch


def width_of(size: float) -> int:
    """Return the width d of the layers for which `LAYERS` matrices [d, d] in float32 have about `size` bytes."""
    return max(1, round(math.sqrt(size / 4 / LAYERS)))


class PacedWork(Workload):
    """The base class: `LAYERS` matrices [width, width], plain SGD, and batches without content."""

    def __init__(self, width: int, workers: int) -> None:
        self._width, self._workers = width, workers

    def data(self) -> Data:
        """Return rows of zeros, because the models of this module ignore them."""
        return data.tensors(torch.zeros(_ROUNDS * self._workers, 1), batch_size=1)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return a loss, which does not depend on the batch."""

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=1e-3)


class SleepWork(PacedWork):
    """A workload that sleeps: in forward half as long as in backward. It uses no processor while it sleeps."""

    def __init__(self, width: int, workers: int, backward: float) -> None:
        """Set the seconds of a whole backward, without the time to write the gradients."""
        super().__init__(width, workers)
        self._seconds = backward / LAYERS

    def model(self) -> nn.Module:
        """Make the model, whose layers ignore their input."""
        return nn.Sequential(*(_SleepLayer(self._width, self._seconds) for _ in range(LAYERS)))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return a constant."""
        found: Tensor = model(torch.zeros(())).sum()
        return found


class _SleepLayer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight, self._seconds = nn.Parameter(torch.zeros(width, width)), seconds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Sleep.apply(x, self.weight, self._seconds)  # type: ignore[no-untyped-call]
        return found


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.shape, ctx.seconds = weight.shape, seconds
        time.sleep(seconds / 2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, torch.ones(ctx.shape), None


class MatmulWork(PacedWork):
    """A workload that multiplies `rows` rows by each of the matrices. Backward is proportional to `rows`."""

    def __init__(self, width: int, workers: int, rows: int) -> None:
        super().__init__(width, workers)
        self._input = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))

    def model(self) -> nn.Module:
        """Make the model."""
        return nn.Sequential(*(nn.Linear(self._width, self._width, bias=False) for _ in range(LAYERS)))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean square of the last layer's output."""
        found: Tensor = model(self._input).square().mean()
        return found
