"""Local SGD: workers train separately and average their parameters every H steps.

Stich, "Local SGD converges fast and communicates little", ICLR 2019, algorithm 1; Lin, Stich, Patel, Jaggi, "Don't use
large mini-batches, use local SGD", ICLR 2020 (post-local SGD). In step t of a phase, worker k of N does:

    w_k <- w_k - step(g_k), where g_k is the gradient of its own next batch
    every H = `period` steps, and at the phase's end: w_k <- sum(n_k w_k) / sum(n_k)

n_k is the number of samples that worker k has used since the last average. A worker that ran out of rows has weight 0.
Evaluations use the mean of the workers' parameters. Checkpoints save this mean and each worker's own state.

- `warmup` T: the first T steps are synchronous, as under all_reduce, and the first period starts after them (post-local
  SGD).
- `momentum`: what an average does to each worker's optimizer state: keep (unchanged, the default), reset (empty it),
  average (like the parameters).
- `buffers`: floating point buffers, such as BatchNorm's statistics: average (the default), or keep each worker's own.
- `compression` (fp16, bf16, int8, top_k, top_k:FRACTION, auto): encodes each worker's change since the last average,
  with error feedback; gradients of the warm-up, moments and buffers are sent uncompressed.

A workload's `clip_norm` clips each g_k, not the average. A worker sends 1/H of the bytes of all_reduce;
momentum=average adds 1/H of the bytes of the optimizer's state. H = 1 with plain SGD is all_reduce. If H is the number
of steps of the phase, there is one average, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps.core.grid import Grid
from rayps.core.strategy import options, traffic
from rayps.core.strategy.strategy import Vector, WorkerView
from rayps.core.strategy.strategy_families import LOCAL_UPDATES
from rayps.core.strategy.topology import Peers
from rayps.core.strategy.traffic import Sizes, TrafficCost
from rayps.strategies.averaging import check_averaging, local_step, report_average, rounds, rounds_done, samples
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Workers that train separately and average every few steps: for slow networks.

    Example:
        rayps.train(work, strategy=rayps.LocalSGD(period=8), workers=2)
    """

    period: int = 8
    warmup: int = 0
    momentum: str = "keep"
    buffers: str = "average"
    compression: str | None = None
    name: ClassVar[str] = "local_sgd"
    loop: ClassVar[str] = LOCAL_UPDATES

    def __post_init__(self) -> None:
        options.whole(self, "period")
        options.whole(self, "warmup", 0)
        check_averaging(self)

    @property
    def topology(self) -> Peers:
        """Workers average their parameters around the ring, at the end of each period."""
        return Peers(compression=self.compression)

    @property
    def mean_rounds(self) -> float:
        """The number of rounds that step by the mean gradient: those of the warm-up."""
        return self.warmup if type(self).round is LocalSGD.round else super().mean_rounds

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the cost per step of the mean of the parameters at each average."""
        return traffic.periodic_mean(grid, sizes, self.compression, self.period, moments=self.momentum == "average")

    def round(self, w: WorkerView) -> None:
        """Apply w_k <- w_k - step(g_k). At the end of a period, average the parameters."""
        t = rounds_done(w)
        if t < self.warmup:
            w.step(w.mean_grad(w.batch()))
            return
        if t == self.warmup and self.compression is not None:
            w.shared["x"] = w.params.clone()
        local_step(w)
        if (t + 1 - self.warmup) % self.period == 0 or w.position == w.plan.end:
            self._average(w)

    def _average(self, w: WorkerView) -> None:
        """Apply w_k <- mean(w_k) or, with compression, w_k <- x + mean(w_k - x), where x is the last average."""
        n, x = samples(w), w.shared.get("x")
        if self.compression is None or x is None:
            w.params = w.mean(w.params, n, exact=True)
        else:
            w.params = x.add_(w.mean(w.params - x, n))
        w.sync_optimizer_and_buffers(n, momentum=self.momentum, buffers=self.buffers)
        report_average(w)

    def consensus(self, w: WorkerView) -> Vector | None:
        """Return the mean of the workers' parameters."""
        return w.mean(w.params, samples(w), exact=True) if rounds(w) else None
