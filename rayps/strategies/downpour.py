"""Downpour SGD: asynchronous replicas that push sums of gradients and fetch parameters, every few steps.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and the algorithm of its appendix. Each
replica (of one or several workers) does, in its step t:

    every n_fetch steps: w <- the parameters on the servers
    g <- gradient of the next batch;  a <- a + g;  w <- w - step(g), on its own copy
    every n_push steps: push a;  a <- 0

Each batch is applied once: a dead replica is replaced while the others continue, and repeats the steps that it had not
pushed. The last a is pushed at the end.

A server applies each push on arrival, without waiting for others: w <- w - step(a), with the full rate as in the paper,
not 1/N of it. So N replicas act as one that sees N times the batches, with late gradients; if that diverges, use
`adagrad`, `warm_start`, or a smaller rate. Weight decay is applied n_push times per push, as a is the sum of n_push
gradients (but once if the decay is decoupled and the step ignores the gradient's scale, as in AdamW).

Two differences from the paper: the paper's client pushes after steps 0, n_push, 2 n_push..., here a push is sent after
n_push gradients, so that every push is the sum of n_push gradients; the paper's client fetches in a background thread,
here a worker waits for the parameters that it fetches, and computes with them.

- `adagrad` (the rate gamma): servers step by gamma / sqrt(sum of squares of the pushes), per parameter; none = the
  workload's optimizer. Copies step by the workload's optimizer, each with its own state.
- `warm_start`: the number of rounds that one replica runs alone, before the others start (section 4.1: "warmstarting").

With a workload's `clip_norm` a copy's step clips g and a push clips a, each once. Sends 1/n_push and receives 1/n_fetch
of the parameters' bytes per step.
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
    """Asynchronous replicas that contact the servers every few steps: many machines, slow networks, failures.

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
        """Servers apply each push on arrival, for all steps since the last push; replicas step their own copies."""
        servers = summing_servers(self.shards, self.adagrad, self.replay_mb, self.replica)
        return replace(servers, own_copies=True, push_every=self.n_push, pull_every=self.n_fetch)

    @property
    def server_half(self) -> ServerHalf:
        """The strategy's server half, for which servers need no worker code; a derived class is its own server half."""
        if type(self) is not Downpour:
            return self
        return PlainServers(summing_servers(self.shards, self.adagrad, self.replay_mb, self.replica))

    def round(self, w: WorkerView) -> None:
        """Take one step of the appendix's client."""
        t, mine = w.position, w.memory
        if not mine and w.rank > 0:
            w.server.wait(0, self.warm_start)
        if not mine or t % self.n_fetch == 0:
            w.params = w.server.pull()
        g = w.grad(w.batch())
        a = self._gather(mine, g)
        fetches = (t + 1) % self.n_fetch == 0
        if g.samples and not fetches:  # else the next fetch replaces this copy
            w.step(g)
        if (t + 1) % self.n_push == 0 or t + 1 == w.plan.end:
            w.server.push(w.clipped(a), float(mine["samples"]), rounds=mine["steps"])
            mine |= {"steps": 0, "samples": 0}
            if not fetches:
                w.server.settle()  # send now, not with the next fetch; a may change afterwards

    def _gather(self, mine: RoundMemory, g: Gradient) -> Vector:
        """Return the sum of the gradients since the last push."""
        steps = mine.get("steps", 0)
        if self.n_push == self.n_fetch == 1:
            # not a copy: this worker does not step by it, and it is sent before the next gradient is computed
            mine["a"] = g.vector
        elif steps:
            mine["a"] += g.vector
        else:
            mine["a"] = g.vector.clone() if "a" not in mine else mine["a"].copy_(g.vector)
        mine |= {"steps": steps + 1, "samples": mine.get("samples", 0) + g.samples}
        total: Vector = mine["a"]
        return total

    def scale_warning(self, workers: int) -> str | None:
        """Return a warning if a push of many gradients moves the optimizer as far as a push of one; else None."""
        if self.n_push == 1 or self.adagrad is not None:
            return None
        return (
            f"a push holds the sum of {self.n_push} gradients, but this optimizer's step size does not depend on "
            "the gradient's scale: the servers step as if it were one; give adagrad, or n_push 1"
        )

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """Apply w <- w - step(a) on arrival; decay the weights once for each gradient in the sum a."""
        apply_sum(shard, value, weight)
