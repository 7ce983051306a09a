"""The factor by which a loss in fp16 is multiplied for backward, so that small gradients do not become 0. Pure.

Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2. The rule is that of `torch.amp.GradScaler`
with its defaults: a step whose gradient is not finite is skipped and halves the scale, and 2000 steps in succession
without a skip double it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KEY = "loss_scale"  # the name of the state among a worker's tensors
START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
# at this scale the gradient itself, not only its multiple, is too large for fp16 or is NaN
SMALLEST = 1.0


class LossScale:
    """The scale, the number of steps since it changed or a step was skipped, and the number of skipped steps.

    A schedule does not count skipped steps: if servers have counted them before, `skipped` begins with their number.
    `skipped_by_all` is the number of rounds in which, as every worker knows, no worker took a step.
    """

    def __init__(self, scale: float = START) -> None:
        self.scale, self._steps, self.skipped, self.skipped_by_all = scale, 0, 0, 0

    @property
    def may_skip(self) -> bool:
        """Whether a gradient that is not finite may be due to the scale. If not, it is an error of the model."""
        return self.scale > SMALLEST

    def update(self, overflow: bool, *, by_all: bool = False) -> None:
        """Count a step. `overflow`: its gradient is not finite, and the step is skipped, `by_all` workers together."""
        self._steps += 1
        if overflow:
            self.scale, self._steps = max(SMALLEST, self.scale * BACKOFF), 0
            self.skipped += 1
            self.skipped_by_all += by_all
        elif self._steps == INTERVAL:
            self.scale, self._steps = self.scale * GROWTH, 0

    def state(self) -> Tensor:
        """Return the state, float64 [4], for checkpoints."""
        return torch.tensor([self.scale, self._steps, self.skipped, self.skipped_by_all], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Restore what `state` returned."""
        scale, steps, skipped, by_all = state.tolist()
        self.scale, self._steps, self.skipped, self.skipped_by_all = scale, int(steps), int(skipped), int(by_all)


def count_skipped(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of steps that a worker has skipped, by its tensors. It is 0 without a scale."""
    return int(tensors[KEY][2]) if KEY in tensors else 0


def with_skipped(tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return a worker's tensors with `count` as the number of skipped steps, if there is a scale among them."""
    if KEY not in tensors:
        return dict(tensors)
    state = tensors[KEY].clone()
    state[2] = count
    return {**tensors, KEY: state}


def count_skipped_by_all(tensors: Mapping[str, Any]) -> int:
    """Return the number of rounds that all workers skipped, by a worker's tensors. It is 0 without a scale."""
    return int(tensors[KEY][3]) if KEY in tensors else 0
