"""Hogwild: the workers of one host step one vector in shared memory, without locks and without waiting.

Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011. Each
worker repeats:

    g <- gradient of its next batch at the current x;  x_v <- x_v - step(g_v) for the elements v that g touches

Steps can be lost: if two workers write one element at the same moment, one of the two steps may be lost for that
element (the paper adds to each element atomically). When a worker dies, all workers restart from the last checkpoint,
because it is unknown which of the dead worker's steps were written.

No message is sent, and workers wait for each other only at the end, so that the result includes all steps. N workers
act as one worker that sees N times the batches, each at the full rate. With sparse gradients, such as those of
nn.Embedding(sparse=True), a step touches only the rows in the gradient, and two workers seldom write the same rows.
Each worker has its own optimizer state. All workers must be on one host, with CPU tensors. A checkpoint has the vector
as it is when rank 0 reaches the checkpoint's round, and rank 0's optimizer state. A workload's `clip_norm` clips each
g, including its sparse rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps.core.strategy.strategy import WorkerView
from rayps.core.strategy.topology import SharedVector
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Workers of one host that all step the same vector in shared memory, without locks: for sparse models.

    Example:
        rayps.train(work, strategy=rayps.Hogwild(), workers=2)
    """

    name: ClassVar[str] = "hogwild"

    @property
    def topology(self) -> SharedVector:
        """All workers read and write one vector in the host's shared memory."""
        return SharedVector()

    def begin(self, w: WorkerView) -> None:
        """Wait until every worker has called this method. The vector then has its initial values."""
        w.memory["others"] = w.ring.progress()
        w.memory["others"].reach(w.position)  # a run may begin in the middle, or at its end only to be evaluated

    def round(self, w: WorkerView) -> None:
        """Apply x <- x - step(g) to the vector in shared memory."""
        w.step(w.grad(w.batch()))
        w.memory["others"].reach(w.position)

    def finish(self, w: WorkerView) -> None:
        """Wait until all workers have written their last steps."""
        w.memory["others"].meet(w.plan.end)
