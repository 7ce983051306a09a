"""Workers that take steps of their own and meet now and then: local SGD, DiLoCo, parallel SGD, ADMM.

Between two meetings the workers' parameters differ, and with them optimizer state, buffers and what the strategy keeps
in `memory`. A checkpoint holds all of it, by rank, so that a run continues from the middle of a period bit for bit;
its parameters are what the workers would agree on at that moment (`Strategy.consensus`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rayps.tensors.local_state import LocalState
from rayps.tensors.snapshot import Snapshot
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Worker
from rayps.worker.loop import Loop
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.worker.ring_worker import RingWorker
from rayps.workload.base import Workload


class LocalWorker(RingWorker):
    """A worker whose gradients stay with it: what the strategy averages travels, and only that is compressed."""

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """See `Worker`."""
        assert peers.ring is not None, "workers meet over a ring"
        super().__init__(workload, plan, peers, device, gradients=peers.ring.buffer)


class LocalUpdates(Loop):
    """Each worker has parameters of its own between meetings."""

    view: ClassVar[type[Worker]] = LocalWorker
    w: LocalWorker

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """See `Loop`."""
        super().__init__(workload, plan, peers, device)
        self._agreed: tuple[Tensor | None] | None = None  # of this round, once it was asked for

    def run_round(self) -> None:
        """See `Loop`."""
        self._agreed = None
        super().run_round()

    def finish(self) -> None:
        """See `Loop`."""
        self._agreed = None
        super().finish()
        self._agreed = None

    def consensus(self) -> Tensor | None:
        """See `Loop`: asked for once a round, although it is both saved and evaluated."""
        if self._agreed is None:
            self._agreed = (super().consensus(),)
        return self._agreed[0]

    def state_dict(self, *, together: bool) -> WorkerPart:
        """See `Loop`. The part holds what this worker alone has; common parameters only if `together`."""
        w = self.w
        assert w.local is not None, "each worker has an optimizer"
        w.means.settle()
        memory = {name: _tensor(value) for name, value in w.memory.items() if isinstance(value, (Tensor, int, float))}
        memory |= w.means.feedback()
        own = LocalState(w.flat.vector.cpu().clone(), w.local.moments(), self.buffers(), memory)
        agreed = self.consensus() if together else None
        common = (own.params if agreed is None else agreed) if together else None
        return self._part(common, own.moments, own)

    def _load(self, state: Snapshot | LocalState) -> None:
        """Of a snapshot, this worker's own part, where there is one."""
        own = state.own.get(self.w.rank) if isinstance(state, Snapshot) else state
        super()._load(state if own is None else own)
        if own is not None:
            self.w.memory = {name: value.clone().to(self.w.device) for name, value in own.memory.items()}
            self.w.means.restore(self.w.memory)


def _tensor(value: Tensor | float) -> Tensor:
    return value.cpu().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
