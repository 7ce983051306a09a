"""Workers in step on servers, with backup workers: a round closes with the pushes of the first N of N + b workers.

Chen et al., "Revisiting distributed synchronous SGD", ICLR 2016 workshop. A worker with a complete gradient asks the
server of segment 0, and pushes only if it is a member of the round. A worker that is late abandons its gradient, and
computes the same rows again, at the newest parameters. Before an evaluation all workers meet, so that all evaluate the
same parameters.
"""

from __future__ import annotations

import time
from collections import deque
from typing import ClassVar

import torch
from torch import Tensor

from rayps.core.rows.step_members import Members
from rayps.data.base import Batch
from rayps.ps.client.round_arrivals import RoundArrivals
from rayps.tensors.flat import Gradient
from rayps.tensors.snapshot import Snapshot
from rayps.worker.abandon import AbandonHooks, StepAbandoned
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Worker
from rayps.worker.exchange.dropped import DropReports
from rayps.worker.loops.server_steps import ServerSteps, ServerWorker
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.worker.rows.held_portions import must_be_over, portions_of, restore_portions, save_portions
from rayps.workload.base import Workload

LOOK_SECONDS = 0.002  # the least time between two questions whether the present round is decided
LOOK_SHARE = 0.05  # the largest part of a worker's time that these questions take


class MemberServerWorker(ServerWorker):
    """A worker that pushes only the gradients of rounds of which it is a member."""

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker. See `ServerWorker`."""
        super().__init__(workload, plan, peers, device)
        assert peers.session is not None, "the plan of a strategy with servers has a seat"
        self._early = None  # nothing is sent before the members of the round are known
        self._arrivals = RoundArrivals(peers.session)
        self._known: deque[Members] = deque()  # of the present round and of later ones
        self._look_at = 0.0
        self.portions = portions_of(self.batches)
        self.drops = DropReports(self.log, self.size, plan.strategy.topology.late, reports=plan.rank == 0)
        self._hooks = AbandonHooks(self.part.module, self._is_late, compiled=bool(workload.compile))
        if plan.rank == 0:
            shares = self.portions.walk.plan.shares
            message = f"each round closes with the pushes of the first {shares} of {self.size} workers"
            self.log.choices.append({"kind": "choice", "message": message, "members": shares})

    @property
    def is_decided(self) -> bool:
        """Whether the members of the present round are known to this worker."""
        return bool(self._known)

    def push_grad(self, batch: Batch) -> None:
        """Push the gradient of the loss on `batch`, if this worker is a member of the round.

        If it is late, its gradient is not computed to the end, and does not count. Raises the errors of `grad`, and
        LinkError if a connection fails.
        """
        random, needed = torch.get_rng_state(), self.portions.walk.now.needed
        gradient = self._unless_late(batch) if self.portions.has_portion and not self._known else None
        if not self._known:
            ask = self._arrivals.wait if gradient is None else self._arrivals.arrive
            self._known.extend(ask(self.position - 1, needed))
        if gradient is not None and self.rank in self._known[0]:
            self.server.push(gradient)
        else:
            self.meter.drop_losses()
            torch.set_rng_state(random)  # the next gradient of these rows uses the same random numbers
            self.server.step += 1
        self._end_round()

    def miss_round(self) -> None:
        """Go through a round whose members were known before it began: this worker has missed it."""
        self.batches.take(self.plan.end)
        self.server.step += 1
        self._end_round()

    def meet(self) -> None:
        """Wait until all workers have called this before the same round. Raises LinkError if one does not in time."""
        self._arrivals.meet(self.position, self.size)

    def _unless_late(self, batch: Batch) -> Gradient | None:
        """Return the gradient, or None if the round was decided while it was computed."""
        began = time.perf_counter()
        self._look_at = began + LOOK_SECONDS
        try:
            with self._hooks:
                return self.grad(batch)
        except StepAbandoned:
            self.meter.compute += time.perf_counter() - began
            self.flat.drop_grad()
            return None

    def _is_late(self) -> bool:
        now = time.perf_counter()
        if now < self._look_at:
            return False
        self._known.extend(self._arrivals.look(self.position - 1))
        spent = time.perf_counter() - now
        self._look_at = now + spent + max(LOOK_SECONDS, spent / LOOK_SHARE)
        return bool(self._known)

    def _end_round(self) -> None:
        members = self._known.popleft()
        self.drops.add(self.portions.walk.now, members, self.position - 1)
        self.portions.walk.advance(members)


class MemberPushes(ServerSteps):
    """The loop of strategies with servers and backup workers."""

    view: ClassVar[type[Worker]] = MemberServerWorker
    w: MemberServerWorker

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker at the start of the plan, also if the others have closed rounds before it joined."""
        super().__init__(workload, plan, peers, device)
        self.w.position = self.w.server.step = plan.start

    def run_round(self) -> None:
        """Run one round, or go through it if this worker has missed it. See `Loop`.

        Raises ConfigError if the strategy has not called `push_grad`.
        """
        if self.w.is_decided:
            self._skipped_before = self.w.scaling.skipped_by_all
            self._set_rates()
            self.w.miss_round()
        else:
            super().run_round()
            must_be_over(self.w.portions, self.w.position, "push_grad")  # a push of another method was not sent yet

    def end_round(self) -> None:
        """Report the dropped rounds at the end of an epoch. See `Loop`."""
        super().end_round()
        batches = self.w.batches
        epoch, index = batches.epoch_of(batches.position)
        if index == 0:
            self.w.drops.end_epoch(epoch - 1)

    def evaluation_params(self) -> Tensor:
        """Return the servers' parameters after this round, which are the same for all workers. See `ServerSteps`."""
        vector = super().evaluation_params()
        self.w.meet()
        return vector

    def load_state_dict(self, snapshot: Snapshot) -> None:
        """Restore a snapshot, and which rows each worker has. See `Loop`."""
        super().load_state_dict(snapshot)
        restore_portions(self.w.portions, self.w.position, snapshot, self.w.shared)

    def state_dict(self, *, together: bool) -> WorkerPart:
        """Return the worker's part of a checkpoint, with the rows that each worker has. See `Loop`."""
        save_portions(self.w.portions, self.w.shared)
        return super().state_dict(together=together)
