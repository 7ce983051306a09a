"""Simulate a schedule's table in time. Pure; exact where the seconds are whole numbers or fractions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from rayps.core.pipeline.schedule import Action, Table, needs, splits
from rayps.core.pipeline.validate import walk

Seconds = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of each worker's actions in one step, from 0 on."""

    rows: list[list[tuple[Action, Seconds, Seconds]]]  # for each worker, its actions as (action, start, end)
    peaks: list[int]  # the most activations that each worker holds at once

    @property
    def makespan(self) -> Seconds:
        """The duration of the step: the last end on any worker."""
        return max((row[-1][2] for row in self.rows if row), default=0)

    @property
    def idles(self) -> list[Seconds]:
        """The idle share of the makespan, one for each worker."""
        whole = self.makespan
        busy = [sum((end - start for _, start, end in row), start=Fraction(0)) for row in self.rows]
        return [1 - each / whole if whole else Fraction(0) for each in busy]

    @property
    def idle(self) -> Seconds:
        """The idle share of all workers' time."""
        return sum(self.idles, start=Fraction(0)) / len(self.rows)


def simulate(
    table: Table, seconds: Callable[[Action], Seconds] | dict[str, Seconds] | None = None, transfer: Seconds = 0
) -> Timeline:
    """Run a table in simulated time: each worker runs its actions in order, each as soon as its inputs have arrived.

    `seconds` gives the time of an action, or of each kind of action, such as {"F": 1, "B": 2}. None means {"F": 1,
    "B": 2} or, if the table has W, 1 for each of F, B and W. `transfer` is the time to send a tensor between two
    workers; both continue to compute during the transfer.

    Raises:
        ConfigError: the table deadlocks.
    """
    if seconds is None:
        seconds = {"F": 1, "B": 1, "W": 1} if splits(table) else {"F": 1, "B": 2}
    takes = seconds if callable(seconds) else _make_lookup(seconds)
    chunks = 1 + max((action.chunk for row in table for action in row), default=-1)
    rows: list[list[tuple[Action, Seconds, Seconds]]] = [[] for _ in table]
    done: dict[Action, Seconds] = {}
    for rank, action in walk(table):
        start = rows[rank][-1][2] if rows[rank] else 0
        for need in needs(action, chunks):
            there = need.chunk % len(table)
            start = max(start, done[need] + (transfer if there != rank else 0))
        done[action] = start + takes(action)
        rows[rank].append((action, start, done[action]))
    return Timeline(rows, [find_peak(row, splits(table)) for row in table])


def find_peak(row: list[Action], split: bool) -> int:
    """Return the most activations that a worker with these actions holds at once.

    The worker holds an activation from the F to the B of its micro-batch, or to the W with `split`.
    """
    held = most = 0
    for action in row:
        held += (action.kind == "F") - (action.kind == ("W" if split else "B"))
        most = max(most, held)
    return most


def _make_lookup(seconds: dict[str, Seconds]) -> Callable[[Action], Seconds]:
    return lambda action: seconds[action.kind]
