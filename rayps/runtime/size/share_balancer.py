"""Watch the workers' speeds: report a worker that is much slower for long, and balance the shares of rows in step.

`rayps.core.rows.balanced_shares` decides about shares and `rayps.core.time.slow_ranks` about reports, both by the
seconds that a worker computes and reads, without its waits for others. For a change of the shares all workers finish
the same round (`rayps.worker.exchange.round_gate`), and continue with the new shares from the next round on. They
exchange nothing for it, and keep their connections and states.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rayps.cluster.members import GroupMember
from rayps.core.job.records import Point
from rayps.core.rows.balanced_shares import LONGEST_WINDOW, WINDOW, RowSpeeds, balance_shares, estimate_round_seconds
from rayps.core.rows.row_shares import RowShares
from rayps.core.time.slow_ranks import SlowRank, SlowRanks
from rayps.runtime.driver.hold_workers import hold_workers
from rayps.runtime.records.journal import Journal


class DealtRounds(Protocol):
    """How the rows of rounds are dealt to workers in step: see `rayps.runtime.size.membership`."""

    @property
    def current(self) -> RowShares:
        """How rows are dealt now."""

    def deal(self, at: int, shares: tuple[int, ...]) -> RowShares:
        """Deal rows by `shares` from round `at` on."""


class ShareBalancer:
    """Reports slow workers. In a job with `balance`, it also changes the workers' shares of rows."""

    def __init__(self, journal: Journal, *, balances: bool) -> None:
        """`balances`: whether the job has asked for shares by speed."""
        self._journal, self._balances = journal, balances
        self._speeds, self._slow = RowSpeeds(0), SlowRanks(0)
        self._size = 0
        self._window = WINDOW  # rounds before a change of the shares; twice as many after each change
        self._first: dict[int, int] = {}  # rank -> its first round that is measured

    def begin(self, size: int) -> None:
        """Begin a generation of `size` workers: what was measured before is dropped."""
        self._size = size
        self._slow = SlowRanks(size)
        self._measure_anew({})

    def add(self, points: Iterable[Point]) -> None:
        """Add new points of single ranks, and report the workers that were slow for long."""
        for point in points:
            rank, rows = point.get("rank"), point.get("samples")
            if point["kind"] != "round" or rank is None or rows is None:
                continue
            seconds = point["compute"] + point["data"]
            for slow in self._slow.add(rank, seconds, rows):
                self._report(slow)
            if point["round"] >= self._first.setdefault(rank, point["round"] + 1):
                self._speeds.add(rank, seconds, rows)

    def balance(self, workers: list[GroupMember], dealt: DealtRounds) -> None:
        """Change the shares if the measured speeds say that this pays. `dealt` is how rows are dealt now."""
        seconds = self._speeds.seconds if self._balances and self._size > 1 else None
        if seconds is None or len(dealt.current.shares) != self._size:
            return
        before = dealt.current.shares
        found = balance_shares(before, seconds)
        if found is None:
            return
        at = hold_workers(workers)
        if at is None:
            return
        rows = dealt.deal(at, found)
        for worker in workers:
            worker.await_reply(worker.handle.call("deal", at, rows))
        self._window = min(LONGEST_WINDOW, 2 * self._window)
        self._measure_anew(dict.fromkeys(range(self._size), at + 1))
        was, will = estimate_round_seconds(before, seconds), estimate_round_seconds(found, seconds)
        each = ", ".join(f"worker-{rank} {share} ({1 / seconds[rank]:.4g} rows/s)" for rank, share in enumerate(found))
        self._journal.event(
            "shares",
            f"from round {at} on, rows are dealt by speed, so that a round should take {will:.3g} s instead of "
            f"{was:.3g} s: {each}",
            round=at,
            shares=list(found),
            before=list(before),
            seconds_per_row=seconds,
        )

    def _measure_anew(self, first: dict[int, int]) -> None:
        self._speeds, self._first = RowSpeeds(self._size, self._window), first

    def _report(self, slow: SlowRank) -> None:
        times = slow.seconds / slow.others if slow.others else float("inf")
        way = (
            "its share of the rows is at its limit"
            if self._balances
            else "give balance=True (all_reduce), or staleness='auto' (parameter_server), or free its machine"
        )
        self._journal.event(
            "slow_worker",
            f"worker-{slow.rank} is slow: its own work takes {slow.seconds:.3g} s a round of {slow.rows:.4g} rows, "
            f"{times:.2g} times as long as that of the other workers ({slow.others:.3g} s), in {slow.rounds} rounds in "
            f"succession: {way}",
            rank=slow.rank,
            seconds=slow.seconds,
            rows=slow.rows,
            others=slow.others,
            rounds=slow.rounds,
        )
