"""Call a function when a backward pass of autograd has ended, also if passes are nested.

Autograd offers a callback at the end of the pass that runs now. A pass may run inside a step of another pass, as in
`torch.utils.checkpoint` with `use_reentrant=True`; the end of the inner pass is not the end. The outer pass is then met
again at the nodes that follow the step in which the inner pass ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from rayps_client.errors import WorkloadError
from torch.autograd import Variable
from torch.autograd.graph import Node


class BackwardEnd:
    """Calls `call` at the end of the outermost backward pass in which `expect` was called."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        # the callback of each pass in which one is queued, by the number of the pass, which alone holds it
        self._passes: dict[int, weakref.ref[Callable[[], None]]] = {}

    def expect(self) -> None:
        """Arrange the call. Call this from a hook of autograd, as often as you like in a pass.

        Raises:
            WorkloadError: a pass in which a call was arranged has ended with an error, without the call.
        """
        number = torch._C._current_graph_task_id()
        if number in self._passes:
            return
        if any(callback() is None for callback in self._passes.values()):
            raise WorkloadError(
                "a backward has ended with an error, and a part of its gradients was sent to the other workers: do not "
                "catch the error, or call this backward inside of optimizer.no_sync()"
            )

        def callback() -> None:
            del self._passes[number]
            self._end_pass()

        self._passes[number] = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)

    def _end_pass(self) -> None:
        outer: Node | None = torch._C._current_autograd_node()  # the step of another pass in which this pass has run
        if outer is None:
            self._call()
            return
        for node in {each for each, _ in outer.next_functions if each is not None}:
            self._expect_at(node)

    def _expect_at(self, node: Node) -> None:
        def before(_: object) -> None:
            handle.remove()
            self.expect()

        handle = node.register_prehook(before)
