"""The job of `python -m benchmarks secure`: a network of numpy's size on the server's side, which only evaluates it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import rayps
from rayps.data.base import Data


class Wide(rayps.Workload):
    """A network 784-hidden-10. The service's side has no training data."""

    hidden: int = 250

    def model(self) -> nn.Module:
        """Return the network."""
        return nn.Sequential(nn.Linear(784, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def data(self) -> Data:
        """Raise an error: the clients have the data."""
        raise RuntimeError("the clients have the data")

    def evaluation_data(self) -> Data:
        """Return eight random rows."""
        made = torch.Generator().manual_seed(0)
        return rayps.data.tensors(torch.rand(8, 784, generator=made), torch.arange(8) % 10, batch_size=8)

    def loss(self, model: nn.Module, batch: rayps.Batch) -> Tensor:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch.x), batch.y)
