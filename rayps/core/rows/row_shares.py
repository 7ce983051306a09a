"""Which rows of an epoch each worker takes in each round, if workers run in step and their number may change. Pure.

An epoch is a permutation of all rows. Each round takes the next rows of it, its *block*, and deals them to the ranks by
their shares. After any round, the rows that were consumed are therefore the first rows of the permutation, whichever
workers took them. A change of the workers continues behind these rows, and every row occurs once in an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rayps_client.errors import CheckpointError
from rayps_client.values import Json


@dataclass(frozen=True, slots=True)
class RowShares:
    """How rows are dealt from round `begin` on, until the workers change again.

    `epoch` is the epoch of round `begin`, and `taken` the number of its rows that earlier rounds have consumed.
    `shares[rank]` is the number of rows that a rank takes in a round; the last block of an epoch may be smaller, unless
    `drop_last` leaves it out.
    """

    begin: int
    epoch: int
    taken: int
    shares: tuple[int, ...]
    drop_last: bool = False

    @property
    def block(self) -> int:
        """The number of rows of a round over all ranks."""
        return sum(self.shares)

    def rounds(self, rows: int) -> int:
        """Return the number of rounds of a whole epoch of `rows` rows."""
        return rows // self.block if self.drop_last else -(-rows // self.block)

    def rounds_left(self, rows: int) -> int:
        """Return the number of rounds from `begin` to the end of the epoch."""
        return self.rounds(rows - self.taken)

    def origin(self, rows: int) -> tuple[int, int]:
        """Return the round and the epoch from which rounds are counted, so that the epoch ends where its rows end.

        The round is where the epoch would have begun if all its rounds had had blocks of this size. It may be negative.
        """
        return self.begin + self.rounds_left(rows) - self.rounds(rows), self.epoch

    def bounds(self, epoch: int, index: int, rows: int) -> tuple[int, int]:
        """Return which rows [low, high) of the permutation of `epoch` its round number `index` takes.

        `index` counts from `origin`.
        """
        if epoch == self.epoch:
            index -= self.rounds(rows) - self.rounds_left(rows)
            low = self.taken + index * self.block
        else:
            low = index * self.block
        return min(low, rows), min(low + self.block, rows)

    def after(self, round: int, rows: int) -> tuple[int, int]:
        """Return (epoch, taken) after `round` rounds, at least `begin`: where the next workers continue."""
        left = self.rounds_left(rows)
        done = round - self.begin
        if done < left:
            return self.epoch, self.taken + done * self.block
        epochs, index = divmod(done - left, self.rounds(rows))
        return self.epoch + 1 + epochs, index * self.block

    def followed_by(self, round: int, shares: Sequence[int], rows: int) -> RowShares:
        """Return how rows are dealt by other shares from `round` on."""
        epoch, taken = self.after(round, rows)
        return RowShares(round, epoch, taken, tuple(shares), self.drop_last)

    def to_json(self) -> list[Json]:
        """Return the values as JSON data."""
        return [self.begin, self.epoch, self.taken, list(self.shares), *([True] if self.drop_last else [])]

    @classmethod
    def from_json(cls, data: Sequence[Json]) -> Self:
        """Return what `to_json` wrote. Raises CheckpointError if `data` is damaged."""
        try:
            begin, epoch, taken, shares, *dropped = data
            return cls(int(begin), int(epoch), int(taken), tuple(int(each) for each in shares), bool(dropped))  # type: ignore[arg-type, union-attr]
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's shares of rows are damaged: {str(data)[:100]!r}") from error


def cut_evenly(block: int, ranks: int) -> tuple[int, ...]:
    """Divide the rows of a block among ranks: the shares differ by at most one row, and the first ones are larger."""
    return tuple(block // ranks + (rank < block % ranks) for rank in range(ranks))


def deal_places(shares: Sequence[int], rank: int) -> list[int]:
    """Return the places in a block that `rank` takes, in increasing order.

    The places are dealt one by one to the ranks in turn; a rank that has its share is passed over. With equal shares,
    rank r of N takes the places r, r + N, r + 2N...
    """
    own = shares[rank]
    before = [share for other, share in enumerate(shares) if other < rank]
    return [sum(min(share, turn) for share in shares) + sum(share > turn for share in before) for turn in range(own)]
