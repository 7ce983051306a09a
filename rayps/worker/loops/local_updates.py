"""Workers that train separately and average periodically: local SGD, DiLoCo, parallel SGD, ADMM.

Between two averages the workers' parameters, optimizer states, buffers and the strategy's `memory` differ. A checkpoint
has all of these for each rank, and a run resumes in the middle of a period with bit-for-bit equal results. The
checkpoint's parameters are the consensus at that moment (`Strategy.consensus`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rayps.tensors import weight_average
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.training_state import TrainingState
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import VectorMemory, Worker
from rayps.worker.exchange.step_flags import StepFlags
from rayps.worker.loops.loop import Loop
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.worker.ring_worker import RingWorker, find_gradient_memory, of_first_rank
from rayps.workload.base import Workload


class LocalWorker(RingWorker):
    """A worker that steps by its own gradients. Only the vectors that the strategy averages are sent and compressed."""

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker, with gradients in memory of the ring. See `Worker`."""
        assert peers.ring is not None, "workers average over a ring"
        super().__init__(workload, plan, peers, device, vectors=VectorMemory(find_gradient_memory(peers.ring, device)))

    def of_first_rank(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rank 0's tensors: see `Worker.of_first_rank`."""
        return of_first_rank(self.means.exact_ring, tensors)


class LocalUpdates(Loop):
    """The loop of strategies whose workers have separate parameters between averages."""

    view: ClassVar[type[Worker]] = LocalWorker
    w: LocalWorker

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker. See `Loop`."""
        super().__init__(workload, plan, peers, device)
        self._agreed: tuple[Tensor | None] | None = None  # the consensus of this round; None until it is computed

    def run_round(self) -> None:
        """Drop the consensus of the previous round, and run one round. See `Loop`."""
        self._agreed = None
        super().run_round()

    def agree(self) -> bool:
        """Exchange the flags if the workers have averaged in this round: see `Loop.agree`."""
        flags = self.w.flags
        if flags.due:
            self.w.exchange_flags()
        return flags.fresh

    def _read_flags(self) -> StepFlags:
        return self.w.flags

    def finish(self) -> None:
        """End the plan, after which all workers have the consensus. See `Loop`."""
        self._agreed = None
        super().finish()
        self._agreed = None

    def consensus(self) -> Tensor | None:
        """Return the consensus. It is computed once per round, for the checkpoint and the evaluation. See `Loop`."""
        if self._agreed is None:
            self._agreed = (super().consensus(),)
        return self._agreed[0]

    def _average_state(self) -> dict[str, Any]:
        """Return the worker's own memory, because the workers' parameters differ.

        The average of an earlier phase, which is equal on all workers, is copied into it.
        """
        w = self.w
        if weight_average.PARAMS not in w.memory:
            w.memory |= {name: value.clone() for name, value in weight_average.select_average(w.shared).items()}
        return w.memory

    def _average_over_job(self, own: Tensor) -> Tensor:
        """Return the mean of the workers' averages, which is the average of the mean of their parameters."""
        return self.w.mean(own, exact=True)

    def state_dict(self, *, together: bool) -> WorkerPart:
        """Return this worker's own state, with the consensus if `together`. See `Loop`."""
        w = self.w
        assert w.local is not None, "each worker has an optimizer"
        w.means.settle()
        memory = {
            name: _copy_tensor(value) for name, value in w.memory.items() if isinstance(value, (Tensor, int, float))
        }
        memory |= w.means.feedback() | w.scaling.state()
        own = TrainingState(w.flat.vector.cpu().clone(), w.local.moments(), self.buffers(), memory)
        agreed = self.consensus() if together else None
        common = (own.params if agreed is None else agreed) if together else None
        return self._make_part(common, own.moments, own)

    def _load(self, state: Snapshot | TrainingState) -> None:
        """Restore this worker's own part of a snapshot, or the consensus if the snapshot has no such part."""
        own = state.own.get(self.w.rank) if isinstance(state, Snapshot) else state
        super()._load(state if own is None else own)
        if own is not None:
            memory = dict(own.memory)
            self.w.scaling.take(memory)
            self.w.memory = {name: value.clone().to(self.w.device) for name, value in memory.items()}
            self.w.means.restore(self.w.memory)


def _copy_tensor(value: Tensor | float) -> Tensor:
    return value.cpu().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
