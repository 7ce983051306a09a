"""Plain data between a driver and its workers: the plan of a generation, and the facts that a worker reports."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from rayps_client.values import JsonObject
from torch import Tensor

from rayps.core.grid import Grid, Point
from rayps.core.job import records
from rayps.core.job.continuation import Continuation
from rayps.core.job.user_code import Call
from rayps.core.rows.phase_rounds import OPEN, Boundary
from rayps.core.rows.row_shares import RowShares
from rayps.core.strategy.strategy import StrategyView
from rayps.core.time.member_times import MemberTimes
from rayps.core.urls import Location
from rayps.privacy.row_level import RowPrivacy
from rayps.ps.protocol.space import SpaceRank
from rayps.recovery.backup_assignment import BackupAssignment
from rayps.recovery.worker_backup import CommitCost
from rayps.tensors import optim
from rayps.tensors.division import Division
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.snapshot import WrittenFacts
from rayps.tensors.training_state import TrainingState


@dataclass(frozen=True, slots=True)
class Orders:
    """What all members of a generation receive: the strategy, the rounds to run, and limits."""

    generation: int
    strategy: StrategyView
    seed: int
    end: int  # the round after which the generation ends
    snapshots: SnapshotPlan
    evaluation: EvaluationPlan
    timeout: float  # seconds to wait for a peer
    origin: tuple[int, int] = (0, 0)  # the round and the epoch at the start of the phase
    division: Division | None = None  # how the model is divided; None if a replica is one worker
    mailbox: str | None = None  # the folder through which real clients send and receive; None if there are none
    ticks: Ticks = field(default_factory=Ticks)  # the epochs of the phase, for schedules on servers
    profile: frozenset[int] = frozenset()  # the ranks that trace some of their rounds
    recovers: bool = False  # whether the generation follows a failure
    reached: tuple[int, ...] = ()  # by rank: the rounds that were trained before, which are repeated; () if none
    elastic: ElasticPlan | None = None  # None if the number of workers is fixed
    leased: bool = False  # whether workers get their rows by leases: see `rayps.worker.rows.lease_book`
    private: PrivatePlan | None = None  # None without privacy


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """When the workers of a generation save their states, and where."""

    boundary: Boundary  # the rounds after which a snapshot is taken
    each_boundary: bool = False  # whether one is taken at every boundary, for which workers wait
    each_epoch: bool = False  # the same at the end of every evaluated epoch, whose round is not known before
    parts: PartsPlan | None = None  # where workers write their parts of checkpoints; None if the driver writes


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """When the workers of a generation evaluate, and on how much data."""

    done: int  # the last round whose evaluation the driver has
    every: int | None = None  # rounds between two evaluations; None: after each epoch
    batches: int | None = None  # the most batches of a worker's evaluation; None: all


@dataclass(frozen=True, slots=True)
class PrivatePlan:
    """What the workers of a job with privacy must know."""

    ledger: str  # the folder of the ledger of private releases
    rows: RowPrivacy | None = None  # how rows are private; None if clients are


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """What the workers of an elastic job get for one generation.

    `lr_factor`: the learning rate of the job's optimizer is multiplied by it. `hands_over`: whether workers
    that pause keep the whole state in memory; if not, the driver takes it. `handover`: how the generation continues
    from the workers' memory; None if it starts from a snapshot. `stop`: the round after which the workers pause; None
    if that is not known before.
    """

    rows: RowShares
    lr_factor: float = 1.0
    hands_over: bool = True
    handover: Continuation | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """Where the workers of a generation write their parts of checkpoints, and the token of these files."""

    place: Location
    token: str


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """How one worker reaches others in a generation: workers of its column and replica, servers, and real clients."""

    secret: bytes = b""
    ring: list[str] = field(default_factory=list)  # addresses of the column's workers, in the order of data ranks
    seat: SpaceRank | None = None  # the worker's place in a space on servers; None if it needs no servers
    # from an axis ("stage", "tensor") to the addresses of the replica's workers along this axis
    axes: dict[str, list[str]] = field(default_factory=dict)
    attempt: int = 0  # how often replicas have started again; connections of another attempt are refused
    mailbox: str | None = None  # the folder through which real clients send and receive; None if there are none


@dataclass(frozen=True, slots=True)
class TimesPlan:
    """What the records of one worker's time must know."""

    traced: bool = False  # whether the worker traces some of its rounds
    recovers: bool = False  # whether the generation, or the start of this worker, follows a failure
    reached: int = 0  # rounds below this one were trained before, and are repeated


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
    start: int  # the position to start from; a replacement worker has -1, the position that the servers report
    end: int  # the position at which the generation ends
    snapshots: SnapshotPlan
    evaluation: EvaluationPlan
    timeout: float  # seconds to wait for a peer
    origin: tuple[int, int] = (0, 0)  # the round and the epoch at the start of the phase
    division: Division | None = None  # how the model is divided; None if a replica is one worker
    backup_assignment: BackupAssignment | None = None  # None if workers do not hold backups of each other's states
    times: TimesPlan = TimesPlan()
    elastic: ElasticPlan | None = None  # None if the number of workers is fixed
    leased: bool = False  # whether this worker gets its rows by leases
    private: PrivatePlan | None = None  # None without privacy

    @property
    def last_epoch(self) -> int | None:
        """The epoch with whose begin the phase ends, if the data has no length; None if the phase ends with a round."""
        began, epoch = self.origin
        epochs, rest = divmod(self.end - began, OPEN)
        return None if rest else epoch + epochs

    @property
    def lr_factor(self) -> float:
        """The factor of the learning rates of an elastic job; 1 if the number of workers is fixed."""
        return 1.0 if self.elastic is None else self.elastic.lr_factor

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
    """What a worker reports in answer to a poll."""

    rank: int
    generation: int
    status: str  # idle, running, paused (its driver has ended it between two rounds), finished, failed
    position: int = 0  # the number of rounds that the worker has reported
    error: Exception | None = None  # the error with which the plan failed
    points: list[records.Point] = field(default_factory=list)  # new points since the last poll
    parts: list[int] = field(default_factory=list)  # the rounds whose parts of a checkpoint are retained
    lines: list[tuple[float, str]] = field(default_factory=list)  # new log lines (time, text)
    kept_since: int = 0  # pushes of earlier steps may have been evicted before they were known to be durable
    cost: CommitCost | None = None  # the cost of the backups of its state; None if there are no backups
    met: str | None = None  # why the strategy's stop rule ended the phase; None if it did not
    call: Call | None = None  # the call of the user's code that has not returned; None if there is none
    ends: list[str] = field(default_factory=list)  # the exceptions that ended threads of its process
    trace: bytes | None = None  # a trace of some rounds, once: see `rayps.worker.profile`
    waits_at: int | None = None  # the step at which it waits for a lease: all earlier pushes are applied
    times: MemberTimes | None = None  # where the time of its process went, about once a second; None in between


