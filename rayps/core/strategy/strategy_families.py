"""What a strategy declares in addition to its topology: distribution of rows, recovery, loop. Pure.

    rows       Reshuffled | Fixed | ByClient     how rows are distributed to workers
    recovery   RestartAll | ReplaceOne | Rebuild     how a run recovers from the death of one worker or server
    loop       the worker's loop: a key of `rayps.worker.loops.loop_of_family`, or "module:Class" of a user's own loop

`recovery_of` and `loop_of` derive the defaults from a topology.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from rayps.core.rows.phase_rounds import OPEN
from rayps.core.strategy.topology import Peers, Servers, Topology

_Source = TypeVar("_Source", covariant=True)


class RowSource(Protocol):
    """A data set, as far as the distribution of its rows to workers is concerned."""

    keeps_rows: bool

    def steps(self, size: int) -> int:
        """Return the number of rounds of an epoch with `size` replicas."""


class DataMethods(Protocol[_Source]):
    """A workload's two methods that return data."""

    def data(self) -> _Source:
        """Return the training data."""

    def evaluation_data(self) -> _Source:
        """Return the evaluation data."""


# ---- rows


class _ByWorker:
    """Rows belong to workers, which read the training data."""

    __slots__ = ()
    _keeps_rows: ClassVar[bool]  # whether a worker has the same rows in every epoch

    @property
    def by_client(self) -> bool:
        """Whether rows belong to clients; then an epoch is one round."""
        return False

    @property
    def remote(self) -> bool:
        """Whether the clients are processes outside of the cluster, which hold the data."""
        return False

    def rounds(self, data: RowSource, replicas: int, accumulate: int = 1) -> int:
        """Tell the data whether workers keep their rows in every epoch, and return the number of rounds of an epoch.

        A round takes `accumulate` batches; the last round of an epoch takes those that are left. The number is `OPEN`
        if the data has no length. Raises DataError or ConfigError if the rows cannot be counted or divided.
        """
        data.keeps_rows = self._keeps_rows
        steps = data.steps(replicas)
        return steps if steps >= OPEN else -(-steps // accumulate)

    def source(self, workload: DataMethods[_Source]) -> _Source:
        """Return the training data, which workers read."""
        return workload.data()


@dataclass(frozen=True, slots=True)
class Reshuffled(_ByWorker):
    """Rows are distributed again in each epoch."""

    _keeps_rows: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Fixed(_ByWorker):
    """A worker has the same rows in every epoch."""

    _keeps_rows: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ByClient:
    """Rows belong to clients."""

    remote: bool = False  # whether the clients are processes outside of the cluster, which hold the rows

    @property
    def by_client(self) -> bool:
        """True: an epoch is one round of clients."""
        return True

    def rounds(self, data: RowSource, replicas: int, accumulate: int = 1) -> int:
        """Return 1: an epoch is one round of clients."""
        data.keeps_rows = False
        return 1

    def source(self, workload: DataMethods[_Source]) -> _Source:
        """Return the training data or, with remote clients, the evaluation data, because workers only evaluate."""
        return workload.evaluation_data() if self.remote else workload.data()


Rows = Reshuffled | Fixed | ByClient


class HasRows(Protocol):
    """A strategy, of which only `rows` is used."""

    @property
    def rows(self) -> Rows:
        """How rows are distributed to workers."""


def learns_by_client(strategy: HasRows) -> bool:
    """Return whether an epoch under a strategy is one round of clients."""
    rows = strategy.rows
    return rows.by_client


def has_remote_clients(strategy: HasRows) -> bool:
    """Return whether a strategy's clients are processes outside of the cluster."""
    rows = strategy.rows
    return rows.remote


def ends_together(topology: Topology) -> bool:
    """Return whether the workers agree on the end of data without a length: those that meet on a ring.

    Under other topologies each worker starts its next pass by itself.
    """
    return isinstance(topology, Peers)


# ---- recovery


@dataclass(frozen=True, slots=True)
class RestartAll:
    """A failure ends the generation: all workers return to the newest snapshot."""


@dataclass(frozen=True, slots=True)
class ReplaceOne:
    """A dead worker or server is replaced while the others continue."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """A dead worker's state is rebuilt, and no worker returns to a snapshot."""

    from_servers: bool = False  # rebuild the state from the servers, not from the backups that peers hold


@dataclass(frozen=True, slots=True)
class RegroupLiving:
    """The living workers of an elastic job form a new group, and continue from the state in their memory."""


Recovery = RestartAll | ReplaceOne | Rebuild | RegroupLiving


def recovery_of(topology: Topology) -> Recovery:
    """Return the default recovery of a topology.

    ReplaceOne if there are servers and workers do not run in step. In other cases: Rebuild if a replica is several
    workers, or if workers hold copies of each other's slices; else RestartAll.
    """
    if isinstance(topology, Peers) and topology.slice_backup:
        return Rebuild()
    if isinstance(topology, Servers) and not topology.in_step:
        return ReplaceOne()
    return RestartAll() if topology.replica is None else Rebuild(from_servers=isinstance(topology, Servers))


class HasRecovery(Protocol):
    """A strategy, of which only `recovery` is used."""

    @property
    def recovery(self) -> Recovery:
        """How a run recovers from the death of one worker or server."""


def rebuilds(strategy: HasRecovery, *, from_servers: bool) -> bool:
    """Return whether a dead worker's state is rebuilt: from the servers if `from_servers`, else from its peers."""
    return strategy.recovery == Rebuild(from_servers)


# ---- loops

SYNC_GRADIENTS = "sync_gradients"
SERVER_STEPS = "server_steps"
LOCAL_UPDATES = "local_updates"
SHARED_VECTOR = "shared_vector"
SHARDED_STATE = "sharded_state"
SHARDED_PARAMETERS = "sharded_parameters"
FEDERATED_ROUNDS = "federated_rounds"


def loop_of(topology: Topology) -> str:
    """Return the name of the loop that runs a topology by default."""
    if isinstance(topology, Peers):
        sharded = SHARDED_PARAMETERS if topology.shard == "parameters" else SHARDED_STATE
        return SYNC_GRADIENTS if topology.shard is None else sharded
    return SERVER_STEPS if isinstance(topology, Servers) else SHARED_VECTOR
