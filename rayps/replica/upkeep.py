"""What a worker does after each step so that its death is no loss, and what that costs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rayps import failpoint
from rayps.errors import LinkError
from rayps.replica.mirror import Mirror
from rayps.replica.vault import State, tensors_of
from rayps.snapshot import Snapshot

log = logging.getLogger(__name__)


class Kept(Protocol):
    """Of a worker, what is kept: all that it has between two rounds."""

    position: int
    optimizer: Any

    @property
    def params(self) -> Tensor:
        """The parameters as one vector."""

    @property
    def moments(self) -> Mapping[str, Mapping[str, Any]]:
        """The optimizer's state by parameter name, not copied."""

    @property
    def own(self) -> Mapping[str, Tensor]:
        """The buffers by name, not copied."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of keeping one worker's state: bytes and seconds per round, and the share of the round that this takes."""

    kept: int = 0  # bytes copied into memory of this host
    sent: int = 0  # bytes sent to another host
    seconds: float = 0.0
    share: float = 0.0

    @classmethod
    def most(cls, costs: Iterable[Cost]) -> Cost | None:
        """Of the worker that pays most."""
        return max(costs, key=lambda cost: (cost.share, cost.kept), default=None)

    def __str__(self) -> str:
        travel = f" and send {_bytes(self.sent)} to another host" if self.sent else ""
        return f"copy {_bytes(self.kept)}{travel}, {self.seconds * 1e3:.2f} ms, {self.share:.1%} of a round"

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready facts."""
        return {"kept_bytes": self.kept, "sent_bytes": self.sent, "seconds": self.seconds, "share": self.share}


class Upkeep:
    """Commits one worker's state after each round of one generation."""

    def __init__(self, mirror: Mirror, writer: int) -> None:
        """`writer` is the generation; the mirror's vault is open for it."""
        self._mirror, self._writer = mirror, writer
        self._rounds = 0
        self._seconds, self._began = 0.0, 0.0
        self._over = False

    def commit(self, worker: Kept, points: list[dict[str, Any]]) -> None:
        """Keep what the worker has now, and points of it that the driver may not have heard.

        A state that cannot be kept is no error: the run goes on without.
        """
        if self._over:
            return
        began = time.perf_counter()
        failpoint.passing("vault: before a commit")
        try:
            kept = tensors_of(worker.params, worker.moments, worker.own, torch.get_rng_state(), points)
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

    @property
    def cost(self) -> Cost | None:
        """So far; None before the first round has ended."""
        rounds = self._rounds - 1
        if rounds < 1:
            return None
        lasted = max(time.perf_counter() - self._began, 1e-9)
        return Cost(
            self._mirror.vault.bytes, self._mirror.bytes, self._seconds / rounds, min(1.0, self._seconds / lasted)
        )

    def close(self) -> None:
        """Leave the keeper; it keeps what it has."""
        self._mirror.close()


def overlaid(snapshot: Snapshot, rank: int, state: State, rest: State | None = None) -> Snapshot:
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


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
