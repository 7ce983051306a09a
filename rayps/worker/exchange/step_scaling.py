"""The scale of one worker's losses in fp16, and whether the next step is skipped because a gradient has overflowed.

Workers in step skip together and therefore have equal scales. Other workers have scales of their own.
"""

from __future__ import annotations

from torch import Tensor

from rayps.tensors.loss_scale import KEY, LossScale


class StepScaling:
    """`scale` is None unless the precision is fp16; then nothing here has an effect.

    `overflow` is whether the last gradient of this worker is not finite, and `skips` whether the next step is skipped.
    """

    def __init__(self, precision: str | None) -> None:
        self.scale = LossScale() if precision == "fp16" else None
        self.overflow = self.skips = False

    @property
    def factor(self) -> float:
        """The factor by which losses are multiplied for backward."""
        return 1.0 if self.scale is None else self.scale.scale

    @property
    def may_skip(self) -> bool:
        """Whether a gradient that is not finite may be due to the scale, so that its step is skipped."""
        return self.scale is not None and self.scale.may_skip

    @property
    def skipped(self) -> int:
        """The number of steps that were skipped since the start of the run."""
        return 0 if self.scale is None else self.scale.skipped

    @property
    def skipped_by_all(self) -> int:
        """The number of rounds in which, as every worker knows, no worker took a step."""
        return 0 if self.scale is None else self.scale.skipped_by_all

    def decide(self, overflow: bool, *, by_all: bool) -> bool:
        """Adapt the scale, and return `overflow`, which is whether the next step is skipped.

        `by_all`: all workers take this decision together, or there is one worker.
        """
        assert self.scale is not None, "called in fp16"
        self.scale.update(overflow, by_all=by_all)
        self.skips = overflow
        return overflow

    def state(self) -> dict[str, Tensor]:
        """Return the state by name, for checkpoints. It is {} without a scale."""
        return {} if self.scale is None else {KEY: self.scale.state()}

    def take(self, held: dict[str, Tensor]) -> None:
        """Restore the state from the tensors that `state` returned, and remove it from them."""
        found = held.pop(KEY, None)
        if found is not None and self.scale is not None:
            self.scale.load(found)
