"""The part of a worker that decides whose gradients of a step count. Where those of all workers do, it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.core.rooms import load
from rayps.core.strategy.topology import backup_in
from rayps.data.base import Batch
from rayps.tensors.snapshot import Snapshot
from rayps.worker.connections import WorkerConnections
from rayps.worker.loops.loop_of_family import MEMBERS

if TYPE_CHECKING:
    from rayps.worker.core import Worker

Send = Callable[[Batch | None], Tensor | None]


class StepMembership(Protocol):
    """Decides, on one worker, whose gradients of each step count. `exchange` stands in for the worker's exchange."""

    def begin(self) -> None:
        """Prepare the first round, before the strategy's `begin`."""

    def run_round(self, call: Callable[[], None]) -> None:
        """Run the strategy's round by `call`, or go through the round without it if this worker has missed the round.

        Raises ConfigError if the strategy's round has not called the worker's exchange once.
        """

    def exchange(self, batch: Batch, send: Send) -> Tensor | None:
        """Exchange the gradients of a step: this worker's of `batch`, if it is a member, and those of other members.

        Return the mean of the members' gradients, read-only, or None if the servers compute it. `send(batch)` is the
        exchange of a worker that does not have this part. `send(None)` is the same without a gradient of this worker.
        """

    def end_round(self) -> None:
        """Report what is due after a round."""

    def meet(self) -> None:
        """Wait until all workers have read the servers' parameters after the same round, to evaluate them."""

    def save(self, shared: dict[str, Tensor]) -> None:
        """Add this part's state to the values of a checkpoint that are equal on all workers."""

    def restore(self, snapshot: Snapshot, shared: dict[str, Tensor]) -> None:
        """Continue after a snapshot, and remove this part's state from `shared`."""

    def close(self) -> None:
        """Release what `begin` has started. This is also called after an error."""


def make_members(w: Worker, peers: WorkerConnections) -> StepMembership | None:
    """Return the part that decides whose gradients count under a worker's plan; None if all workers' count."""
    strategy = w.plan.strategy
    made: StepMembership | None = load(MEMBERS[strategy.loop])(w, peers) if backup_in(strategy) else None
    return made


def other_exchange(name: str) -> ConfigError:
    """Return the error for an exchange that members take no part in. `name`: the worker's method that they do."""
    return ConfigError(
        f"with backup workers a strategy's round calls {name}(batch) once, and no other exchange, because a late "
        f"worker takes part in none: call w.{name}, or leave out backup",
        field="backup",
    )
