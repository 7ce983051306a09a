"""Points of a run that returned to an earlier state: each round counts once, with its last point. Pure.

After a return to the state of round r, rounds from r on are repeated, and their points follow those of before. The
journal writes a point of the kind `RETURNED` first. Whatever reads the points shows those that count
(`select_counted`), or tells its reader of the return before it sends the repeated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayps.core.job.records import Point

RETURNED = "returned"  # the kind of a point that says that the run has returned to the state of its `round`


class SeenRounds:
    """The numbers of the rounds that were reported: all below `below`, and those in `others`."""

    def __init__(self, below: int = 0, others: Sequence[int] = ()) -> None:
        self.below, self.others = below, set(others)

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.others

    def add(self, number: int) -> bool:
        """Record a round. Return False if it was recorded before."""
        if number in self:
            return False
        self.others.add(number)
        while self.below in self.others:
            self.others.remove(self.below)
            self.below += 1
        return True

    def forget(self, begin: int) -> None:
        """Forget the rounds from `begin` on, because the run repeats them."""
        self.below, self.others = min(self.below, begin), {each for each in self.others if each < begin}


class Returns:
    """Finds where a run has returned to an earlier state, in its points in the order in which they were written."""

    def __init__(self, newest: int = -1) -> None:
        """`newest`: the newest round of points that were written before."""
        self.newest = newest
        self._generation: object = None

    def of(self, point: Point) -> int | None:
        """Take the next point. Return the round of the state to which the run returned before this point, or None.

        This is said by a point of the kind `RETURNED`, or follows from a round of another generation that is not new.
        """
        round = point.get("round")
        if not isinstance(round, int) or point.get("kind") not in ("round", RETURNED):
            return None
        if point["kind"] == RETURNED:
            self.newest, self._generation = round - 1, None
            return round
        another = point.get("generation") != self._generation
        self._generation = point.get("generation")
        back = another and round <= self.newest
        self.newest = round if back else max(self.newest, round)
        return round if back else None


def is_void(point: Point, back: int) -> bool:
    """Return whether a point does not count any more after a return to the state of round `back`."""
    return bool(point["round"] > back if point.get("kind") == "evaluation" else point["round"] >= back)


def select_counted(points: Iterable[Point], *, tell: bool = False) -> list[Point]:
    """Return the points that count: each round and each evaluation once, with its last point.

    `tell`: the reader may have points of before that do not count any more, so that points of the kind `RETURNED` stay.
    """
    returns, found = Returns(), dict[tuple[object, int], Point]()
    for point in points:
        back = returns.of(point)
        if back is not None:
            found = {key: each for key, each in found.items() if each["kind"] == RETURNED or not is_void(each, back)}
        if point.get("kind") != RETURNED or tell:
            key = point.get("kind"), point["round"]
            found.pop(key, None)  # the last point of a round has the place of the last one
            found[key] = point
    return list(found.values())
