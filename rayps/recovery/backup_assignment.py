"""Which worker holds a backup of whose state, and from which round a grid continues after a failure. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayps.core.grid import Grid


@dataclass(frozen=True, slots=True)
class HeldRounds:
    """The rounds of a worker whose states another one holds; not `whole`: only what the worker's twins lack."""

    rounds: tuple[int, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Source:
    """Where a replaced worker's state is: `giver` holds that of `owner`; `rest` holds what a twin lacks."""

    giver: int
    owner: int
    rest: int | None = None

    @property
    def twin(self) -> bool:
        """Whether it is the giver's own state."""
        return self.giver == self.owner


@dataclass(frozen=True, slots=True)
class Mending:
    """All workers continue from `round`: survivors from their own states, the lost from their sources."""

    round: int
    sources: dict[int, Source]

    @property
    def complete(self) -> bool:
        """Whether what twins lack is there too."""
        return all(not source.twin or source.rest is not None for source in self.sources.values())


@dataclass(frozen=True, slots=True)
class Bond:
    """How a worker's state is backed up in one generation, so that its death loses no round."""

    line: int  # see `rayps.recovery.slots.StateSlots`
    doors: tuple[str, ...]  # all workers' addresses for backups
    keeper: int  # the worker that holds this one's backup
    twin: bool  # whether this worker has a twin
    recalls: bool = False  # start from a retained state, not from the snapshot
    source: Source | None = None  # where that state is, if not on this worker


def keepers(grid: Grid, hosts: Sequence[str]) -> list[int | None]:
    """Return, for each rank, the worker that holds its backup: a twin if there is one, else a neighbour of its replica.

    The next one in a circle that is on another host, else the next one. None: there is no other worker.
    """
    return [_keeper(grid, hosts, rank) for rank in range(grid.size)]


def _keeper(grid: Grid, hosts: Sequence[str], rank: int) -> int | None:
    circle = grid.along("data", rank) if grid.data > 1 else grid.replica(grid.at(rank).data)
    at = circle.index(rank)
    others = circle[at + 1 :] + circle[:at]
    elsewhere = [other for other in others if hosts[other] != hosts[rank]]
    return next(iter(elsewhere or others), None)


def mending(grid: Grid, holdings: Mapping[int, Mapping[int, HeldRounds]]) -> Mending | None:
    """Return the newest round that every worker has or can get.

    `holdings`: for each survivor, the states that it holds.

    If only a twin has the newest round, an older one is taken: buffers and random numbers are each worker's own. None:
    there is no such round, because a worker, its twins and its backup were lost together.
    """
    lost = [rank for rank in range(grid.size) if rank not in holdings]
    if not holdings:
        return None
    own = [set(held[rank].rounds) if rank in held else set[int]() for rank, held in holdings.items()]
    ways: list[Mending] = []
    for found in sorted(set.intersection(*own), reverse=True):
        sources = {rank: _source(grid, holdings, rank, found) for rank in lost}
        if None not in sources.values():
            ways.append(Mending(found, {rank: source for rank, source in sources.items() if source is not None}))
    return next((way for way in ways if way.complete), ways[0] if ways else None)


def _source(grid: Grid, holdings: Mapping[int, Mapping[int, HeldRounds]], rank: int, found: int) -> Source | None:
    having = [giver for giver, held in holdings.items() if rank in held and found in held[rank].rounds]
    twins = [t for t in grid.along("data", rank) if t in holdings and t != rank and found in holdings[t][t].rounds]
    if twins:
        return Source(twins[0], twins[0], next(iter(having), None))
    mirrors = [giver for giver in having if holdings[giver][rank].whole]
    return Source(mirrors[0], rank) if mirrors else None
