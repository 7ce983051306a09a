"""Measure pulls and pushes of a sparse table's rows through servers and through Ray actor calls, in one run.

The contender `own` does what a training worker does: it makes ids unique, sorts them, pulls their rows from servers,
and pushes gradients for them. The contender `calls` uses actors that each store a part of a dense torch table and apply
index_select and index_add_. Its arguments are numpy arrays, and its ids are divided among the actors before the
measurement. The same workers measure both contenders alternately.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rayps_client.errors import ConfigError

from rayps.bench.parallel_calls import call_all
from rayps.bench.rows import Ids, Rows
from rayps.bench.table import BenchRow
from rayps.cluster.local import ActorHandle, Cluster
from rayps.ps import group as elastic
from rayps.ps.client.session import KEEP_BYTES, Session
from rayps.ps.group import ManagerClient
from rayps.ps.protocol.space import Space, SparseTable
from rayps.ps.tables.client import Tables
from rayps.strategies.parameter_server import ParameterServer

WAIT_SECONDS = 300.0
TABLE = "bench"
_LR = 0.01
_BATCHES = 8  # batches of a worker, used one after another
_MOST_WARM_UP = 2000  # the most turns before the measurement


@dataclass(frozen=True, slots=True)
class CallsRow(BenchRow):
    """One comparison. Figures are medians. Rates are rows per second; a row that is pulled and pushed counts twice."""

    columns: ClassVar[str] = (
        "optimizer | workers | servers | ids | own: rows/s | calls: by calls | times_calls: times | "
        "own_turn_s: turn s | calls_turn_s: by calls | own_cpu_s: cpu s | calls_cpu_s: by calls"
    )

    rows: int
    ids: int  # ids of one batch, all different
    dim: int
    workers: int
    servers: int
    optimizer: str
    repeats: int
    own: float
    calls: float
    times_calls: float  # own / calls: the median of the runs' ratios
    own_turn_s: float  # seconds in which one worker pulls and pushes a batch
    calls_turn_s: float
    own_cpu_s: float | None  # CPU seconds of workers and servers per turn of a worker; None if on other hosts
    calls_cpu_s: float | None  # the same for workers and actors, without Ray's processes, which transfer the rows


class RayRows:
    """The contender without rayps: an actor that stores a part of a table and is called through Ray."""

    def __init__(self, rows: int, dim: int) -> None:
        torch.set_num_threads(1)
        self._table = torch.zeros(rows, dim)

    def pull(self, ids: Ids) -> Rows:
        """Return the rows with these ids."""
        found: Rows = self._table.index_select(0, torch.from_numpy(ids)).numpy()
        return found

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def push(self, ids: Ids, grads: Rows) -> None:
        """Apply an SGD step to the rows with these ids, which are unique."""
        self._table.index_add_(0, torch.from_numpy(ids), torch.from_numpy(grads) * -_LR)


class TableBench:
    """An actor: one worker that pulls and pushes a table's rows."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._session: Session | None = None
        self._tables: Tables | None = None
        self._generator = np.random.default_rng(rank)

    def join(self, group: ManagerClient, space: Space) -> int:
        """Connect to the group's servers; return the number of this rank's next step."""
        incarnation = group.join(space.number, self._rank)
        self._session = Session(group.contact(), space, self._rank, incarnation=incarnation, timeout=WAIT_SECONDS)
        steps = self._session.join()
        self._tables = Tables(self._session, space)
        self._tables.step = max(steps.values(), default=0)
        return self._tables.step

    def turns_on_servers(self, rows: int, ids: int, turns: int) -> tuple[float, float]:
        """Make a warm-up turn, then `turns` turns through servers; return these turns' wall-clock start and end."""
        assert self._tables is not None
        batches = [torch.from_numpy(batch) for batch in _draw_batches(self._rank, rows, ids)]
        grads = torch.rand(ids, self._tables.space.tables[0].dim)
        began = 0.0
        for turn in range(turns + 1):
            if turn == 1:
                began = time.time()
            self._turn(batches[turn % len(batches)], grads)
        return began, time.time()

    def turns_by_calls(
        self, parts: list[ActorHandle], rows: int, ids: int, dim: int, turns: int
    ) -> tuple[float, float]:
        """Make a warm-up turn, then `turns` turns through calls; return these turns' wall-clock start and end."""
        batches = [_cut(batch, len(parts)) for batch in _draw_batches(self._rank, rows, ids)]
        grads = np.random.default_rng(0).random((ids, dim), np.float32)
        out, began = np.empty_like(grads), 0.0
        for turn in range(turns + 1):
            if turn == 1:
                began = time.time()
            cut = batches[turn % len(batches)]
            pulls = [part.call("pull", local) for part, (_, local) in zip(parts, cut, strict=True)]
            for reply, (places, _) in zip(pulls, cut, strict=True):
                out[places] = reply.result(WAIT_SECONDS)
            pushes = [part.call("push", local, grads[places]) for part, (places, local) in zip(parts, cut, strict=True)]
            for reply in pushes:
                reply.result(WAIT_SECONDS)
        return began, time.time()

    def zipf_turns(self, rows: int, ids: int, zipf: float, seconds: float) -> int:
        """Make turns with Zipf-distributed ids for `seconds` seconds; return the number of turns."""
        assert self._tables is not None
        turns, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            batch = torch.from_numpy((self._generator.zipf(zipf, ids) - 1) % rows)
            self._turn(batch, None)
            turns += 1
        return turns

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def close(self) -> None:
        """Disconnect from the servers."""
        if self._session is not None:
            self._session.close()

    def _turn(self, ids: torch.Tensor, grads: torch.Tensor | None) -> None:
        tables = self._tables
        assert tables is not None
        client = tables.clients[TABLE]
        tables.begin(tables.step)
        lookup, rows = client.rows(ids)
        client.gradient(lookup, torch.ones_like(rows) if grads is None else grads)
        tables.push(tables.step, 1.0)


