"""Parallel SGD: workers train separately, merge their parameters, and repeat from the result.

Zinkevich, Weimer, Smola, Li, "Parallelized stochastic gradient descent", NIPS 2010, algorithm 3 (`rounds` = 1: one
average at the end). More rounds are iterative parameter mixing: McDonald, Hall, Mann, "Distributed training strategies
for the structured perceptron", NAACL 2010. A phase of T steps has `rounds` = R parts of T/R steps:

    each worker k: SGD on its own rows, from the common parameters
    at the end of a part, all workers take w <- merge(w_1 ... w_N)

- `merge`: mean is the mean of the w_k, weighted by the samples that each worker used in the part. best is the w_k with
  the lowest loss on all of the evaluation data; each worker evaluates its own w_k (on a tie, the lowest rank is best).
- `shuffle`: with true, rows are distributed to workers again in each epoch (the paper draws each worker's rows at
  random). With false, a worker has the same rows for the whole run: the rows of the first epoch or, if the data has
  clients, the rows of some clients, such as label-sorted shards. `data` in the history is the seconds spent on getting
  batches, including this distribution.
- `momentum` (keep, reset, average) and `buffers` (keep, average): as in `local_sgd`. With merge=best, average takes the
  state or buffers of the best worker.
- `compression`: encodes each worker's change since the last merge. It cannot be combined with merge=best.

A workload's `clip_norm` clips each worker's gradients, not the merged parameters. In total, the parameters are sent
around the ring R times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps.core.grid import Grid
from rayps.core.refusals.table import refuse
from rayps.core.strategy import options, traffic
from rayps.core.strategy.strategy import Vector, WorkerView
from rayps.core.strategy.strategy_families import LOCAL_UPDATES, Fixed, Reshuffled, Rows
from rayps.core.strategy.topology import Peers
from rayps.core.strategy.traffic import Sizes, TrafficCost
from rayps.strategies.averaging import check_averaging, local_step, report_average, rounds, rounds_done, samples
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class ParallelSGD(Strategy):
    """Workers that train separately and merge their parameters once or a few times in a run: almost no traffic.

    Example:
        rayps.train(work, strategy=rayps.ParallelSGD(rounds=2), workers=2)
    """

    rounds: int = 1
    merge: str = "mean"
    shuffle: bool = True
    momentum: str = "keep"
    buffers: str = "average"
    compression: str | None = None
    name: ClassVar[str] = "parallel_sgd"
    loop: ClassVar[str] = LOCAL_UPDATES

    def __post_init__(self) -> None:
        options.whole(self, "rounds")
        check_averaging(self)
        options.choice(self, "merge", ("mean", "best"))
        options.flag(self, "shuffle")
        if self.merge == "best" and self.compression is not None:
            refuse({"compression": self.compression, "merge by the best worker": True})

    @property
    def rows(self) -> Rows:
        """How rows are distributed to workers: reshuffled each epoch or, with shuffle=False, fixed."""
        return Reshuffled() if self.shuffle else Fixed()

    @property
    def topology(self) -> Peers:
        """Workers merge their parameters around the ring, at the end of each part."""
        return Peers(compression=self.compression)

    @property
    def needs_end(self) -> bool:
        """True: the rounds of a phase are divided into parts."""
        return True

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the cost per step of the mean of the parameters at each merge."""
        return traffic.periodic_mean(grid, sizes, self.compression, None, moments=self.momentum == "average")

    def round(self, w: WorkerView) -> None:
        """Take a step on this worker alone. At the end of a part, merge the parameters."""
        t, steps = rounds_done(w), int(w.plan.end - w.plan.origin[0])
        if self.compression is not None and rounds(w) == 0:
            w.shared["x"] = w.params.clone()
        local_step(w)
        if (t + 1) * self.rounds // steps > t * self.rounds // steps:
            self._merge(w)

    def _merge(self, w: WorkerView) -> None:
        """Merge the parameters of all workers by the option `merge`. Every worker continues from the result."""
        weight, facts = self._weight(w)
        x = w.shared.get("x")
        if self.compression is None or x is None:
            w.params = w.mean(w.params, weight, exact=True)
        else:
            w.params = x.add_(w.mean(w.params - x, weight))
        w.sync_optimizer_and_buffers(weight, momentum=self.momentum, buffers=self.buffers)
        report_average(w, **facts)

    def consensus(self, w: WorkerView) -> Vector | None:
        """Return the parameters that a merge would give now, or None if no step was taken since the last merge."""
        return w.mean(w.params, self._weight(w)[0], exact=True) if rounds(w) else None

    def _weight(self, w: WorkerView) -> tuple[float, dict[str, float]]:
        """Return this worker's weight in the merge and, with merge=best, the best worker's rank for the report."""
        if self.merge == "mean":
            return samples(w), {}
        losses = w.ring.all_gather(w.params.new_empty(1).double().fill_(w.own_loss())).flatten()
        losses[losses.isnan()] = float("inf")
        best = int(losses.argmin())
        return float(w.rank == best), {"best": best}