@dataclass(slots=True)
class WorkerPart:
    """A worker's part of a checkpoint.

    Only the part of data rank 0 has parameters, moments, buffers and shared values. If servers hold the parameters and
    moments, no worker's part has them.
    """

    round: int
    params: Tensor | None
    moments: optim.Moments
    buffers: dict[str, Tensor]
    rng: Tensor | None  # torch's random state; None in a private job, which saves none
    own: TrainingState | None = None  # the worker's own state if workers train separately; else None
    shared: dict[str, Tensor] = field(default_factory=dict)  # values that are equal on all workers
    met: bool = False  # whether the strategy's stop rule was met in this round, which ends the phase
    cursor: JsonObject | None = None  # from where the worker continues in data without a length: see `Cursor`
    pending: PendingPart | None = None  # on the worker: the write of its tensors, if the worker writes them itself
    written: WrittenFacts | None = None  # on the driver: what the worker has written

    @property
    def is_complete(self) -> bool:
        """Whether the part can be sent to the driver: the worker has written its tensors, or failed to."""
        return self.pending is None or self.pending.done()

    def delivered(self) -> WorkerPart:
        """Return the part as the driver receives it. Raises the error of the write, if it has failed."""
        if self.pending is None:
            return self
        return replace(self, pending=None, written=self.pending.facts())


class PendingPart(Protocol):
    """A worker's file of a checkpoint, which is written in the background."""

    def done(self) -> bool:
        """Return whether the write has ended, with or without an error."""

    def facts(self) -> WrittenFacts:
        """Return what was written. Call it after the end of the write, whose error it raises."""
