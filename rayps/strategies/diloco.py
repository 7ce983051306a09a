"""DiLoCo: long periods of local steps, and an outer optimizer that steps by the workers' mean change.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105, algorithm 1.
All workers start at theta. In a period worker k takes H = `period` steps (50; the paper's H is 500) of the workload's
optimizer (the paper's AdamW) from theta to theta_k. Then

    D <- sum(n_k (theta - theta_k)) / sum(n_k)        the outer gradient; n_k: the samples of worker k in the period
    v <- mu v + D;  theta <- theta - lr (D + mu v)    lr = `outer_lr`, mu = `outer_momentum` (Nesterov)

and all workers continue from theta. The last period ends with the phase. lr = 1 and mu = 0 is local SGD. Between outer
steps, evaluations and checkpoints use the mean of the workers' parameters. A checkpoint also has each worker's state,
so that a job can resume within a period.

- `overlap` S: D is sent while the next S steps (fewer than H) run. Then each worker continues from the new theta plus
  the change of its parameters since it sent D: w_k <- theta + (w_k - theta_k). The outer step is S steps late (similar
  to Wang et al., "Overlap local-SGD", ICASSP 2020). With 0, the default, workers wait for D.
- `compression` (fp16, bf16, int8, top_k, top_k:FRACTION, auto): encodes theta - theta_k, with error feedback.
- `buckets`: the number of parts in which theta - theta_k is sent, one after another; the result is the same.
- `momentum`: what an outer step does to the inner optimizers' states: keep (as the paper), reset or average them.
- `buffers`: what an outer step does to floating point buffers: average or keep them.

A workload's `clip_norm` clips the gradients of inner steps, not D. A worker sends 1/H of the bytes of all_reduce. It
stores two more vectors of the model's size (theta and v), or four more with `overlap`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from rayps_client.errors import ConfigError

from rayps.core.grid import Grid
from rayps.core.strategy import options, traffic
from rayps.core.strategy.strategy import Vector, WorkerView
from rayps.core.strategy.strategy_families import LOCAL_UPDATES
from rayps.core.strategy.topology import Peers
from rayps.core.strategy.traffic import Sizes, TrafficCost
from rayps.strategies.averaging import check_averaging, local_step, report_average, rounds, rounds_done, samples
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Distant workers that take hundreds of local steps, then one step of an outer optimizer by their mean change.

    Example:
        rayps.train(work, strategy=rayps.DiLoCo(period=8, outer_lr=0.7), workers=2)
    """

    period: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    overlap: int = 0
    compression: str | None = None
    buckets: int = 1
    momentum: str = "keep"
    buffers: str = "average"
    name: ClassVar[str] = "diloco"
    loop: ClassVar[str] = LOCAL_UPDATES

    def __post_init__(self) -> None:
        for field, least in (("period", 1), ("overlap", 0), ("buckets", 1)):
            options.whole(self, field, least)
        if self.overlap >= self.period:
            raise ConfigError(
                f"overlap is {self.overlap} and period is {self.period}: one mean must arrive before the next "
                "mean is sent; give an overlap below the period",
                field="overlap",
            )
        options.number(self, "outer_lr", above=0, expected="a rate above 0")
        options.number(self, "outer_momentum", least=0, below=1, expected="0 or more, and below 1")
        check_averaging(self)

    @property
    def topology(self) -> Peers:
        """Workers average their changes of the parameters around the ring, at each outer step."""
        return Peers(compression=self.compression)

    @property
    def needs_end(self) -> bool:
        """Whether an outer step arrives after its period, and the last one must be awaited at the end."""
        return self.overlap > 0

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the cost per step of the mean of the parameters at each outer step."""
        return traffic.periodic_mean(grid, sizes, self.compression, self.period, moments=self.momentum == "average")

    def begin(self, w: WorkerView) -> None:
        """Start with theta = the common initial parameters and v = 0."""
        if "theta" not in w.shared:
            w.shared |= {"theta": w.params.clone(), "v": w.params * 0}

    def round(self, w: WorkerView) -> None:
        """Take one inner step. At the end of a period, send theta - theta_k; take the outer step when D arrives."""
        local_step(w)
        t, last = rounds_done(w), w.position == w.plan.end
        if "D0" in w.memory and (last or t % self.period == self.overlap):
            self._take_outer_step(w)
        if t % self.period == 0 or last:
            self._send_change(w)
            if last or not self.overlap:
                self._take_outer_step(w)

    def _send_change(self, w: WorkerView) -> None:
        """Start to compute D, the mean of theta - theta_k. Average the moments and buffers without waiting for D."""
        n, apart = samples(w), w.shared["theta"] - w.params
        w.memory |= {f"D{i}": w.mean_later(apart[cut], n, slot=i) for i, cut in enumerate(self._cuts(w))}
        w.memory["theta_k"] = w.params.clone()
        w.sync_optimizer_and_buffers(n, momentum=self.momentum, buffers=self.buffers)
        report_average(w)

    def _take_outer_step(self, w: WorkerView) -> None:
        """Wait for D, then v <- mu v + D;  theta <- theta - lr (D + mu v);  w_k <- theta + (w_k - theta_k)."""
        theta, v = w.shared["theta"], w.shared["v"]
        for i, cut in enumerate(self._cuts(w)):
            d = w.arrived(w.memory.pop(f"D{i}"))
            v[cut].mul_(self.outer_momentum).add_(d)
            theta[cut].sub_(d.add_(v[cut], alpha=self.outer_momentum), alpha=self.outer_lr)
        since = w.params - w.memory.pop("theta_k")
        w.params = theta + since if rounds(w) else theta

    def _cuts(self, w: WorkerView) -> list[slice]:
        """Return the slices of the vector that are sent one after another."""
        size = len(w.params)
        ends = [size * i // self.buckets for i in range(self.buckets + 1)]
        return [slice(lo, hi) for lo, hi in pairwise(ends) if lo < hi]

    def consensus(self, w: WorkerView) -> Vector | None:
        """Return the mean of the workers' parameters."""
        if rounds(w):
            return w.mean(w.params, samples(w), exact=True)
        return w.mean(w.params, exact=True) if "D0" in w.memory else None
