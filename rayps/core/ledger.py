"""Which pushes have been applied: for each rank a contiguous mark, and the few steps above it. Pure; plain data.

A push is (rank, step). Retries and replays may come in any order and any number of times: the ledger says whether one
is new, so that each is applied once. It is saved with the parameters that it describes, and loaded with them: a
shard restored from a snapshot knows exactly which pushes those parameters hold. Vector clocks as filters of repeated
messages: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rayps.core.errors import CheckpointError

WINDOW = 1024  # steps that may be filed above a gap: more of them is a fault, not a retry


class Ledger:
    """The pushes that have been applied, of the ranks 0 to n-1.

    `marks[rank]` is the number of steps from 0 on without a gap: the rank's clock. Whoever is given `marks` reads it;
    only the ledger writes it.
    """

    def __init__(self, marks: Iterable[int], above: Mapping[int, Iterable[int]] | None = None) -> None:
        self.marks = dict(enumerate(marks))
        self._above: dict[int, set[int]] = {rank: set() for rank in self.marks}
        for rank, steps in (above or {}).items():
            for step in steps:
                self.add(rank, step)

    def seen(self, rank: int, step: int) -> bool:
        """Whether the push is filed already. Raises ValueError for a rank that is not of this group."""
        return step < self._mark(rank) or step in self._above[rank]

    def add(self, rank: int, step: int) -> bool:
        """File a push; False, and no change, when it was filed before.

        Raises:
            ValueError: the rank is not of this group, or the step lies `WINDOW` or more above the first gap.
        """
        mark = self._mark(rank)
        if step == mark and not self._above[rank]:  # in order, as nearly always
            self.marks[rank] = mark + 1
            return True
        if self.seen(rank, step):
            return False
        if step - mark >= WINDOW:
            raise ValueError(f"rank {rank} pushed step {step} before step {mark}: at most {WINDOW - 1} may be skipped")
        self._above[rank].add(step)
        self._prune(rank)
        return True

    def fill(self, rank: int, step: int) -> bool:
        """File a push that stands for every step up to `step`; False, and no change, when it was filed before."""
        if step < self._mark(rank):
            return False
        self.skip(rank, step + 1)
        return True

    def skip(self, rank: int, step: int) -> int:
        """Give up what is missing below `step`: nobody has it any more. The number of pushes that are lost so."""
        lost = max(0, step - self._mark(rank)) - sum(1 for known in self._above[rank] if known < step)
        self.marks[rank] = max(self.marks[rank], step)
        self._above[rank] = {known for known in self._above[rank] if known >= self.marks[rank]}
        self._prune(rank)
        return lost

    def reach(self, rank: int) -> int:
        """One more than the highest step filed."""
        return max(self._above[rank], default=self._mark(rank) - 1) + 1

    def copy(self) -> Ledger:
        """Another one that says the same."""
        return Ledger(self.marks.values(), self._above)

    def to_json(self) -> dict[str, Any]:
        """As plain data, for a snapshot."""
        above = {str(rank): sorted(steps) for rank, steps in self._above.items() if steps}
        return {"marks": list(self.marks.values()), "above": above}

    @classmethod
    def from_json(cls, data: Any) -> Ledger:
        """Read back what `to_json` gave. Raises CheckpointError."""
        try:
            return cls(map(int, data["marks"]), {int(rank): map(int, steps) for rank, steps in data["above"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"a ledger of pushes cannot be read: {str(data)[:100]!r}") from error

    def _mark(self, rank: int) -> int:
        if rank not in self.marks:
            raise ValueError(f"rank {rank} is not one of the ranks {sorted(self.marks)}")
        return self.marks[rank]

    def _prune(self, rank: int) -> None:
        above = self._above[rank]
        while self.marks[rank] in above:
            above.remove(self.marks[rank])
            self.marks[rank] += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Ledger({self.to_json()})"


def anywhere(ledgers: Iterable[Ledger]) -> Ledger:
    """What at least one of these has filed: of a range that was held by several shards, and now by one."""
    held = list(ledgers)
    found = Ledger(max(ledger.marks[rank] for ledger in held) for rank in held[0].marks)
    for ledger in held:
        for rank, steps in ledger._above.items():
            for step in steps:
                found.add(rank, step)
    return found
