"""Measure resizes of a server group during a synchronous run: bytes migrated, loss of speed, and equal results."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError
from rayps_client.values import Keywords

from benchmarks.changes.group_load import SEGMENTS
from rayps.bench.table import BenchRow, Opt, Workers, read_megabytes
from rayps.cluster.local import ActorHandle, Cluster
from rayps.ps.protocol.segment_map import SpaceMap
from rayps.ps.server_group import ServerGroup

CALM_SECONDS = 3.0
BIN_SECONDS = 0.25
LOW = 0.8  # share of the usual rate below which the rate counts as a dip
WAIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ResizeRow(BenchRow):
    """One resize. `moved` is the share of parameters with a new primary; `by_the_book` is its least possible value."""

    columns: ClassVar[str] = (
        "before: servers | after: then | moved | by_the_book: by the book | moved_bytes: bytes | seconds | "
        "rounds_s: rounds/s | dip | dip_seconds: below 0.8 for s | calm_dip_seconds: without resize | "
        "same_bits: same bits | same_curve: same curve"
    )

    before: int
    after: int
    workers: int
    replicas: int
    bytes: int
    moved: float
    by_the_book: float
    moved_bytes: int  # as the manager counts them
    seconds: float  # seconds until all segments and backups were in place
    rounds_s: float  # rounds per second before the resize
    dip: float  # share of this rate that was lost in the worst quarter of a second
    dip_seconds: float  # seconds with less than 0.8 of this rate
    calm_dip: float  # dip at the same time of a run without resizes: the noise of the machine
    calm_dip_seconds: float  # dip_seconds at the same time of a run without resizes
    same_bits: bool  # whether the final parameters are bit for bit those of a run without resizes
    same_curve: bool  # whether the losses of all rounds are those of a run without resizes


TrainedWorker = tuple[list[float], list[float], NDArray[np.float32]]  # ends of rounds, losses, final parameters


class TrainBench:
    """An actor: one worker of a synchronous run on a quadratic loss. Its gradients depend on all earlier rounds."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank

    def train(self, group: ServerGroup, rounds: int, pause: float) -> TrainedWorker:
        """Train; return the end of each round by the wall clock, each round's loss, and the final parameters."""
        server, n = group.join(self._rank), group.layout.size
        noise = torch.Generator().manual_seed(self._rank)
        target = torch.randn(n, generator=torch.Generator().manual_seed(99))
        times, losses = [], []
        params = server.pull()
        out = torch.empty_like(params)
        for _ in range(rounds):
            error = params - target
            losses.append(float(error.square().mean()))
            grad = error.add_(torch.randn(n, generator=noise), alpha=0.1)
            time.sleep(pause)
            params = server.push_pull(grad, out=out)
            times.append(time.time())
        server.close()
        return times, losses, params.numpy()


