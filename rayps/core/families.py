"""What a strategy declares beside its topology: whose rows are whose, what a death costs, which loop runs it. Pure.

    rows       Reshuffled | Fixed | ByClient     how rows are dealt to workers
    recovery   RestartAll | ReplaceOne | Rebuild     what the death of one worker or server brings about
    loop       the name of the worker's loop: a key of `rayps.worker.families`, or "module:Class" of a user's own

`recovery_of` and `loop_of` say what follows from a topology where a strategy declares nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from rayps.core.topology import Peers, Servers, Topology

_Source = TypeVar("_Source", covariant=True)


class RowSource(Protocol):
    """What a rule of rows needs of the data."""

    keeps_rows: bool

    def steps(self, size: int) -> int:
        """Rounds of an epoch with so many replicas."""


class DataMethods(Protocol[_Source]):
    """A workload's two ways to give data."""

    def data(self) -> _Source:
        """What is learnt from."""

    def evaluation_data(self) -> _Source:
        """What is evaluated on."""


# ---- rows


@dataclass(frozen=True, slots=True)
class Reshuffled:
    """Rows are dealt to the workers anew in each epoch."""

    @property
    def by_client(self) -> bool:
        """Whether rows belong to clients, and an epoch is one round."""
        return False

    @property
    def remote(self) -> bool:
        """Whether the clients are processes outside of the cluster, with data of their own."""
        return False

    def rounds(self, data: RowSource, replicas: int) -> int:
        """Rounds of an epoch; tells the data how its rows are dealt. Raises DataError, ConfigError."""
        data.keeps_rows = False
        return data.steps(replicas)

    def source(self, workload: DataMethods[_Source]) -> _Source:
        """What workers read."""
        return workload.data()


@dataclass(frozen=True, slots=True)
class Fixed:
    """A worker has the same rows in every epoch."""

    @property
    def by_client(self) -> bool:
        """See Reshuffled."""
        return False

    @property
    def remote(self) -> bool:
        """See Reshuffled."""
        return False

    def rounds(self, data: RowSource, replicas: int) -> int:
        """See Reshuffled."""
        data.keeps_rows = True
        return data.steps(replicas)

    def source(self, workload: DataMethods[_Source]) -> _Source:
        """See Reshuffled."""
        return workload.data()


@dataclass(frozen=True, slots=True)
class ByClient:
    """Rows belong to clients. `remote`: the clients are processes outside of the cluster, which hold the rows."""

    remote: bool = False

    @property
    def by_client(self) -> bool:
        """See Reshuffled."""
        return True

    def rounds(self, data: RowSource, replicas: int) -> int:
        """See Reshuffled: one."""
        data.keeps_rows = False
        return 1

    def source(self, workload: DataMethods[_Source]) -> _Source:
        """See Reshuffled; with remote clients a worker only evaluates."""
        return workload.evaluation_data() if self.remote else workload.data()


Rows = Reshuffled | Fixed | ByClient


class HasRows(Protocol):
    """A strategy, as far as its rows go."""

    @property
    def rows(self) -> Rows:
        """How rows are dealt to workers."""


def learns_by_client(strategy: HasRows) -> bool:
    """Whether an epoch under a strategy is one round of clients."""
    rows = strategy.rows
    return rows.by_client


def has_remote_clients(strategy: HasRows) -> bool:
    """Whether a strategy's clients are processes outside of the cluster."""
    rows = strategy.rows
    return rows.remote


# ---- recovery


@dataclass(frozen=True, slots=True)
class RestartAll:
    """One death ends the generation: all workers go back to the newest snapshot."""


@dataclass(frozen=True, slots=True)
class ReplaceOne:
    """A dead worker or server is replaced while the others continue."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """A dead worker's state is rebuilt from its peers' copies, or from the servers; nobody goes back to a snapshot."""

    from_servers: bool = False


Recovery = RestartAll | ReplaceOne | Rebuild


def recovery_of(topology: Topology) -> Recovery:
    """What follows from a topology: out of step one is replaced, a divided replica is rebuilt, else all restart."""
    if isinstance(topology, Servers) and not topology.in_step:
        return ReplaceOne()
    return RestartAll() if topology.replica is None else Rebuild(from_servers=isinstance(topology, Servers))


def recovery_now(declared: Recovery, *, holds_tables: bool, rejoins: bool) -> Recovery:
    """What a death brings about in a run as it is now, under a strategy that declares `declared`.

    Parameters in one space with tables are too large for a snapshot, so one is replaced. `rejoins`: a replica can begin
    again from the servers; where it cannot, all restart.
    """
    if isinstance(declared, Rebuild):
        if not declared.from_servers:
            return declared
        return ReplaceOne() if rejoins else RestartAll()
    return ReplaceOne() if holds_tables else declared


class HasRecovery(Protocol):
    """A strategy, as far as deaths go."""

    @property
    def recovery(self) -> Recovery:
        """What the death of one worker or server brings about."""


def rebuilds(strategy: HasRecovery, *, from_servers: bool) -> bool:
    """Whether a dead worker's state is rebuilt from the servers; else whether from its peers."""
    return strategy.recovery == Rebuild(from_servers)


# ---- loops

SYNC_GRADIENTS = "sync_gradients"
SERVER_STEPS = "server_steps"
LOCAL_UPDATES = "local_updates"
SHARED_VECTOR = "shared_vector"
FEDERATED_ROUNDS = "federated_rounds"


def loop_of(topology: Topology) -> str:
    """The loop that follows from a topology."""
    if isinstance(topology, Peers):
        return SYNC_GRADIENTS
    return SERVER_STEPS if isinstance(topology, Servers) else SHARED_VECTOR
