"""Measure two jobs on one server group: whether they change each other's results, slowdowns, and memory.

The slowdowns are those by the other job, by a flood of pushes, and by processes that only load the CPU.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError
from rayps_client.values import JsonObject

from benchmarks.changes.group_load import SEGMENTS, WAIT_SECONDS, PushWorkers, median
from rayps.bench.table import BenchRow, Opt, Servers, Workers, read_megabytes
from rayps.cluster.local import ActorHandle, Cluster
from rayps.ps import group as elastic
from rayps.ps.group import ManagerClient
from rayps.ps.server_group import ServerGroup

PAUSE_SECONDS = 0.005  # seconds that a worker sleeps in each round, in place of a computation


@dataclass(frozen=True, slots=True)
class NeighboursRow(BenchRow):
    """Two synchronous jobs, alone and together, and the first job during a flood of pushes by other workers."""

    columns: ClassVar[str] = (
        "same_first: first same | same_second: second same | same_flooded: flooded same | "
        "rounds_s_alone: rounds/s alone | slowdown_together: together x | slowdown_flooded: flooded x | "
        "slowdown_busy: busy machine x | group_bytes_before: bytes before | group_bytes_with: with flood | "
        "group_bytes_after: after"
    )

    servers: int
    workers: int
    bytes: int
    same_first: bool  # whether the first job's final parameters, with the second job, are bit for bit those alone
    same_second: bool  # the same for the second job
    same_flooded: bool  # the same for the first job during the flood
    rounds_s_alone: float  # the first job's rounds per second, alone
    rounds_s_together: float  # the first job's rounds per second while the second job runs
    rounds_s_flooded: float  # the first job's rounds per second during the flood
    rounds_s_busy: (
        float  # the first job's rounds per second while other processes load the CPU, without using the group
    )
    flood_pushes_s: float  # pushes of the flood per second
    group_bytes_before: int  # bytes on the group before the flood's space was created
    group_bytes_with: int  # bytes on the group with the flood's space
    group_bytes_after: int  # bytes on the group after the deletion of the flood's space
    memory_before: int | None  # resident bytes of the server processes at these times; None if on other hosts
    memory_with: int | None
    memory_after: int | None

    @property
    def slowdown_together(self) -> float:
        """The first job's rounds per second alone, divided by those while the second job runs."""
        return self.rounds_s_alone / self.rounds_s_together

    @property
    def slowdown_flooded(self) -> float:
        """The first job's rounds per second alone, divided by those during the flood."""
        return self.rounds_s_alone / self.rounds_s_flooded

    @property
    def slowdown_busy(self) -> float:
        """The first job's rounds per second alone, divided by those while other processes load the CPU."""
        return self.rounds_s_alone / self.rounds_s_busy

    def to_dict(self) -> JsonObject:
        """Return the row as JSON data, with the slowdowns."""
        slowdowns = (self.slowdown_together, self.slowdown_flooded, self.slowdown_busy)
        names = ("slowdown_together", "slowdown_flooded", "slowdown_busy")
        return asdict(self) | dict(zip(names, slowdowns, strict=True))


