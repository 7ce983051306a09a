"""Hogwild: the workers of one host step one vector in shared memory, without locks and without waiting.

Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011. Each
worker repeats:

    g <- gradient of its next batch at the current x;  x_v <- x_v - step(g_v) for the v that g touches

What can be lost: if two workers write one element at the same moment, one of the two steps may be lost there (the paper
adds to each element atomically). When a worker dies, all restart from the last checkpoint: it is unknown which of its
steps were written.

Nothing is sent, and workers wait only at the end, so that the result has all steps. N workers act as one that sees N
times the batches, each at its full rate. With sparse gradients, as of nn.Embedding(sparse=True), a step touches their
rows only, and two workers seldom write the same ones. Each worker has its own optimizer state. All must be on one host,
with CPU tensors. A checkpoint holds the vector when rank 0 reaches its round, with rank 0's optimizer. A workload's
`clip_norm` clips each g, its sparse rows too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps.core.strategy import WorkerView
from rayps.core.topology import SharedVector
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class Hogwild(Strategy):
    """The workers of one host step one vector without locks: for sparse models; no message is sent.

    Example:
        rayps.train(work, strategy=rayps.Hogwild(), workers=2)
    """

    name: ClassVar[str] = "hogwild"

    @property
    def topology(self) -> SharedVector:
        """One vector in the host's shared memory."""
        return SharedVector()

    def begin(self, w: WorkerView) -> None:
        """Wait for the other workers, which have then written the same x."""
        w.memory["others"] = w.ring.progress()

    def round(self, w: WorkerView) -> None:
        """Apply x <- x - step(g) in the shared memory."""
        w.step(w.grad(w.batch()))
        w.memory["others"].reach(w.position)

    def finish(self, w: WorkerView) -> None:
        """Wait for the other workers' steps."""
        w.memory["others"].meet(w.plan.end)
