"""A sharded parameter server: bulk-synchronous, bounded staleness (SSP) or asynchronous.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013. The servers hold the parameters in
`shards` slices and run the optimizer. A worker pulls, computes, pushes.

`staleness` s decides when pushes are applied, with N workers:

- s = 0: the servers wait for all N pushes and step once by their mean, weighted by samples.
- s > 0: each push is applied on arrival, scaled by 1/N; a pull waits while its worker is more than s rounds ahead.
  Each server decides for itself, as the bound is of each read (Ho et al., section 3).
- s = None: each push is applied on arrival, scaled by 1/N; no pull waits.
- s = "auto": each push is applied on arrival, scaled by 1/N; the bound moves by what waiting and staleness cost, as
  measured (`rayps.core.strategy.adaptive_staleness`). It may become 0, at which pulls wait for all workers' pushes, and
  none.

After a server's death with s = 0, no push is lost: all workers return to the last snapshot and repeat the rounds since
then. With s != 0, pushes are lost that are in no replay buffer. A worker retains its newest pushes until a snapshot
includes them, up to `replay_mb` (10^6 bytes; 256 by default), and sends them again to a restored server. With
replay_mb=0, all pushes since the snapshot are lost. `replicas` is the number of backups of each slice on other servers;
none means servers without backups. With backups, one server may die without a restart.

With s > 0 or None, all pushes have equal weight, whatever their number of samples (a push of 0 samples is ignored). A
push scaled by 1/N also applies 1/N of the optimizer's weight decay (SGD, Adagrad, Adam), so that N pushes have the same
regularised optimum as one step. This is also true for the rows of tables that a push touches. If the decay is decoupled
and the step ignores the gradient's scale (AdamW), rate and decay are not scaled: each push is a full step of the
optimizer, and the job reports a warning.

With s = 0 and `backup` b, a round closes with the pushes of the first N of N + b workers (Chen et al., "Revisiting
distributed synchronous SGD", ICLR 2016 workshop). A worker asks the first server before it pushes. One that is late
pushes nothing, and computes the same rows again in the next round (docs/backup_workers.md). One that is dropped in
`late_limit` rounds in a row (10 by default) is reported and, with `replace_late`, once replaced by a new process.

With s = 0 and `privacy=dp(...)` a step is one of DP-SGD (Abadi et al., "Deep learning with differential privacy", CCS
2016): see `rayps.privacy.row_level` and docs/privacy.md.

- `compression` (fp16, bf16, int8, top_k, top_k:FRACTION, auto): encodes the pushes, with error feedback.
- `consistent`: with s != 0 a pull has the values of one moment: each push is in the values of all servers, or of none.
  A pull then takes four exchanges in place of one, and delays the pushes of other workers. With s = 0 every pull is so.
- `replica` of several workers: each worker of a replica pulls and pushes its part of the model. Each part has its own
  shards (`shards` in total, at least one for each part).
- `shard_resources` ({"gpu": 0.25}): each shard keeps its slice and its optimizer on a part of a GPU. Only for fixed
  servers, without `replicas`, tables and a server group.

A workload's `clip_norm` clips each worker's push (dense part and rows of tables together) before the N pushes are
averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps_client.values import Json

from rayps.core.strategy import options
from rayps.core.strategy.apply_pushes import PlainServers, apply_mean, apply_push, plain_servers
from rayps.core.strategy.replica import Replica
from rayps.core.strategy.strategy import ServerHalf, ShardView, Vector, WorkerView
from rayps.core.strategy.topology import Servers
from rayps.privacy.options import PrivacySpec, privacy_of
from rayps.privacy.row_level import check_row_level
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Servers hold the parameters and run the optimizer; with staleness, fast workers need not wait for slow ones.

    Example:
        rayps.train(work, strategy=rayps.ParameterServer(shards=2, staleness=3), workers=2)
    """

    shards: int = 1
    staleness: int | str | None = 0
    compression: str | None = None
    replay_mb: float | None = None
    replicas: int | None = None
    replica: Replica | None = None
    shard_resources: dict[str, float] | None = None
    backup: int | None = None
    late_limit: int | None = None
    replace_late: bool | None = None
    privacy: Json | PrivacySpec = None
    consistent: bool | None = None
    name: ClassVar[str] = "parameter_server"

    def __post_init__(self) -> None:
        _ = self.topology  # the topology checks the options
        check_row_level(self.privacy_spec)

    @property
    def topology(self) -> Servers:
        """Servers hold the dense part and the sparse tables, both with the same staleness bound.

        With staleness 0, the servers wait for all pushes of a round; otherwise they apply each push on arrival.
        """
        return plain_servers(
            self.shards,
            self.staleness,
            self.compression,
            self.replicas,
            self.replay_mb,
            self.replica,
            shard_resources=self.shard_resources,
            backup=self.backup,
            late=options.late_workers(self),
            private=self.privacy_spec is not None,
            consistent=False if self.consistent is None else self.consistent,
        )

    @property
    def privacy_spec(self) -> PrivacySpec | None:
        """The options of row-level differential privacy; None if the job is not private."""
        return privacy_of(self.privacy)

    @property
    def server_half(self) -> ServerHalf:
        """A plain description of what the servers do, for which they need no worker code.

        For a derived class, this is the strategy itself, because the class may override `on_push` and `on_round`.
        """
        return PlainServers(self.topology) if type(self) is ParameterServer else self

    def round(self, w: WorkerView) -> None:
        """Pull the parameters w, compute the gradient g of the next batch at w, and push g."""
        w.params = w.server.pull()
        w.push_grad(w.batch())

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """Apply w <- w - step(g_i / N) when a push arrives, unless staleness is 0."""
        if self.staleness != 0:
            apply_push(shard, value, weight)

    def on_round(self, shard: ShardView, values: list[Vector], weights: list[float]) -> None:
        """Apply w <- w - step(sum(n_i g_i) / sum(n_i)) when all pushes of a round have arrived, with staleness 0."""
        apply_mean(shard, values, weights)
