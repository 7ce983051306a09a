"""Hogwild: the workers of one host step one vector in shared memory, each in its own time, without locks.

Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011.
Each worker does, as often as it can:
    g <- gradient of its next batch at x, as x is at that moment;  x_v <- x_v - step(g_v) for the v that g touches
Nothing is sent and nobody is waited for, but at the very end, so that the result has everyone's steps. N workers do
what one would do that sees N times the batches, each at its full rate. With sparse gradients, as of
nn.Embedding(sparse=True), a step touches their rows only, and two workers seldom meet; where two do write one element
at the same moment, one of the two steps may be lost there (the paper adds to each element atomically). Each worker has
an optimizer's state of its own. All must be on one host, with CPU tensors. A checkpoint holds what is there when rank 0
comes to its round, with rank 0's optimizer. When a worker dies, everyone begins again from the last checkpoint: nobody
knows which of its steps were written. A workload's `clip_norm` clips each g, its sparse rows too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps.core.strategy import WorkerView
from rayps.core.topology import SharedVector
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class Hogwild(Strategy):
    """The cores of one host on one vector, without locks: sparse models, and nothing to send.

    Example:
        rayps.train(work, strategy=rayps.Hogwild(), workers=2)
    """

    name: ClassVar[str] = "hogwild"

    @property
    def topology(self) -> SharedVector:
        """One vector in the host's shared memory."""
        return SharedVector()

    def begin(self, w: WorkerView) -> None:
        """Meet the others: after this everyone has put the same x there."""
        w.memory["others"] = w.ring.progress()

    def round(self, w: WorkerView) -> None:
        """Apply x <- x - step(g) in the shared memory."""
        w.step(w.grad(w.batch()))
        w.memory["others"].reach(w.position)

    def finish(self, w: WorkerView) -> None:
        """Wait for the others' steps."""
        w.memory["others"].meet(w.plan.end)
