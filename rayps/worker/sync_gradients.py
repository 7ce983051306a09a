"""Workers in step: in each round, all gradients are averaged over the ring, and all workers take the same step.

If the model has sparse tables, these are on servers, and the gradients of their rows are pushed after the step.
"""

from __future__ import annotations

import time
from typing import ClassVar

from torch import Tensor

from rayps.comm.ring import Ring
from rayps.core.topology import Peers
from rayps.data import Batch
from rayps.tensors.flat import Gradient
from rayps.worker.buckets import Buckets
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Worker
from rayps.worker.loop import Loop
from rayps.worker.plan import WorkerPlan
from rayps.worker.ring_worker import RingWorker
from rayps.worker.tables import bind_tables
from rayps.workload.base import Workload


class SyncWorker(RingWorker):
    """A worker whose `mean_grad` averages gradients over the ring while backward continues.

    The other ranks of its host read its gradients in shared memory.
    """

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker, the buckets of its gradients, and the connection to sparse tables. See `Worker`."""
        assert peers.ring is not None, "gradients are averaged over a ring"
        super().__init__(workload, plan, peers, device, gradients=peers.ring.buffer)
        self.ring = self.means.sent
        self._buckets: Buckets | None = None
        if isinstance(self.ring, Ring) and plan.division is None:
            topology = plan.strategy.topology
            size = topology.bucket_mb if isinstance(topology, Peers) else None
            self._buckets = Buckets(self.flat, self.ring, size)
            self.log.choices += [self._buckets.choice] if plan.rank == 0 and plan.size > 1 else []
        if peers.session is not None:
            bind_tables(self, peers.session)

    def grad(self, batch: Batch) -> Gradient:
        """Return the gradient as `Worker.grad` does.

        In the next `step` every parameter has a gradient, which is zero if backward has computed none.
        """
        self._skip(())
        return self._gradient(batch)[0]

    def mean_grad(self, batch: Batch) -> Tensor:
        """Return `ring.mean(grad(batch))`, read-only. It is computed in buckets that are sent while backward continues.

        The next `step` skips the parameters that no rank used. Raises the errors of `grad`, and LinkError if a
        connection fails.
        """
        buckets = self._buckets
        if buckets is None:
            return super().mean_grad(batch)
        began, talked = time.perf_counter(), buckets.seconds
        buckets.begin(batch.size)
        if batch.size:
            self._backward(batch)
        # if this rank's gradient is not finite, report it now, because the other ranks do not know which rank it is
        self._must_be_finite(*(buckets.fault or (self.rank, None)))
        mean, unused = buckets.finish()
        self._skip(unused, mean)
        if buckets.fault is not None:
            self._must_be_finite(*buckets.fault)
        self.meter.compute += time.perf_counter() - began - (buckets.seconds - talked)
        return mean


class SyncGradients(Loop):
    """The loop of strategies in step, whose parameters are equal on all workers."""

    view: ClassVar[type[Worker]] = SyncWorker

    def run_round(self) -> None:
        """Run one round. With sparse tables, look up rows before the round, and push their gradients after it."""
        w = self.w
        if w.tables is None:
            super().run_round()
            return
        step = w.position
        w.tables.begin(step)
        super().run_round()
        w.tables.push(step, float(w.batches.samples))
