"""How long a client trains in a round: the options of a federated strategy that a client reads."""

from __future__ import annotations

from dataclasses import dataclass


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
