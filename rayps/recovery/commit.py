"""What a worker does after each step so that its death is no loss, and what that costs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rayps.core import failpoint
from rayps.core.costs import amount
from rayps.core.errors import LinkError
from rayps.recovery.peer_replication import Mirror
from rayps.recovery.slots import CommittedState, tensors_of
from rayps.tensors.optim import with_edits
from rayps.tensors.snapshot import Snapshot

log = logging.getLogger(__name__)


class CommittedWorker(Protocol):
    """A worker, as far as it is kept: what it has between two rounds."""

    position: int
    flat: Any
    held: Any
    optimizer: Any


@dataclass(frozen=True, slots=True)
class CommitCost:
    """Of keeping one worker's state: bytes and seconds per round, and the share of the round that this takes."""

    kept: int = 0  # bytes copied into memory of this host
    sent: int = 0  # bytes sent to another host
    seconds: float = 0.0
    share: float = 0.0

    @classmethod
    def most(cls, costs: Iterable[CommitCost]) -> CommitCost | None:
        """Of the worker that pays most."""
        return max(costs, key=lambda cost: (cost.share, cost.kept), default=None)

    def __str__(self) -> str:
        travel = f" and send {amount(self.sent)} to another host" if self.sent else ""
        return f"copy {amount(self.kept)}{travel}, {self.seconds * 1e3:.2f} ms, {self.share:.1%} of a round"

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready facts."""
        return {"kept_bytes": self.kept, "sent_bytes": self.sent, "seconds": self.seconds, "share": self.share}


class Committer:
    """Commits one worker's state after each round of one generation."""

    def __init__(self, mirror: Mirror, writer: int, points: Callable[[], list[dict[str, Any]]]) -> None:
        """`writer`: the generation, for which the vault is open. `points`: what the driver may not have heard."""
        self._mirror, self._writer, self._points = mirror, writer, points
        self._frozen: set[str] | None = None  # parameters that need no gradient: they stay what they are
        self._rounds = 0
        self._seconds, self._began = 0.0, 0.0
        self._over = False

    def commit(self, worker: CommittedWorker) -> None:
        """Keep what the worker has now. A state that cannot be kept is no error: the run goes on without."""
        if self._over:
            return
        began = time.perf_counter()
        failpoint.passing("vault: before a commit")
        try:
            kept = self._state_of(worker)
            if self._mirror.vault.commit(self._writer, worker.position, *kept):
                self._mirror.committed(worker.position)
        except (LinkError, TypeError, ValueError) as error:
            self._over = True
            self._mirror.vault.shut()
            log.warning("a death from now on means going back to a snapshot: %s", error)
        failpoint.passing("vault: after a commit")
        ended = time.perf_counter()
        if self._rounds == 0:
            self._began = ended  # the first one makes the memory, and belongs to no round
        else:
            self._seconds += ended - began
        self._rounds += 1

    def _state_of(self, worker: CommittedWorker) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Nothing is copied."""
        if self._frozen is None:
            self._frozen = {name for name, p in worker.held.module.named_parameters() if not p.requires_grad}
        named = zip(worker.flat.layout.entries, worker.flat.parameters, strict=True)
        moments = {entry.name: worker.optimizer.state.get(p, {}) for entry, p in named}
        moments = with_edits(moments, worker.optimizer, worker.flat.layout, worker.flat.parameters)
        buffers = {name: value for name, value in worker.held.beside.items() if name not in self._frozen}
        return tensors_of(worker.flat.vector, moments, buffers, torch.get_rng_state(), self._points())

    @property
    def cost(self) -> CommitCost | None:
        """So far; None before the first round has ended."""
        rounds = self._rounds - 1
        if rounds < 1:
            return None
        lasted = max(time.perf_counter() - self._began, 1e-9)
        return CommitCost(
            self._mirror.vault.bytes, self._mirror.bytes, self._seconds / rounds, min(1.0, self._seconds / lasted)
        )

    def close(self) -> None:
        """Leave the keeper; it keeps what it has."""
        self._mirror.close()


def overlaid(snapshot: Snapshot, rank: int, state: CommittedState, rest: CommittedState | None = None) -> Snapshot:
    """A column's snapshot with a worker's newer state in place of its own; `rest` is what the twin lacked."""
    rng = rest.rng if rest is not None else state.rng
    return replace(
        snapshot,
        params=state.tensors["params"],
        moments=state.moments,
        buffers=snapshot.buffers | state.buffers | ({} if rest is None else rest.buffers),
        rng={} if rng is None else {rank: rng},
        positions=[state.round] * len(snapshot.positions),
    )
