"""How servers apply pushes: the servers' half of the strategies parameter_server and downpour.

Pure; works on tensors without importing torch.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014. If workers run in step, the
servers apply one step by the mean of a round's N pushes, weighted by samples. Otherwise they apply each push as it
arrives, scaled by 1/N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject, Keywords

from rayps.core.rows.dropped_steps import LateWorkers
from rayps.core.strategy import options
from rayps.core.strategy.compression import compression_of
from rayps.core.strategy.replica import Replica, check_replica
from rayps.core.strategy.strategy import ShardView, Vector
from rayps.core.strategy.topology import ASP, AUTO, REPLAY, PerPush, PerRound, Servers, Update, consistency_of


def plain_servers(
    shards: int = 1,
    staleness: int | str | None = 0,
    compression: str | None = None,
    replicas: int | None = None,
    replay_mb: float | None = None,
    replica: Replica | None = None,
    *,
    shard_resources: Mapping[str, float] | None = None,
    backup: int | None = None,
    late: LateWorkers | None = None,
    private: bool = False,
    consistent: bool = False,
) -> Servers:
    """Return the topology of a plain parameter server with these options.

    The bound `staleness` also applies to pulls of the rows of sparse tables; "auto" is a bound that moves.
    `shard_resources` is {"gpu": a part of a GPU}, or None for servers on the CPU. `backup` is the number of backup
    workers; None and 0 mean that there are none. `late`: what follows if one is late in a row. `private`: whether
    workers clip the gradient of each row, and add noise to the sum. `consistent`: whether a pull out of step has the
    values of one moment from all servers.

    Raises:
        ConfigError: an option is invalid, or two options cannot be combined.
    """
    given = SimpleNamespace(shards=shards, replay_mb=replay_mb, backup=backup, consistent=consistent)
    options.whole(given, "shards")
    options.whole(given, "backup", least=0, none=True)
    options.flag(given, "consistent")
    whole = isinstance(staleness, int) and not isinstance(staleness, bool) and staleness >= 0
    if not whole and staleness not in (None, AUTO):
        raise ConfigError(
            f"staleness is {staleness!r}: give 0 (synchronous), a whole number of rounds, none (asynchronous), or auto "
            "(a bound that moves)",
            field="staleness",
        )
    options.number(given, "replay_mb", least=0, none=True, expected=REPLAY)
    copies = 0 if replicas is None else replicas
    if isinstance(copies, bool) or not isinstance(copies, int) or not 0 <= copies < shards:
        raise ConfigError(
            f"replicas is {copies!r} and there are {shards} shards: give a number of backups from 0 to {shards - 1}, "
            "or none (fixed servers)",
            field="replicas",
        )
    if compression is not None:
        compression_of(compression)
    check_replica(replica)
    gpus = _gpus_of(shard_resources)
    consistency, update = consistency_of(staleness), update_of(staleness)
    return Servers(
        shards,
        replicas,
        consistency,
        update,
        replica,
        compression,
        replay_mb,
        tables=True,
        gpus=gpus,
        backup=backup or 0,
        late=late or LateWorkers(),
        private=private,
        consistent=consistent,
    )


def _gpus_of(given: Mapping[str, float] | None) -> float:
    """Return the part of a GPU of each shard. Raises ConfigError if `given` is not valid."""
    if given is None:
        return 0.0
    amount = given.get("gpu") if isinstance(given, Mapping) and set(given) == {"gpu"} else None
    if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 < amount <= 1:
        raise ConfigError(
            f"shard_resources is {given!r}: give the part of a GPU of each shard, above 0 and at most 1, such as "
            '{"gpu": 0.25} (in text: shard_resources=(gpu=0.25)), or none',
            field="shard_resources",
        )
    return float(amount)


def summing_servers(
    shards: int = 1, adagrad: float | None = None, replay_mb: float | None = None, replica: Replica | None = None
) -> Servers:
    """Return the topology of servers that apply sums of gradients on arrival, for Downpour.

    Raises:
        ConfigError: an option is invalid.
    """
    given = SimpleNamespace(shards=shards, adagrad=adagrad, replay_mb=replay_mb)
    options.whole(given, "shards")
    options.number(given, "adagrad", above=0, none=True, expected="a rate above 0")
    options.number(given, "replay_mb", least=0, none=True, expected=REPLAY)
    check_replica(replica)
    update = PerPush(borrows=True, spans=True)
    return Servers(shards, None, ASP(), update, replica, replay_mb=replay_mb, adagrad=adagrad)


def update_of(staleness: int | str | None) -> Update:
    """Return how a plain parameter server applies pushes: with staleness 0 a round's mean, else each on arrival."""
    return PerRound(means=True, borrows=True) if staleness == 0 else PerPush(borrows=True)


