"""Synchronous data-parallel SGD over a ring all-reduce.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
Every worker holds all parameters w and its own optimizer. In round t, worker i computes g_i on its
batch of n_i samples; the ring computes g = sum(n_i g_i) / sum(n_i) on every worker; all take the same step.
Gradients are sent in buckets of `bucket_mb` (10^6 bytes; 0 = all at once, none = chosen) while backward continues.
A workload's `clip_norm` clips g, the mean.
`compression` (fp16, bf16, int8, top_k, top_k:FRACTION, auto) encodes the g_i, with error feedback.
With a `replica` of several workers i counts replicas, and each worker averages its part of the model with the workers
that hold the same part; a part's gradient is sent at once, uncompressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps.core.compression import compression_of
from rayps.core.errors import ConfigError
from rayps.core.replica import Replica, must_go_with
from rayps.core.strategy import WorkerView
from rayps.core.topology import Peers
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Equal workers in step: exact, and the fastest when all machines are equally fast.

    Example:
        rayps.train(work, strategy=rayps.AllReduce(bucket_mb=4), workers=2)
    """

    compression: str | None = None
    bucket_mb: float | None = None
    replica: Replica | None = None
    name: ClassVar[str] = "all_reduce"

    @property
    def topology(self) -> Peers:
        """Workers average gradients around the ring of their column."""
        return Peers(self.replica, self.compression, self.bucket_mb)

    def __post_init__(self) -> None:
        if self.compression is not None:
            compression_of(self.compression)
        mb = self.bucket_mb
        if mb is not None and (isinstance(mb, bool) or not isinstance(mb, (int, float)) or not 0 <= mb < float("inf")):
            raise ConfigError(
                f"bucket_mb is {mb!r}: give megabytes such as 4, 0 (one bucket after backward) or none (chosen)",
                field="bucket_mb",
            )
        must_go_with(self.replica, compression=self.compression, bucket_mb=mb)

    def round(self, w: WorkerView) -> None:
        """Compute g <- mean over workers; w <- w - step(g)."""
        w.step(w.mean_grad(w.batch()))
