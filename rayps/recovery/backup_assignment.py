"""Which worker holds a backup of whose state, and from which round a grid continues after a failure. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayps.core.grid import Grid


@dataclass(frozen=True, slots=True)
class HeldRounds:
    """The rounds of which another worker holds a worker's state.

    `whole`: the states are complete; else they are only the part that the worker's twins lack.
    """

    rounds: tuple[int, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Source:
    """Where the state of a replaced worker is: worker `giver` holds the state of worker `owner`.

    `rest` is the worker that holds the part which a twin's state lacks.
    """

    giver: int
    owner: int
    rest: int | None = None

    @property
    def twin(self) -> bool:
        """Whether the giver gives its own state, as a twin of the lost worker, and not a stored copy of the lost state.

        A twin is the worker at the same place in another replica.
        """
        return self.giver == self.owner


@dataclass(frozen=True, slots=True)
class Mending:
    """How all workers continue from `round`: survivors from their own states, replaced workers from their sources."""

    round: int
    sources: dict[int, Source]

    @property
    def complete(self) -> bool:
        """Whether the parts that twins' states lack are available too."""
        return all(not source.twin or source.rest is not None for source in self.sources.values())


@dataclass(frozen=True, slots=True)
class Bond:
    """How a worker's state is backed up in one generation, so that its death loses no round."""

    line: int  # see `rayps.recovery.slots.StateSlots`
    doors: tuple[str, ...]  # all workers' addresses for backups
    keeper: int  # the worker that holds this one's backup
    twin: bool  # whether this worker has a twin: a worker at the same place in another replica
    recalls: bool = False  # whether the worker starts from a retained state, not from the snapshot
    source: Source | None = None  # where the retained state is; None = on this worker


def keepers(grid: Grid, hosts: Sequence[str]) -> list[int | None]:
    """Return, for each rank, the worker that holds its backup.

    It is a twin if there is one, else another worker of the replica. Of these it is the next one, in a circle, on
    another host; if all are on one host, the next one. None: the job has one worker.
    """
    return [_keeper(grid, hosts, rank) for rank in range(grid.size)]


def _keeper(grid: Grid, hosts: Sequence[str], rank: int) -> int | None:
    circle = grid.along("data", rank) if grid.data > 1 else grid.replica(grid.at(rank).data)
    at = circle.index(rank)
    others = circle[at + 1 :] + circle[:at]
    elsewhere = [other for other in others if hosts[other] != hosts[rank]]
    return next(iter(elsewhere or others), None)


def mending(grid: Grid, holdings: Mapping[int, Mapping[int, HeldRounds]]) -> Mending | None:
    """Return the newest round from which every worker can continue, and the source of each lost worker's state.

    `holdings`: for each survivor, the states that it holds.

    If only a twin has a lost worker's newest round, an older round is preferred, because a twin lacks the worker's own
    buffers and random state. None: there is no common round, because a worker, its twins and its backup were lost
    together.
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