def bench_resize(
    cluster: Cluster,
    *,
    sizes: Annotated[
        Sequence[int], Opt("Numbers of servers: start with the first, then resize to the others in order.")
    ] = (2, 4, 3),
    workers: Workers = 2,
    replicas: Annotated[int, Opt("Backups of each segment on other servers.")] = 1,
    size: Annotated[
        int, Opt("Size of the parameters, in 10^6 bytes.", "--mb", read=read_megabytes, text="4")
    ] = 4_000_000,
    pause: float = 0.005,
    seconds: Annotated[float, Opt("Length of the run, in seconds.", least=5.0)] = 20.0,
) -> list[ResizeRow]:
    """Measure the resizes between consecutive `sizes` (numbers of servers) during a run of about `seconds` seconds.

    The model has `size` bytes of parameters.

    Raises:
        ConfigError: there are fewer than two sizes.
    """
    if len(sizes) < 2:
        raise ConfigError(f"sizes is {sizes}: give at least two numbers of servers, such as 2,4,3", field="sizes")
    actors = [cluster.spawn("benchmarks.changes.resize:TrainBench", rank) for rank in range(workers)]
    try:
        n = max(SEGMENTS, size // 4)
        rounds = _count_rounds(cluster, actors, n, sizes[0], replicas, pause, seconds)
        found, rows = _run(cluster, actors, n, sizes, replicas, pause, rounds)
        reference, _ = _run(cluster, actors, n, sizes[:1], replicas, pause, len(found[0][0]))
        for row in rows:
            _, row["calm_dip"], row["calm_dip_seconds"] = _measure_dip(
                reference[0][0], *(reference[0][0][0] + t for t in row.pop("span"))
            )
    finally:
        for actor in actors:
            cluster.kill(actor)
    same = all((a[2] == b[2]).all() for a, b in zip(found, reference, strict=True))
    curve = all(a[1] == b[1] for a, b in zip(found, reference, strict=True))
    return [ResizeRow(**row, same_bits=bool(same), same_curve=curve) for row in rows]


def _count_rounds(
    cluster: Cluster, actors: list[ActorHandle], n: int, servers: int, replicas: int, pause: float, seconds: float
) -> int:
    """Return how many rounds take about `seconds` seconds, estimated from a run of 30 rounds."""
    found, _ = _run(cluster, actors, n, (servers,), replicas, pause, 30)
    taken = found[0][0][-1] - found[0][0][9]
    return int(seconds / max(taken, 0.01) * 20)


def _run(
    cluster: Cluster, actors: list[ActorHandle], n: int, sizes: Sequence[int], replicas: int, pause: float, rounds: int
) -> tuple[list[TrainedWorker], list[Keywords]]:
    """Make one run with the resizes between consecutive `sizes`; return the workers' results, and a row per resize."""
    with ServerGroup(
        torch.zeros(n),
        shards=sizes[0],
        replicas=replicas,
        workers=len(actors),
        segments=SEGMENTS,
        optimizer=_make_adam,
        cluster=cluster,
    ) as group:
        replies = [actor.call("train", group, rounds, pause) for actor in actors]
        spans = [_resize(group, before, after) for before, after in itertools.pairwise(sizes)]
        found = [reply.result(WAIT_SECONDS) for reply in replies]
    times = found[0][0]
    rows = []
    for span in spans:
        since, until, row = span.pop("since"), span.pop("until"), span
        usual, dip, low = _measure_dip(times, since, until)
        rows.append(
            row
            | {
                "workers": len(actors),
                "replicas": replicas,
                "bytes": 4 * n,
                "rounds_s": usual,
                "dip": dip,
                "dip_seconds": low,
                "seconds": until - since,
                "span": (since - times[0], until - times[0]),
            }
        )
    return found, rows


def _resize(group: ServerGroup, before: int, after: int) -> Keywords:
    time.sleep(CALM_SECONDS)
    running, space = group.group, group.space
    assert running is not None and space is not None
    old, counts = running.map(space.number), running.facts()["counts"]
    since = time.time()
    group.resize(after)
    group.wait_settled(WAIT_SECONDS)
    until = time.time()
    new = running.map(space.number)
    moved = running.facts()["counts"]["moved_bytes"] - counts["moved_bytes"]
    book = abs(after - before) / max(before, after)
    return {
        "before": before,
        "after": after,
        "moved": _measure_moved(old, new, space.cuts),
        "by_the_book": book,
        "moved_bytes": moved,
        "since": since,
        "until": until,
    }


def _measure_moved(old: SpaceMap, new: SpaceMap, cuts: tuple[tuple[int, int], ...]) -> float:
    total = cuts[-1][1]
    return (
        sum(hi - lo for (lo, hi), a, b in zip(cuts, old.holders, new.holders, strict=True) if a.primary != b.primary)
        / total
    )


def _measure_dip(times: list[float], since: float, until: float) -> tuple[float, float, float]:
    """Return the rate before `since`, the largest share of it that was lost later, and the seconds with a low rate."""
    usual = sum(since - CALM_SECONDS + 0.5 <= t < since for t in times) / (CALM_SECONDS - 0.5)
    bins = []
    at = since
    while at < until + 1.0 and at + BIN_SECONDS < times[-1]:
        bins.append(sum(at <= t < at + BIN_SECONDS for t in times) / BIN_SECONDS)
        at += BIN_SECONDS
    if not bins or not usual:
        return usual, 0.0, 0.0
    return usual, max(0.0, 1 - min(bins) / usual), BIN_SECONDS * sum(each < LOW * usual for each in bins)


def _make_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)
