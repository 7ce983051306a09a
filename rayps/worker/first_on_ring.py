"""The first gradients of a step on a ring, with backup workers: their mean is applied on all workers.

A worker that is late abandons its gradient, applies the means of the steps that it has missed, in order, and computes
the same rows again. No worker waits for it: a thread takes part in each sum on its behalf
(`rayps.comm.ring.member_means`). See `rayps.worker.first_arrivals`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from rayps.comm.ring.member_means import MemberMeans
from rayps.data.base import Batch
from rayps.worker.connections import WorkerConnections
from rayps.worker.exchange.step_flags import COUNT
from rayps.worker.first_arrivals import FirstArrivals
from rayps.worker.members import Send, other_exchange

if TYPE_CHECKING:
    from rayps.worker.ring_worker import RingWorker


class FirstOnRing(FirstArrivals):
    """The members of a step on a ring. From `begin` on, its thread is the only one that uses the ring."""

    method: ClassVar[str] = "mean_grad"
    choice: ClassVar[str] = "each step is the mean of the first {shares} of {size} gradients, sent after backward"
    _w: RingWorker

    def __init__(self, w: RingWorker, peers: WorkerConnections) -> None:
        """Prepare this worker's part in the means. All workers call this together."""
        super().__init__(w)
        ring = peers.ring
        assert ring is not None, "gradients are averaged over a ring"
        marks = len(w.layout.entries) + COUNT
        self._ring, self._waited = ring, 0.0
        self._means = MemberMeans(ring, w.layout.size, w.layout.dtype, marks, w.plan.timeout)

    def begin(self) -> None:
        """Start the thread that takes part in the steps, and let the strategy use no other collective."""
        ring, w = self._ring, self._w
        w.ring = _NoCollectives()
        w.meter.sources = [lambda: (self._waited, 0.0, ring.bytes_sent)]
        self._means.start(self._portions.walk.copy(), w.plan.end)

    def meet(self) -> None:
        """Do nothing: each worker has the parameters of each step, and evaluates its own."""

    def close(self) -> None:
        """End the thread."""
        self._means.close()

    def exchange(self, batch: Batch, send: Send) -> Tensor:
        """Return the mean gradient of the step's members, read-only, valid until the next call.

        If this worker is late, its own gradient is not computed to the end, and does not count. Raises the errors of
        `RingWorker.compute_marked`, and LinkError if a connection fails.
        """
        w, step, random = self._w, self._w.position - 1, torch.get_rng_state()
        own = self._attempt(partial(w.compute_marked, batch))
        if own is not None:
            gradient, marks = own
            self._means.offer(step, gradient.vector, gradient.samples, marks)
        began = time.perf_counter()
        found = self._means.take(step, limited=own is not None)
        self._waited += time.perf_counter() - began
        self._end_step(found.members, random)
        w.receive_marks(found.marks)
        mean = w.clip.mean = found.mean.to(w.flat.vector)
        return mean

    def _is_late(self) -> bool:
        return self._means.is_late(self._w.position - 1)


class _NoCollectives:
    """Stands for the ring of a worker whose rounds must not use it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise other_exchange(FirstOnRing.method)
