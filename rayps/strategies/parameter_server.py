"""A sharded parameter server: bulk-synchronous, bounded staleness (SSP) or asynchronous.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013. The servers hold the parameters in
`shards` slices and run the optimizer. A worker pulls, computes, pushes.

- s = 0: the servers wait for all N pushes and step once by their mean, weighted by samples.
- s > 0: each push is applied on arrival, scaled by 1/N; a pull waits while its worker is more than s rounds ahead.
- s = None: the same without the wait.

What a server's death can lose: with s = 0 no push; all workers return to the last snapshot and repeat the rounds since.
With s != 0 only pushes that no replay buffer holds: a worker retains its newest pushes until a snapshot has them, up to
`replay_mb` (10^6 bytes; none = 256), and sends them again to a restored server. With `replay_mb` 0 all pushes since the
snapshot are lost. With `replicas` (none = fixed servers) the servers are a group of `shards` servers that holds each
slice 1 + replicas times: one of them may die without a restart.

For s > 0 and none pushes have equal weight, whatever their samples (0: no weight). A push of 1/N also decays the
parameters by 1/N of the optimizer's weight decay (SGD, Adagrad, Adam), so that N pushes have the regularised optimum of
one step; rows of tables likewise for each push that touches them. Where the decay is decoupled and the step ignores the
gradient's scale (AdamW), rate and decay are not scaled: each push is a whole step of the optimizer, with a warning.

- `compression` (fp16, bf16, int8, top_k, top_k:FRACTION, auto): encodes the pushes, with error feedback.
- `replica` of several workers: each of its workers pulls and pushes its part of the model, which has shards of its own
  (`shards` in total, at least one for each part).

A workload's `clip_norm` clips what each worker pushes, the dense part and rows of tables together, before N pushes are
averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps.core.replica import Replica
from rayps.core.server_updates import PlainServers, apply_mean, apply_push, plain_servers
from rayps.core.strategy import ServerHalf, ShardView, Vector, WorkerView
from rayps.core.topology import Servers
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Servers hold the parameters; workers may have different speeds, and with staleness need not wait for each other.

    Example:
        rayps.train(work, strategy=rayps.ParameterServer(shards=2, staleness=3), workers=2)
    """

    shards: int = 1
    staleness: int | None = 0
    compression: str | None = None
    replay_mb: float | None = None
    replicas: int | None = None
    replica: Replica | None = None
    name: ClassVar[str] = "parameter_server"

    def __post_init__(self) -> None:
        _ = self.topology  # the topology checks the options

    @property
    def topology(self) -> Servers:
        """Servers hold the dense part; sparse tables follow the same clock.

        Only in step do servers wait for all pushes.
        """
        return plain_servers(self.shards, self.staleness, self.compression, self.replicas, self.replay_mb, self.replica)

    @property
    def server_half(self) -> ServerHalf:
        """The strategy's server half, for which servers need no worker code; a derived class is its own server half."""
        return PlainServers(self.topology) if type(self) is ParameterServer else self

    def round(self, w: WorkerView) -> None:
        """Pull w; push g(w)."""
        w.params = w.server.pull()
        w.server.push(w.grad(w.batch()))

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """Apply, if s != 0, w <- w - step(g_i / N) on arrival."""
        if self.staleness != 0:
            apply_push(shard, value, weight)

    def on_round(self, shard: ShardView, values: list[Vector], weights: list[float]) -> None:
        """Apply, if s = 0, w <- w - step(sum(n_i g_i) / sum(n_i))."""
        apply_mean(shard, values, weights)
