"""Plain data between a driver and its workers: the plan of a generation, and the facts that a worker reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rayps.core import records
from rayps.core.grid import Grid, Point
from rayps.core.phase_rounds import Boundary
from rayps.core.strategy import StrategyView
from rayps.core.user_code import Call
from rayps.parallel.division.division import Division
from rayps.ps.protocol.space import SpaceRank
from rayps.recovery.backup_assignment import BackupAssignment
from rayps.recovery.worker_backup import CommitCost
from rayps.tensors import optim
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.local_state import LocalState


@dataclass(frozen=True, slots=True)
class Orders:
    """The facts and limits of a generation that all its members receive."""

    generation: int
    strategy: StrategyView
    seed: int
    end: int
    boundary: Boundary
    evaluated: int  # the last round whose evaluation is in the journal
    timeout: float
    origin: tuple[int, int] = (0, 0)  # the round and the epoch at the start of the phase
    division: Division | None = None  # how the model is divided; None: a replica is one worker
    mailbox: str | None = None  # the folder through which real clients send and receive; None = there are none
    ticks: Ticks = field(default_factory=Ticks)  # the epochs of the phase, for schedules on servers


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """The addresses of one worker's peers in a generation: its column's workers, servers, its replica's workers."""

    secret: bytes = b""
    ring: list[str] = field(default_factory=list)  # addresses of the column's workers, in the order of data ranks
    seat: SpaceRank | None = None  # the worker's place in a space on servers
    axes: dict[str, list[str]] = field(default_factory=dict)  # addresses of the replica's workers along each axis
    attempt: int = 0  # how often replicas have started again; connections of another attempt are refused


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The plan of one worker in one generation. Positions count a replica's batches since the start of the run.

    `rank` is the worker's number among all `size` workers.
    """

    generation: int
    rank: int
    size: int
    strategy: StrategyView
    peers: PeerAddresses
    seed: int
    start: int  # the position to start from; -1 = the position that the servers report, for a replacement worker
    end: int
    boundary: Boundary
    evaluated: int  # the last round whose evaluation by this rank the driver has
    timeout: float
    origin: tuple[int, int] = (0, 0)  # the round and the epoch at the start of the phase
    division: Division | None = None  # how the model is divided; None: a replica is one worker
    backup_assignment: BackupAssignment | None = None  # set if workers hold backups of each other's states
    mailbox: str | None = None  # the folder through which real clients send and receive; None = there are none

    @property
    def grid(self) -> Grid:
        """The layout of all workers."""
        return self.strategy.grid(self.size)

    @property
    def place(self) -> Point:
        """The rank's coordinates in the grid of workers."""
        return self.grid.at(self.rank)


@dataclass(slots=True)
class WorkerFacts:
    """The facts that a worker reports to a poll."""

    rank: int
    generation: int
    status: str  # idle, running, finished, failed
    position: int = 0
    error: Exception | None = None
    points: list[records.Point] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)  # rounds whose part of a checkpoint is retained
    lines: list[tuple[float, str]] = field(default_factory=list)  # log lines: time, text
    kept_since: int = 0  # pushes of steps below this may have been evicted before they were known to be durable
    cost: CommitCost | None = None  # the cost of the backups of its state
    met: str | None = None  # why the strategy's stop rule ended the phase
    call: Call | None = None  # the call of the user's code that has not returned yet
    ends: list[str] = field(default_factory=list)  # exceptions that ended threads of its process


@dataclass(slots=True)
class WorkerPart:
    """A worker's part of a checkpoint. Only data rank 0's part has parameters and moments, unless servers hold them."""

    round: int
    params: Tensor | None
    moments: optim.Moments
    buffers: dict[str, Tensor]
    rng: Tensor
    own: LocalState | None = None  # the worker's own state, if workers train separately
    shared: dict[str, Tensor] = field(default_factory=dict)  # values that are equal on all workers; in rank 0's part
    met: bool = False  # whether the strategy's stop rule was met in this round, so that the phase ends
