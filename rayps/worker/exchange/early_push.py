"""Push the gradient of a model on a device by segment, while backward computes the rest of it.

A segment of the vector leaves when autograd has computed the gradients of all parameters in it. A parameter that gets
no gradient in a backward is known only at its end, and its segments then leave at the end. The pushed values are those
of `Worker.grad`, bit for bit.

Autograd may compute a gradient in several parts (a checkpoint of torch with `use_reentrant=True` does). Then no
segment leaves early. The first round shows whether it does so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from rayps_client.errors import WorkloadError
from torch import Tensor

from rayps.ps.client.device_server import DeviceServer
from rayps.tensors.flat import FlatModel, Layout, dense


def touched(layout: Layout, cuts: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return, for each parameter of the layout, the segments that have elements of it. `cuts` are the segments."""
    return [[s for s, (a, b) in enumerate(cuts) if max(a, entry.lo) < min(b, entry.hi)] for entry in layout.entries]


class EarlyPush:
    """Gives the segments of a gradient to a `DeviceServer` as soon as backward has computed them.

    Call `begin` before the last backward of a step, then backward, `collect` and `end`; call `fail` after an error.
    """

    def __init__(self, flat: FlatModel, server: DeviceServer) -> None:
        self._flat, self._server = flat, server
        self._segments = touched(flat.layout, server.cuts)
        self._counts = [sum(s in found for found in self._segments) for s in range(len(server.cuts))]
        self._missing: list[int] = []  # by segment: the parameters in it without a complete gradient
        self._parts = [0] * len(self._segments)  # by parameter: the parts of its gradient in this backward
        self._whole: bool | None = None  # whether gradients are computed in one part; None before the first round
        self._sent: set[int] = set()
        self._active, self._factor = False, 1.0
        for i, p in enumerate(flat.parameters):
            p.register_post_accumulate_grad_hook(_early_hook(weakref.ref(self), i))  # type: ignore[no-untyped-call]

    @property
    def begun(self) -> bool:
        """Whether `begin` was called, and `end` was not."""
        return self._active

    def begin(self, weight: float, factor: float = 1.0) -> None:
        """Begin the push of a gradient of `weight` samples; each gradient in `.grad` is multiplied by `factor`."""
        self._server.begin(self._flat.packed[:-1], weight)
        self._missing = list(self._counts)
        self._parts = [0] * len(self._parts)
        self._sent = set()
        self._active, self._factor = True, factor

    def collect(self) -> None:
        """Collect the rest of the gradient into the vector, and send the segments that have not been sent.

        Raises WorkloadError if a part of a gradient was computed after its segment had been sent.
        """
        with torch.no_grad():
            for i, p in enumerate(self._flat.parameters):
                if p.grad is not None and self._factor != 1 and not self._taken(i):
                    p.grad.mul_(self._factor)
        self._flat.collect_grad()
        late = [i for i, parts in enumerate(self._parts) if parts > 1 and self._taken(i)]
        if late:
            raise WorkloadError(
                f"the gradient of parameter {self._flat.layout.entries[late[0]].name!r} was computed in several parts, "
                "after it had been pushed, and in one part in the first round: give use_reentrant=False to "
                "torch.utils.checkpoint, or call w.server.push(w.grad(batch)) in a strategy of your own"
            )
        if self._whole is None:
            self._whole = max(self._parts, default=0) <= 1
        for segment in reversed(range(len(self._server.cuts))):
            if segment not in self._sent:
                self._server.send(segment)

    def end(self) -> None:
        """End the push, after `collect` and the check of the gradient."""
        self._active = False
        self._server.end()

    def fail(self) -> None:
        """End the push without its rest, because the gradient has failed."""
        if self._active:
            self._active = False
            self._server.end(refused=True)

    def _taken(self, i: int) -> bool:
        """Return whether the gradient of parameter `i` was collected before the end of backward."""
        return bool(self._whole) and self._parts[i] > 0

    def _add_gradient(self, i: int, p: Tensor) -> None:
        """Count a part of the gradient of parameter `i`, and collect it if it is complete. Called by autograd."""
        if not self._active or p.grad is None:
            return
        self._parts[i] += 1
        if not self._whole or self._parts[i] > 1:
            return
        view = self._flat.views[i]
        with torch.no_grad():
            grad = dense(p.grad)
            view.copy_(grad if self._factor == 1 else grad.mul_(self._factor))
        p.grad = view
        for segment in self._segments[i]:
            self._missing[segment] -= 1
            if not self._missing[segment]:
                self._sent.add(segment)
                self._server.send(segment)


def _early_hook(push: weakref.ref[EarlyPush], i: int) -> Callable[[Tensor], None]:
    """Return a hook with a weak reference, because a model may exist longer than its push."""

    def hook(p: Tensor) -> None:
        found = push()
        if found is not None:
            found._add_gradient(i, p)

    return hook
