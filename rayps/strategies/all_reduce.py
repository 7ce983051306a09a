"""Synchronous data-parallel SGD over a ring all-reduce.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
Every worker holds all parameters w and its own optimizer. In round t, worker i computes g_i on its batch of n_i
samples; the ring computes g = sum(n_i g_i) / sum(n_i) on every worker; all workers take the same step.
Gradients are sent in buckets of `bucket_mb` (10^6 bytes) while backward continues. 0 means one piece after backward,
and none means that rayps chooses the size, between hosts by the measured latency and bandwidth. With three or more
hosts, the order of additions depends on the size of the buckets.
A workload's `clip_norm` clips g, the mean.
`compression` (fp16, bf16, int8, top_k, top_k:FRACTION, auto) encodes the g_i, with error feedback.
`shard` divides state that is equal on all workers (Rajbhandari et al., "ZeRO: Memory optimizations toward training
trillion parameter models", SC 2020). With "optimizer" (stage 1), worker i gets only its slice of g, steps its slice of
w with its slice of the optimizer's moments, and sends it to the others. With "gradients" (stage 2), no worker holds the
whole g: each micro-batch's gradient is sent bucket by bucket and dropped. With "parameters" (stage 3), torch's FSDP2
also divides w. With `slice_backup`, another worker holds a copy of each slice, from which a dead worker is rebuilt.
With `backup` b, only the gradients of the first N of N + b workers count in a step (Chen et al., "Revisiting
distributed synchronous SGD", ICLR 2016 workshop). Which these are is agreed before anything is sent, so that nothing is
sent while backward continues. A worker that is late drops its gradient and computes it again, of the same rows, in the
next step (docs/backup_workers.md). One that is dropped in `late_limit` steps in a row (10 by default) is reported and,
with `replace_late`, once replaced by a new process.
With `privacy=dp(...)` a step is one of DP-SGD (Abadi et al., "Deep learning with differential privacy", CCS 2016): see
`rayps.privacy.row_level` and docs/privacy.md.
With a `replica` of several workers, i numbers the replicas. Each worker averages the gradient of its part of the model
with the workers of the other replicas that have the same part. This gradient is sent in one piece, uncompressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps_client.errors import ConfigError
from rayps_client.values import Json

from rayps.core.strategy import options
from rayps.core.strategy.compression import compression_of
from rayps.core.strategy.replica import Replica, check_replica
from rayps.core.strategy.strategy import WorkerView
from rayps.core.strategy.topology import Peers
from rayps.privacy.options import PrivacySpec, privacy_of
from rayps.privacy.row_level import check_row_level
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Workers that take each step together, by their mean gradient: the fastest if all machines are equally fast.

    Example:
        rayps.train(work, strategy=rayps.AllReduce(bucket_mb=4), workers=2)
    """

    compression: str | None = None
    bucket_mb: float | None = None
    replica: Replica | None = None
    shard: str | None = None
    slice_backup: bool | None = None
    backup: int | None = None
    late_limit: int | None = None
    replace_late: bool | None = None
    privacy: Json | PrivacySpec = None
    name: ClassVar[str] = "all_reduce"

    @property
    def topology(self) -> Peers:
        """Workers that have the same part of the model average its gradient around a ring."""
        copies = False if self.slice_backup is None else self.slice_backup
        return Peers(
            self.replica,
            self.compression,
            self.bucket_mb,
            shard=self.shard,
            slice_backup=copies,
            backup=self.backup or 0,
            late=options.late_workers(self),
            private=self.privacy_spec is not None,
        )

    @property
    def privacy_spec(self) -> PrivacySpec | None:
        """The options of row-level differential privacy; None if the job is not private."""
        return privacy_of(self.privacy)

    def __post_init__(self) -> None:
        if self.compression is not None:
            compression_of(self.compression)
        mb = self.bucket_mb
        if mb is not None and (isinstance(mb, bool) or not isinstance(mb, (int, float)) or not 0 <= mb < float("inf")):
            raise ConfigError(
                f"bucket_mb is {mb!r}: give megabytes such as 4, or 0 (one bucket after backward), or none (automatic)",
                field="bucket_mb",
            )
        check_replica(self.replica)
        _ = self.topology  # checks how the options can be combined
        check_row_level(self.privacy_spec)

    def round(self, w: WorkerView) -> None:
        """Do one round: g <- mean of the workers' gradients; w <- w - step(g)."""
        w.step(w.mean_grad(w.batch()))