def apply_push(shard: ShardView, value: Vector, weight: float) -> None:
    """Apply the push g_i of one of N workers: w <- w - step(g_i / N). A push without samples changes nothing."""
    if weight:
        shard.step(value, 1 / shard.size)


def apply_mean(shard: ShardView, values: Sequence[Vector], weights: Sequence[float]) -> None:
    """Apply a round's pushes g_i of n_i samples: w <- w - step(sum(n_i g_i) / sum(n_i)).

    A round without samples changes nothing.
    """
    if sum(weights):
        shard.step_mean(values, weights)


def apply_sum(shard: ShardView, value: Vector, weight: float) -> None:
    """Apply a push a, the sum of a worker's gradients since its last push: w <- w - step(a).

    Weights decay once per gradient. A push without samples changes nothing.
    """
    if weight:
        shard.step(value, decays=shard.rounds)


@dataclass(frozen=True, slots=True)
class PlainServers:
    """The servers' half of the strategy parameter_server, or of downpour, whose pushes each contain several steps.

    This class serves parameters and tables without a job (`rayps.ServerGroup`, tables in one process). It is also sent
    to a server group in place of a job's strategy. A group's record contains the result of `to_wire`.
    """

    topology: Servers

    @property
    def name(self) -> str:
        """The name of the strategy to which this server half belongs."""
        servers = self.topology
        return "downpour" if servers.update.spans else "parameter_server"

    @property
    def server_half(self) -> PlainServers:
        """The object itself: servers receive it in place of the strategy."""
        return self

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """Apply one push on arrival, if workers do not run in step."""
        servers = self.topology
        if servers.update.spans:
            apply_sum(shard, value, weight)
        elif not servers.in_step:
            apply_push(shard, value, weight)

    def on_round(self, shard: ShardView, values: list[Vector], weights: list[float]) -> None:
        """Apply the mean of a round's pushes; servers call this if workers run in step."""
        apply_mean(shard, values, weights)

    def to_wire(self) -> JsonObject:
        """Return the strategy's options as JSON-ready data, without options that are None and without `replica`.

        Servers do not need `replica`, because each column has its own space.
        """
        servers = self.topology
        found: JsonObject = {"name": self.name, "shards": servers.count, "replay_mb": servers.replay_mb}
        if servers.update.spans:
            found |= {"adagrad": servers.adagrad}
        else:
            found |= {"replicas": servers.replicas, "compression": servers.compression}
            found |= {"backup": servers.backup or None, "consistent": servers.consistent or None}
        found = {name: value for name, value in found.items() if value is not None}
        return found if servers.update.spans else found | {"staleness": AUTO if servers.adaptive else servers.staleness}

    @classmethod
    def from_wire(cls, found: Mapping[str, Json]) -> PlainServers:
        """Read what `to_wire` wrote.

        Raises ValueError if `found` names another strategy, TypeError if an option is unknown, and ConfigError if an
        option is invalid.
        """
        options: Keywords = dict(found)
        name = options.pop("name", None)
        if name not in ("parameter_server", "downpour"):
            raise ValueError(f"servers of strategy {name!r} cannot be read: expected parameter_server or downpour")
        if name == "parameter_server":
            return cls(plain_servers(**options))
        known = ("shards", "adagrad", "replay_mb")  # the other options concern workers
        return cls(summing_servers(**{option: options[option] for option in known if option in options}))


def weighted_mean(values: list[Vector], weights: list[float]) -> Vector:
    """Return sum(w_i v_i) / sum(w_i), added in the order given. Raises ValueError if all weights are 0.

    Half-precision values are added in float32 and rounded once. A value with weight 0 is not read: it may be NaN.
    """
    total = sum(weights)
    if total == 0:
        raise ValueError(f"there is no mean, because all {len(weights)} weights are 0: give one weight above 0")
    half = values[0].is_floating_point() and values[0].element_size() < 4
    shares = [(value.float() if half else value, w / total) for value, w in zip(values, weights, strict=True) if w]
    mean = shares[0][0] * shares[0][1]
    for value, share in shares[1:]:
        mean += value * share
    return mean.to(values[0].dtype)
