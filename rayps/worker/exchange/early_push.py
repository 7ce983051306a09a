"""Push the gradient of a model on a device by segment, while backward computes the rest of it.

A segment of the vector leaves when autograd has computed the gradients of all parameters in it. A parameter that gets
no gradient in a backward is known only at its end, and its segments then leave at the end. The pushed values are those
of `Worker.grad`, bit for bit.

In the first round no segment leaves early: it shows in how many parts autograd computes each gradient (a checkpoint of
torch with `use_reentrant=True` makes several).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rayps_client.errors import WorkloadError
from torch import Tensor

from rayps.ps.client.device_server import DeviceServer
from rayps.tensors.flat import FlatModel, Layout, make_dense
from rayps.worker.exchange.arrivals import GradientArrivals, watch


def find_touched(layout: Layout, cuts: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return, for each segment of `cuts`, the indices of the parameters that have elements in it."""
    return [[i for i, entry in enumerate(layout.entries) if max(a, entry.lo) < min(b, entry.hi)] for a, b in cuts]


class EarlyPush:
    """Gives the segments of a gradient to a `DeviceServer` as soon as backward has computed them.

    Call `begin` before the last backward of a step, then backward, `collect` and `end`; call `fail` after an error.
    """

    def __init__(self, flat: FlatModel, server: DeviceServer) -> None:
        self._flat, self._server = flat, server
        self._everyone = range(len(flat.layout.entries))
        self._arrivals = GradientArrivals(len(self._everyone), find_touched(flat.layout, server.cuts))
        self._collected: set[int] = set()  # the parameters whose gradients are in the vector before the end of backward
        self._active, self._factor = False, 1.0
        watch(flat.parameters, self._add_gradient)

    @property
    def begun(self) -> bool:
        """Whether `begin` was called, and `end` was not."""
        return self._active

    def begin(self, weight: float, factor: float = 1.0) -> None:
        """Begin the push of a gradient of `weight` samples; each gradient in `.grad` is multiplied by `factor`."""
        self._server.begin(self._flat.packed[:-1], weight)
        self._arrivals.begin(pending=self._everyone)  # a segment also waits for parameters that were not used
        self._collected.clear()
        self._active, self._factor = True, factor

    def collect(self) -> None:
        """Collect the rest of the gradient into the vector, and send the segments that have not been sent.

        Raises WorkloadError if a part of a gradient was computed after its segment had been sent.
        """
        with torch.no_grad():
            for i, p in enumerate(self._flat.parameters):
                if p.grad is not None and self._factor != 1 and i not in self._collected:
                    p.grad.mul_(self._factor)
        self._flat.collect_grad()
        late = sorted(i for i in self._collected if not self._arrivals.is_complete(i))
        if late:
            raise WorkloadError(
                f"the gradient of parameter {self._flat.layout.entries[late[0]].name!r} was computed in more parts "
                "than in the round before, after it had been pushed: give use_reentrant=False to "
                "torch.utils.checkpoint, or call w.server.push(w.grad(batch)) in a strategy of your own"
            )
        self._arrivals.end()
        for segment in reversed(self._arrivals.list_unsent()):
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

    def _add_gradient(self, i: int, p: Tensor) -> None:
        """Count a part of the gradient of parameter `i`, and collect it if it is complete. Called by autograd."""
        if not self._active or p.grad is None:
            return
        complete = self._arrivals.count(i)
        if not self._arrivals.is_complete(i):
            return
        self._collected.add(i)
        view = self._flat.views[i]
        with torch.no_grad():
            grad = make_dense(p.grad)
            view.copy_(grad if self._factor == 1 else grad.mul_(self._factor))
        p.grad = view
        for segment in complete:
            self._arrivals.sent(segment)
            self._server.send(segment)
