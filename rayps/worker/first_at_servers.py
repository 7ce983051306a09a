"""The first gradients of a round on servers, with backup workers: the round closes with their pushes.

A worker with a complete gradient asks the server of segment 0, and pushes only if it is a member of the round. A worker
that is late abandons its gradient, and computes the same rows again, at the newest parameters. Before an evaluation all
workers meet, so that all evaluate the same parameters. See `rayps.worker.first_arrivals`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from rayps.core.rows.step_members import Members
from rayps.data.base import Batch
from rayps.ps.client.round_arrivals import RoundArrivals
from rayps.tensors.flat import Gradient
from rayps.worker.connections import WorkerConnections
from rayps.worker.first_arrivals import FirstArrivals
from rayps.worker.members import Send

if TYPE_CHECKING:
    from rayps.worker.loops.server_steps import ServerWorker

LOOK_SECONDS = 0.002  # the least time between two questions whether the present round is decided
LOOK_SHARE = 0.05  # the largest part of a worker's time that these questions take


class FirstAtServers(FirstArrivals):
    """The members of a round on servers, as the server of segment 0 decides."""

    method: ClassVar[str] = "push_grad"
    choice: ClassVar[str] = "each round closes with the pushes of the first {shares} of {size} workers"
    _w: ServerWorker

    def __init__(self, w: ServerWorker, peers: WorkerConnections) -> None:
        """Prepare this worker's questions about the members."""
        super().__init__(w)
        assert peers.session is not None, "the plan of a strategy with servers has a seat"
        self._arrivals = RoundArrivals(peers.session)
        self._known: deque[Members] = deque()  # of the present round and of later ones
        self._look_at = 0.0

    def begin(self) -> None:
        """Do nothing: the servers know from where the rounds begin."""

    def run_round(self, call: Callable[[], None]) -> None:
        """Run the strategy's round, or go through the round if its members were known before it began."""
        if not self._known:
            super().run_round(call)
            return
        w = self._w
        w.batches.take(w.plan.end)
        w.server.step += 1
        self._end_step(self._known.popleft(), torch.get_rng_state())

    def exchange(self, batch: Batch, send: Send) -> None:
        """Push the gradient of the loss on `batch`, if this worker is a member of the round.

        If it is late, its gradient is not computed to the end, and does not count. Raises the errors of
        `ServerWorker.grad`, and LinkError if a connection fails.
        """
        w, random, needed = self._w, torch.get_rng_state(), self._portions.walk.now.needed
        gradient = self._attempt(partial(self._compute, batch))
        if not self._known:
            ask = self._arrivals.wait if gradient is None else self._arrivals.arrive
            self._known.extend(ask(w.position - 1, needed))
        members = self._known.popleft()
        if gradient is not None and w.rank in members:
            w.server.push(gradient)
        else:
            send(None)
        self._end_step(members, random)

    def meet(self) -> None:
        """Wait until all workers have called this before the same round. Raises LinkError if one does not in time."""
        self._arrivals.meet(self._w.position, self._w.size)

    def close(self) -> None:
        """Do nothing: the connection to the servers is not this part's own."""

    def _compute(self, batch: Batch) -> Gradient:
        self._look_at = time.perf_counter() + LOOK_SECONDS
        return self._w.grad(batch)

    def _is_late(self) -> bool:
        return bool(self._known)

    def _look(self) -> bool:
        now = time.perf_counter()
        if now < self._look_at:
            return False
        self._known.extend(self._arrivals.look(self._w.position - 1))
        spent = time.perf_counter() - now
        self._look_at = now + spent + max(LOOK_SECONDS, spent / LOOK_SHARE)
        return bool(self._known)
