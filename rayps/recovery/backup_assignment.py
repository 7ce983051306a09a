"""Which worker holds a backup of whose state, and from which round a grid continues after a failure. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayps.core.grid import Grid


@dataclass(frozen=True, slots=True)
class HeldRounds:
    """The rounds after which a given worker holds the state of some worker.

    `whole`: the states are complete; else they have only the part that the twins of that worker lack.
    """

    rounds: tuple[int, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Source:
    """Where a replaced worker gets its state from: worker `giver` holds the state of worker `owner`.

    A twin is the worker at the same place in another replica. `rest` is the worker that holds the part of the replaced
    worker's state that a twin lacks; None = no worker has it.
    """

    giver: int
    owner: int
    rest: int | None = None

    @property
    def twin(self) -> bool:
        """Whether the giver is a twin that gives its own state, and does not give a stored copy of the lost state."""
        return self.giver == self.owner


@dataclass(frozen=True, slots=True)
class Mending:
    """How all workers continue from `round`: survivors from their own states, replaced workers from their sources."""

    round: int
    sources: dict[int, Source]

    @property
    def complete(self) -> bool:
        """Whether the part that a twin's state lacks is available too, for each worker that continues from a twin."""
        return all(not source.twin or source.rest is not None for source in self.sources.values())


@dataclass(frozen=True, slots=True)
class Bond:
    """How a worker's state is backed up in one generation, so that its death loses no round."""

    line: int  # the sequence of states since one snapshot: see `rayps.recovery.state_slots.StateSlots`
    addresses: tuple[str, ...]  # by rank: the addresses at which workers receive backups and send them to others
    keeper: int  # the worker that holds this one's backup
    twin: bool  # whether this worker has a twin: a worker at the same place in another replica
    recalls: bool = False  # whether the worker starts from a retained state, not from the snapshot
    source: Source | None = None  # where the retained state is; None = on this worker


def keepers(grid: Grid, hosts: Sequence[str]) -> list[int | None]:
    """Return, for each rank, the worker that holds its backup.

    The holder is a twin (a worker at the same place in another replica) if there is one, else another worker of the
    replica: the next one in a circle of ranks on another host, or, if all are on one host, simply the next one. None:
    the job has one worker.
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

    `holdings` has, for each survivor, the rounds of the states that it holds, by the rank whose states they are.

    If only a twin has a lost worker's state of a round, an older round is preferred, because a twin lacks the lost
    worker's own buffers and random state. None: there is no common round, because a worker, its twins and its backup
    were lost together.
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