def _draw_batches(rank: int, rows: int, ids: int) -> list[Ids]:
    """Draw the batches of a rank: unique ids in random order."""
    generator = np.random.default_rng(rank)
    return [generator.choice(rows, ids, replace=False) for _ in range(_BATCHES)]


def _cut(ids: Ids, parts: int) -> list[tuple[Ids, Ids]]:
    """Divide ids among `parts` actors; return for each its ids' positions in `ids` and their row numbers on it."""
    found = []
    for part in range(parts):
        places = np.flatnonzero(ids % parts == part)
        found.append((places, ids[places] // parts))
    return found


def make_space(workers: int, dim: int, segments: int, optimizer: str) -> Space:
    """Return the description of an asynchronous space with one table."""
    table = SparseTable(TABLE, dim, segments, optimizer={"name": optimizer, "lr": _LR})
    return Space("bench", 0, workers, ParameterServer(staleness=None), tables=(table,))


def bench_calls(
    cluster: Cluster,
    *,
    rows: int = 200_000,
    ids: int = 50_000,
    dim: int = 16,
    workers: int = 4,
    servers: int = 2,
    segments: int = 16,
    optimizer: str = "sgd",
    repeats: int = 5,
    turns: int = 20,
) -> CallsRow:
    """Measure both contenders with batches of `ids` unique ids of a table with `rows` rows. Servers have no backups.

    Raises:
        ConfigError: a number is too small, or there is no such optimizer.
    """
    if not 1 <= ids <= rows or min(workers, servers, repeats, turns) < 1:
        raise ConfigError(
            f"ids is {ids}, rows {rows}, workers {workers}, servers {servers}, repeats {repeats}, turns {turns}: give "
            "at least 1 of each, and at least as many rows as ids",
            field="ids",
        )
    running = elastic.start(cluster, f"bench-{secrets.token_hex(4)}", servers, 0, detached=False, balance=None)
    actors = [cluster.spawn("benchmarks.tables.calls:TableBench", rank) for rank in range(workers)]
    parts = [cluster.spawn("benchmarks.tables.calls:RayRows", -(-rows // servers), dim) for _ in range(servers)]
    own: list[tuple[float, float | None]] = []
    calls: list[tuple[float, float | None]] = []
    few = max(2, turns // 4)
    try:
        space = running.open(make_space(workers, dim, segments, optimizer))
        call_all(actors, "join", running, space, timeout=WAIT_SECONDS)
        call_all(actors, "turns_on_servers", rows, ids, _warm_up(ids, dim), timeout=WAIT_SECONDS)
        pids = call_all(actors, "ping", timeout=WAIT_SECONDS)
        mine = [*pids, *(server["pid"] for server in running.facts()["servers"])]
        theirs = [*pids, *call_all(parts, "ping", timeout=WAIT_SECONDS)]
        for _ in range(repeats):
            own.append(_measure(mine, workers, turns, actors, "turns_on_servers", rows, ids))
            calls.append(_measure(theirs, workers, few, actors, "turns_by_calls", parts, rows, ids, dim))
        call_all(actors, "close", timeout=WAIT_SECONDS)
    finally:
        for handle in [*actors, *parts]:
            cluster.kill(handle)
        running.stop()
    rates = [statistics.median(rate for rate, _ in found) for found in (own, calls)]
    used = [
        None if None in [cpu for _, cpu in found] else statistics.median(cpu or 0.0 for _, cpu in found)
        for found in (own, calls)
    ]
    times = statistics.median(a / b for (a, _), (b, _) in zip(own, calls, strict=True))
    return CallsRow(
        rows,
        ids,
        dim,
        workers,
        servers,
        optimizer,
        repeats,
        2 * ids * rates[0],
        2 * ids * rates[1],
        times,
        workers / rates[0],
        workers / rates[1],
        *used,
    )


def _warm_up(ids: int, dim: int) -> int:
    """Return a number of turns after which all rows exist, and workers reuse the memory of their replay buffers."""
    return min(_MOST_WARM_UP, max(_BATCHES, KEEP_BYTES // (4 * ids * dim) + 1))


def _measure(
    pids: list[int], workers: int, turns: int, actors: list[ActorHandle], method: str, *args: Any
) -> tuple[float, float | None]:
    """Measure one contender; return turns per second of all workers together, and CPU seconds per turn."""
    before = _read_cpu(pids)
    rate = _compute_rate(call_all(actors, method, *args, turns, timeout=WAIT_SECONDS), workers * turns)
    after = _read_cpu(pids)
    # each worker makes one warm-up turn
    return rate, None if before is None or after is None else (after - before) / (workers * (turns + 1))


def _read_cpu(pids: list[int]) -> float | None:
    """Return the CPU seconds of these processes so far, or None if one of them is on another host."""
    found = 0.0
    for pid in set(pids):
        path = Path(f"/proc/{pid}/stat")
        if not path.exists():
            return None
        fields = path.read_text().rpartition(")")[2].split()
        found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _compute_rate(spans: list[tuple[float, float]], turns: int) -> float:
    """Return turns per second from the first start to the last end."""
    return turns / (max(end for _, end in spans) - min(begin for begin, _ in spans))
