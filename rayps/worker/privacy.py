"""The part of a worker that makes what leaves it private. A worker without privacy has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from rayps.core.rooms import load
from rayps.data.base import Batch
from rayps.worker.loops.loop_of_family import ROW_PRIVACY

if TYPE_CHECKING:
    from rayps.worker.core import Worker


class Privacy(Protocol):
    """Computes a worker's part of each private sum, in place of the gradient of its batch.

    The exchange adds the parts of all workers, and divides the sum by `batch`.
    """

    @property
    def batch(self) -> int:
        """The logical batch, by which a sum is divided."""

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Prepare the first step. `stopped` returns whether the plan was ended from outside."""

    def seed_step(self, step: int) -> None:
        """Set torch's random state for the model's random numbers in a step."""

    def part(self, batch: Batch) -> Tensor:
        """Return this worker's part of the sum over a step's rows, [size] in at least float32."""

    def end_reason(self, step: int) -> str | None:
        """Return why no step from `step` on may be taken; None if one may."""

    def close(self) -> None:
        """Release what `begin` has opened."""


def make_privacy(w: Worker) -> Privacy | None:
    """Return the privacy of a worker under its plan; None without one."""
    private = w.plan.private
    made: Privacy | None = None if private is None or private.rows is None else load(ROW_PRIVACY)(w)
    return made
