"""The members of each round of a space with backup workers, on the server of its segment 0.

The state is of one generation of the servers. If a server or a worker dies, all workers return to a snapshot, and the
servers begin anew (`rayps.core.strategy.strategy_families.recovery_of`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rayps_client.errors import PeerTimeout

from rayps.core.rows.step_members import StepMembers
from rayps.ps.protocol.messages import ArrivalKind, pack_members, read_numbers


class Arrivals:
    """The rounds and the meetings of the `workers` workers of one space."""

    def __init__(self, workers: int, first: int) -> None:
        """Begin with round `first`."""
        self._rounds = StepMembers(workers, first)
        self._meetings: dict[int, set[int]] = {}  # from a round to the ranks that have met before it

    def record(self, rank: int, round: int, needed: int, piece: Sequence[int]) -> bool:
        """Record what a rank says by ARRIVE; return whether this may answer other ranks. Raises ValueError.

        `piece` is the payload's piece.
        """
        kind = kind_of(piece)
        if kind is ArrivalKind.READY:
            return self._rounds.arrive(rank, round, needed)
        if kind is ArrivalKind.MEET:
            self._meetings = {at: ranks for at, ranks in self._meetings.items() if at >= round}
            self._meetings.setdefault(round, set()).add(rank)
            return len(self._meetings[round]) >= needed
        return False

    def answer(self, rank: int, round: int, needed: int, piece: Sequence[int]) -> bytes | None:
        """Return the answer to a rank, or None if it must wait. Raises ValueError if it cannot ask about this round."""
        kind = kind_of(piece)
        if kind is ArrivalKind.MEET:
            return b"" if len(self._meetings.get(round, ())) >= needed else None
        if kind is not ArrivalKind.LOOK and round >= self._rounds.step:
            return None
        return pack_members(self._rounds.since(rank, round))

    def too_late(self, seconds: float, asker: str, round: int, needed: int, piece: Sequence[int]) -> PeerTimeout:
        """Return the error for `asker`, which has waited for `seconds`. It names the ranks that have not arrived."""
        meets = kind_of(piece) is ArrivalKind.MEET
        there = self._meetings.get(round, set()) if meets else set(self._rounds.arrived)
        missing = [rank for rank in range(self._rounds.size) if rank not in there]
        names = ", ".join(f"worker-{rank}" for rank in missing)
        what = "to evaluate the parameters" if meets else f"to complete a gradient ({needed} are needed)"
        return PeerTimeout(
            f"{asker} waited {seconds:g} s before round {round} for {names} {what}: raise `timeout` if a round may "
            "take longer",
            peer=f"worker-{missing[0]}" if missing else "server",
            seconds=seconds,
            ranks=missing,
        )


def kind_of(piece: Sequence[int]) -> ArrivalKind:
    """Return what an ARRIVE asks. Raises ValueError if its piece is not valid."""
    values = read_numbers(piece)
    if len(values) != 1:
        raise ValueError(f"the piece of an ARRIVE has {len(values)} numbers: expected 1, an ArrivalKind")
    return ArrivalKind(values[0])
