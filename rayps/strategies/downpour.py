"""Downpour SGD: asynchronous replicas that push sums of gradients and fetch parameters, every few steps.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and the algorithm of its appendix. In its
step t, each replica (of one or several workers) does:

    every n_fetch steps: w <- the parameters on the servers
    g <- gradient of the next batch;  a <- a + g;  w <- w - step(g), on its own copy
    every n_push steps: push a;  a <- 0

Each batch is applied once: a replica that dies is replaced while the others continue, and the new one repeats the steps
that the old one had not pushed. At the end, the last a is pushed.

A server applies each push on arrival, without waiting for others: w <- w - step(a), with the full rate as in the paper,
not 1/N of it. So N replicas act as one that sees N times the batches, with late gradients; if that diverges, use
`adagrad`, `warm_start`, or a smaller rate. As a is the sum of n_push gradients, a push applies the weight decay n_push
times (but once if the decay is decoupled and the step ignores the gradient's scale, as in AdamW).

Two differences from the paper. The paper's client pushes after steps 0, n_push, 2 n_push...; here a push is sent after
every n_push gradients, so that it is always the sum of n_push gradients. The paper's client fetches in a background
thread; here a worker waits for the parameters that it fetches, and computes with them.

- `adagrad` (the rate gamma): the servers' step is gamma / sqrt(sum of squares of the pushes), per parameter; with none,
  it is that of the workload's optimizer. Each worker's own copy steps by the workload's optimizer, with its own state.
- `warm_start`: the number of rounds that one replica runs alone, before the others start (section 4.1: "warmstarting").

A workload's `clip_norm` clips g in the step of a worker's copy, and a in a push. Per step, a worker sends 1/n_push and
receives 1/n_fetch of the parameters' bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rayps.core import options
from rayps.core.replica import Replica
from rayps.core.server_updates import PlainServers, apply_sum, summing_servers
from rayps.core.strategy import RoundMemory, ServerHalf, ShardView, Vector, WorkerView
from rayps.core.topology import Servers
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
        """Servers apply each push on arrival; a push has all gradients since the last one; replicas step own copies."""
        servers = summing_servers(self.shards, self.adagrad, self.replay_mb, self.replica)
        return replace(servers, own_copies=True, push_every=self.n_push, pull_every=self.n_fetch)

    @property
    def server_half(self) -> ServerHalf:
        """A plain description of what the servers do, for which they need no worker code.

        For a class derived from this one, it is the strategy itself, which may override `on_push`.
        """
        if type(self) is not Downpour:
            return self
        return PlainServers(summing_servers(self.shards, self.adagrad, self.replay_mb, self.replica))

    def round(self, w: WorkerView) -> None:
        """Take one step of the client in the paper's appendix."""
        t, mine = w.position, w.memory
        if not mine and w.rank > 0:
            w.server.wait(0, self.warm_start)  # until rank 0 has done `warm_start` rounds
        if not mine or t % self.n_fetch == 0:
            w.params = w.server.pull()
        g = w.grad(w.batch())
        a = self._gather(mine, g)
        fetches = (t + 1) % self.n_fetch == 0
        if g.samples and not fetches:  # before a fetch no step is needed: the fetch replaces this copy
            w.step(g)
        if (t + 1) % self.n_push == 0 or t + 1 == w.plan.end:
            w.server.push(w.clipped(a), float(mine["samples"]), rounds=mine["steps"])
            mine |= {"steps": 0, "samples": 0}
            if not fetches:
                w.server.settle()  # wait until the push is sent: the next step changes a

    def _gather(self, mine: RoundMemory, g: Gradient) -> Vector:
        """Return the sum of the gradients since the last push."""
        steps = mine.get("steps", 0)
        if self.n_push == self.n_fetch == 1:
            # no copy is needed: this worker does not step by it, and sends it before it computes the next gradient
            mine["a"] = g.vector
        elif steps:
            mine["a"] += g.vector
        else:
            mine["a"] = g.vector.clone() if "a" not in mine else mine["a"].copy_(g.vector)
        mine |= {"steps": steps + 1, "samples": mine.get("samples", 0) + g.samples}
        total: Vector = mine["a"]
        return total

    def scale_warning(self, workers: int) -> str | None:
        """Return a warning that a push of many gradients makes no larger a step than a push of one; None if it does."""
        if self.n_push == 1 or self.adagrad is not None:
            return None
        return (
            f"a push is the sum of {self.n_push} gradients, but this optimizer's step size does not depend on the "
            "gradient's scale, so the servers take one step for it; give adagrad, or n_push=1"
        )

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """Apply w <- w - step(a) when a push arrives, with the weight decay once for each gradient in the sum a."""
        apply_sum(shard, value, weight)
