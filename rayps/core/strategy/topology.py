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

from rayps.core.grid import Grid
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
        _check_peers_with_backup(self)
        _check_private_peers(self)

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
        return _grid(self.replica, workers)

    def check(self, name: str, job: JobFacts) -> None:
        """Raise ConfigError if the job cannot be combined with this topology. `name` is the strategy's name."""
        if job.tables and self.tables is None:
            raise _no_tables(name, job)
        _refuse_replica(self.replica, job)
        _refuse_branch(name, job)
        _refuse_private(self.private, job)
        _refuse_clipping(name, job)

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
        _check_servers_with_backup(self)
        _check_private_servers(self)

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
        return _grid(self.replica, workers)

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
        if job.tables and not self.tables:
            raise _no_tables(name, job)
        _refuse_private(self.private, job)
        _refuse_replica(self.replica, job)
        _refuse_group_with_backup(self.backup, job)
        if self.gpus and (job.tables or job.group is not None):
            why = f"on server group {job.group!r}" if job.group is not None else "on a server group, with its tables"
            raise ConfigError(
                f"shard_resources gives each shard {self.gpus:g} GPU, and the parameters are {why}: only a job's own "
                "fixed servers can be on GPUs; leave out shard_resources" + (", or server_group" if job.group else ""),
                field="shard_resources",
            )

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
        if job.tables:
            raise _no_tables(name, job)
        _refuse_branch(name, job)

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the traffic of a step, which is zero."""
        return [TrafficCost("gradients on one shared vector", "0: all workers write into the same memory", 0, 0, 0)]


Topology = Peers | Servers | SharedVector


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


def _grid(replica: Replica | None, workers: int) -> Grid:
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
    if shard is None:
        if peers.slice_backup:
            raise ConfigError(
                "slice_backup is True without shard: every worker holds the whole state; give also shard='optimizer' "
                "or shard='gradients', or leave out slice_backup",
                field="slice_backup",
            )
        return
    if peers.replica is not None:
        raise ConfigError(
            f"shard is {shard!r} and replica is {peers.replica.name}: the workers of a replica hold parts of the model "
            "already; leave out one of them",
            field="shard",
        )
    if peers.tables is not None:
        raise ConfigError(
            f"shard is {shard!r} with sparse tables, whose rows are on servers already: leave out shard", field="shard"
        )
    if peers.compression is not None and shard != "optimizer":
        raise ConfigError(
            f"shard is {shard!r} and compression is {peers.compression!r}, which needs the whole gradient on each "
            "worker: use shard='optimizer', or leave out compression",
            field="shard",
        )
    if peers.slice_backup and shard == "parameters":
        raise ConfigError(
            "slice_backup is True and shard is 'parameters', for which no worker holds copies: leave out slice_backup "
            "(a failure then restarts all workers from the newest checkpoint), or use shard='gradients'",
            field="slice_backup",
        )


def _check_backup(backup: int, workers: int) -> None:
    """Raise ConfigError unless more than half of the workers count in each step."""
    if backup and 2 * backup >= workers:
        raise ConfigError(
            f"backup is {backup} and there are {workers} workers: give fewer than half of the workers as backup "
            f"workers, or at least {2 * backup + 1} workers",
            field="backup",
        )


def _check_peers_with_backup(peers: Peers) -> None:
    """Raise ConfigError if backup workers cannot be combined with another option of `peers`."""
    others = (
        ("replica", peers.replica and peers.replica.name, "the workers of a replica wait for each other"),
        ("compression", peers.compression, "a late worker has no error to feed back"),
        ("shard", peers.shard, "each worker is needed for its slice of the state"),
        ("bucket_mb", peers.bucket_mb or None, "nothing is sent before the members of a step are known"),
    )
    _refuse_with_backup(peers.backup, others)
    if peers.backup and peers.tables is not None:
        raise _backup_with("sparse tables", "a late worker's rows are on servers", "use all_reduce without tables")


def _check_servers_with_backup(servers: Servers) -> None:
    """Raise ConfigError if backup workers cannot be combined with another option of `servers`."""
    if servers.backup and not servers.in_step:
        staleness = "none" if servers.staleness is None else servers.staleness
        raise _backup_with(
            f"staleness {staleness}", "no worker waits for all others", "give staleness=0, or leave out backup"
        )
    others = (
        ("replica", servers.replica and servers.replica.name, "the workers of a replica wait for each other"),
        ("replicas", servers.replicas, "the members of a round are known to fixed servers only"),
    )
    _refuse_with_backup(servers.backup, others)


def _refuse_with_backup(backup: int, others: Iterable[tuple[str, object, str]]) -> None:
    for name, given, why in others if backup else ():
        if given is not None:
            raise _backup_with(f"{name} {given}", why, f"leave out {name}, or backup")


def _refuse_group_with_backup(backup: int, job: JobFacts) -> None:
    """Refuse backup workers with servers that outlive a failure, or with tables, which need such servers."""
    if backup and job.tables:
        raise _backup_with("sparse tables", "a late worker's rows are on servers", "leave out backup")
    if backup and (job.group is not None or job.branch is not None):
        where = f"server group {job.group!r}" if job.group is not None else f"branch {job.branch!r}"
        raise _backup_with(
            where, "the members of a round are known to fixed servers only", "leave out the group, or backup"
        )


def _backup_with(what: str, why: str, way_out: str) -> ConfigError:
    return ConfigError(f"backup workers cannot be combined with {what}: {why}; {way_out}", field="backup")


def _check_private_peers(peers: Peers) -> None:
    """Raise ConfigError if privacy cannot be combined with another option of `peers`."""
    others = (
        ("replica", peers.replica and peers.replica.name, "no worker has a row's whole gradient, and its norm"),
        ("compression", peers.compression, "what compression leaves out of a sum would be added to later sums"),
        ("shard", peers.shard, "a row's norm needs its gradient by all parameters"),
        ("bucket_mb", peers.bucket_mb, "nothing may be sent before the noise is added"),
        ("backup", peers.backup or None, "a late worker's rows would be missing from the sum"),
    )
    _refuse_with_privacy(peers.private, others)


def _check_private_servers(servers: Servers) -> None:
    """Raise ConfigError if privacy cannot be combined with another option of `servers`."""
    staleness = "none" if servers.staleness is None else "auto" if servers.adaptive else servers.staleness
    others = (
        ("staleness", None if servers.in_step else staleness, "each push would need noise of its own"),
        ("replica", servers.replica and servers.replica.name, "no worker has a row's whole gradient, and its norm"),
        ("compression", servers.compression, "what compression leaves out of a sum would be added to later sums"),
        ("replicas", servers.replicas, "the accounting is only for servers that return to a snapshot together"),
        ("backup", servers.backup or None, "a late worker's rows would be missing from the sum"),
    )
    _refuse_with_privacy(servers.private, others)


def _refuse_with_privacy(private: bool, others: Iterable[tuple[str, object, str]]) -> None:
    for name, given, why in others if private else ():
        if given is not None:
            raise ConfigError(
                f"privacy cannot be combined with {name} {given}: {why}; leave out {name}, or privacy", field="privacy"
            )


def _refuse_private(private: bool, job: JobFacts) -> None:
    """Refuse a private job whose sums would leave without noise, or whose gradient would be clipped twice."""
    if not private:
        return
    others = (
        ("sparse tables", job.tables, "which rows of a table a batch looks up is visible", "use dense embeddings"),
        ("clip_norm", job.clip_norm, "privacy clips the gradient of each row", "set clip_norm to None"),
        (
            "server_group",
            job.group,
            "its servers serve other jobs, and would get sums without noise",
            "leave server_group out",
        ),
    )
    for name, given, why, way_out in others:
        if given:
            raise ConfigError(
                f"privacy cannot be combined with {name}: {why}; {way_out}, or leave out privacy", field="privacy"
            )


def _no_tables(name: str, job: JobFacts) -> ConfigError:
    known = ", ".join(map(repr, job.tables))
    return ConfigError(
        f"the model has sparse tables ({known}), and {name} has no servers for them: use the strategy hybrid, or "
        "parameter_server",
        field="strategy",
    )


def _refuse_replica(replica: Replica | None, job: JobFacts) -> None:
    """Refuse a model that is divided among workers and has sparse tables: each part would need the tables' rows."""
    if replica is not None and job.tables:
        known = ", ".join(map(repr, job.tables))
        raise ConfigError(
            f"replica is a {replica.name} of several workers, and the model has sparse tables ({known}): the workers "
            "of a replica cannot share the rows of a table; leave out replica, or use a dense embedding",
            field="replica",
        )


