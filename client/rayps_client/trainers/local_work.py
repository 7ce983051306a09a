"""How long a client trains in a round: the options of a federated strategy that a client reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rayps_client.error_hints import NO_STATISTICS, ONE_ROW_WAY
from rayps_client.errors import DataError, WorkloadError


@dataclass(frozen=True)
class LocalWork:
    """The options `local_epochs` (default 1) or `local_steps`, and `batch_size`.

    A batch has `batch_size` rows. 0 means all rows of the client, and None means the data's batch size.
    """

    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = None

    @property
    def epochs(self) -> int:
        """The number of epochs, by default 1. This property is not used if `local_steps` is given."""
        return self.local_epochs or 1

    def rows(self, own: int, default: int) -> int:
        """Return the number of rows in a batch of a client with `own` rows. `default` is the data's batch size."""
        return default if self.batch_size is None else self.batch_size or own

    def used(self, own: int, default: int, *, drop_last: bool, who: str = "the client") -> int:
        """Return how many of a client's `own` rows an epoch uses. `drop_last` leaves out a last batch that is smaller.

        Raises:
            DataError: there is no whole batch. The error names the client by `who`.
        """
        size = self.rows(own, default)
        if drop_last and own < size:
            raise no_whole_batch(f"{who} has {counted(own)}", size)
        return own - own % size if drop_last else own


def no_whole_batch(who: str, batch_size: int) -> DataError:
    """Return the error that `drop_last` leaves no batch. `who` says which rows there are."""
    return DataError(
        f"{who}, fewer than batch_size={batch_size}, and drop_last is True: there is no whole batch to train on; give "
        "a smaller batch_size, or drop_last=False"
    )


def counted(rows: int) -> str:
    """Return a number of rows in words: `1 row`, `2 rows`."""
    return f"{rows} row{'' if rows == 1 else 's'}"


def tried_sizes(own: int, size: int, *, drop_last: bool) -> list[int]:
    """Return with how many rows a client of `own` rows tries its workload: a batch of `size`, and one row if it occurs.

    Raises:
        DataError: the client has no whole batch, and `drop_last` is True.
    """
    used = LocalWork().used(own, size, drop_last=drop_last)
    return [min(used, size), *([1] if used > size and used % size == 1 else [])]


def try_batches(train: Callable[[int], None], own: int, size: int, *, drop_last: bool) -> str | None:
    """Call `train` with each of the `tried_sizes`.

    Return what to tell the user if a BatchNorm layer has no statistics of the last batch, of one row. This is no error
    yet: the strategy of a job may have another batch size, or so few steps that the batch does not occur.

    Raises:
        WorkloadError, DataError: the user's code or data failed, or there is no whole batch.
    """
    sizes = tried_sizes(own, size, drop_last=drop_last)
    train(sizes[0])
    for one in sizes[1:]:
        try:
            train(one)
        except WorkloadError as error:
            if NO_STATISTICS not in error.message:
                raise
            return (
                f"the client has {own} rows, of which the last batch of {size} has one row, and a BatchNorm layer has "
                f"no statistics of one row: a job that trains on this batch fails here; {ONE_ROW_WAY}"
            )
    return None
