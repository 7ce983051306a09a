"""What a server does with a segment: `rayps.ps.server.dense_segment`, `rayps.ps.tables.table_segment`.

No sockets, no threads. A segment is a state machine: what `push` returns, applied in the same order to a backup by
`replay`, makes the backup equal to the bit. So a backup, a move and a recovery are one operation: a state, then the
pushes that followed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ServedSegment(Protocol):
    """One segment of a space, as its primary and as a copy."""

    seq: int  # how many changes were applied: what `push` gave back, one by one
    operations: int  # pushes and pulls, for the load; rows of them, for a table
    copied: bool  # whether changes go to copies; where not, they come back empty

    @property
    def version(self) -> int:
        """Steps that the optimizer has taken here."""

    @property
    def rows(self) -> int:
        """Of a table; elements of the dense vector."""

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, optimizer state and index."""

    def push(self, rank: int, step: int, weight: float, data: memoryview) -> list[bytes]:
        """File a push, which may close rounds; what copies must apply for it, in order ([]: known, or nothing yet).

        Raises ValueError, ConfigError: it cannot be; nothing was applied.
        """

    def check(self, rank: int, step: int, weight: float, data: memoryview) -> None:
        """Raises what `push` would, so that a request of several segments has effect in all of them or in none."""

    def replay(self, change: memoryview) -> None:
        """On a copy: apply one item of what `push` gave on the primary."""

    def may_pull(self, rank: int) -> bool:
        """Whether a pull of `rank` may be served now."""

    def laggards(self) -> list[int]:
        """The ranks that pulls wait for."""

    def pull(self, rank: int, data: memoryview, out: memoryview | None = None) -> tuple[Any, int, list[bytes]]:
        """Return a buffer with the requested values, the lead of `rank`, and what the backups must apply.

        The buffer is `out` where the values fit. The lead is the number of rounds that `rank` is ahead of the slowest.
        Backups apply the rows that this pull created or counted.
        """

    def read(self, data: memoryview) -> Any:
        """The same outside the clock; changes nothing."""

    def marks(self) -> dict[int, int]:
        """By rank: its next step here."""

    def durable(self, rank: int) -> int:
        """The step of this rank below which all pushes are applied here (copies have what is applied)."""

    def dump(self) -> bytes:
        """The whole state, for a copy, a move, a branch or a checkpoint."""

    def load(self, state: Any) -> None:
        """Become what `dump` gave."""

    def part(self, rounds: int) -> bytes | None:
        """The state after `rounds`, if it is kept (see `keep`)."""

    def keep(self, rounds: Sequence[int]) -> None:
        """After which rounds to keep a state."""

    def branch(self) -> ServedSegment:
        """Another segment that begins with the same values and goes its own way; memory is shared until it differs.

        The branch's clock begins anew, at step 0 for all ranks.
        """
