"""Workers in step: in each round, all gradients are averaged over the ring, and all workers take the same step.

If the model has sparse tables, these are on servers, and the gradients of their rows are pushed after the step.
"""

from __future__ import annotations

import time
from functools import partial
from typing import ClassVar

import torch
from rayps_client.errors import DataError, WorkloadError
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.core.job.user_code import user_code
from rayps.core.metrics import Totals
from rayps.core.strategy.topology import Peers, backup_in
from rayps.data.base import Batch
from rayps.tensors.flat import Gradient
from rayps.tensors.weight_watch import check_alike, explain_evaluation_changed
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import VectorMemory, Worker
from rayps.worker.exchange.buckets import Buckets
from rayps.worker.exchange.step_flags import CHANGED, OVERFLOW, StepFlags
from rayps.worker.exchange.sync_batchnorm import BatchNormSync, synchronize
from rayps.worker.loops.loop import Loop
from rayps.worker.plan import WorkerPlan
from rayps.worker.ring_worker import RingWorker, find_gradient_memory, of_first_rank
from rayps.worker.tables import bind_tables
from rayps.workload.accumulate import Ready, StepLoss
from rayps.workload.base import Workload
from rayps.workload.loss_result import loss_result
from rayps.workload.model_part import Whole
from rayps.workload.precision import autocast


