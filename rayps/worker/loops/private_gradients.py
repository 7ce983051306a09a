"""Workers in step under row-level differential privacy (DP-SGD): see `rayps.privacy.row_level`.

Each worker adds the clipped gradients of the rows that it has drawn. Rank 0 records the release in the ledger and adds
the noise to its part before anything leaves it. On a ring the parts are then summed, and every worker divides the sum
by the logical batch and steps. With servers each worker pushes its part, and the servers step by the sum divided by the
logical batch.

The training loss and metrics of training rows are not reported, and neither is the number of rows drawn, because they
are functions of the rows without noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NoReturn

import torch
from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.data.base import Batch
from rayps.tensors.flat import Gradient
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Worker
from rayps.worker.loops.loop import Loop
from rayps.worker.loops.server_steps import ServerSteps, ServerWorker
from rayps.worker.plan import WorkerPlan
from rayps.worker.ring_worker import RingWorker
from rayps.worker.rows.private_rows import RowReleases
from rayps.workload.accumulate import micro_batches
from rayps.workload.base import Workload
from rayps.workload.clipped_sum import ClippedSum


class NoisedSums:
    """Computes one worker's part of each noised sum."""

    def __init__(self, w: Worker) -> None:
        self._w, self.releases = w, RowReleases(w.plan)
        self._rows = ClippedSum(w.workload, w.part, self.releases.privacy.clip)
        self._reported = False  # whether it was reported that rows are computed one by one

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
            said = self.releases.release(w.position - 1, total)
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
        return self.releases.privacy.batch


class PrivateRingWorker(RingWorker):
    """A worker whose `mean_grad` returns the noised sum of clipped gradients, divided by the logical batch."""

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker. See `Worker`."""
        super().__init__(workload, plan, peers, device)
        self.sums = NoisedSums(self)

    def batch(self) -> Batch:
        """Return the rows that this worker has drawn: see `Worker.batch`."""
        return Worker.batch(self)

    def mean_grad(self, batch: Batch) -> Tensor:
        """Return the noised mean. Raises the errors of `NoisedSums.part`, and LinkError if a connection fails."""
        total = self.sums.part(batch)
        self.means.exact_ring.sum(total)
        self._skip(())
        mean = self.clip.mean = (total / self.sums.batch).to(self.flat.vector.dtype)
        return mean

    def grad(self, batch: Batch) -> Gradient:
        """Raise ConfigError: it would be a gradient without noise."""
        _refuse("mean_grad")


class PrivatePushWorker(ServerWorker):
    """A worker whose `push_grad` pushes its part of the noised sum."""

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker and connect it to the servers. See `ServerWorker`."""
        super().__init__(workload, plan, peers, device)
        self.sums = NoisedSums(self)

    def push_grad(self, batch: Batch) -> None:
        """Push this worker's part: the servers' mean of N parts times N / L is the sum divided by L.

        Raises the errors of `NoisedSums.part`, and LinkError if a connection fails.
        """
        with self.refusing_changes("loss"):
            part = self.sums.part(batch)
        gradient = Gradient(self.flat.packed, 1)
        self.server.settle()  # the vector must not change before the last push has left
        gradient.vector.copy_(part.mul_(self.size / self.sums.batch))
        self.server.push(gradient)

    def grad(self, batch: Batch) -> Gradient:
        """Raise ConfigError: it would be a gradient without noise."""
        _refuse("push_grad")


class BudgetedLoop(Loop):
    """A loop that opens the ledger at its begin, and ends the phase when the budget is spent."""

    w: PrivateRingWorker | PrivatePushWorker

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Open the ledger, and end the phase if the budget allows no step. See `Loop`."""
        super().begin(stopped)
        self.w.sums.releases.begin(stopped)
        end_by_budget(self.w, self.w.sums.releases)

    def run_round(self) -> None:
        """Run a step, with random numbers of the model that nobody can draw again. See `Loop`."""
        self.w.sums.releases.seed_step(self.w.position)
        super().run_round()

    def end_round(self) -> None:
        """End the phase if the budget allows no further step. See `Loop`."""
        end_by_budget(self.w, self.w.sums.releases)

    def close(self) -> None:
        """Release the loop's resources, and close the ledger. See `Loop`."""
        super().close()
        self.w.sums.releases.close()


class PrivateGradients(BudgetedLoop):
    """The loop of private workers on a ring."""

    view: ClassVar[type[Worker]] = PrivateRingWorker
    w: PrivateRingWorker


class PrivatePushes(BudgetedLoop, ServerSteps):
    """The loop of private workers with servers."""

    view: ClassVar[type[Worker]] = PrivatePushWorker
    w: PrivatePushWorker


def end_by_budget(w: Worker, releases: RowReleases) -> None:
    """End the phase on all workers in the same round, after the last step that the budget allows."""
    privacy = releases.privacy
    if privacy.end is not None and w.position >= privacy.end:
        w.done, w.reason = True, privacy.reason


def _refuse(way: str) -> NoReturn:
    raise ConfigError(
        f"under privacy a strategy's round calls w.{way}(batch), which clips the gradient of each row and adds noise, "
        "and not w.grad, whose result has no noise: change the strategy's round, or leave out privacy",
        field="privacy",
    )
