"""Measure a hot table: the load of the servers and the workers' rate before and after the policy moves segments.

Ids follow Zipf's law and batches are small: a few ids make a few segments hot. If each server has its own machine, the
busiest one limits all workers. If all share a few cores, as here, a move changes neither the total work nor, nearly,
the rate.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from rayps.bench.calls import WAIT_SECONDS, a_space
from rayps.cluster.local import ActorHandle, Cluster
from rayps.core.errors import ConfigError
from rayps.ps import group as elastic
from rayps.ps.group import ManagerClient
from rayps.ps.manager.assign_segments import Balance, skew
from rayps.ps.manager.launcher import actor_name

WARM_SECONDS = 3.0
SETTLE_SECONDS = 40.0  # seconds for the policy to finish its moves
FIRST_SECONDS = 10.0  # more seconds for the first move, which the policy delays
CALM_SECONDS = 6.0  # seconds without a move: the policy has finished


@dataclass(frozen=True, slots=True)
class HotRow:
    """Before and after. Loads: seconds of service per thousand turns (a pull and a push) by server, largest first.

    Skews are the largest load divided by the mean.
    """

    zipf: float
    ids: int  # drawn for a batch
    rows: int
    workers: int
    servers: int
    segments: int
    moves: int
    turns_before: float  # a second, of all workers together
    turns_after: float
    skew_before: float  # of seconds of service
    skew_after: float
    ids_skew_before: float  # of ids pulled and pushed
    ids_skew_after: float
    busiest_before: float  # the largest load: the least time of a thousand turns if each server has its own cores
    busiest_after: float
    bound_gain: float  # the gain of such servers for the same total work: skew before / skew after
    loads_before: list[float]
    loads_after: list[float]


@dataclass(frozen=True, slots=True)
class _Look:
    turns: float
    loads: list[float]
    ids: list[float]


def bench_hot(
    cluster: Cluster,
    *,
    zipf: float = 1.2,
    ids: int = 8,
    rows: int = 100_000,
    workers: int = 4,
    servers: int = 4,
    segments: int = 32,
    seconds: float = 8.0,
    balance: Balance | None = None,
) -> HotRow:
    """Measure `seconds` of load before and after the moves. `balance`: by default from 1.2 down to 1.05 times the mean.

    Raises:
        ConfigError: an exponent of 1 or less, or fewer than two servers.
    """
    if zipf <= 1.0 or servers < 2:
        raise ConfigError(
            f"zipf is {zipf:g} on {servers} servers: give an exponent above 1, and at least 2 servers", field="zipf"
        )
    # observations, one per second: the policy acts only after the first measurement
    patience = int(WARM_SECONDS + seconds) + 4
    policy = balance or Balance(hot=1.2, cool=1.05, patience=patience, floor=10.0)
    running = elastic.start(cluster, f"bench-{secrets.token_hex(4)}", servers, 0, detached=False, balance=policy)
    actors = [cluster.spawn("rayps.bench.calls:TableBench", rank) for rank in range(workers)]
    try:
        space = running.open(a_space(workers, 16, segments, "sgd"))
        for reply in [actor.call("join", running, space) for actor in actors]:
            reply.result(WAIT_SECONDS)

        def work(period: float) -> int:
            replies = [actor.call("drawn", rows, ids, zipf, period) for actor in actors]
            return sum(reply.result(WAIT_SECONDS) for reply in replies)

        work(WARM_SECONDS)
        before = _look(cluster, running, work, seconds)
        moves = _moved(running, work)
        after = _look(cluster, running, work, seconds)
        for reply in [actor.call("close") for actor in actors]:
            reply.result(WAIT_SECONDS)
    finally:
        for actor in actors:
            cluster.kill(actor)
        running.stop()
    most = max(before.loads), max(after.loads)
    return HotRow(
        zipf,
        ids,
        rows,
        workers,
        servers,
        segments,
        moves,
        before.turns,
        after.turns,
        skew(before.loads),
        skew(after.loads),
        skew(before.ids),
        skew(after.ids),
        *most,
        skew(before.loads) / skew(after.loads),
        sorted(before.loads, reverse=True),
        sorted(after.loads, reverse=True),
    )


def _look(cluster: Cluster, running: ManagerClient, work: Callable[[float], int], seconds: float) -> _Look:
    hosts = {
        server["name"]: cluster.find(actor_name(running.name, server["name"])) for server in running.facts()["servers"]
    }
    old, began = _served(hosts), time.monotonic()
    turns = work(seconds)
    took, now = time.monotonic() - began, _served(hosts)
    loads = [1000 * (now[name][0] - old[name][0]) / max(turns, 1) for name in hosts]
    ids = [
        float(sum(count - old[name][1].get(index, count) for index, count in now[name][1].items())) for name in hosts
    ]
    return _Look(turns / took, loads, ids)


def _served(hosts: dict[str, ActorHandle | None]) -> dict[str, tuple[float, dict[str, int]]]:
    """Return by server its total seconds of service, and by segment the ids that were pulled and pushed."""
    found = {}
    for name, host in hosts.items():
        spaces = {} if host is None else host.call("facts").result(WAIT_SECONDS)["spaces"]
        ids = {index: int(values[2]) for space in spaces.values() for index, values in space["segments"].items()}
        found[name] = sum(float(space["seconds"]) for space in spaces.values()), ids
    return found


def _moved(running: ManagerClient, work: Callable[[float], int]) -> int:
    """Wait until the policy has finished its moves; return the number of moved segments."""
    moves, calm, end = 0, time.monotonic(), time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end and time.monotonic() - calm < CALM_SECONDS + (0.0 if moves else FIRST_SECONDS):
        work(1.0)
        now = running.facts()["counts"]["moves"]
        if now != moves:
            moves, calm = now, time.monotonic()
    running.wait_settled(WAIT_SECONDS)
    return moves
