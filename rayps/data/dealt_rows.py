"""A data set whose rows are dealt to ranks by shares, for workers in step whose number may change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rayps_client.errors import ConfigError

from rayps.core.rows.row_shares import RowShares
from rayps.core.rows.step_rows import RowBlock, ShareCut
from rayps.data.base import Batch, Data, Place, Position, check_place


class DealtRows(Data):
    """The rows of `data`, of which each rank takes its share of each round's block: see `rayps.core.rows.row_shares`.

    A rank's share is cut into micro-batches of at most `data.batch_size` rows, as equal as possible. All ranks have
    `micro_batches` of them in each round; some may be empty.
    """

    def __init__(self, data: Data, rows: RowShares) -> None:
        """Deal the rows of `data` by `rows`.

        Raises:
            ConfigError: the rows of `data` cannot be taken by number.
        """
        must_have_row_numbers(data)
        self._data, self._rows = data, rows
        self.batch_size, self.ahead, self.ends = data.batch_size, data.ahead, data.ends
        self.client = data.client
        self._cut = ShareCut(data.rows(), data.batch_size, rows)
        self.micro_batches = self._cut.accumulate

    def dealt_by(self, rows: RowShares) -> DealtRows:
        """Return the same data, dealt by other shares."""
        return DealtRows(self._data, rows)

    def check(self) -> None:
        """Check the data: see `Data.check`."""
        self._data.check()

    def rows(self) -> int:
        """Return the number of rows in an epoch, over all ranks."""
        return self._data.rows()

    def steps(self, size: int) -> int:
        """Return the number of micro-batches that each rank has in a whole epoch."""
        return self._rows.rounds(self.rows()) * self.micro_batches

    def share(self, rank: int, size: int) -> int:
        """Return the number of rows that a rank takes in a whole epoch, rounded down."""
        return self.rows() * self._rows.shares[rank] // self._rows.block

    def parts(self, processes: int) -> int:
        """Return `processes`: rows are taken by number."""
        return processes

    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the micro-batches of `rank` in an epoch, from number `start` on: see `Data.batches`."""
        check_place(rank, size, start)
        for batch, _ in self.part(Place(rank, size, seed, epoch), start):
            yield batch

    def part(
        self, place: Place, start: int = 0, position: Position | None = None
    ) -> Iterator[tuple[Batch, Position | None]]:
        """Yield the micro-batches of one reader: see `Data.part`."""
        order = self._data.order(place.seed, place.epoch)
        for number in range(place.process + start * place.processes, self.steps(place.size), place.processes):
            index, micro = divmod(number, self.micro_batches)
            own = self._cut.places(RowBlock(0, place.epoch, index, place.rank, place.size))[micro]
            yield self._data.take(order[np.asarray(own, dtype=np.int64)]), None


def must_have_row_numbers(data: Data) -> None:
    """Raise ConfigError if the rows of `data` cannot be taken by number, or are divided otherwise."""
    if not data.has_row_numbers:
        raise ConfigError(
            f"the number of workers may change, and the rows of {type(data).__name__} cannot be taken by number:\n"
            "use rayps.data.tensors, dataset or table, or Parquet files that fit into window_mb; or give a fixed "
            "number of workers",
            field="workers",
        )
