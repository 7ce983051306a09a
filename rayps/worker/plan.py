"""What a driver tells the members of a generation, and what it gets of a worker: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rayps.core.calendar import Boundary
from rayps.core.grid import Grid, Point
from rayps.core.strategy import StrategyView
from rayps.core.user_code import Call
from rayps.parallel.division.division import Division
from rayps.ps.protocol.space import SpaceRank
from rayps.recovery.backup_assignment import Bond
from rayps.recovery.worker_backup import CommitCost
from rayps.tensors import optim
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.local_state import LocalState


@dataclass(frozen=True, slots=True)
class Orders:
    """What every member of a generation is told."""

    generation: int
    strategy: StrategyView
    seed: int
    end: int
    boundary: Boundary
    evaluated: int  # the last round whose evaluation is filed
    timeout: float
    origin: tuple[int, int] = (0, 0)  # the round and the epoch that the phase's epochs are counted from
    division: Division | None = None  # how the model is divided, where a replica is several workers
    mailbox: str | None = None  # the folder of the job's real clients, where it has some
    ticks: Ticks = field(default_factory=Ticks)  # the epochs of the phase, for schedules on servers


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """Where one worker's peers are in a generation: the workers of its column, servers, the workers of its replica."""

    secret: bytes = b""
    ring: list[str] = field(default_factory=list)  # of the column's workers, in the order of data ranks
    shards: list[tuple[str, int, int]] = field(default_factory=list)  # of the column's fixed servers: address, lo, hi
    seat: SpaceRank | None = None  # the place in a space on an elastic server group
    axes: dict[str, list[str]] = field(default_factory=dict)  # along each axis within the replica
    attempt: int = 0  # how often this replica has started in this generation; another attempt's calls are refused


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One generation's orders to one worker. Positions count the batches that a replica has taken since the run began.

    `rank` is among all `size` workers.
    """

    generation: int
    rank: int
    size: int
    strategy: StrategyView
    peers: PeerAddresses
    seed: int
    start: int  # position; -1 = ask the servers (a worker that replaces another)
    end: int
    boundary: Boundary
    evaluated: int  # the last round after which this rank's evaluation was heard
    timeout: float
    origin: tuple[int, int] = (0, 0)  # see Orders
    division: Division | None = None
    bond: Bond | None = None  # where workers keep each other's states
    mailbox: str | None = None  # see Orders

    @property
    def grid(self) -> Grid:
        """How all workers are laid out."""
        return self.strategy.grid(self.size)

    @property
    def place(self) -> Point:
        """The rank's place in the grid of workers."""
        return self.grid.at(self.rank)


@dataclass(slots=True)
class WorkerFacts:
    """What a worker is asked about while it runs."""

    rank: int
    generation: int
    status: str  # idle, running, finished, failed
    position: int = 0
    error: Exception | None = None
    points: list[dict[str, Any]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    kept_since: int = 0  # pushes below this step are not kept, and are not known to be durable
    cost: CommitCost | None = None  # of keeping its state for a death
    met: str | None = None  # why the phase is over before its end, as its strategy's stop rule says
    call: Call | None = None  # of the user's code, which has not returned yet
    ends: list[str] = field(default_factory=list)  # what threads of its process ended by


@dataclass(slots=True)
class WorkerPart:
    """A worker's share of a checkpoint; parameters and moments from data rank 0 of a strategy without servers."""

    round: int
    params: Tensor | None
    moments: optim.Moments
    buffers: dict[str, Tensor]
    rng: Tensor
    own: LocalState | None = None  # where workers learn apart
    shared: dict[str, Tensor] = field(default_factory=dict)  # of rank 0
    met: bool = False  # the phase ends here: its strategy has met its stop rule
