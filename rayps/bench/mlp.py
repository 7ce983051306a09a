"""An MLP as a training step's workload: a few large parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayps import data
from rayps.data import Batch, Data
from rayps.workload.base import Workload

_BATCH, _ROUNDS = 32, 64  # samples per step; steps per epoch


class Mlp(Workload):
    """A workload: an MLP with 64 inputs, two hidden layers and ten classes."""

    def __init__(self, hidden: int, size: int) -> None:
        self._hidden, self._rows = hidden, _BATCH * _ROUNDS * size

    def model(self) -> nn.Module:
        """Make the model: 4.3 million parameters with hidden 2048."""
        n = self._hidden
        return nn.Sequential(nn.Linear(64, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 10))

    def data(self) -> Data:
        """Return random rows, because only the time of a step matters."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self._rows, 64, generator=generator)
        return data.tensors(x, torch.randint(0, 10, (self._rows,), generator=generator), batch_size=_BATCH)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=0.01)
