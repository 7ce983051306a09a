"""Hybrid: the model's dense part is trained by all-reduce, and its sparse tables are on servers.

Lian et al., "Persia: an open, hybrid system scaling deep learning-based recommenders up to 100 trillion parameters",
KDD 2022. A batch touches few rows of a table; two workers' gradients of rows therefore seldom overlap and may be
applied late. Every batch touches the whole dense part, which is therefore trained synchronously. In each round a worker
pulls the rows of its batch. The ring computes g = sum(n_i g_i) / sum(n_i) of the dense part, and all workers take the
same step by g. The rows' gradients are pushed to `servers` servers. With `staleness` none, the servers apply each push
on arrival. With s > 0 they also do so, but no worker may be more than s rounds ahead. With 0, they wait for the pushes
of all workers and apply the mean.

A workload with tables cannot have `clip_norm`, because no worker has the mean gradient of the tables' rows. `prefetch`:
if the workload defines `lookups`, the rows of the next batch are pulled while the current batch is computed. These rows
lack this worker's newest push, except with staleness 0. `replicas` is the number of backups of each segment on other
servers. `compression` and `bucket_mb` are those of all_reduce.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from rayps_client.errors import ConfigError

from rayps.core.strategy import options
from rayps.core.strategy.strategy import WorkerView
from rayps.core.strategy.topology import Peers, refuse_adaptive
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.base import Strategy
from rayps.strategies.parameter_server import ParameterServer


@dataclass(frozen=True)
class Hybrid(Strategy):
    """All-reduce for the dense part of the model, and servers for its sparse tables: for recommenders.

    Example:
        rayps.train(ratings, strategy=rayps.Hybrid(servers=2), workers=2)  # a workload with sparse tables
    """

    servers: int = 2
    staleness: int | None = None
    replicas: int = 0
    prefetch: bool = True
    compression: str | None = None
    bucket_mb: float | None = None
    dense: InitVar[AllReduce | None] = None
    sparse: InitVar[ParameterServer | None] = None
    name: ClassVar[str] = "hybrid"

    def __post_init__(self, dense: AllReduce | None, sparse: ParameterServer | None) -> None:
        """Copy options from `dense` and `sparse`: Hybrid(sparse=ParameterServer(staleness=3)) is Hybrid(staleness=3).

        Raises:
            ConfigError: an option has an invalid value.
        """
        self._copy_options("dense", dense, AllReduce, ("compression", "bucket_mb"))
        self._copy_options("sparse", sparse, ParameterServer, ("staleness", "replicas"))
        if sparse is not None and sparse.shards > 1:
            object.__setattr__(self, "servers", sparse.shards)
        options.whole(self, "servers")
        options.flag(self, "prefetch")
        _ = self.ring  # both strategies check their own options
        refuse_adaptive(self.tables.topology, "hybrid")

    def _copy_options(self, name: str, part: Strategy | None, kind: type[Strategy], fields: tuple[str, ...]) -> None:
        if part is None:
            return
        if not isinstance(part, kind):
            raise ConfigError(f"{name} is {type(part).__name__}: give hybrid {name}={kind.__name__}(...)", field=name)
        for field in fields:
            given = getattr(part, field)
            if given is not None or field == "staleness":
                object.__setattr__(self, field, given)

    @property
    def ring(self) -> AllReduce:
        """The strategy that trains the dense part."""
        return AllReduce(compression=self.compression, bucket_mb=self.bucket_mb)

    @property
    def topology(self) -> Peers:
        """The gradient of the dense part is averaged around the ring; the tables are on servers."""
        tables = self.tables.topology
        return Peers(None, self.compression, self.bucket_mb, tables, self.prefetch)

    @property
    def mean_rounds(self) -> float:
        """The number of rounds that step by the mean gradient: all."""
        return self.ring.mean_rounds if type(self).round is Hybrid.round else super().mean_rounds

    @property
    def tables(self) -> ParameterServer:
        """The strategy whose servers hold the tables."""
        return ParameterServer(shards=self.servers, staleness=self.staleness, replicas=self.replicas)

    def round(self, w: WorkerView) -> None:
        """Compute g <- mean over workers; w <- w - step(g). The worker then pushes the gradients of the rows."""
        self.ring.round(w)
