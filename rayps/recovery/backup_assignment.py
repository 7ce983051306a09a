"""Which worker holds a backup of whose state, and from which round all workers continue after a failure. Pure.

A worker's *counterpart* is the worker at the same place in another replica: both have the same stage and the same
tensor rank, so their parameters and moments are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayps.core.grid import Grid
from rayps.core.job.continuation import Continuation, Source


@dataclass(frozen=True, slots=True)
class HeldRounds:
    """The rounds after which one worker holds the state of another worker, or its own.

    `whole`: the states are complete. If False, they have only the part that the counterparts' states lack.
    """

    rounds: tuple[int, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class BackupAssignment:
    """How a worker's state is backed up in one generation, so that its death loses no round."""

    base_generation: int  # the newest generation that started from a snapshot: see `state_slots.StateSlots`
    addresses: tuple[str, ...]  # one for each rank: where that worker receives backups and requests for states
    holder: int  # the rank of the worker that holds this worker's backup
    has_counterpart: bool  # whether another replica has a worker at the same place
    restores_state: bool = False  # whether the worker starts from a committed state, not from the snapshot
    source: Source | None = None  # the worker that has the committed state; None if this worker has it


def choose_backup_holders(grid: Grid, hosts: Sequence[str]) -> list[int | None]:
    """Return, for each rank, the rank of the worker that holds its backup, or None if the job has one worker.

    The holder is a counterpart if there is one, otherwise another worker of the same replica. Candidates are tried in
    the order of ranks after the worker's own rank. The first one on another host is taken, or the first one if all are
    on one host.
    """
    return [_choose_backup_holder(grid, hosts, rank) for rank in range(grid.size)]


def _choose_backup_holder(grid: Grid, hosts: Sequence[str], rank: int) -> int | None:
    circle = grid.along("data", rank) if grid.data > 1 else grid.replica(grid.at(rank).data)
    at = circle.index(rank)
    others = circle[at + 1 :] + circle[:at]
    elsewhere = [other for other in others if hosts[other] != hosts[rank]]
    return next(iter(elsewhere or others), None)


def plan_rebuild(grid: Grid, held_rounds: Mapping[int, Mapping[int, HeldRounds]]) -> Continuation | None:
    """Return the newest round from which every worker can continue, and the source of each lost worker's state.

    `held_rounds[survivor][owner]` are the rounds after which the worker `survivor` holds the state of worker `owner`.

    A counterpart's state lacks the lost worker's own buffers and random state. If no worker has these for a round, an
    older round for which they are available is preferred. Return None if there is no common round, because a worker,
    its counterparts and its backup were lost together.
    """
    lost = [rank for rank in range(grid.size) if rank not in held_rounds]
    if not held_rounds:
        return None
    own = [set(held[rank].rounds) if rank in held else set[int]() for rank, held in held_rounds.items()]
    plans: list[Continuation] = []
    for found in sorted(set.intersection(*own), reverse=True):
        sources = {rank: _find_source(grid, held_rounds, rank, found) for rank in lost}
        if None not in sources.values():
            known = {rank: source for rank, source in sources.items() if source is not None}
            plans.append(Continuation(found, tuple(sorted(held_rounds)), True, known))
    return next((plan for plan in plans if plan.complete), plans[0] if plans else None)


def _find_source(
    grid: Grid, held_rounds: Mapping[int, Mapping[int, HeldRounds]], rank: int, found: int
) -> Source | None:
    holders = [holder for holder, held in held_rounds.items() if rank in held and found in held[rank].rounds]
    counterparts = [
        other
        for other in grid.along("data", rank)
        if other in held_rounds and other != rank and found in held_rounds[other][other].rounds
    ]
    if counterparts:
        return Source(counterparts[0], counterparts[0], next(iter(holders), None))
    backups = [holder for holder in holders if held_rounds[holder][rank].whole]
    return Source(backups[0], rank) if backups else None
