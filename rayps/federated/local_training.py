"""The options that set how long a client trains in a round: epochs or steps, and the size of batches."""

from __future__ import annotations

from dataclasses import dataclass

from rayps_client.trainers.local_work import LocalWork

from rayps.core.refusals.table import refuse
from rayps.core.strategy import options


@dataclass(frozen=True)
class LocalTraining(LocalWork):
    """How long a client trains in a round: `local_epochs` epochs of its rows (default 1), or `local_steps` steps.

    A batch has `batch_size` rows. 0 means all rows of the client, and None means the data's batch size.
    """

    def __post_init__(self) -> None:
        if self.local_epochs is not None and self.local_steps is not None:
            refuse({"local_epochs": self.local_epochs, "local_steps": self.local_steps})
        for field in ("local_epochs", "local_steps"):
            options.whole(self, field, none=True)
        options.whole(self, "batch_size", 0, none=True, hint="; 0 takes all rows of a client at once")

    def work(self, own: int, default: int, accumulate: int = 1) -> int:
        """Return how many samples a client with `own` rows processes in a round.

        `default` is the data's batch size, and `accumulate` the number of batches in a step.
        """
        if self.local_steps is None:
            return own * self.epochs
        return self.local_steps * min(self.rows(own, default) * accumulate, own)