def _refuse_branch(name: str, job: JobFacts) -> None:
    if job.branch is not None:
        raise ConfigError(
            f"branch is {job.branch!r}, and {name} has no parameters on servers: start with parameter_server, or "
            "leave out branch",
            field="branch",
        )


def _refuse_clipping(name: str, job: JobFacts) -> None:
    """Refuse `clip_norm` for tables: workers cannot compute the norm, as only servers know the rows' mean gradient."""
    if job.clip_norm is not None and job.tables:
        raise ConfigError(
            f"clip_norm is {job.clip_norm!r} and {name} trains sparse tables: no worker has the mean gradient of "
            "their rows, so the norm of the whole gradient is not known; use parameter_server, which clips each "
            "worker's push (dense part and rows together), or set clip_norm to None",
            field="clip_norm",
        )


def is_adaptive(strategy: ServerHalf) -> bool:
    """Return whether the staleness bound of a strategy moves while the job trains."""
    servers = servers_of(strategy)
    return servers is not None and servers.adaptive


def refuse_adaptive(servers: Servers, where: str) -> None:
    """Raise ConfigError if the bound must move while training. `where` is what cannot move it."""
    if servers.adaptive:
        raise ConfigError(
            f"staleness is 'auto', and {where} cannot move the bound: give 0 (synchronous), a whole number of rounds, "
            "or none (asynchronous); rayps.train with parameter_server takes 'auto'",
            field="staleness",
        )
