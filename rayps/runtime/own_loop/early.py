"""The mean gradient of a user's loop, sent while backward continues: see `rayps.worker.buckets`.

A user's loop does not say when a step's gradients are complete. A gradient is therefore sent after as many backward
passes as in the step before (one, in the first step), and `.grad` holds at any time what it holds in plain torch. If
the loop then does something else (another backward pass, zero_grad without a step, another number of samples), the mean
that was sent is dropped on all workers, and computed again from `.grad` at the step. A flag in the same collective says
so. Inside `no_sync` nothing is sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection

from torch import Tensor

from rayps.comm.ring import Ring
from rayps.tensors.flat import FlatModel
from rayps.worker.buckets import Buckets
from rayps.worker.step_flags import REPEAT, StepFlags


class EarlyGradients:
    """Sends the gradients of a flat model's parameters in buckets, as backward computes them."""

    def __init__(self, flat: FlatModel, ring: Ring, bucket_mb: float | None) -> None:
        """Prepare the buckets. All ranks must construct it, and later call `finish`, in the same order."""
        self._flat, self._flags = flat, StepFlags()
        self._buckets = Buckets(flat, ring, bucket_mb, self._flags, hooked=False)
        self.early, self.choice = self._buckets.early, str(self._buckets.choice["message"])
        self.suspended = 0  # the number of open `no_sync` blocks
        self.held = False  # whether the mean is in `.grad`, because the loop has clipped it
        # returns the number of samples of this rank's batch, when its first gradient is sent
        self.weight: Callable[[], float] = lambda: 1
        count = len(flat.parameters)
        self._expected = [1] * count  # the number of backward passes after which a gradient is sent
        self._times = [0] * count  # backward passes of this step
        self._sent: dict[int, tuple[Tensor, int]] = {}  # the gradients that were sent, and their versions
        self._begun: float | None = None  # the number of samples with which this step's mean was begun
        self._hooks = [
            p.register_post_accumulate_grad_hook(_hook(weakref.ref(self), i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(flat.parameters)
        ]

    def finish(self, samples: float) -> tuple[Tensor, Collection[int]] | None:
        """Return the mean gradient, and the indices of the parameters that no rank has used.

        Return None on all ranks if the mean must be computed from `.grad`. The mean is read-only, and valid until the
        next backward. Raises LinkError if a connection fails.
        """
        self._begin(samples)
        for i, p in enumerate(self._flat.parameters):
            if i not in self._sent and p.grad is not None:
                self._send(i, p)
        if self._begun != samples or not all(self._is_current(i) for i in self._sent):
            self._flags.state(REPEAT)
        mean, unused = self._buckets.finish()
        self._expected = [times or before for times, before in zip(self._times, self._expected, strict=True)]
        self._times = [0] * len(self._times)
        self._sent, self._begun = {}, None
        return None if self._flags.stated(REPEAT) else (mean, unused)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._sent = {}

    def _begin(self, samples: float) -> None:
        if self._begun is None:
            self._begun = samples
            self._buckets.begin(samples, drop=False)

    def _is_current(self, i: int) -> bool:
        grad, version = self._sent[i]
        now = self._flat.parameters[i].grad
        return now is grad and grad._version == version

    def _arrived(self, i: int, p: Tensor) -> None:
        """Take note of a backward pass that has added to the gradient of parameter `i`."""
        if self.suspended or self.held or p.grad is None:
            return
        self._times[i] += 1
        if self._times[i] == self._expected[i] and i not in self._sent:
            self._begin(self.weight())
            self._send(i, p)

    def _send(self, i: int, p: Tensor) -> None:
        grad = p.grad
        assert grad is not None
        if grad.data_ptr() == self._flat.views[i].data_ptr():
            grad = grad.clone()  # the mean is computed in the memory of the views
        self._buckets.take(i)
        p.grad = grad
        self._sent[i] = grad, grad._version


def _hook(early: weakref.ref[EarlyGradients], i: int) -> Callable[[Tensor], None]:
    """Return a hook with a weak reference, because a model may outlive the loop."""

    def hook(p: Tensor) -> None:
        found = early()
        if found is not None:
            found._arrived(i, p)

    return hook
