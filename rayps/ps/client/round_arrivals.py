"""A worker's questions about the members of rounds, in a space with backup workers: `GroupMessage.ARRIVE`.

The server of segment 0 decides for all segments: a worker pushes only if it is a member, and then to every segment. No
segment can therefore have other members of a round than another segment.
"""

from __future__ import annotations

from rayps.core.rows.step_members import Members
from rayps.ps.client.session import Session
from rayps.ps.protocol.messages import ArrivalKind, GroupMessage, pack_numbers, unpack_members


class RoundArrivals:
    """Asks the server of segment 0, through a worker's session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def look(self, round: int) -> list[Members]:
        """Return the members of `round` and of later rounds, as far as they are decided. Raises LinkError."""
        return self._ask(ArrivalKind.LOOK, round, 0)

    def arrive(self, round: int, needed: int) -> list[Members]:
        """Say that this worker's gradient of a round is complete, and wait until the members are decided.

        Return the members of this round and of later ones. `needed` is the number of members. Raises PeerTimeout if too
        few workers arrive in time; the error names those that have not.
        """
        return self._ask(ArrivalKind.READY, round, needed)

    def wait(self, round: int, needed: int) -> list[Members]:
        """Wait as `arrive`, for a worker without rows, which is no member."""
        return self._ask(ArrivalKind.WAIT, round, needed)

    def meet(self, round: int, workers: int) -> None:
        """Wait until `workers` workers have called this before a round. Raises PeerTimeout as `arrive`."""
        self._ask(ArrivalKind.MEET, round, workers)

    def _ask(self, kind: ArrivalKind, round: int, needed: int) -> list[Members]:
        found = self._session.exchange(GroupMessage.ARRIVE, {0: pack_numbers([kind])}, step=round, weight=needed)
        return unpack_members(found.pieces[0])
