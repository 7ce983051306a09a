"""Move the staleness bound of a job while it trains, by what the rounds of its workers show.

`rayps.core.strategy.adaptive_staleness` decides. This module collects the rounds of an interval, tells the servers the
new bound, and writes the reason into the job's journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from rayps.core.grid import Grid
from rayps.core.job.records import Point
from rayps.core.strategy.adaptive_staleness import BoundControl, BoundMove, PushFacts, cost_of, is_complete
from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.topology import is_adaptive
from rayps.runtime.records.journal import Journal


class BoundedGroup(Protocol):
    """The workers and servers of a job, whose staleness bound can be replaced."""

    @property
    def grid(self) -> Grid:
        """The layout of the workers."""

    def move_bound(self, staleness: int | None) -> None:
        """Replace the staleness bound on all servers."""


class BoundMover:
    """Moves the bound of a run under an adaptive staleness; under another strategy it does nothing.

    What it has learned is used again after a restart of the workers, and in a later phase of the run.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._control = BoundControl()
        self._active = self._behind = False
        self._facts: list[PushFacts] = []
        self._next: dict[int, int] = {}  # rank -> its next round that belongs to an interval

    @property
    def moves(self) -> bool:
        """Whether the bound of this generation moves."""
        return self._active

    @property
    def bound(self) -> int | None:
        """The bound now; None is no bound."""
        return self._control.bound

    def begin(self, strategy: StrategyView) -> None:
        """Begin a generation, whose servers start with the strategy's bound."""
        self._active = is_adaptive(strategy)
        self._behind = self._active and self.bound != BoundControl().bound
        self._facts, self._next = [], {}

    def follow(self, group: BoundedGroup, points: Iterable[Point]) -> None:
        """Take over new points of single ranks, and move the bound if they show that another one costs less."""
        workers = group.grid.data
        if not self._active or workers < 2:  # one worker waits for nobody
            return
        for point in points:
            if point["kind"] == "round" and group.grid.column(point["rank"]) == 0:
                self._add(point)
        if self._behind:
            self._behind = False
            group.move_bound(self.bound)
        if not is_complete(self._facts, workers):
            return
        move = self._control.after(cost_of(self._facts, workers))
        self._facts = []
        if move is not None:
            group.move_bound(move.new)
            self._next = {rank: number + 1 for rank, number in self._next.items()}  # the round in progress has waited
            self._report(move)

    def _add(self, point: Point) -> None:
        rank, number = point["rank"], point["round"]
        if number >= self._next.get(rank, number + 1):  # the first round includes the start
            keys = ("seconds", "wait", "between", "agreement", "loss")
            self._facts.append(PushFacts(rank, *(point[key] for key in keys)))
        self._next[rank] = max(number + 1, self._next.get(rank, 0))

    def _report(self, move: BoundMove) -> None:
        cost, old, new = move.cost, _write_bound(move.old), _write_bound(move.new)
        why = (
            f"in {cost.rounds} rounds the workers waited {cost.waited:.2f} of {cost.seconds:.2f} s "
            f"({cost.waiting:.0%}), and old pushes lost {cost.lost:.0%} of the progress"
        )
        if move.rises:
            why = f"the loss has risen to {cost.loss:.4g} in {cost.rounds} rounds"
        self._journal.event(
            "staleness",
            f"the staleness bound moves from {old} to {new}: {why}",
            old=move.old,
            new=move.new,
            rounds=cost.rounds,
            seconds=cost.seconds,
            waited=cost.waited,
            lost=cost.lost,
            loss=None if math.isnan(cost.loss) else cost.loss,
            rises=move.rises,
        )


def _write_bound(bound: int | None) -> str:
    return "none" if bound is None else str(bound)
