"""The workers of an elastic job in step, from round to round: how many there are, and how rows are dealt to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rayps.core.rows.row_shares import RowShares, cut_evenly
from rayps.core.strategy.elastic import ElasticWorkers


class Membership:
    """How the rows of each round are dealt, since the start of the run. Pure.

    A run that is repeated with the `log` of this one as `ElasticWorkers.replay` has the same rows on the same ranks.
    """

    def __init__(self, elastic: ElasticWorkers, rows: int, each: int, least: int, *, drop_last: bool = False) -> None:
        """Prepare. `rows` are those of an epoch, `each` those of one worker in a round without a global batch.

        `drop_last` leaves out an epoch's last round if it has fewer rows than the others.
        """
        self.elastic, self.rows, self.each = elastic, rows, each
        self._least = least
        self._history = [RowShares(0, 0, 0, self.shares(least), drop_last)]

    def shares(self, workers: int) -> tuple[int, ...]:
        """Return the shares of a round's rows of so many workers."""
        if self.elastic.global_batch is not None:
            return cut_evenly(self.elastic.global_batch, workers)
        return (self.each,) * workers

    @property
    def current(self) -> RowShares:
        """How rows are dealt now."""
        return self._history[-1]

    @property
    def lr_factor(self) -> float:
        """The factor of the learning rate now: it is 1 with the least number of workers."""
        return self.elastic.lr_factor(self.current.block, sum(self.shares(self._least)))

    def change(self, at: int, workers: int) -> RowShares:
        """Continue after round `at` with so many workers. Later changes, if there were any, are dropped."""
        following = self.at(at).followed_by(at, self.shares(workers), self.rows)
        self._history = [*(each for each in self._history if each.begin < at), following]
        return self.current

    def deal(self, at: int, shares: Sequence[int]) -> RowShares:
        """Continue after round `at` with the same workers and blocks, which are dealt by `shares`."""
        assert sum(shares) == self.current.block, "the blocks of rows stay the same"
        following = self.at(at).followed_by(at, shares, self.rows)
        self._history = [*(each for each in self._history if each.begin < at), following]
        return self.current

    def enter_phase(self, at: int, epoch: int) -> None:
        """Begin a phase after round `at` with the first round of `epoch`: a stop rule may have moved its begin."""
        self._history = [
            *(each for each in self._history if each.begin < at),
            replace(self.at(at), begin=at, epoch=epoch, taken=0),
        ]

    def at(self, round: int) -> RowShares:
        """Return how the rows of this round were dealt."""
        return next(each for each in reversed(self._history) if each.begin <= round)

    def resume(self, saved: RowShares) -> None:
        """Continue from a checkpoint: `saved` is how rows were dealt when it was written."""
        self._history = [saved]

    @property
    def log(self) -> list[tuple[int, int]]:
        """The pairs (round, workers) of all changes so far."""
        return [(each.begin, len(each.shares)) for each in self._history]

    def next_replay(self, done: int) -> tuple[int, int] | None:
        """Return the next pair (round, workers) to replay after `done` rounds; None if there is none."""
        pairs: Sequence[tuple[int, int]] = self.elastic.replay or ()
        return next(((at, count) for at, count in pairs if at > done), None)

    def replayed_at(self, done: int) -> int:
        """Return the number of workers that a replay has after `done` rounds."""
        pairs: Sequence[tuple[int, int]] = self.elastic.replay or ()
        return next((count for at, count in reversed(pairs) if at <= done), self._least)
