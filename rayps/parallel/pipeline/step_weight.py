"""The weight of a pipeline's step, which only the last stage knows if losses are pairs (sum, weight).

The engine weights the loss of a micro-batch by its fraction of the batch's rows, which all stages know. If losses are
pairs, the last stage divides each sum by one number instead, the weight of the first micro-batch. After the step it
sends the total weight to the other stages, and what remains is a factor of all gradients. At the first step it also
sends which kind the losses are. If they are means, nothing is sent after later steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.workload.accumulate import StepLoss
from rayps.workload.loss_result import LossResult, is_pair, whole


class StepWeight:
    """The weight of a step, and the factor of its gradients, on all stages of a pipeline."""

    def __init__(self, ring: Ring) -> None:
        """Prepare for the steps of the stages of `ring`."""
        self._ring = ring
        self._pairs: bool | None = None  # whether the losses on the last stage are pairs; None before the first loss
        self._agreed: bool | None = None  # the same as all stages know it; None before the first step
        self._weight = self._divisor = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._weight = self._divisor = 0.0

    def add(self, found: LossResult, fraction: float) -> Tensor:
        """Return what the last stage gives the engine as the loss of a micro-batch.

        `fraction` is that of the batch's rows, by which the engine multiplies the gradient.

        Raises WorkloadError if the loss is a pair for one micro-batch and a mean for another.
        """
        self._pairs = is_pair(found, self._pairs)
        if found.weight is None:
            return found.total
        self._weight += found.weight
        self._divisor = self._divisor or found.weight
        return found.total / (self._divisor * fraction) if found.weight else found.total

    def finish(self, mean: float | None, rows: int) -> StepLoss:
        """Return the step's loss. All stages must call this together. Raises LinkError if a connection fails.

        `mean` is what the engine returned: None on all stages but the last. `rows` is the number of the batch's rows.
        """
        if self._agreed is None or self._agreed:
            found = torch.tensor([float(bool(self._pairs)), self._weight, self._divisor], dtype=torch.float64)
            pairs, self._weight, self._divisor = self._ring.broadcast(found, root=self._ring.size - 1).tolist()
            self._agreed = bool(pairs)
        if not self._agreed:
            return StepLoss(mean, rows)
        weight = self._weight
        factor = self._divisor / weight if weight else 1.0
        if mean is not None:
            mean = mean * factor if weight else math.nan
        return StepLoss(mean, whole(weight), factor)
