"""Sum each bucket of gradients to the ranks that own its slices during backward, and hold only this rank's slice.

Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020, section 5.2 (stage
2). Each micro-batch is sent: a rank holds the gradients that backward has computed and that are not sent yet, one
bucket, and its own slice of the sum. All ranks send the buckets in one order, from the last parameters to the first.
On one host, a bucket is summed in shared memory as soon as all ranks have submitted it. Otherwise the ring's background
thread sends it while backward continues.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.comm.ring.bucket_scatter import make_bucket_scatter
from rayps.comm.ring.owned_slices import OwnedSlices
from rayps.tensors.finite import is_finite
from rayps.tensors.flat import FlatModel, make_dense
from rayps.worker.exchange.arrivals import GradientArrivals, watch
from rayps.worker.exchange.step_flags import COUNT, StepFlags, with_flags


class ScatteredGradients:
    """Computes this rank's slice of the mean gradient over all ranks and micro-batches.

    In each step, call `begin_step`, then `begin`, backward and `end` for each micro-batch, then `finish`. All ranks
    must make the same calls. A rank without rows calls `begin` with weight 0, and no backward.
    """

    def __init__(
        self,
        flat: FlatModel,
        ring: Ring,
        slices: OwnedSlices,
        buckets: Sequence[Sequence[int]],
        flags: StepFlags,
        *,
        several: bool = False,
    ) -> None:
        """Prepare the buckets. `buckets` has the indices of each bucket's parameters.

        `flags` are exchanged by `finish`. `several`: a step may have several micro-batches.
        """
        self._flat, self._ring, self._slices, self._flags = flat, ring, slices, flags
        self._buckets = [list(members) for members in buckets]
        self._scatter = make_bucket_scatter(ring, slices, flat.layout.dtype, several=several)
        self._factor, self._weight, self._all = 1.0, 0.0, 0.0  # of this micro-batch; the weight of the step so far
        count = len(flat.layout.entries)
        self._used = [False] * count  # whether this rank has computed a gradient of a parameter in this step
        self._arrivals = GradientArrivals(count, self._buckets, expected=1)  # late parts: weighted, of the step
        self._next = 0  # the first bucket that is not sent in this micro-batch
        self.fault: str | None = None  # the name of a parameter whose gradient on this rank is not finite
        watch(flat.parameters, self._add_gradient)

    @property
    def seconds(self) -> float:
        """The total number of seconds that the caller's thread has spent on communication."""
        return self._scatter.seconds

    def begin_step(self) -> None:
        """Start a step: the slice of the sum becomes zero."""
        self._used = [False] * len(self._used)
        self.fault, self._all = None, 0.0
        self._arrivals.late.clear()
        self._flat.drop_grad()
        self._scatter.begin_step()

    def begin(self, weight: float, factor: float = 1.0) -> None:
        """Start a micro-batch, before its backward. Its gradient, times `factor`, is a mean with this weight.

        Raises LinkError if a connection fails.
        """
        self._weight, self._factor = weight, factor
        self._all += weight
        self._arrivals.begin()
        self._next = 0
        self._scatter.begin(weight)

    def end(self) -> None:
        """End a micro-batch, after its backward: send the remaining buckets. Raises LinkError if a connection fails."""
        while self._next < len(self._buckets):
            self._send_bucket()
        if self._weight:
            self._arrivals.end()
        self._weight = 0.0

    def finish(self) -> tuple[Tensor, Collection[int]]:
        """Return this rank's slice of the mean gradient, and the indices of the parameters that no rank has used.

        The slice is one vector: the owned ranges, ascending and joined. The flags are exchanged. Raises LinkError if a
        connection fails.
        """
        mean = self._scatter.finish()
        marks = with_flags([*self._used, bool(self._arrivals.late)], self._flags)
        began = time.perf_counter()
        self._ring.max(marks)
        self._scatter.seconds += time.perf_counter() - began
        self._flags.receive(marks[-COUNT:])
        *used, late = marks[:-COUNT].tolist()
        if late:
            mean = mean.clone().add_(self._average_late())  # the scatter reuses its memory
        return mean, [i for i, each in enumerate(used) if not each]

    def _add_gradient(self, i: int, p: Tensor) -> None:
        """Count a part of the gradient of parameter `i`. Autograd calls this as a hook."""
        if not self._weight or p.grad is None:
            return
        self._used[i] = True
        late = self._arrivals.is_late(i)
        self._arrivals.count(i)
        if late:
            part, p.grad = self._take(i, p).mul_(self._weight), None
            self._arrivals.add_late(i, part)
            return
        while self._next < len(self._buckets) and not self._arrivals.waits(self._next):
            self._send_bucket()

    def _take(self, i: int, p: Tensor) -> Tensor:
        assert p.grad is not None, "the caller has checked it"
        grad = make_dense(p.grad)
        if self.fault is None and not is_finite(grad):
            self.fault = self._flat.layout.entries[i].name
        return grad if self._factor == 1 else grad.mul_(self._factor)

    def _send_bucket(self) -> None:
        """Send the next bucket, and drop its gradients. A parameter without a gradient counts as zeros."""
        bucket, self._next = self._next, self._next + 1
        self._arrivals.sent(bucket)
        start = self._slices.cuts[bucket].start
        memory = self._scatter.memory(bucket)
        with torch.no_grad():
            for i in self._buckets[bucket]:
                entry, p = self._flat.layout.entries[i], self._flat.parameters[i]
                into = memory[entry.lo - start : entry.hi - start].view(entry.shape)
                if self._arrivals.parts[i] and p.grad is not None:
                    into.copy_(self._take(i, p))
                    p.grad = None
                else:
                    into.zero_()
        self._scatter.send(bucket)

    def _average_late(self) -> Tensor:
        """Return this rank's slice of the mean of the parts that arrived late, of this rank or of others."""
        self._scatter.begin_step()
        self._scatter.begin(self._all)
        for bucket, members in enumerate(self._buckets):
            start = self._slices.cuts[bucket].start
            memory = self._scatter.memory(bucket)
            memory.zero_()
            for i in members:
                entry = self._flat.layout.entries[i]
                if i in self._arrivals.late:
                    part = self._arrivals.late[i] / self._all
                    memory[entry.lo - start : entry.hi - start].view(entry.shape).copy_(part)
            self._scatter.send(bucket)
        return self._scatter.finish()
