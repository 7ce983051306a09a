"""The topology that a strategy declares: which processes communicate, and what they exchange. Plain data, no torch.

    Peers          workers exchange vectors with each other, in step, around a ring
    Servers        workers push to and pull from servers that hold the parameters in slices
    SharedVector   workers of one host step one vector in shared memory

A topology defines whether workers run in step, how they are laid out on a grid, what a step costs by formula, and which
options and models it cannot be combined with (`check`). All other code asks the topology, never the strategy's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from rayps_client.errors import ConfigError
from rayps_client.values import Json

from rayps.core.grid import Grid
from rayps.core.refusals.table import refuse
from rayps.core.rows.dropped_steps import LateWorkers
from rayps.core.strategy import traffic
from rayps.core.strategy.adaptive_staleness import FIRST
from rayps.core.strategy.replica import Replica
from rayps.core.strategy.traffic import Sizes, TrafficCost

if TYPE_CHECKING:
    from rayps.core.strategy.strategy import ServerHalf

REPLAY_MB = 256.0
AUTO_BUCKET_MB = 4.0  # 10^6 bytes of a bucket of gradients, if buckets are sent early and no size is given
REPLAY = "the size of the pushes that a worker may retain, in 10^6 bytes, at least 0"  # for errors about `replay_mb`


# ---- consistency: when a pull may be served


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk-synchronous: a pull waits until the servers have all workers' pushes of the round before."""

    @property
    def staleness(self) -> int | None:
        """0: no worker may be ahead of the slowest worker when it pulls."""
        return 0


@dataclass(frozen=True, slots=True)
class SSP:
    """Bounded staleness: a pull waits while the worker is more than `staleness` rounds ahead of the slowest worker."""

    staleness: int


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous: a pull never waits."""

    @property
    def staleness(self) -> int | None:
        """None: a worker may be any number of rounds ahead of the slowest worker."""
        return None


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Bounded staleness whose bound moves while the job trains: see `rayps.core.strategy.adaptive_staleness`."""

    @property
    def staleness(self) -> int | None:
        """The bound with which a job begins."""
        return FIRST


Consistency = BSP | SSP | ASP | Adaptive
AUTO = "auto"  # the `staleness` of an adaptive bound


def consistency_of(staleness: int | str | None) -> Consistency:
    """Return BSP for a `staleness` of 0, SSP for another number of rounds, ASP for None, and Adaptive for "auto"."""
    if isinstance(staleness, str):
        return Adaptive()
    return ASP() if staleness is None else SSP(staleness) if staleness else BSP()


# ---- updates: how servers apply pushes


@dataclass(frozen=True, slots=True)
class PerPush:
    """Servers call `on_push` for each push as it arrives, and never `on_round`."""

    borrows: bool = False  # `on_push` reads a value only during the call; the value may be in the sender's memory
    spans: bool = False  # a push contains all of a worker's rounds since its last push, not only one

    @property
    def gathers(self) -> bool:
        """Whether servers hold a round's pushes until all have arrived."""
        return False

    @property
    def means(self) -> bool:
        """Whether `on_round` only calls `step_mean(values, weights)`, or does nothing if all weights are 0."""
        return False

    @property
    def listens(self) -> bool:
        """Whether `on_push` changes the shard's state."""
        return True


@dataclass(frozen=True, slots=True)
class PerRound:
    """Servers call `on_round` once they have all workers' pushes of the round."""

    means: bool = False  # `on_round` only calls `step_mean(values, weights)`, or does nothing if all weights are 0
    borrows: bool = False  # `on_round` reads values only during the call
    listens: bool = False  # `on_push` is also called, as each push arrives, and changes the shard's state

    @property
    def gathers(self) -> bool:
        """True: servers hold a round's pushes until all have arrived."""
        return True

    @property
    def spans(self) -> bool:
        """False: a push contains one round."""
        return False


Update = PerPush | PerRound


# ---- topologies

