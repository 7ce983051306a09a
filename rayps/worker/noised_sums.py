"""The privacy of single rows (DP-SGD), a part of a worker: see `rayps.worker.privacy`, `rayps.privacy.row_level`.

Each worker adds the clipped gradients of the rows that it has drawn. Rank 0 records the release in the ledger and adds
the noise to its part before anything leaves it.

The training loss and metrics of training rows are not reported, and neither is the number of rows drawn, because they
are functions of the rows without noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rayps.data.base import Batch
from rayps.worker.core import Worker
from rayps.worker.rows.private_rows import RowReleases
from rayps.workload.accumulate import micro_batches
from rayps.workload.clipped_sum import ClippedSum


class NoisedSums:
    """Computes one worker's part of each noised sum: see `rayps.worker.privacy.Privacy`."""

    def __init__(self, w: Worker) -> None:
        self._w, self._releases = w, RowReleases(w.plan)
        self._rows = ClippedSum(w.workload, w.part, self._releases.privacy.clip)
        self._reported = False  # whether it was reported that rows are computed one by one

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Open the ledger on rank 0: see `RowReleases.begin`."""
        self._releases.begin(stopped)

    def seed_step(self, step: int) -> None:
        """Set torch's random state from a source that nobody can draw again: see `RowReleases.seed_step`."""
        self._releases.seed_step(step)

    def end_reason(self, step: int) -> str | None:
        """Return why the budget allows no step from `step` on; None if it allows one. All workers return the same."""
        privacy = self._releases.privacy
        return privacy.reason if privacy.end is not None and step >= privacy.end else None

    def close(self) -> None:
        """Close the ledger."""
        self._releases.close()

    def part(self, batch: Batch) -> Tensor:
        """Return the sum of the clipped gradients of a step's rows, on rank 0 with noise. [size], at least float32.

        It is rounded once, after the noise.

        Raises WorkloadError if the user's loss fails, and OSError if the ledger cannot be written.
        """
        w = self._w
        with w.meter.computing():
            total = self._rows.of(micro_batches(batch))
            w.flat.refuse_thawed()
            w.flat.refuse_frozen(w.plan.strategy.name)
            said = self._releases.release(w.position - 1, total)
        if said:
            w.say(**said)
        if self._rows.slow is not None and not self._reported and not w.rank:
            w.event(
                "warning",
                "the gradients of rows are computed one by one, which is slow, because torch.func.vmap cannot run the "
                f"loss ({self._rows.slow}): avoid item(), data-dependent if, and layers that vmap does not support",
            )
            self._reported = True
        return total.to(torch.promote_types(w.layout.dtype, torch.float32))

    @property
    def batch(self) -> int:
        """The logical batch, by which a sum is divided."""
        return self._releases.privacy.batch
