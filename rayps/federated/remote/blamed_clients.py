"""Which client is excluded because its secure rounds are void: from who has refused whose messages. Pure.

A client refuses another if it cannot check the other's keys or open its shares, and sends nothing more in the round.
A refusal alone does not say which of the two is at fault: the refused one may have sent a wrong message, and the other
may have refused a right one. So both are in a *conflict*, and a client is blamed if it is in conflict with more than
half of its neighbours. As long as fewer than half of a client's neighbourhood lie, they can blame no other client: an
honest client is in conflict with them alone, and these are no more than half of its neighbours.

If the clients that this blames are half of the clients or more, there is no majority: nobody is blamed, and the round
is *undecided*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from rayps_client.values import Keywords

VOID_ROUNDS = 3  # a client that is blamed for so many void rounds, without a sum with it in between, is excluded


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which clients one client has refused, and in which stage it then sent no message."""

    stage: str
    whom: frozenset[int]


@dataclass(frozen=True, slots=True)
class Refusals:
    """The refusals of a secure round: each client's neighbours, and from client to what it has refused."""

    neighbours: Mapping[int, frozenset[int]] = field(default_factory=dict)
    refused: Mapping[int, Refusal] = field(default_factory=dict)

    def conflicts(self) -> dict[int, set[int]]:
        """Return, for each client, the neighbours that have refused it or that it has refused."""
        found: dict[int, set[int]] = {number: set() for number in self.neighbours}
        for who in self.refused:
            for whom in self.refused_by(who):
                found[who].add(whom)
                found[whom].add(who)
        return found

    def refused_by(self, number: int) -> frozenset[int]:
        """Return the neighbours that a client has refused."""
        known = self.neighbours.get(number, frozenset())
        return self.refused[number].whom & known if number in self.refused else frozenset()


@dataclass(frozen=True, slots=True)
class VoidCounts:
    """How many void rounds were counted so far."""

    serial: int = 0  # the newest order that was counted
    blamed: Mapping[int, int] = field(default_factory=dict)  # per client, the rounds for which it was blamed
    undecided: int = 0  # undecided rounds since the last sum

    def facts(self) -> Keywords:
        """Return the counts as JSON-ready data."""
        return {
            "serial": self.serial,
            "blamed": {str(number): count for number, count in self.blamed.items()},
            "undecided": self.undecided,
        }

    @classmethod
    def read(cls, facts: Keywords | None) -> VoidCounts:
        """Read what `facts` returned. None: nothing was counted."""
        if facts is None:
            return cls()
        blamed = cast("Mapping[str, int]", facts["blamed"])
        return cls(facts["serial"], {int(number): count for number, count in blamed.items()}, facts["undecided"])


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from a round: the clients that are excluded, and whether undecided rounds are to be reported."""

    excluded: frozenset[int] = frozenset()
    undecided: bool = False


def blamed(refusals: Refusals) -> frozenset[int]:
    """Return the clients that are in conflict with more than half of their neighbours; none without a majority."""
    found = frozenset(
        number for number, others in refusals.conflicts().items() if 2 * len(others) > len(refusals.neighbours[number])
    )
    return found if 2 * len(found) < len(refusals.neighbours) else frozenset()


def counted(before: VoidCounts, serial: int, refusals: Refusals, summed: frozenset[int]) -> tuple[VoidCounts, Decision]:
    """Count the round of order `serial`. Return the new counts, and what follows.

    `summed`: the clients whose updates are in the round's sum; none if the round is void. A client in a sum is no
    longer blamed for the rounds before. An order that was counted is not counted again.
    """
    if serial <= before.serial:
        return before, Decision()
    if summed:
        kept = {number: count for number, count in before.blamed.items() if number not in summed}
        return VoidCounts(serial, kept, 0), Decision()
    found = blamed(refusals)
    counts = {**before.blamed, **{number: before.blamed.get(number, 0) + 1 for number in found}}
    excluded = frozenset(number for number, count in counts.items() if count >= VOID_ROUNDS)
    left = {number: count for number, count in counts.items() if number not in excluded}
    is_undecided = not found and any(refusals.conflicts().values())
    undecided = before.undecided + is_undecided
    return VoidCounts(serial, left, undecided), Decision(excluded, is_undecided and undecided == VOID_ROUNDS)
