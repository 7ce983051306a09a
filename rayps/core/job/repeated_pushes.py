"""The ledger of applied pushes: it makes each push apply exactly once. Pure; plain data.

A push is identified by (rank, step). Retries and replays may arrive in any order and any number of times; the ledger
shows whether a push is new. For each rank the ledger stores a mark, below which all steps are applied, and the few
applied steps above the mark. The ledger is saved and loaded with the parameters. A restored shard therefore knows
exactly which pushes its parameters include. In fp16 the ledger also has the number of skipped pushes, because a server
needs it wherever it needs the ledger. Vector clocks as filters of repeated messages: Li et al., "Scaling Distributed
Machine Learning with the Parameter Server", OSDI 2014, section 4.1.

If workers join and leave, the ledger has a mark for each rank that may exist, and the set of the *active* ranks. Marks
of inactive ranks stay. A worker that joins as a rank which another worker had continues above that worker's steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NotRequired, TypedDict

from rayps_client.errors import CheckpointError

from rayps.core.strategy.staleness_bound import ActiveRanks, Clock, PushCount

WINDOW = 1024  # a push of a step this far above the first missing step, or farther, is an error


class LedgerJson(TypedDict):
    """A ledger as plain data."""

    marks: list[int]  # one for each rank
    above: dict[str, list[int]]  # from rank to its applied steps above a gap
    skipped: NotRequired[list[int]]  # one for each rank; missing if they are not counted
    active: NotRequired[list[int]]  # the active ranks; missing if the ranks do not change
    floor: NotRequired[int]  # see `ActiveRanks`
    pushes: NotRequired[list[int]]  # see `PushCount.to_json`
    missed: NotRequired[dict[str, list[list[int]]]]  # from rank to ranges of steps, see `Ledger`
    repeats: NotRequired[dict[str, list[int]]]  # from rank to steps, see `Ledger`


class Ledger:
    """The pushes of ranks 0 to n-1 that have been applied.

    `marks[rank]` is the rank's clock: the number of its steps applied without a gap. Only the ledger writes `marks`.
    `skipped[rank]` is the number of the rank's recorded steps that a schedule does not count, because their gradients
    have overflowed in fp16. It is None if these steps are not counted. `active` has the ranks of workers that take part
    now. It is None if all ranks do, and no rank joins or leaves. `missed[rank]` has the ranges [low, high) of steps
    that a joining worker has passed over: they are below the mark, and no push of them was applied here.
    `repeats[rank]` has steps whose pushes are still to come, and will repeat an applied push of another rank: they are
    recorded, and have no effect.
    """

    def __init__(
        self,
        marks: Iterable[int],
        above: Mapping[int, Iterable[int]] | None = None,
        skipped: Mapping[int, int] | None = None,
        active: ActiveRanks | None = None,
    ) -> None:
        self.marks = dict(enumerate(marks))
        self.skipped = None if skipped is None else dict(skipped)
        self.active = None if active is None else active.copy()
        self.missed: dict[int, list[tuple[int, int]]] = {}
        self.repeats: dict[int, set[int]] = {}
        self._above: dict[int, set[int]] = {rank: set() for rank in self.marks}
        for rank, steps in (above or {}).items():
            for step in steps:
                self.add(rank, step)

    def seen(self, rank: int, step: int) -> bool:
        """Return whether this push is recorded. Raises ValueError if `rank` is not one of the ledger's ranks."""
        return step < self._mark(rank) or step in self._above[rank]

    def add(self, rank: int, step: int) -> bool:
        """Record a push; return whether it must be applied.

        Return False, without a change, if it is recorded already, and False if it repeats a push of another rank.

        Raises:
            ValueError: `rank` is not one of the ledger's ranks, or `step` is `WINDOW` or more above the first gap.
        """
        mark = self._mark(rank)
        if step == mark and not self._above[rank] and not self.repeats:  # in order: the usual case
            self.marks[rank] = mark + 1
            return True
        if self.seen(rank, step):
            return False
        if step - mark >= WINDOW:
            raise ValueError(
                f"rank {rank} pushed step {step} before step {mark}: at most {WINDOW - 1} steps may be skipped"
            )
        self._above[rank].add(step)
        self._prune(rank)
        return not self._take_repeat(rank, step)

    def fill(self, rank: int, step: int) -> bool:
        """Record a push that contains every step up to `step`. Return False, without a change, if it is recorded."""
        if step < self._mark(rank):
            return False
        self.skip(rank, step + 1)
        return True

    def skip(self, rank: int, step: int) -> int:
        """Count all steps of `rank` below `step` as applied, because no worker retains the pushes of these steps.

        Return the number of lost pushes: those that had not been applied.
        """
        lost = max(0, step - self._mark(rank)) - sum(1 for known in self._above[rank] if known < step)
        self.marks[rank] = max(self.marks[rank], step)
        self._above[rank] = {known for known in self._above[rank] if known >= self.marks[rank]}
        self._prune(rank)
        return lost

    def reach(self, rank: int) -> int:
        """Return one more than the highest recorded step of `rank`."""
        return max(self._above[rank], default=self._mark(rank) - 1) + 1

    # ---- ranks that join and leave

    def takes_part(self, rank: int) -> bool:
        """Return whether pushes of this rank are applied: its worker has joined, and has not left."""
        return self.active is None or rank in self.active.ranks

    def begin_members(self, floor: int, pushes: PushCount) -> None:
        """Let ranks join and leave from now on. No rank takes part yet, and the slowest clock is `floor`.

        `pushes` counts them; if this ledger has counted those that it contains, its own number holds.
        """
        counted = None if self.active is None else self.active.pushes.done
        found = pushes if counted is None else replace(pushes, done=counted)
        self.active, self.repeats = ActiveRanks(floor=floor, pushes=found), {}

    def count_push(self) -> None:
        """Count an applied push, if ranks join and leave."""
        if self.active is not None:
            self.active.pushes = self.active.pushes.plus(1)

    def admit(self, rank: int, first: int) -> int:
        """Let a worker join as `rank`; return its first step.

        This is the smallest step that is at least `first`, at least the slowest active clock, and above every recorded
        step of the rank. All lower steps count as recorded, because no worker will push them. Raises ValueError if
        there is no such rank, or ranks do not change.
        """
        active = self._require_members(rank)
        again = rank in active.ranks  # with a later first step
        low = self.marks[rank] if again else Clock(self.marks, None, active).slowest
        first = max(first, self.reach(rank), low)
        self.repeats.pop(rank, None)
        self._pass_over(rank, first)
        active.ranks.add(rank)
        return first

    def readmit(self, rank: int, first: int) -> None:
        """Let a worker take part that had joined as `rank`, with the step `first`, before this state was restored.

        Its pushes from `first` on that this state lacks can be repeated. Raises ValueError as `admit`.
        """
        active = self._require_members(rank)
        if self.marks[rank] < first:
            self._pass_over(rank, first)
        active.ranks.add(rank)

    def remove(self, rank: int) -> None:
        """Let the worker `rank` leave. Its recorded steps stay recorded. Raises ValueError as `admit`."""
        active = self._require_members(rank)
        if active.ranks == {rank}:
            active.floor = max(active.floor, self.marks[rank])
        active.ranks.discard(rank)
        self.repeats.pop(rank, None)

    def end_members(self, step: int) -> None:
        """Let all workers leave, and raise all marks to `step`, which is above them."""
        for rank in self.marks:
            self._pass_over(rank, step)
            self.marks[rank], self._above[rank] = step, set()
        self.active = ActiveRanks(floor=step, pushes=PushCount() if self.active is None else self.active.pushes)

    def expect_repeat(self, rank: int, step: int, earlier: Iterable[tuple[int, int]]) -> None:
        """Let the push (`rank`, `step`) have no effect when it arrives, if one of the `earlier` pushes was applied.

        These are pushes (rank, step) of the same batch by workers that left before all servers had the push.
        """
        if any(self.applied(*each) for each in earlier) and not self.seen(rank, step):
            self.repeats.setdefault(rank, set()).add(step)

    def is_repeat(self, rank: int, step: int) -> bool:
        """Return whether this push, which is still to come, will have no effect."""
        return step in self.repeats.get(rank, ())

    def applied(self, rank: int, step: int) -> bool:
        """Return whether this push is recorded, and not passed over by a worker that joined later."""
        return self.seen(rank, step) and not any(low <= step < high for low, high in self.missed.get(rank, ()))

    def _take_repeat(self, rank: int, step: int) -> bool:
        found = self.is_repeat(rank, step)
        if found:
            self.repeats[rank].discard(step)
            if not self.repeats[rank]:
                del self.repeats[rank]
        return found

    def _require_members(self, rank: int) -> ActiveRanks:
        self._mark(rank)
        if self.active is None:
            raise ValueError(f"rank {rank} can neither join nor leave: the ranks of this ledger do not change")
        return self.active

    def _pass_over(self, rank: int, first: int) -> None:
        """Count the steps of a rank below `first` as recorded; those that are not are `missed`."""
        low = self.marks[rank]
        missed = self.missed.setdefault(rank, [])
        for known in [*sorted(step for step in self._above[rank] if step < first), first]:
            if low < known:
                missed.append((low, known))
            low = known + 1
        self.skip(rank, first)

    # ---- copies

    def with_ranks(self, count: int, mark: int) -> Ledger:
        """Return a copy with the ranks 0 to `count` - 1, of which none takes part. New ranks have the mark `mark`."""
        marks = [self.marks.get(rank, mark) for rank in range(count)]
        above = {rank: steps for rank, steps in self._above.items() if rank < count}
        skipped = self.skipped and {rank: self.skipped.get(rank, 0) for rank in range(count)}
        active = None if self.active is None else replace(self.active, ranks=set())
        found = Ledger(marks, above, skipped, active)
        found.missed = {rank: list(ranges) for rank, ranges in self.missed.items() if rank < count}
        return found

    def copy(self) -> Ledger:
        """Return a copy."""
        found = Ledger(self.marks.values(), self._above, self.skipped, self.active)
        found.missed = {rank: list(ranges) for rank, ranges in self.missed.items()}
        found.repeats = {rank: set(steps) for rank, steps in self.repeats.items()}
        return found

    def to_json(self) -> LedgerJson:
        """Return the ledger as plain data, for a snapshot."""
        above = {str(rank): sorted(steps) for rank, steps in self._above.items() if steps}
        found: LedgerJson = {"marks": list(self.marks.values()), "above": above}
        if self.skipped is not None:
            found["skipped"] = list(self.skipped.values())
        if self.active is not None:
            found["active"], found["floor"] = sorted(self.active.ranks), self.active.floor
            if self.active.pushes.done is not None:
                found["pushes"] = self.active.pushes.to_json()
        if any(self.missed.values()):
            found["missed"] = {
                str(rank): list(map(list, ranges)) for rank, ranges in sorted(self.missed.items()) if ranges
            }
        if self.repeats:
            found["repeats"] = {str(rank): sorted(steps) for rank, steps in sorted(self.repeats.items())}
        return found

    @classmethod
    def from_json(cls, data: LedgerJson) -> Ledger:
        """Return the ledger from which `to_json` returned `data`. Raises CheckpointError if `data` is damaged."""
        try:
            above = {int(rank): map(int, steps) for rank, steps in data["above"].items()}
            counts = data.get("skipped")
            skipped = None if counts is None else dict(zip(range(len(data["marks"])), map(int, counts), strict=True))
            active = None
            if "active" in data:
                pushes = PushCount.from_json(data["pushes"]) if "pushes" in data else PushCount()
                active = ActiveRanks(set(map(int, data["active"])), int(data["floor"]), pushes)
            found = cls(map(int, data["marks"]), above, skipped, active)
            for rank, ranges in data.get("missed", {}).items():
                found.missed[int(rank)] = [(int(low), int(high)) for low, high in ranges]
            found.repeats = {int(rank): set(map(int, steps)) for rank, steps in data.get("repeats", {}).items()}
            return found
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint's ledger of pushes is damaged: {str(data)[:100]!r}") from error

    def _mark(self, rank: int) -> int:
        if rank not in self.marks:
            raise ValueError(f"rank {rank} is not one of the ledger's ranks {sorted(self.marks)}")
        return self.marks[rank]

    def _prune(self, rank: int) -> None:
        above = self._above[rank]
        while self.marks[rank] in above:
            above.remove(self.marks[rank])
            self.marks[rank] += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # a ledger is mutable

    def __repr__(self) -> str:
        return f"Ledger({self.to_json()})"


def merge_ledgers(ledgers: Iterable[Ledger]) -> Ledger:
    """Return a ledger with all pushes of `ledgers`, for a range that several shards held before."""
    held = list(ledgers)
    marks = [max(ledger.marks[rank] for ledger in held) for rank in held[0].marks]
    counts = [ledger.skipped for ledger in held if ledger.skipped is not None]
    skipped = {rank: max(count[rank] for count in counts) for rank in held[0].marks} if counts else None
    found = Ledger(marks, skipped=skipped, active=_merge_active(held))
    for rank, missed in held[0].missed.items():
        found.missed[rank] = [each for each in missed if all(each in other.missed.get(rank, ()) for other in held)]
    for ledger in held:
        for number, steps in ledger.to_json()["above"].items():
            for step in steps:
                found.add(int(number), step)
    return found


def _merge_active(ledgers: list[Ledger]) -> ActiveRanks | None:
    held = [ledger.active for ledger in ledgers if ledger.active is not None]
    if not held:
        return None
    counted = max((each.pushes for each in held), key=lambda pushes: -1 if pushes.done is None else pushes.done)
    return ActiveRanks(set().union(*(each.ranks for each in held)), max(each.floor for each in held), counted)