class SyncWorker(RingWorker):
    """A worker whose `mean_grad` averages gradients over the ring while backward continues.

    The other ranks of its host read its gradients in shared memory.
    """

    synchronizes_batchnorm: ClassVar[bool] = True

    def __init__(
        self,
        workload: Workload,
        plan: WorkerPlan,
        peers: WorkerConnections,
        device: str = "cpu",
        *,
        vectors: VectorMemory | None = None,
    ) -> None:
        """Build the worker, the buckets of its gradients, and the connection to sparse tables. See `Worker`."""
        assert peers.ring is not None, "gradients are averaged over a ring"
        if vectors is None and not backup_in(plan.strategy):
            vectors = VectorMemory(find_gradient_memory(peers.ring, device))
        super().__init__(workload, plan, peers, device, vectors=vectors)
        self.ring = self.means.sent
        self._batchnorm: BatchNormSync | None = None
        if workload.sync_batchnorm and plan.size > 1:
            self._batchnorm = synchronize(self.part.module, peers.ring)
            if isinstance(self.part, Whole):  # `_backward` refuses these weights, and the layers are called in step
                self.part.check_weight.is_checked = True
        self._counted: Batch | None = None  # the last batch with rows, if BatchNorm layers are synchronized
        self._buckets: Buckets | None = None
        begins_early = plan.division is None and self.privacy is None and self.members is None
        if isinstance(self.ring, Ring) and begins_early:
            self._buckets = self._make_buckets(self.ring)
            if self._buckets is not None and plan.rank == 0 and plan.size > 1:
                self.log.choices.append(self._buckets.choice)
        if peers.session is not None:
            bind_tables(self, peers.session)

    def of_first_rank(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rank 0's tensors: see `Worker.of_first_rank`. With members, a late worker has its own."""
        return of_first_rank(self.means.exact_ring, tensors) if self.members is None else tensors

    def _make_buckets(self, ring: Ring) -> Buckets | None:
        return Buckets(self.flat, ring, self._bucket_mb, self.flags)

    @property
    def _bucket_mb(self) -> float | None:
        """The size of buckets in 10^6 bytes: 0 means one bucket, None an automatic choice."""
        if self.workload.sync_batchnorm and self.plan.size > 1:
            return 0.0  # the sums of BatchNorm layers use the ring during backward
        topology = self.plan.strategy.topology
        return topology.bucket_mb if isinstance(topology, Peers) else None

    def grad(self, batch: Batch) -> Gradient:
        """Return the gradient as `Worker.grad` does.

        In the next `step` every parameter has a gradient, which is zero if backward has computed none. In fp16 all
        workers must call this together: if the gradient of one has overflowed, the gradient of each is zero, with 0
        samples, and the next `step` does nothing. Also raises LinkError if a connection fails.
        """
        self._refuse_other_exchange()
        self._skip(())
        self._take_part(batch)
        gradient = self._compute_gradient(batch)[0]
        if self.scaling.scale is not None:
            overflow = self.means.exact_ring.max(torch.tensor([self.scaling.overflow], dtype=torch.uint8))
            self._decide(bool(overflow), all_ranks=True)
            if self.scaling.skips:
                gradient.packed.zero_()
                gradient.samples, gradient.skipped = 0, True
        return gradient

    def _average_gradients(self, batch: Batch) -> Tensor:
        """Return the mean gradient of all workers, computed in buckets that are sent while backward continues."""
        buckets = self._buckets
        self._take_part(batch)
        if buckets is None:
            return super()._average_gradients(batch)
        began, talked = time.perf_counter(), buckets.seconds
        self.flat.drop_grad()
        adds = len(batch.parts) > 1
        ready = partial(buckets.begin, adds=adds) if adds else buckets.begin
        found = self._backward(batch, ready) if batch.size else None
        if found is None or not found.weight:
            buckets.begin(0)
        elif self.tables is not None and found.factor != 1:
            self.tables.scale(found.factor)
        may_skip = self.scaling.may_skip
        if not may_skip:
            # if this rank's gradient is not finite, report it now: the other ranks do not know which rank it is
            self._must_be_finite(*(buckets.fault or (self.rank, None)))
        elif buckets.fault is not None:
            self.flags.state(OVERFLOW)
        mean, unused = buckets.finish()
        self._skip(unused, mean)
        if buckets.fault is not None and not may_skip:
            self._must_be_finite(*buckets.fault)
        if self.scaling.scale is not None:
            self._decide(may_skip and (self.flags.stated(OVERFLOW) or buckets.fault is not None), all_ranks=True)
            mean = torch.zeros_like(mean) if self.scaling.skips else mean
        self.clip.mean = mean
        self.meter.compute += time.perf_counter() - began - (buckets.seconds - talked)
        return mean

    def step(self, grad: Gradient | Tensor) -> None:
        """Apply a gradient as `Worker.step` does.

        If the loss of a worker has changed its parameters in place, all workers first compare theirs. Raises
        WorkloadError if these differ.
        """
        self._must_be_alike()
        super().step(grad)

    def _record_parameters(self) -> None:
        if self.size > 1 and self.members is None:
            self.flat.watch.record()

    def _state_changes(self) -> None:
        """State in the next flags whether the user's code has changed parameters since they were recorded."""
        if self.size > 1 and self.members is None and self.flat.watch.touched():
            self.flags.state(CHANGED)

    def _must_be_alike(self) -> None:
        if self.flags.stated(CHANGED) and self.flags.fresh:
            check_alike(self.flat, self.means.exact_ring)

    def _take_part(self, batch: Batch) -> None:
        """Prepare synchronized BatchNorm layers for a batch.

        If the batch is empty, run forward and backward over a batch that does not count, because the layers of the
        other workers wait for the sums of all workers.
        """
        sync = self._batchnorm
        if sync is None:
            return
        sync.rows = float(batch.size)
        if batch.size:
            self._counted = batch
            return
        if self._counted is None:  # this worker has had no rows so far
            self._counted = self._find_any_batch()
        with user_code("loss"):
            with autocast(self.workload, self.device):
                given = self.workload.loss(self.flat.model, self._counted.to(self.device))
            loss_result(given, self._counted.size).total.backward()  # type: ignore[no-untyped-call]
        self.flat.drop_grad()

    def _find_any_batch(self) -> Batch:
        """Return a batch with rows of any worker. Raises DataError if no worker has one."""
        with user_code("data"):
            for rank in range(self.size):
                for batch in self.batches.data.batches(rank=rank, size=self.size, seed=self.plan.seed, epoch=0):
                    if batch.size:
                        return batch
        raise DataError("the data has no row on any worker, and synchronized BatchNorm layers need one")

    def _backward(self, batch: Batch, ready: Ready | None = None) -> StepLoss:
        self._record_parameters()
        found = super()._backward(batch, ready)
        self._state_changes()
        if self._batchnorm is not None and found.weight != batch.size:
            raise WorkloadError(
                "loss(model, batch) returned a pair (sum, weight), and sync_batchnorm is True: return the mean over "
                "the rows of the batch, because synchronized layers weight the workers by their rows"
            )
        return found


class SyncGradients(Loop):
    """The loop of strategies in step, whose parameters are equal on all workers."""

    view: ClassVar[type[Worker]] = SyncWorker
    w: SyncWorker

    def agree(self) -> bool:
        """Exchange the flags, unless they were exchanged with the mean gradient: see `Loop.agree`."""
        self.w.exchange_flags()
        return True

    def evaluate(self, vector: Tensor | None = None) -> Totals:
        """Evaluate the model, which must not change its parameters: see `Loop.evaluate`. Raises WorkloadError."""
        if vector is not None:
            self.w.params = vector
        if self.w.size == 1:
            return super().evaluate()
        with self.w.flat.watch.refusing(explain_evaluation_changed):
            return super().evaluate()

    def _read_flags(self) -> StepFlags:
        return self.w.flags

    def run_round(self) -> None:
        """Run one round. With sparse tables, look up rows before the round, and push their gradients after it."""
        w = self.w
        if w.tables is None:
            super().run_round()
            return
        step = w.position
        w.tables.begin(step)
        super().run_round()
        w.tables.push(step, float(w.batches.weight))