SHARDS = ("optimizer", "gradients", "parameters")


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The facts of a job against which its strategy's topology is checked."""

    branch: str | None = None  # the space, on a server group, from which the job copies its first parameters
    tables: tuple[str, ...] = ()  # names of the model's sparse tables
    clip_norm: float | None = None  # the workload's `clip_norm`
    group: str | None = None  # the server group that the job names

    def features(self) -> dict[str, Json]:
        """Return those that are given, as `rayps.core.refusals` names them."""
        tables = ", ".join(map(repr, self.tables)) or None
        found = {
            "branch": self.branch,
            "sparse tables": tables,
            "clip_norm": self.clip_norm,
            "server_group": self.group,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Peers:
    """Workers exchange vectors with each other, in step. With `tables`, servers hold the model's sparse tables."""

    replica: Replica | None = None  # the workers of one copy of the model; None means one worker
    compression: str | None = None  # compression of vectors (see `compression_of`); None means uncompressed
    bucket_mb: float | None = None  # 10^6 bytes of a bucket of gradients; 0 means one bucket, None an automatic choice
    tables: Servers | None = None  # the servers of sparse tables; None if the model must have no tables
    prefetch: bool = True  # pull the next batch's rows of tables while the current batch is computed
    shard: str | None = None  # which state each worker holds only a slice of; None: each worker holds all of it
    slice_backup: bool = False  # whether another worker holds a copy of each worker's slice
    backup: int = 0  # backup workers: in each step so many of the workers need not be waited for
    late: LateWorkers = field(default_factory=LateWorkers)  # with backup workers: workers that are late in a row
    private: bool = False  # whether each row's gradient is clipped, and noise is added to the sum (DP-SGD)

    def __post_init__(self) -> None:
        _check_shard(self)
        refuse(features_of(self))

    @property
    def in_step(self) -> bool:
        """Whether all workers are at the same round."""
        return True

    @property
    def group_size(self) -> int:
        """The number of servers of the group that a job starts if it names no group; 0 = the job needs no group."""
        return 0 if self.tables is None else self.tables.count

    def grid(self, workers: int) -> Grid:
        """Return the layout of `workers`.

        Raises ConfigError if they are not a whole number of replicas, or too few beside the backup workers.
        """
        _check_backup(self.backup, workers)
        return _make_grid(self.replica, workers)

    def check(self, name: str, job: JobFacts) -> None:
        """Raise ConfigError if the job cannot be combined with this topology. `name` is the strategy's name."""
        both: dict[str, Json] = {"tables beside a ring": True} if job.tables else {}
        refuse(features_of(self) | job.features() | both | {"strategy": name})

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the traffic of a step between replicas, by formula."""
        whole = self.replica is None and self.compression is None and self.bucket_mb != 0 and not self.private
        if self.shard is not None:
            return traffic.sharded_step(grid, sizes, self.shard, self.compression, overlaps=whole)
        found = traffic.ring_mean(grid, sizes, self.compression, overlaps=whole)
        return [*found, traffic.table_rows()] if self.tables is not None and grid.data > 1 else found


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers hold the parameters in `count` slices; workers push to and pull from them."""

    count: int = 1
    replicas: int | None = None  # backups of each slice, in a private server group; None means fixed servers
    consistency: Consistency = field(default_factory=BSP)
    update: Update = field(default_factory=PerRound)
    replica: Replica | None = None  # the workers of one copy of the model; None means one worker
    compression: str | None = None  # compression of pushes (see `compression_of`); None means uncompressed
    replay_mb: float | None = None  # 10^6 bytes of pushes that a worker retains until durable; None means REPLAY_MB
    adagrad: float | None = None  # learning rate of an Adagrad on the servers; None means the workload's optimizer
    own_copies: bool = False  # each worker also steps its own copy of the parameters between two pulls
    tables: bool = False  # the servers also hold sparse tables, and apply their pushes by the same rules
    prefetch: bool = True  # pull the next batch's rows of tables while the current batch is computed
    push_every: int = 1  # steps between two pushes of a worker
    pull_every: int = 1  # steps between two pulls
    gpus: float = 0.0  # the part of a GPU on which each server steps its slice; 0 means on the CPU
    backup: int = 0  # backup workers: in each round so many of the workers need not be waited for
    late: LateWorkers = field(default_factory=LateWorkers)  # with backup workers: workers that are late in a row
    private: bool = False  # whether each row's gradient is clipped, and noise is added to the sum (DP-SGD)
    consistent: bool = False  # out of step: a pull from several servers has the values of one moment

    def __post_init__(self) -> None:
        refuse(features_of(self))

    @property
    def staleness(self) -> int | None:
        """Rounds that a worker may be ahead of the slowest worker when it pulls; None means no bound."""
        return self.consistency.staleness

    @property
    def adaptive(self) -> bool:
        """Whether the bound moves while the job trains."""
        return isinstance(self.consistency, Adaptive)

    @property
    def in_step(self) -> bool:
        """Whether all workers are at the same round."""
        return self.staleness == 0

    @property
    def pulls_one_moment(self) -> bool:
        """Whether a pull from several servers has the values of one moment: in step always, else if `consistent`.

        A staleness bound does not need it. The bound of Ho et al. (NIPS 2013, section 3) is of each read: a value that
        is read at round r contains all updates of rounds up to r - s - 1, on each server by itself.
        """
        return self.in_step or self.consistent

    @property
    def group_size(self) -> int:
        """The number of servers of the group that a job starts if it names no group; 0 = the job needs no group."""
        return 0 if self.replicas is None else self.count

    @property
    def group_replay_bytes(self) -> int:
        """Bytes of pushes that a worker retains for a server group, which replaces servers without a restart."""
        return int(1e6 * (REPLAY_MB if self.replay_mb is None else self.replay_mb))

    @property
    def replay_bytes(self) -> int:
        """Bytes of pushes that a worker retains for fixed servers.

        0 if workers run in step, because a failure then restarts all workers from one snapshot.
        """
        return 0 if self.in_step else self.group_replay_bytes

    def grid(self, workers: int) -> Grid:
        """Return the layout of `workers`.

        Raises ConfigError if they are not a whole number of replicas, or too few beside the backup workers.
        """
        _check_backup(self.backup, workers)
        return _make_grid(self.replica, workers)

    def shards(self, columns: int) -> int:
        """Return the number of servers for a model in `columns` parts: at least one for each part."""
        return max(self.count, columns)

    def scale_warning(self, workers: int) -> str | None:
        """Return a warning if the optimizer's step size ignores the gradient's scale, or None if no warning applies."""
        if self.in_step or workers == 1:
            return None
        return (
            "each push is scaled by 1/N, but this optimizer's step size does not depend on "
            "the gradient's scale: N workers move N times as far; lower its learning rate (a decoupled weight decay, "
            "as in AdamW, is N times as strong too, so its proportion to the steps stays the same)"
        )

    def check(self, name: str, job: JobFacts) -> None:
        """Raise ConfigError if the job cannot be combined with this topology. `name` is the strategy's name."""
        refuse(features_of(self) | job.features() | {"strategy": name})

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the traffic of a step with the servers, by formula."""
        return traffic.push_pull(
            grid,
            sizes,
            self.shards(len(sizes.columns)),
            self.compression,
            push_every=self.push_every,
            pull_every=self.pull_every,
            overlaps=not self.in_step,
        )


@dataclass(frozen=True, slots=True)
class SharedVector:
    """The workers of one host apply their steps to one vector in shared memory, without waiting for each other.

    No message is sent. When a worker dies, all workers restart from the last snapshot, because it is unknown which of
    the dead worker's steps were written.
    """

    @property
    def in_step(self) -> bool:
        """True: workers run different rounds, but start and end together, as workers in step do."""
        return True

    @property
    def replica(self) -> Replica | None:
        """None: one worker holds a copy of the model."""
        return None

    @property
    def compression(self) -> str | None:
        """None: nothing is sent, so nothing is compressed."""
        return None

    @property
    def backup(self) -> int:
        """0: no worker waits for another, so that none need be spared."""
        return 0

    @property
    def late(self) -> LateWorkers:
        """The default: no worker is late."""
        return LateWorkers()

    @property
    def group_size(self) -> int:
        """0: the job needs no servers."""
        return 0

    def grid(self, workers: int) -> Grid:
        """Return the layout of `workers`: each worker is a replica."""
        return Grid(workers)

    def check(self, name: str, job: JobFacts) -> None:
        """Raise ConfigError if the job cannot be combined with this topology. `name` is the strategy's name."""
        refuse(features_of(self) | job.features() | {"strategy": name})

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the traffic of a step, which is zero."""
        return [TrafficCost("gradients on one shared vector", "0: all workers write into the same memory", 0, 0, 0)]


Topology = Peers | Servers | SharedVector


def features_of(topology: Topology) -> dict[str, Json]:
    """Return the features of a job that its topology declares, as `rayps.core.refusals` names them."""
    if isinstance(topology, SharedVector):
        return {"one shared vector": True, "no servers for tables": True, "no servers": True}
    found: dict[str, Json] = {}
    if topology.replica is not None:
        found["replica"] = topology.replica.name
    if topology.compression is not None:
        found["compression"] = topology.compression
    if topology.backup:
        found["backup"] = topology.backup
    if topology.private:
        found["privacy"] = True
    return found | (_features_of_peers(topology) if isinstance(topology, Peers) else _features_of_servers(topology))


def _features_of_peers(peers: Peers) -> dict[str, Json]:
    tables = "no servers for tables" if peers.tables is None else "servers for tables"
    found: dict[str, Json] = {"no servers": True, tables: True}
    if peers.shard is None:
        found["no shard"] = True
    else:
        found["shard"] = peers.shard
        if peers.shard != "optimizer":
            found["slices of gradients"] = True
        if peers.shard == "parameters":
            found["slices of parameters"] = True
    if peers.slice_backup:
        found["slice_backup"] = True
    if peers.bucket_mb is not None:
        found["bucket_mb"] = peers.bucket_mb
    if peers.bucket_mb:
        found["buckets"] = peers.bucket_mb
    return found


def _features_of_servers(servers: Servers) -> dict[str, Json]:
    found: dict[str, Json] = {}
    if not servers.in_step:
        found["staleness"] = AUTO if servers.adaptive else "none" if servers.staleness is None else servers.staleness
    if servers.adaptive:
        found["staleness that moves"] = True
    if servers.replicas is not None:
        found["replicas"] = servers.replicas
    if servers.backup:
        found["backup at servers"] = servers.backup
    if servers.own_copies:
        found["copies of servers' parameters"] = True
    if servers.gpus:
        found["shard_resources"] = servers.gpus
    if not servers.tables:
        found["no servers for tables"] = True
    return found


def shard_of(strategy: ServerHalf) -> str | None:
    """Return which state each worker holds only a slice of under a strategy, or None if it holds all of it."""
    topology = strategy.topology
    return topology.shard if isinstance(topology, Peers) else None


def servers_of(strategy: ServerHalf) -> Servers | None:
    """Return the servers that hold the dense parameters under a strategy, or None if workers hold them."""
    topology = strategy.topology
    return topology if isinstance(topology, Servers) else None


def shard_bundles(strategies: Iterable[ServerHalf], workers: int) -> list[dict[str, float]]:
    """Return the resources to reserve for each of a job's own servers, for all its strategies.

    The list is empty if no server needs a GPU.
    """
    found: list[float] = []
    for servers in filter(None, map(servers_of, strategies)):
        wanted = [servers.gpus] * servers.shards(servers.grid(workers).columns) if servers.gpus else []
        found = [max(pair) for pair in zip_longest(found, wanted, fillvalue=0.0)]
    return [{"gpu": gpus} for gpus in found]


def replica_of(strategy: ServerHalf) -> Replica | None:
    """Return how a strategy divides one copy of the model among workers, or None if one worker holds a copy."""
    topology = strategy.topology
    return topology.replica


def replicas_in(strategy: ServerHalf, workers: int) -> int:
    """Return the number of copies of the model on `workers`. Raises ConfigError if the number is not whole."""
    topology = strategy.topology
    return topology.grid(workers).data


def compression_in(strategy: ServerHalf) -> str | None:
    """Return the compression of vectors under a strategy, or None if they are not compressed."""
    topology = strategy.topology
    return topology.compression


def backup_in(strategy: ServerHalf) -> int:
    """Return how many of the workers need not be waited for in a step under a strategy: its backup workers."""
    topology = strategy.topology
    return topology.backup


def is_private(strategy: ServerHalf) -> bool:
    """Return whether a strategy's workers clip the gradient of each row, and add noise to the sum (DP-SGD)."""
    topology = strategy.topology
    return isinstance(topology, (Peers, Servers)) and topology.private


def runs_in_step(strategy: ServerHalf) -> bool:
    """Return whether all workers are at the same round under a strategy."""
    topology = strategy.topology
    return topology.in_step


def group_of(topology: Topology) -> tuple[int, int]:
    """Return (servers, backups of each slice) of a group for this topology, or (0, 0) if it has no servers."""
    servers = topology.tables if isinstance(topology, Peers) else topology
    return (servers.count, servers.replicas or 0) if isinstance(servers, Servers) else (0, 0)


def _make_grid(replica: Replica | None, workers: int) -> Grid:
    return Grid(workers) if replica is None else Grid.of(workers, replica.stages, replica.tensor)


def _check_shard(peers: Peers) -> None:
    """Raise ConfigError if the options of sharded state cannot be combined."""
    shard = peers.shard
    if shard is not None and shard not in SHARDS:
        known = ", ".join(map(repr, SHARDS))
        raise ConfigError(
            f"shard is {shard!r}: give {known}, or none (each worker holds the whole state)", field="shard"
        )
    if not isinstance(peers.slice_backup, bool):
        raise ConfigError(f"slice_backup is {peers.slice_backup!r}: give True or False", field="slice_backup")


def _check_backup(backup: int, workers: int) -> None:
    """Raise ConfigError unless more than half of the workers count in each step."""
    if backup and 2 * backup >= workers:
        raise ConfigError(
            f"backup is {backup} and there are {workers} workers: give fewer than half of the workers as backup "
            f"workers, or at least {2 * backup + 1} workers",
            field="backup",
        )


def is_adaptive(strategy: ServerHalf) -> bool:
    """Return whether the staleness bound of a strategy moves while the job trains."""
    servers = servers_of(strategy)
    return servers is not None and servers.adaptive


def refuse_adaptive(servers: Servers, where: str) -> None:
    """Raise ConfigError if the bound must move while training. `where` is the feature that cannot move it."""
    if servers.adaptive:
        refuse({where: True, "staleness that moves": True})
