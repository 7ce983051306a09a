"""Workers in step with backup workers: the mean gradient of the first N of N + b workers is applied on all of them.

Chen et al., "Revisiting distributed synchronous SGD", ICLR 2016 workshop. The members of a step are agreed before a
gradient is sent, so that nothing is sent while backward continues. A worker that is late abandons its gradient, applies
the means of the steps that it has missed, in order, and computes the same rows again. No worker waits for it: a thread
takes part in each sum on its behalf (`rayps.comm.ring.member_means`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, NoReturn

import torch
from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.comm.ring.member_means import MemberMeans
from rayps.core.strategy.strategy_families import MEMBER_GRADIENTS
from rayps.data.base import Batch
from rayps.tensors.flat import Gradient
from rayps.tensors.snapshot import Snapshot
from rayps.worker.abandon import AbandonHooks, StepAbandoned
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Worker
from rayps.worker.exchange.dropped import DropReports
from rayps.worker.exchange.step_flags import COUNT, OVERFLOW, with_flags
from rayps.worker.loops.loop import Loop
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.worker.ring_worker import RingWorker
from rayps.worker.rows.held_portions import must_be_over, portions_of, restore_portions, save_portions
from rayps.workload.base import Workload


class MemberWorker(RingWorker):
    """A worker whose `mean_grad` returns the mean gradient of the members of the step.

    In a round it is called once, with the round's batch; the worker has no other collective.
    """

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker, and its part in the means. See `Worker`."""
        super().__init__(workload, plan, peers, device)
        ring = peers.ring
        assert ring is not None, "gradients are averaged over a ring"
        marks = len(self.layout.entries) + COUNT
        self.members = MemberMeans(ring, self.layout.size, self.layout.dtype, marks, plan.timeout)
        self.ring = _NoCollectives()
        self.portions = portions_of(self.batches)
        self.drops = DropReports(self.log, self.size, plan.strategy.topology.late, reports=plan.rank == 0)
        self._waited = self._talked = 0.0
        self.meter.sources = [lambda: (self._waited, 0.0, ring.bytes_sent)]
        self._hooks = AbandonHooks(self.part.module, self._is_late, compiled=bool(workload.compile))
        if plan.rank == 0:
            shares = self.portions.walk.plan.shares
            message = f"each step is the mean of the first {shares} of {self.size} gradients, sent after backward"
            self.log.choices.append({"kind": "choice", "message": message, "members": shares})

    def _is_late(self) -> bool:
        return self.members.is_late(self.position - 1)

    def mean_grad(self, batch: Batch) -> Tensor:
        """Return the mean gradient of the step's members, read-only, valid until the next call.

        If this worker is late, its own gradient is not computed to the end, and does not count. The next `step` skips
        the parameters that no member used. Raises the errors of `grad`, and LinkError if a connection fails.
        """
        step, random = self.position - 1, torch.get_rng_state()
        arrives = self.portions.has_portion and not self._is_late() and self._offer(step, batch)
        began = time.perf_counter()
        found = self.members.take(step, limited=arrives)
        self._waited += time.perf_counter() - began
        if self.rank not in found.members:
            self.meter.drop_losses()
            torch.set_rng_state(random)  # the next gradient of these rows uses the same random numbers
        self.drops.add(self.portions.walk.now, found.members, step)
        self.portions.walk.advance(found.members)
        self.flags.receive(found.marks[-COUNT:])
        if self.scaling.scale is not None:
            self._decide(self.flags.stated(OVERFLOW), all_ranks=True)
        self._skip([i for i, used in enumerate(found.marks[:-COUNT].tolist()) if not used])
        mean = self.clip.mean = found.mean.to(self.flat.vector)
        return mean

    def _offer(self, step: int, batch: Batch) -> bool:
        """Compute and offer this worker's gradient. Return False if the step was abandoned."""
        began = time.perf_counter()
        try:
            with self._hooks:
                gradient, used = self._gradient(batch)
        except StepAbandoned:
            self.meter.compute += time.perf_counter() - began
            self.flat.drop_grad()
            return False
        if self.scaling.overflow:
            self.flags.state(OVERFLOW)
        self.members.offer(step, gradient.vector, gradient.samples, with_flags(used, self.flags))
        return True

    def grad(self, batch: Batch) -> Gradient:
        """Raise ConfigError: a worker's own gradient may be dropped, and only `mean_grad` knows."""
        _refuse()

    def mean(self, vector: Tensor, samples: float = 1.0, *, exact: bool = False) -> Tensor:
        """Raise ConfigError: a late worker does not take part in other collectives."""
        _refuse()

    def mean_later(self, vector: Tensor, samples: float = 1.0, *, slot: int = 0) -> Tensor:
        """Raise ConfigError: a late worker does not take part in other collectives."""
        _refuse()

    def sync_optimizer_and_buffers(self, samples: float, *, momentum: str, buffers: str) -> None:
        """Raise ConfigError: a late worker does not take part in other collectives."""
        _refuse()


class MemberGradients(Loop):
    """The loop of strategies in step with backup workers. All workers apply the same means, late workers later."""

    view: ClassVar[type[Worker]] = MemberWorker
    w: MemberWorker

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Start the thread that takes part in the steps. See `Loop`."""
        super().begin(stopped)
        self.w.members.start(self.w.portions.walk.copy(), self.w.plan.end)

    def run_round(self) -> None:
        """Run one round. Raises ConfigError if the strategy has not called `mean_grad`. See `Loop`."""
        super().run_round()
        must_be_over(self.w.portions, self.w.position, "mean_grad")

    def end_round(self) -> None:
        """Report the dropped steps at the end of an epoch. See `Loop`."""
        super().end_round()
        batches = self.w.batches
        epoch, index = batches.epoch_of(batches.position)
        if index == 0:
            self.w.drops.end_epoch(epoch - 1)

    def load_state_dict(self, snapshot: Snapshot) -> None:
        """Restore a snapshot, and which rows each worker has. See `Loop`."""
        super().load_state_dict(snapshot)
        restore_portions(self.w.portions, self.w.position, snapshot, self.w.shared)

    def state_dict(self, *, together: bool) -> WorkerPart:
        """Return the worker's part of a checkpoint, with the rows that each worker has. See `Loop`."""
        save_portions(self.w.portions, self.w.shared)
        return super().state_dict(together=together)

    def close(self) -> None:
        """Release the loop's resources, and end the thread. See `Loop`."""
        super().close()
        self.w.members.close()


class _NoCollectives:
    """Stands for the ring of a worker whose rounds must not use it."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise ConfigError(
        f"with backup workers (the loop {MEMBER_GRADIENTS}) a strategy's round calls mean_grad(batch) once, and no "
        "other collective, because a late worker takes part in none: call w.mean_grad, or leave out backup",
        field="backup",
    )
