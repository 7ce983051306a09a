"""Kill servers under load; check that every push is applied exactly once, and measure how long pushes wait.

Li et al. (OSDI 2014) report 0.8 s to recover, for a counting sketch.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from rayps_client.errors import ConfigError

from benchmarks.changes.group_load import (
    SEGMENTS,
    PushWorkers,
    find_longest_gap,
    find_wrong_slots,
    measure_rate,
    median,
)
from rayps.bench.table import BenchRow
from rayps.cluster.local import Cluster, until
from rayps.ps.server_group import ServerGroup

CALM_SECONDS = 2.0  # seconds in which the rate of pushes is measured, before the first kill and after the last
AROUND_SECONDS = 5.0  # seconds after a kill in which a gap is attributed to the kill
SETTLE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class FaultsRow(BenchRow):
    """The result of a run with kills. The gap of a kill is the longest time that a worker had no acknowledged push."""

    columns: ClassVar[str] = (
        "kills | ledger_exact: ledger exact | median_gap_s: median gap s | worst_gap_s: worst gap s | "
        "calm_gap_s: without kills | pushes_s_before: pushes/s before | pushes_s_after: after | "
        "settled_s: whole again s | pushes"
    )

    kills: int
    servers: int
    workers: int
    replicas: int
    staleness: int | None
    bytes: int
    seed: int
    pushes: int
    ledger_exact: bool
    median_gap_s: float
    worst_gap_s: float
    pushes_s_before: float
    pushes_s_after: float
    calm_gap_s: float  # the longest gap before the first kill
    settled_s: float  # median seconds from a kill until all backups and a new server were ready
    seconds: float
    wrong: list[str] = field(default_factory=list)  # the first ten wrong slots
    gaps: list[float] = field(default_factory=list)


def bench_faults(
    cluster: Cluster,
    *,
    kills: int = 50,
    servers: int = 3,
    workers: int = 4,
    replicas: int = 1,
    staleness: int | None = None,
    size: int = 1_000_000,
    seed: int | None = None,
    warm: float = 5.0,
) -> FaultsRow:
    """Kill servers at random moments while workers push and pull vectors of `size` bytes.

    The killed servers must be on this host. The first `warm` seconds, in which the cluster starts processes, are not
    measured.

    Raises:
        ConfigError: kills is below 1, or without replicas a killed server's parameters would be lost.
    """
    if kills < 1 or replicas < 1 or servers < 2:
        raise ConfigError(
            f"kills is {kills}, replicas {replicas}, servers {servers}: give at least 1 kill, 1 replica and 2 servers; "
            "without a replica on another server, a killed server's parameters would be lost",
            field="replicas",
        )
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    chance, began = random.Random(seed), time.time()
    n = max(SEGMENTS * 2 * workers, size // 8)
    push_workers = PushWorkers(cluster, workers)
    try:
        with ServerGroup(
            torch.zeros(n, dtype=torch.float64),
            shards=servers,
            replicas=replicas,
            workers=workers,
            staleness=staleness,
            segments=SEGMENTS,
            cluster=cluster,
        ) as group:
            push_workers.begin(group)
            time.sleep(warm)
            calm = time.time()
            time.sleep(CALM_SECONDS)
            moments, settled = _kill_servers(group, kills, chance)
            after = time.time()
            time.sleep(CALM_SECONDS)
            ended = time.time()
            done = push_workers.end()
            values = group.server(0).read()
    finally:
        push_workers.close()
    wrong = [each.error for each in done if each.error] + find_wrong_slots(values, workers, done)
    ends = [*moments[1:], ended]
    gaps = [find_longest_gap(done, at, min(end, at + AROUND_SECONDS)) for at, end in zip(moments, ends, strict=True)]
    return FaultsRow(
        kills,
        servers,
        workers,
        replicas,
        staleness,
        8 * n,
        seed,
        sum(each.pushes for each in done),
        not wrong,
        median(gaps),
        max(gaps),
        measure_rate(done, calm, moments[0]),
        measure_rate(done, after, ended),
        find_longest_gap(done, calm, moments[0] - 0.1),
        median(settled),
        time.time() - began,
        wrong[:10],
        gaps,
    )


def _kill_servers(group: ServerGroup, kills: int, chance: random.Random) -> tuple[list[float], list[float]]:
    """Kill servers one after another; return each kill's time, and the seconds until the group was complete again."""
    moments, settled, here = list[float](), list[float](), socket.gethostname()
    while len(moments) < kills:
        group.wait_settled(SETTLE_SECONDS)
        time.sleep(chance.random())
        facts = group.facts()
        there = [each for each in facts["servers"] if each["state"] == "alive"]
        mine = [each for each in there if each["host"] == here]
        if not mine:
            hosts = sorted({each["host"] for each in there})
            raise ConfigError(
                f"no server is on this host ({here}); they are on {hosts}: run the bench on one of these hosts"
            )
        victim, deaths = chance.choice(mine), facts["counts"]["deaths"]
        moments.append(time.time())
        os.kill(victim["pid"], signal.SIGKILL)
        until(lambda: group.facts()["counts"]["deaths"] > deaths, SETTLE_SECONDS)  # noqa: B023  called at once
        group.wait_settled(SETTLE_SECONDS)
        settled.append(time.time() - moments[-1])
    return moments, settled
