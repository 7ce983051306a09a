"""A sharded parameter server: bulk-synchronous, bounded staleness (SSP) or asynchronous.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014;
Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
The servers hold the parameters in `shards` slices and run the optimizer. A worker pulls, computes, pushes.
s = 0: the servers wait for all N pushes and step once by their mean, weighted by samples.
s > 0: each push is applied as it comes, scaled by 1/N; a pull waits while the puller leads by more than s.
s = None: the same without the wait. For s > 0 and none pushes count alike, whatever their samples (0: not at all).
A push of 1/N also decays the parameters by 1/N of the optimizer's weight decay (SGD, Adagrad, Adam), so that N pushes
have the regularised optimum of one step; rows of tables by as much for each push that touches them. Where the decay
stands beside the gradient and the step ignores the gradient's size (AdamW), rate and decay stay as they are: each push
is a whole step of the optimizer, and a warning says so.
A workload's `clip_norm` clips what each worker pushes, the dense part and rows of tables together, before N pushes
are averaged.
`compression` (fp16, bf16, int8, top_k, top_k:FRACTION, auto) says how the pushes travel, with error feedback.
s != 0: a worker keeps its newest pushes until a snapshot has them, up to `replay_mb` (10^6 bytes; none = 256), and says
them again to a server that is restored; what is beyond is lost with the server, with 0 all since the snapshot.
`replicas` (none = fixed servers): the servers are an elastic group of `shards` of them, each slice held 1 + replicas
times, and one may die without a restart of anything.
With a `replica` of several workers a worker is such a replica: each of its workers pulls and pushes its part of the
model, which has shards of its own (`shards` in all, at least one for each part).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rayps.core import options
from rayps.core.errors import ConfigError
from rayps.strategies.base import REPLAY, Replica, ShardView, Strategy, WorkerView, compression_of, must_go_with


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Parameters on servers; workers may be unequal, and with staleness need not wait for each other."""

    shards: int = 1
    staleness: int | None = 0
    compression: str | None = None
    replay_mb: float | None = None
    replicas: int | None = None
    replica: Replica | None = None
    name: ClassVar[str] = "parameter_server"
    borrows: ClassVar[bool] = True
    means: ClassVar[bool] = True

    def __post_init__(self) -> None:
        options.whole(self, "shards")
        s = self.staleness
        if s is not None and (isinstance(s, bool) or not isinstance(s, int) or s < 0):
            raise ConfigError(
                f"staleness is {s!r}: give 0 (synchronous), a whole number of rounds, or none (asynchronous)",
                field="staleness",
            )
        options.number(self, "replay_mb", least=0, none=True, expected=REPLAY)
        c = 0 if self.replicas is None else self.replicas
        if isinstance(c, bool) or not isinstance(c, int) or not 0 <= c < self.shards:
            raise ConfigError(
                f"replicas is {c!r} and there are {self.shards} shards: give fewer copies than servers, 0 or more, or "
                "none (fixed servers)",
                field="replicas",
            )
        if self.compression is not None:
            compression_of(self.compression)
        must_go_with(self.replica, compression=self.compression, replicas=self.replicas)

    @property
    def tables(self) -> Strategy:
        """Tables follow the same clock as the dense part."""
        return self

    @property
    def gathers(self) -> bool:  # type: ignore[override]
        """Only the synchronous server keeps pushes until everyone has spoken."""
        return self.staleness == 0

    def round(self, w: WorkerView) -> None:
        """w <- pull; push g(w)."""
        w.params = w.server.pull()
        w.server.push(w.grad(w.batch()))

    def on_push(self, shard: ShardView, value: Any, weight: float) -> None:
        """s != 0: w <- w - step(g_i / N), at once."""
        if self.staleness != 0 and weight:
            shard.step(value, 1 / shard.size)

    def on_round(self, shard: ShardView, values: list[Any], weights: list[float]) -> None:
        """s = 0: w <- w - step(sum(n_i g_i) / sum(n_i))."""
        if sum(weights):
            shard.step_mean(values, weights)
