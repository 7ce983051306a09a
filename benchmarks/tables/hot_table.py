"""Measure how the balancing policy spreads a hot table: servers' load and workers' rate before and after migrations.

Ids follow Zipf's law and batches are small, so a few ids cause most of the load, and a few segments carry it. If each
server has its own machine, the busiest server limits all workers. If all servers share the cores of one machine, the
migration of a segment does not change the total work, and hardly changes the rate.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rayps_client.errors import ConfigError

from benchmarks.tables.calls import WAIT_SECONDS, make_space
from rayps.bench.table import BenchRow
from rayps.cluster.local import Cluster
from rayps.ps import group as elastic
from rayps.ps.group import ManagerClient
from rayps.ps.manager.assign_segments import Balance, measure_skew

WARM_SECONDS = 3.0
HEARTBEATS_SECONDS = 0.5
SETTLE_SECONDS = 40.0  # seconds that the policy has to finish its migrations
FIRST_SECONDS = 10.0  # further seconds to wait for the first migration, which the policy delays
CALM_SECONDS = 6.0  # seconds without a migration, after which the policy has finished


@dataclass(frozen=True, slots=True)
class HotRow(BenchRow):
    """The figures before and after the migrations. A turn is a pull and a push.

    A server's load is its seconds of service per thousand turns. The lists of loads begin with the largest. A skew is
    the largest server's figure divided by the mean of all servers.
    """

    columns: ClassVar[str] = (
        "servers | moves | turns_before: turns/s before | turns_after: after | skew_before: skew before | "
        "skew_after: after | ids_skew_before: of ids before | ids_skew_after: after | "
        "busiest_before: busiest s/1000 before | busiest_after: after | "
        "bound_gain: gain where servers have cores"
    )

    zipf: float
    ids: int  # number of draws for a batch
    rows: int
    workers: int
    servers: int
    segments: int
    moves: int
    turns_before: float  # turns per second, of all workers together
    turns_after: float
    skew_before: float  # skew of the load
    skew_after: float
    ids_skew_before: float  # skew of the number of ids pulled and pushed
    ids_skew_after: float
    busiest_before: float  # the largest load: the least time of a thousand turns if each server has its own cores
    busiest_after: float
    bound_gain: float  # how much faster such servers would be with the same total work: skew before / skew after
    loads_before: list[float]
    loads_after: list[float]


@dataclass(frozen=True, slots=True)
class _Load:
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
    """Measure the load for `seconds`, let the policy `balance` migrate segments, and measure the load again.

    By default, segments migrate from a server with more than 1.2 times the mean load until it has 1.05 times the mean.

    Raises:
        ConfigError: the exponent is 1 or less, or there are fewer than two servers.
    """
    if zipf <= 1.0 or servers < 2:
        raise ConfigError(
            f"zipf is {zipf:g} on {servers} servers: give an exponent above 1, and at least 2 servers", field="zipf"
        )
    # the policy checks once a second: with this patience it acts only after the first measurement
    patience = int(WARM_SECONDS + seconds) + 4
    policy = balance or Balance(hot=1.2, cool=1.05, patience=patience, floor=10.0)
    running = elastic.start(cluster, f"bench-{secrets.token_hex(4)}", servers, 0, detached=False, balance=policy)
    actors = [cluster.spawn("benchmarks.tables.calls:TableBench", rank) for rank in range(workers)]
    try:
        space = running.open(make_space(workers, 16, segments, "sgd"))
        for reply in [actor.call("join", running, space) for actor in actors]:
            reply.result(WAIT_SECONDS)

        def work(period: float) -> int:
            replies = [actor.call("zipf_turns", rows, ids, zipf, period) for actor in actors]
            return sum(reply.result(WAIT_SECONDS) for reply in replies)

        work(WARM_SECONDS)
        before = _measure_load(running, work, seconds)
        moves = _await_moves(running, work)
        after = _measure_load(running, work, seconds)
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
        measure_skew(before.loads),
        measure_skew(after.loads),
        measure_skew(before.ids),
        measure_skew(after.ids),
        *most,
        measure_skew(before.loads) / measure_skew(after.loads),
        sorted(before.loads, reverse=True),
        sorted(after.loads, reverse=True),
    )


def _measure_load(running: ManagerClient, work: Callable[[float], int], seconds: float) -> _Load:
    old, began = _read_served(running), time.monotonic()
    turns = work(seconds)
    took = time.monotonic() - began
    time.sleep(HEARTBEATS_SECONDS)  # so that the heartbeats have the last turns
    now = _read_served(running)
    loads = [1000 * (now[name][0] - old[name][0]) / max(turns, 1) for name in now]
    ids = [float(sum(count - old[name][1].get(index, count) for index, count in now[name][1].items())) for name in now]
    return _Load(turns / took, loads, ids)


def _read_served(running: ManagerClient) -> dict[str, tuple[float, dict[str, int]]]:
    """Return for each server its total seconds of service, and for each of its segments the ids pulled and pushed."""
    found = {}
    for name, spaces in running.loads().items():
        ids = {index: int(values[2]) for space in spaces.values() for index, values in space["segments"].items()}
        found[name] = sum(float(space["seconds"]) for space in spaces.values()), ids
    return found


def _await_moves(running: ManagerClient, work: Callable[[float], int]) -> int:
    """Let the workers continue until the policy has finished; return the number of segments that migrated."""
    moves, calm, end = 0, time.monotonic(), time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end and time.monotonic() - calm < CALM_SECONDS + (0.0 if moves else FIRST_SECONDS):
        work(1.0)
        now = running.facts()["counts"]["moves"]
        if now != moves:
            moves, calm = now, time.monotonic()
    running.wait_settled(WAIT_SECONDS)
    return moves
