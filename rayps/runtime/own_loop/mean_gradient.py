"""The mean gradient of a user's loop, which is in `.grad` when backward has ended, as under torch's DDP.

Gradients are sent while backward continues, see `rayps.worker.exchange.buckets`; compressed ones are sent after it. A
callback of autograd at the end of backward waits for the mean M, and puts it into `.grad`. What the loop then does with
`.grad` (unscale, clip, project) it does with the mean, alike on all workers. A further backward before the step adds
this worker's gradient g to M, and the mean of M + g is M plus the mean of g. Inside `no_sync` nothing is sent: `.grad`
is this worker's own until the next backward outside, or until the step if there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch
from rayps_client.errors import WorkloadError
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.comm.ring.compressed_mean import CompressedRing
from rayps.tensors.backward_end import BackwardEnd
from rayps.tensors.finite import is_finite
from rayps.tensors.flat import FlatModel, Gradient
from rayps.tensors.weight_watch import check_alike
from rayps.worker.exchange.arrivals import watch
from rayps.worker.exchange.buckets import Buckets
from rayps.worker.exchange.step_flags import CHANGED, COUNT, EVEN_STEP, ODD_STEP, OVERFLOW, StepFlags, with_flags


class MeanGradient:
    """Puts the mean gradient of all workers into the `.grad` of a flat model's parameters."""

    def __init__(self, flat: FlatModel, ring: Ring, sent: Ring | CompressedRing, bucket_mb: float | None) -> None:
        """Prepare the means. All ranks must construct it, and later call `average`, in the same order.

        `sent` is the ring that compresses gradients, or `ring` itself.
        """
        self._flat, self._ring, self._sent, self._flags = flat, ring, sent, StepFlags()
        self._buckets = Buckets(flat, ring, bucket_mb, self._flags, hooked=False) if sent is ring else None
        self.choice = "" if self._buckets is None else str(self._buckets.choice["message"])
        self.held = 0.0  # seconds for which means have held up the loop: see `RoundThread.take_held`
        self.suspended = 0  # the number of open `no_sync` blocks
        # the number of samples with which the mean that is in `.grad` was computed; None: `.grad` is this rank's own
        self.samples: float | None = None
        self.in_backward = False  # whether the mean was computed in backward
        # returns the number of samples of this rank's batch, when its first gradient is sent
        self.weight: Callable[[], float] = lambda: 1
        # returns whether the round of the next step takes the mean gradient, after a check of the parameters
        self.is_due: Callable[[], bool] = lambda: True
        # returns whether the loop has written parameters of this rank in place since the last mean
        self.is_touched: Callable[[], bool] = lambda: False
        self._begun: float | None = None  # the number of samples with which a mean was begun in this backward
        self._step = 0
        self._end = BackwardEnd(self._end_backward)
        self._hooks = watch(flat.parameters, self._take_gradient)

    @torch.no_grad()
    def average(self, samples: float) -> None:
        """Replace each `.grad` by the mean over the workers; `samples` is the weight of this worker's gradient.

        A parameter that no worker has used keeps None. All workers must call it together.

        Raises:
            WorkloadError: some workers take a step, and others have called backward once more; or the loop has changed
                parameters in place, and not alike on all workers.
            LinkError: a connection fails.
        """
        began = time.perf_counter()
        self._begin(samples)
        self._flags.state(ODD_STEP if self._step % 2 else EVEN_STEP)
        self._flags.state(CHANGED, self.is_touched())
        mean, unused = self._average_compressed(samples) if self._buckets is None else self._buckets.finish()
        self._flat.load_grad(mean)
        for i in unused:
            self._flat.parameters[i].grad = None
        self.samples, self._begun, self.in_backward = self._begun, None, False
        self.held += time.perf_counter() - began
        if self._flags.stated(ODD_STEP) and self._flags.stated(EVEN_STEP):
            raise WorkloadError(
                "the workers have called backward unequally often before optimizer.step(): each backward outside of "
                "no_sync averages the gradients of all workers\ncall backward equally often on all workers, or put all "
                "but the last call of a step into `with optimizer.no_sync():`"
            )
        if self._flags.stated(CHANGED):
            check_alike(self._flat, self._ring)

    def end_step(self) -> None:
        """Take note of the end of a step: what the next backward adds to `.grad` is this worker's own."""
        self.samples, self.in_backward = None, False
        self._step += 1

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, samples: float) -> None:
        if self._begun is None:
            self._begun = samples
            if self._buckets is not None:
                self._buckets.begin(samples, adds=True)

    def _take_gradient(self, i: int, p: Tensor) -> None:
        """Take a gradient that backward has computed."""
        if self.suspended:
            self.samples, self.in_backward = None, False
            return
        if self._begun is None:
            if not self.is_due():
                return
            self._begin(self.weight())
        self._end.expect()
        if self._buckets is not None:
            self._buckets.take(i)

    def _end_backward(self) -> None:
        if self._begun is not None:
            self.average(self._begun)
            self.in_backward = True

    def _average_compressed(self, samples: float) -> tuple[Tensor, Collection[int]]:
        """Return the mean of compressed gradients, and the indices of the parameters that no rank has used.

        If a gradient is not finite, the mean is sent without compression: error feedback would keep the infinity.
        """
        used = [p.grad is not None for p in self._flat.parameters]
        gradient = Gradient(self._flat.collect_grad(), samples)
        self._flags.state(OVERFLOW, samples > 0 and not is_finite(gradient.vector))
        marks = self._ring.max(with_flags(used, self._flags))
        self._flags.receive(marks[-COUNT:])
        mean: Tensor = (self._ring if self._flags.stated(OVERFLOW) else self._sent).mean(gradient)
        return mean, [i for i, some in enumerate(marks[:-COUNT].tolist()) if not some]