class BusyBench:
    """An actor that keeps a processor busy."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def burn(self, seconds: float) -> int:
        """Add vectors for `seconds` seconds; return the number of additions."""
        a, count, end = torch.zeros(100_000), 0, time.time() + seconds
        while time.time() < end:
            a.add_(1.0)
            count += 1
        return count


def bench_jobs(
    cluster: Cluster,
    *,
    servers: Servers = 2,
    workers: Workers = 2,
    flooders: Annotated[int, Opt("Workers that push as fast as they can.")] = 2,
    size: Annotated[
        int, Opt("Size of the parameters, in 10^6 bytes.", "--mb", read=read_megabytes, text="1")
    ] = 1_000_000,
    rounds: Annotated[int, Opt("Rounds of each run.")] = 300,
) -> NeighboursRow:
    """Measure two jobs of `workers` workers on `size` bytes of parameters, and `flooders` workers that flood the group.

    Raises:
        ConfigError: there are fewer than two servers, but each segment has a backup on another server.
    """
    if servers < 2:
        raise ConfigError(f"servers is {servers}: give at least 2, because each segment has a backup", field="servers")
    n = max(SEGMENTS * 2 * max(workers, flooders), size // 4)
    running = elastic.start(cluster, f"bench-{secrets.token_hex(4)}", servers, 1, detached=False)
    actors = [
        [cluster.spawn("benchmarks.changes.resize:TrainBench", rank) for rank in range(workers)] for _ in range(2)
    ]
    busy = [cluster.spawn("benchmarks.changes.neighbours:BusyBench") for _ in range(flooders)]
    push_workers = PushWorkers(cluster, flooders)
    try:
        _train(cluster, running, actors[:1], n, 20)  # warm-up
        (alone,) = _train(cluster, running, actors[:1], n, rounds)
        (second,) = _train(cluster, running, actors[1:], n, rounds)
        first_beside, second_beside = _train(cluster, running, actors, n, rounds)
        burning = [actor.call("burn", 1.2 * rounds / alone[0]) for actor in busy]
        (beside_busy,) = _train(cluster, running, actors[:1], n, rounds)
        for reply in burning:
            reply.result(WAIT_SECONDS)
        before = _measure_memory(running)
        with ServerGroup(
            torch.zeros(n, dtype=torch.float64),
            group=running,
            name="flood",
            workers=flooders,
            staleness=None,
            segments=SEGMENTS,
            cluster=cluster,
        ) as flood:
            push_workers.begin(flood)
            began = time.time()
            (flooded,) = _train(cluster, running, actors[:1], n, rounds)
            done = push_workers.end()
            pushes = sum(len(each.times) for each in done) / (time.time() - began)
            with_it = _measure_memory(running)
        time.sleep(1.0)
        after = _measure_memory(running)
    finally:
        push_workers.close()
        for actor in [*busy, *(each for some in actors for each in some)]:
            cluster.kill(actor)
        running.stop()
    return NeighboursRow(
        servers,
        workers,
        4 * n,
        _are_same(alone, first_beside),
        _are_same(second, second_beside),
        _are_same(alone, flooded),
        alone[0],
        first_beside[0],
        flooded[0],
        beside_busy[0],
        pushes,
        before[0],
        with_it[0],
        after[0],
        before[1],
        with_it[1],
        after[1],
    )


def _train(
    cluster: Cluster, running: ManagerClient, jobs: list[list[ActorHandle]], n: int, rounds: int
) -> list[tuple[float, list[NDArray[np.float32]]]]:
    """Run jobs at the same time; return for each job its rounds per second and its workers' final parameters."""
    groups = [
        ServerGroup(
            torch.zeros(n),
            group=running,
            name=f"job-{secrets.token_hex(4)}",
            workers=len(actors),
            segments=SEGMENTS,
            optimizer=_make_adam,
            cluster=cluster,
        )
        for actors in jobs
    ]
    try:
        running.wait_settled(WAIT_SECONDS)
        replies = [
            [actor.call("train", group, rounds, PAUSE_SECONDS) for actor in actors]
            for group, actors in zip(groups, jobs, strict=True)
        ]
        found = []
        for of_job in replies:
            ended = [reply.result(WAIT_SECONDS) for reply in of_job]
            times = ended[0][0]
            steps = np.diff(times[len(times) // 10 :])
            found.append((1 / max(median(steps.tolist()), 1e-9), [each[2] for each in ended]))
        return found
    finally:
        for group in groups:
            group.close()


def _are_same(one: tuple[float, list[NDArray[np.float32]]], other: tuple[float, list[NDArray[np.float32]]]) -> bool:
    return all(bool((a == b).all()) for a, b in zip(one[1], other[1], strict=True))


def _measure_memory(running: ManagerClient) -> tuple[int, int | None]:
    """Return the bytes that the servers report, and their processes' resident bytes (None if on other hosts)."""
    time.sleep(0.5)  # for a few heartbeats, which report the bytes
    servers = running.facts()["servers"]
    found = 0
    for server in servers:
        path = Path(f"/proc/{server['pid']}/status")
        if not path.exists():
            return sum(each["bytes"] for each in servers), None
        resident = next(line for line in path.read_text().splitlines() if line.startswith("VmRSS"))
        found += 1024 * int(resident.split()[1])
    return sum(each["bytes"] for each in servers), found


def _make_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)
