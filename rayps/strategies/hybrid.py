"""Hybrid: the dense part by all-reduce, the sparse tables on servers.

Lian et al., "Persia: an open, hybrid system scaling deep learning-based recommenders up to 100 trillion parameters",
KDD 2022. A batch touches few rows of a table, so gradients of rows seldom overlap and may be applied late; every batch
touches the whole dense part, which is kept in step. Each round a worker looks up its rows; the ring computes g =
sum(n_i g_i) / sum(n_i) of the dense part on all workers, which take the same step; the rows' gradients are pushed to
`servers` servers, which apply them: with `staleness` none on arrival, with s on arrival while no worker is ahead by
more than s rounds, with 0 after all have arrived, by their mean.

A workload's `clip_norm` is refused with tables: no worker has the mean gradient of their rows. `prefetch`: where the
workload has `lookups`, the next batch's rows are pulled while this one is computed, and lack this worker's newest push
(with staleness 0 they do not). `replicas` are backups of each segment on other servers; `compression` and `bucket_mb`
are those of all_reduce.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from rayps.core import options
from rayps.core.errors import ConfigError
from rayps.core.strategy import WorkerView
from rayps.core.topology import Peers
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.base import Strategy
from rayps.strategies.parameter_server import ParameterServer


@dataclass(frozen=True)
class Hybrid(Strategy):
    """All-reduce for the dense part, servers for sparse tables: for recommenders.

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
        """Accept `dense` and `sparse` as strategies: Hybrid(sparse=ParameterServer(staleness=3), servers=4).

        Raises:
            ConfigError: an option has an invalid value.
        """
        self._take("dense", dense, AllReduce, ("compression", "bucket_mb"))
        self._take("sparse", sparse, ParameterServer, ("staleness", "replicas"))
        if sparse is not None and sparse.shards > 1:
            object.__setattr__(self, "servers", sparse.shards)
        options.whole(self, "servers")
        options.flag(self, "prefetch")
        _ = self.ring, self.tables  # both strategies check their own options

    def _take(self, name: str, part: Strategy | None, kind: type[Strategy], fields: tuple[str, ...]) -> None:
        if part is None:
            return
        if not isinstance(part, kind):
            raise ConfigError(f"{name} is {type(part).__name__}: hybrid takes {kind.__name__}(...)", field=name)
        for field in fields:
            given = getattr(part, field)
            if given is not None or field == "staleness":
                object.__setattr__(self, field, given)

    @property
    def ring(self) -> AllReduce:
        """The strategy of the dense part."""
        return AllReduce(compression=self.compression, bucket_mb=self.bucket_mb)

    @property
    def topology(self) -> Peers:
        """The dense part is averaged around the ring; the tables are on servers."""
        tables = self.tables.topology
        return Peers(None, self.compression, self.bucket_mb, tables, self.prefetch)

    @property
    def tables(self) -> ParameterServer:
        """The strategy of the tables' servers."""
        return ParameterServer(shards=self.servers, staleness=self.staleness, replicas=self.replicas)

    def round(self, w: WorkerView) -> None:
        """Compute g <- mean over workers; w <- w - step(g); then push the gradients of the rows."""
        self.ring.round(w)
