"""A workload whose result shows each push: every row of the data has a slot, to which its push adds exactly 1.

The loss of a batch is minus the number of rows of a whole step times the mean of the slots of the batch's rows. The
optimizer is SGD with a rate of 1, and a step is the mean over the rows of all workers, or, asynchronous, the workers'
pushes are divided by their number. Therefore a row adds exactly 1 to its slot in each epoch. All numbers are whole, and
exact in float64, if a batch is one row. Where the number of workers that divides a push changes, the optimizer steps by
the signs of the gradient.

The schedule leaves the rate as it is, and refuses a step that the job does not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from rayps_client.errors import WorkloadError
from torch import Tensor, nn

import rayps.data
from rayps.data.base import Batch, Data
from rayps.workload.base import Workload


class _Slots(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.zeros(rows, dtype=torch.float64))


class LedgerWork(Workload):
    """The workload. `step_rows`: the rows of a step, of all workers together; `rows`: a multiple of it.

    A worker's batch is one row. With a fixed number of workers, `step_rows` is this number. `pause` is in seconds.
    `signs`: whether the optimizer steps by signs. `steps`: the number of the job's rounds; 0 if there is no schedule.
    """

    step_rows: int = 2
    rows: int = 240
    pause: float = 0.05
    signs: bool = False
    steps: int = 0

    def model(self) -> nn.Module:
        """Return the slots, all zero."""
        return _Slots(self.rows)

    def data(self) -> Data:
        """Return the numbers of the rows, one row in a batch."""
        return rayps.data.tensors(torch.arange(self.rows), torch.zeros(self.rows), batch_size=1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss, whose gradient in the batch's slots is minus `step_rows` divided by the batch's rows."""
        if torch.is_grad_enabled():  # not in an evaluation
            time.sleep(self.pause)
        slots: Tensor = model.get_parameter("slots")
        return -float(self.step_rows) * slots[batch.x].mean()

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the mean number of pushes that the batch's slots have."""
        return {"pushes": model.get_parameter("slots")[batch.x].mean()}

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with a rate of 1, or Rprop whose step of each element is always 1."""
        if self.signs:
            return torch.optim.Rprop(params, lr=1.0, step_sizes=(1.0, 1.0))
        return torch.optim.SGD(params, lr=1.0)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Callable[[int], float] | None:
        """Return the factor 1 for each step of the job."""
        return self._factor if self.steps else None

    def _factor(self, step: int) -> float:
        if not 0 <= step < self.steps:
            raise WorkloadError(f"the schedule is asked for step {step}, and the job has {self.steps}")
        return 1.0
