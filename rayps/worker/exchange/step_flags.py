"""Facts of a step that one worker states and all workers learn in the same step, as bytes beside the mean gradient.

A flag is true on all workers if any worker stated it. All workers therefore take the same decision, such as to skip a
step whose gradient has overflowed, without another message.
"""

from __future__ import annotations

import torch
from torch import Tensor

OVERFLOW = 0  # a gradient of this step is infinite or NaN after the scaling of fp16, and the step is skipped
DATA_ENDED = 1  # this worker has no batch for the next round
DATA_LEFT = 2  # this worker has a batch for the next round
DATA_SEEN = 3  # this worker has had a batch in this epoch
EVEN_STEP = 4  # this worker computes the mean of a step with an even number
ODD_STEP = 5  # the same with an odd number
CHANGED = 6  # the user's code has written parameters of this worker in place, and all workers compare theirs
COUNT = 7


class StepFlags:
    """The flags of one worker. `state` sets a flag for the next exchange, and `stated` returns the last exchange's.

    `marks` and `receive` are called by the worker's collective.
    """

    def __init__(self) -> None:
        self._own = [False] * COUNT
        self._all = [False] * COUNT
        self.fresh = False  # whether the flags were exchanged in this round
        self.due = False  # whether all workers have met in this round without exchanging the flags

    def begin(self) -> None:
        """Start a round."""
        self.fresh = self.due = False

    def state(self, flag: int, value: bool = True) -> None:
        """State a flag in the next exchange, or with False take it back."""
        self._own[flag] = value

    def stated(self, flag: int) -> bool:
        """Return whether any worker stated the flag in the last exchange."""
        return self._all[flag]

    def marks(self) -> list[bool]:
        """Return the flags to send: one boolean for each flag."""
        return list(self._own)

    def receive(self, marks: Tensor) -> None:
        """Take the maximum over the workers (uint8 [COUNT]). The flags for the next exchange are false again."""
        self._all, self._own = [bool(mark) for mark in marks.tolist()], [False] * COUNT
        self.fresh = True


def with_flags(used: list[bool], flags: StepFlags) -> Tensor:
    """Return marks [len(used) + COUNT] for a collective that computes maxima."""
    return torch.tensor([*used, *flags.marks()], dtype=torch.uint8)
