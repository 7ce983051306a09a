"""From which round, and from whose memory, a generation continues without a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Source:
    """Where a replaced worker gets its state from: worker `holder` holds the state of worker `owner`.

    `rest`: the worker that holds the part of the replaced worker's state that a counterpart lacks; None if no worker
    has this part.
    """

    holder: int
    owner: int
    rest: int | None = None

    @property
    def counterpart(self) -> bool:
        """Whether the holder is a counterpart that sends its own state. If False, it sends a backup."""
        return self.holder == self.owner


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a generation continues: from the state after `round`, which the ranks `holders` have in memory.

    The ranks are those of the new generation. If the holders' states are equal, the first holder sends its own to the
    workers that lack it. With `keeps_places`, each rank has a state of its own, so that no worker can change its rank:
    `sources` is a dict from the rank of each replaced worker to its source.
    """

    round: int
    holders: tuple[int, ...]
    keeps_places: bool = False
    sources: dict[int, Source] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether no part of a state is missing.

        False if a worker continues from a counterpart's state and no worker has the part that this state lacks.
        """
        return all(not source.counterpart or source.rest is not None for source in self.sources.values())

    def lacking(self, size: int) -> list[int]:
        """Return the ranks, of `size`, that do not hold the state."""
        return [rank for rank in range(size) if rank not in self.holders]

    def among(self, order: Sequence[int | None]) -> Continuation | None:
        """Return the same for other workers; None if they cannot continue: no holder is one of them, or places change.

        `order` has for each new rank the rank before, or None for a worker that joins.
        """
        if self.keeps_places:
            return self if [*order] == [*range(len(self.holders) + len(self.sources))] else None
        holders = tuple(rank for rank, old in enumerate(order) if old in self.holders)
        return Continuation(self.round, holders) if holders else None
