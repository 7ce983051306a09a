"""A workload whose result shows each push: every row of the data has a slot, to which its push adds exactly 1.

A batch is one row, and its loss is minus the number of workers times the slot of the row. The optimizer is SGD with a
rate of 1, and servers and rings divide by the number of workers. Therefore a row adds exactly 1 to its slot in each
epoch under a strategy whose steps are means over workers. All numbers are whole, and exact in float64.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import rayps.data
from rayps.data.base import Batch, Data
from rayps.workload.base import Workload


class _Slots(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.zeros(rows, dtype=torch.float64))


class LedgerWork(Workload):
    """The workload. `workers` must be the job's number of workers; `rows` a multiple of it; `pause` is in seconds."""

    workers: int = 2
    rows: int = 240
    pause: float = 0.05

    def model(self) -> nn.Module:
        """Return the slots, all zero."""
        return _Slots(self.rows)

    def data(self) -> Data:
        """Return the numbers of the rows, one row in a batch."""
        return rayps.data.tensors(torch.arange(self.rows), torch.zeros(self.rows), batch_size=1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss, whose gradient in the batch's slots is minus the number of workers."""
        if torch.is_grad_enabled():  # not in an evaluation
            time.sleep(self.pause)
        slots: Tensor = model.get_parameter("slots")
        return -float(self.workers) * slots[batch.x].sum()

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the mean number of pushes that the batch's slots have."""
        return {"pushes": model.get_parameter("slots")[batch.x].mean()}

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with a rate of 1."""
        return torch.optim.SGD(params, lr=1.0)
