"""Workers of one host that all step one vector in shared memory, without locks and without waits for each other."""

from __future__ import annotations

from typing import ClassVar

from rayps.worker.connections import WorkerConnections
from rayps.worker.core import VectorMemory, Worker
from rayps.worker.loops.loop import Loop
from rayps.worker.plan import WorkerPlan
from rayps.worker.ring_worker import RingWorker
from rayps.workload.base import Workload


class SharedVectorWorker(RingWorker):
    """A worker whose parameters are in memory that all workers write. Its gradient and optimizer state are private."""

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker, with parameters in memory of the ring. See `Worker`."""
        assert peers.ring is not None, "the ring allocates the shared memory"
        common = peers.ring.common
        vectors = VectorMemory(parameters=lambda layout: common, keeps_sparse=True)
        super().__init__(workload, plan, peers, device, vectors=vectors)


class SharedVectorSteps(Loop):
    """The loop of strategies whose workers step one shared vector. This vector is saved and evaluated."""

    view: ClassVar[type[Worker]] = SharedVectorWorker
