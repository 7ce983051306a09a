"""Downpour SGD: asynchronous replicas that push sums of gradients and fetch parameters, every few steps.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and the algorithm of its appendix. In its
step t, each replica (of one or several workers) does:

    every n_fetch steps: w <- the parameters on the servers
    g <- gradient of the next batch;  a <- a + g;  w <- w - step(g), on its own copy
    every n_push steps: push a;  a <- 0

Each batch is applied once. A replica that dies is replaced while the others continue, and the new replica repeats the
steps that the old replica had not pushed. At the end, the last a is pushed.

A server applies each push on arrival, without waiting for others: w <- w - step(a), with the full rate as in the paper,
not 1/N of it. N replicas therefore act as one replica that sees N times the batches, with late gradients. If the
training diverges, use `adagrad`, `warm_start`, or a smaller rate. Because a is the sum of n_push gradients, a push
applies the weight decay n_push times (but once if the decay is decoupled and the step ignores the gradient's scale, as
in AdamW). A step that is skipped in fp16 is not in the sum: the worker first pushes an empty gradient for the skipped
steps, so that the servers count them, and then a for the others. If a replica dies between these two pushes, the
gradients of as many of its steps are lost.

There are two differences from the paper. The paper's client pushes after steps 0, n_push, 2 n_push...; here a push is
sent after every n_push gradients, so that a push is always the sum of n_push gradients. The paper's client fetches in a
background thread; here a worker waits for the parameters that it fetches, and computes with them.

- `adagrad` (the rate gamma): the servers' step is gamma / sqrt(sum of squares of the pushes) for each parameter. With
  none, the servers step by the workload's optimizer. Each worker's own copy steps by the workload's optimizer, with its
  own state.
- `warm_start`: the number of rounds that one replica runs alone, before the others start (section 4.1: "warmstarting").
  In a phase with fewer rounds, the others start after its last one.

A workload's `clip_norm` clips g in the step of a worker's copy, and a in a push. Per step, a worker sends 1/n_push and
receives 1/n_fetch of the parameters' bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rayps.core.strategy import options
from rayps.core.strategy.apply_pushes import PlainServers, apply_sum, summing_servers
from rayps.core.strategy.replica import Replica
from rayps.core.strategy.strategy import RoundMemory, ServerHalf, ShardView, Vector, WorkerView
from rayps.core.strategy.topology import Servers
from rayps.strategies.base import Strategy

if TYPE_CHECKING:
    from rayps.tensors.flat import Gradient


@dataclass(frozen=True)
class Downpour(Strategy):
    """Asynchronous replicas that contact the servers every few steps: for many machines, slow networks and failures.

    Example:
        rayps.train(work, strategy=rayps.Downpour(shards=2, n_push=4, n_fetch=4), workers=2)
    """

    n_push: int = 1
    n_fetch: int = 1
    shards: int = 1
    adagrad: float | None = None
    warm_start: int = 0
    replay_mb: float | None = None
    replica: Replica | None = None
    name: ClassVar[str] = "downpour"

    def __post_init__(self) -> None:
        for field, least in (("n_push", 1), ("n_fetch", 1), ("warm_start", 0)):
            options.whole(self, field, least)
        _ = self.topology  # the topology checks the servers' options

    @property
    def topology(self) -> Servers:
        """Servers apply each push, a sum of gradients, on arrival. Replicas step their own copies between pulls."""
        servers = summing_servers(self.shards, self.adagrad, self.replay_mb, self.replica)
        return replace(servers, own_copies=True, push_every=self.n_push, pull_every=self.n_fetch)

    @property
    def server_half(self) -> ServerHalf:
        """A plain description of what the servers do, for which they need no worker code.

        For a derived class, this is the strategy itself, because the class may override `on_push`.
        """
        if type(self) is not Downpour:
            return self
        return PlainServers(summing_servers(self.shards, self.adagrad, self.replay_mb, self.replica))

    def round(self, w: WorkerView) -> None:
        """Take one step of the client in the paper's appendix."""
        t, memory = w.position, w.memory
        if not memory and w.rank > 0:
            # until rank 0 has done `warm_start` rounds, or all of a shorter phase
            w.server.wait(0, min(self.warm_start, w.plan.end))
        if not memory or t % self.n_fetch == 0:
            w.params = w.server.pull()
        g = w.grad(w.batch())
        a = self._add_gradient(memory, g)
        fetches = (t + 1) % self.n_fetch == 0
        if g.samples and not fetches:  # before a fetch no step is needed: the fetch replaces this copy
            w.step(g)
        if (t + 1) % self.n_push == 0 or t + 1 == w.plan.end:
            steps, skipped = memory["steps"], memory["skipped"]
            if skipped:
                w.server.push(a[:0], 0.0, rounds=skipped)
            if steps > skipped:
                w.server.push(w.clipped(a), float(memory["samples"]), rounds=steps - skipped)
            memory |= {"steps": 0, "skipped": 0, "samples": 0}
            if not fetches:
                w.server.settle()  # wait until the push is sent: the next step changes a

    def finish(self, w: WorkerView) -> None:
        """Push the sum of the gradients since the last push, if the last round was not known as the last."""
        steps = w.memory.get("steps", 0)
        if steps:
            w.server.push(w.clipped(w.memory["a"]), float(w.memory["samples"]), rounds=steps)
            w.memory |= {"steps": 0, "samples": 0}

    def _add_gradient(self, memory: RoundMemory, g: Gradient) -> Vector:
        """Add `g` to the sum of the gradients since the last push, and return the sum."""
        steps = memory.get("steps", 0)
        if self.n_push == self.n_fetch == 1:
            # no copy is needed: this worker does not step by `g`, and sends `g` before it computes the next gradient
            memory["a"] = g.vector
        elif steps:
            memory["a"] += g.vector
        else:
            memory["a"] = g.vector.clone() if "a" not in memory else memory["a"].copy_(g.vector)
        memory |= {
            "steps": steps + 1,
            "skipped": memory.get("skipped", 0) + g.skipped,
            "samples": memory.get("samples", 0) + g.samples,
        }
        total: Vector = memory["a"]
        return total

    def scale_warning(self, workers: int) -> str | None:
        """Return a warning that a push of many gradients and a push of one make equal steps, or None if they do not."""
        if self.n_push == 1 or self.adagrad is not None:
            return None
        return (
            f"a push is the sum of {self.n_push} gradients, but this optimizer's step size does not depend on the "
            "gradient's scale: the servers take one step for the sum; give adagrad, or n_push=1"
        )

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """Apply w <- w - step(a) when a push arrives, with the weight decay once for each gradient in the sum a."""
        apply_sum(shard, value, weight)
