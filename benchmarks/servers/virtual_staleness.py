"""Train in virtual time under a staleness bound: the arithmetic is that of a job, and only the durations are made up.

Gradients are computed, a shard applies them, its clock delays pulls, and the driver's part moves an adaptive bound. A
round lasts as long as its scene says (`benchmarks.servers.stragglers.draw_factors`), an exchange always `EXCHANGE` of a
normal round, and the driver polls ten times a second. So the result depends on the seed alone, and not on the load of
the machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.servers.stragglers import SlowDigits, draw_factors
from rayps.core.grid import Grid
from rayps.core.job.records import Point
from rayps.core.strategy.staleness_bound import MovedBound
from rayps.core.strategy.strategy import StrategyView
from rayps.data import Batch, Data
from rayps.ps.protocol.pieces import Extent
from rayps.ps.server.dense_segment import Shard
from rayps.runtime.driver.bound_mover import BoundMover
from rayps.runtime.records.journal import Journal
from rayps.tensors.flat import FlatModel
from rayps.tensors.learning_rate import recipe_of
from rayps.worker.exchange.push_agreement import PushAgreement

EXCHANGE = 0.04  # the length of an exchange, as a part of a normal round
POLL_SECONDS = 0.1


@dataclass(slots=True)
class _VirtualRound:
    """The round of a worker that has begun, at the time `began`; its pull was served at the time `pulled`."""

    began: float
    pulled: float = 0.0
    params: Tensor = field(default_factory=lambda: torch.empty(0))


class VirtualJob:
    """Workers and a shard in virtual time. Implements `rayps.runtime.driver.bound_mover.BoundedGroup`."""

    def __init__(self, workload: SlowDigits, rows: Data, strategy: StrategyView, workers: int, *, seed: int) -> None:
        """Prepare. `rows` are the training data; `workload` has the scene, and the seconds of a normal round."""
        self.grid, self.now = Grid(workers), 0.0
        self.flat = FlatModel(workload.model())
        self.workload, self._pace = workload, workload.pace
        layout = self.flat.layout
        start = self.flat.vector.clone()
        extent = Extent(layout, 0, layout.size)
        self.shard = Shard(extent, strategy, recipe_of(workload), start, [0] * workers, private=True)
        self._batches = [_yield_batches(rows, rank, workers, seed) for rank in range(workers)]
        self._factors = [_yield_all_factors(rows, workload.scene, rank, workers, seed) for rank in range(workers)]
        self._versions, self._rounds = [0] * workers, [_VirtualRound(0.0) for _ in range(workers)]
        self._agreements = [PushAgreement(partial(self._versions.__getitem__, rank)) for rank in range(workers)]
        self._points: list[Point] = []
        self._reported = [0] * workers  # rounds that the driver knows
        self._waiting = list(range(workers))  # ranks whose pull is not served yet
        self._due: list[tuple[float, int]] = []  # (time of its push, rank)
        self._mover = BoundMover(journal := Journal())
        self.events = journal.events
        self._mover.begin(strategy)
        self._poll_at = POLL_SECONDS
        self._serve()

    def move_bound(self, staleness: int | None) -> None:
        """Replace the staleness bound, as of the rounds that the driver knows."""
        self.shard.clock.move(MovedBound(staleness, tuple(self._reported)))
        self._serve()

    def advance(self) -> None:
        """Go on to the next push or poll."""
        if not self._due or self._poll_at <= self._due[0][0]:
            self.now, self._poll_at = self._poll_at, self._poll_at + POLL_SECONDS
            self._poll()
            return
        self.now, rank = heapq.heappop(self._due)
        self._push(rank)
        self._serve()

    def loss(self, batch: Batch) -> float:
        """Return the loss of the shard's parameters on a batch."""
        self.flat.vector.copy_(self.shard.params)
        with torch.no_grad():
            return float(self.workload.loss(self.flat.model, batch))

    def _push(self, rank: int) -> None:
        """End a worker's round: compute its gradient at the parameters that it pulled, and push it."""
        running, step, batch = self._rounds[rank], self.shard.ledger.marks[rank], next(self._batches[rank])
        gradient, loss = self._compute_gradient(running.params, batch)
        self._agreements[rank].add(gradient)
        self.shard.push(rank, step, gradient, float(batch.size))
        seconds, wait = self.now - running.began, running.pulled - running.began
        facts = {"kind": "round", "rank": rank, "round": step, "seconds": seconds, "wait": wait, "loss": loss}
        self._points.append(facts | self._agreements[rank].point())
        self._rounds[rank] = _VirtualRound(self.now)
        self._waiting.append(rank)

    def _compute_gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, float]:
        self.flat.vector.copy_(params)
        loss = self.workload.loss(self.flat.model, batch)
        parts = torch.autograd.grad(loss, list(self.flat.parameters))
        return torch.cat([part.reshape(-1) for part in parts]), float(loss.detach())

    def _serve(self) -> None:
        """Serve the pulls that need not wait."""
        for rank in [rank for rank in self._waiting if self.shard.clock.may_pull(rank)]:
            self._waiting.remove(rank)
            running, exchange = self._rounds[rank], EXCHANGE * self._pace
            running.pulled, running.params = self.now + exchange, self.shard.params.clone()
            self._versions[rank] = self.shard.version
            length = next(self._factors[rank]) * self._pace
            heapq.heappush(self._due, (running.pulled + length, rank))

    def _poll(self) -> None:
        points, self._points = self._points, []
        for point in points:
            self._reported[point["rank"]] = point["round"] + 1
        self._mover.follow(self, points)


def _yield_batches(rows: Data, rank: int, workers: int, seed: int) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from rows.batches(rank=rank, size=workers, seed=seed, epoch=epoch)
        epoch += 1


def _yield_all_factors(rows: Data, scene: str, rank: int, workers: int, seed: int) -> Iterator[float]:
    epoch = 0
    while True:
        yield from draw_factors(scene, rank, rows.steps(workers), seed, epoch)
        epoch += 1
