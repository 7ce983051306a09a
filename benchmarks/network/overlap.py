"""Measure how much of a gradient's transfer between hosts hides behind backward, by the size of the buckets.

The hosts are network namespaces (`rayps.bench.netns`) with one rank on each, a plain process with one thread. All
contenders alternate in one run: `own` (AllReduce in the real worker) and `ddp` (DistributedDataParallel on gloo) for
each size of buckets, `alone` (a step without communication), and the sum of the whole gradient without a step, by the
ring (`own_line`) and by gloo (`gloo_line`). Backward is made as long as the line needs for the gradient.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
from rayps_client.errors import ConfigError
from torch import nn

from benchmarks.network.overlap_bound import (
    StepTimes,
    compute_bound,
    compute_hidden,
    compute_line_seconds,
    find_slowest,
    scale_rows,
)
from benchmarks.network.paced import LAYERS, NO_BATCH, MatmulWork, PacedWork, SleepWork, width_of
from rayps.bench.contender import plain_steps
from rayps.bench.netns import Hosts, bits
from rayps.bench.parallel_calls import call_all
from rayps.bench.table import BenchRow, Opt, read_size
from rayps.bench.worker_steps import worker_steps
from rayps.comm.link import Listener
from rayps.comm.ring import Ring
from rayps.tensors.flat import FlatModel
from rayps.worker.exchange.buckets import Buckets

COMPUTES = ("sleep", "torch")
AUTO = "auto"  # the size of buckets that the contender itself chooses
_START_SECONDS = 120.0
_FIRST_ROWS, _CALIBRATIONS, _CALIBRATION_STEPS = 256, 4, 5
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class OverlapRow(BenchRow):
    """One contender. Times are in milliseconds, and medians; the slowest rank counts."""

    columns: ClassVar[str] = (
        "contender | bucket: bucket MB | buckets | step: ms a step | cpu: cpu ms | backward | line | bound | "
        "of_bound: of bound | hidden | times_ddp: x ddp | load"
    )

    contender: str
    bucket: str  # 10^6 bytes of a bucket; 0: one, sent after backward; auto; "" where there are no buckets
    buckets: int | None  # their number, of the contender `own`
    compute: str  # what backward does: sleep or torch
    bytes: int  # of the gradient
    rate: str
    repeats: int
    step: float
    backward: float  # of a step without communication
    line: float  # least time of the gradient on the line, with the packets' headers
    bound: float | None  # least time of the step with these buckets
    of_bound: float | None  # bound / step
    hidden: float | None  # the share of `line` that does not lengthen the step
    times_ddp: float | None  # the step of DDP's fastest size of buckets / step
    cpu: float  # processor time of the rank's process
    load: float  # the system's load average over a minute, before the measurement


class OverlapRank:
    """An actor: one rank of all contenders."""

    def __init__(self, rank: int, address: str, secret: bytes, timeout: float) -> None:
        torch.set_num_threads(1)
        self._rank, self._secret, self._timeout, self._host = rank, secret, timeout, address
        self._listener = Listener(f"rank {rank}", secret, host=address)
        self._turns: dict[tuple[str, str], Callable[[int], dict[str, Any]]] = {}
        self._generation = 0

    def addresses(self) -> tuple[str, int]:
        """Return the addresses of this rank's listener, and the port of its store, by which gloo's ranks meet."""
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return self._listener.address, int(self._store.port)

    def meet(self, addresses: list[str], store: tuple[str, int]) -> None:
        """Form the ring and gloo's process group with the other ranks."""
        self._ring = Ring.form(
            self._rank, addresses, self._listener, secret=self._secret, generation=0, timeout=self._timeout
        )
        met = dist.TCPStore(*store) if self._rank else self._store  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=met, rank=self._rank, world_size=len(addresses), timeout=timedelta(seconds=self._timeout)
        )

    def calibrate(self, width: int, rows: int) -> float:
        """Return the seconds of processor time of a backward of `MatmulWork`. All ranks run it at the same time."""
        work = MatmulWork(width, self._ring.size, rows)
        model = work.model()
        self._ring.barrier()
        spans: list[float] = []
        for _ in range(_CALIBRATION_STEPS):
            loss = work.loss(model, NO_BATCH)
            start = time.process_time()
            loss.backward()  # type: ignore[no-untyped-call]
            spans.append(time.process_time() - start)
        return statistics.median(spans)

    def prepare(self, work: tuple[str, int, float], contenders: list[tuple[str, str]]) -> dict[str, Any]:
        """Make each contender's model. `work` is the kind of compute, the width, and the seconds or rows.

        Return for each size of buckets of `own` the parameters of each bucket, in the order of sending.
        """
        kind, width, amount = work
        size = self._ring.size
        made: PacedWork = SleepWork(width, size, amount) if kind == "sleep" else MatmulWork(width, size, int(amount))
        found: dict[str, Any] = {}
        for contender in contenders:
            name, bucket = contender
            if name == "own":
                mb = None if bucket == AUTO else float(bucket)
                self._turns[contender] = worker_steps(made, self._ring, mb)
                found[bucket] = Buckets(FlatModel(made.model()), self._ring, mb, hooked=False).members
            elif name == "ddp":
                size_mib = None if bucket == AUTO else 1e6 * float(bucket) / _MIB  # None: DDP's default
                model = nn.parallel.DistributedDataParallel(made.model(), bucket_cap_mb=size_mib)
                self._turns[contender] = plain_steps(made, model)
            elif name == "alone":
                self._turns[contender] = _make_timed_steps(made)
            else:
                self._turns[contender] = _make_sums(width, self._ring if name == "own_line" else None)
        return found

    def turn(self, contender: tuple[str, str], steps: int) -> dict[str, Any]:
        """Make `steps` steps; return milliseconds per step as "step" and "cpu", and of `alone` its "timeline"."""
        self._ring.barrier()
        start = time.process_time()
        found = self._turns[contender](steps)
        return found | {"cpu": 1000 * (time.process_time() - start) / steps}

    def close(self) -> None:
        """Close the ring and gloo's group."""
        self._ring.close()
        dist.destroy_process_group()


def _make_timed_steps(work: PacedWork) -> Callable[[int], dict[str, Any]]:
    """Return a plain training loop, which measures when backward starts and ends, and when each gradient is ready."""
    model = work.model()
    params = list(model.parameters())
    optimizer = work.optimizer(params)
    ready = [0.0] * len(params)

    def take(i: int) -> None:
        ready[i] = time.perf_counter()

    for i, p in enumerate(params):
        p.register_post_accumulate_grad_hook(lambda p, i=i: take(i))  # type: ignore[no-untyped-call]

    def turn(steps: int) -> dict[str, Any]:
        found: list[StepTimes] = []
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = work.loss(model, NO_BATCH)
            forward = time.perf_counter() - start
            loss.backward()  # type: ignore[no-untyped-call]
            backward = time.perf_counter() - start
            optimizer.step()
            loss.item()
            times = tuple(each - start for each in ready)
            found.append(StepTimes(times, (forward, backward), time.perf_counter() - start))
        middle = sorted(found, key=lambda each: each.step)[len(found) // 2]
        return {"step": 1000 * statistics.mean(each.step for each in found), "timeline": middle}

    return turn


def _make_sums(width: int, ring: Ring | None) -> Callable[[int], dict[str, Any]]:
    """Return a function that sums the whole gradient over the ring, or over gloo if `ring` is None."""
    x = torch.zeros(LAYERS * width * width)

    def turn(steps: int) -> dict[str, Any]:
        start = time.perf_counter()
        for _ in range(steps):
            if ring is None:
                dist.all_reduce(x)
            else:
                ring.sum(x)
        return {"step": 1000 * (time.perf_counter() - start) / steps}

    return turn


def bench_overlap(
    *,
    hosts: Annotated[int, Opt("Number of hosts; they are network namespaces, which need root.")] = 2,
    rate: Annotated[str, Opt("The rate of each host's link, e.g. 1gbit.")] = "1gbit",
    compute: Annotated[str, Opt("sleep (layers sleep), or torch (layers multiply matrices).")] = "sleep",
    size: Annotated[int, Opt("The size of the gradient.", read=read_size, text="17MB")] = 17_000_000,
    buckets: Annotated[Sequence[str], Opt("Sizes of buckets in MB; 0 (one, after backward); auto (own choice).")] = (
        "0",
        "1",
        "4",
        "16",
        AUTO,
    ),
    steps: Annotated[int, Opt("Steps of a measurement.")] = 3,
    repeats: Annotated[int, Opt("Number of measurements.")] = 9,
    timeout: float = 120.0,
) -> list[OverlapRow]:
    """Measure steps between `hosts` hosts on links of `rate`, with a gradient of about `size` bytes.

    `compute` is "sleep" (layers that sleep) or "torch" (layers that multiply matrices). `buckets` are sizes in 10^6
    bytes; 0 means one bucket after backward, "auto" means the contender's own choice. `timeout` is in seconds.

    Raises:
        ConfigError: an argument is not valid.
        ClusterError: this machine cannot make network namespaces, or an actor died.
        LinkError: a rank did not answer within `timeout`.
    """
    _check(hosts, compute, size, buckets)
    secret, load, width = secrets.token_bytes(32), os.getloadavg()[0], width_of(size)
    size = 4 * LAYERS * width * width
    line = compute_line_seconds(size, hosts, bits(rate))
    contenders = [("alone", ""), ("own_line", ""), ("gloo_line", "")]
    contenders += [("own", bucket) for bucket in buckets] + [("ddp", bucket) for bucket in buckets if bucket != "0"]
    turns: dict[tuple[str, str], list[dict[str, Any]]] = {contender: [] for contender in contenders}
    with Hosts(hosts, rate) as net:
        actors = [
            net.spawn(rank, "benchmarks.network.overlap:OverlapRank", rank, net.addresses[rank], secret, timeout)
            for rank in range(hosts)
        ]
        for actor in actors:
            actor.started.result(_START_SECONDS)
        found = call_all(actors, "addresses", timeout=_START_SECONDS)
        call_all(actors, "meet", [address for address, _ in found], (net.addresses[0], found[0][1]), timeout=timeout)
        amount = line
        if compute == "torch":
            amount = _FIRST_ROWS
            for _ in range(_CALIBRATIONS):
                amount = scale_rows(
                    int(amount), max(call_all(actors, "calibrate", width, amount, timeout=timeout)), line
                )
        cuts = call_all(actors, "prepare", (compute, width, amount), contenders, timeout=timeout)[0]
        for turn in range(repeats + 1):
            first = turn % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                parts = call_all(actors, "turn", contender, steps, timeout=timeout)
                if turn:  # turn 0 is the warm-up: it touches new pages and learns the order of gradients in backward
                    worst = max(parts, key=lambda part: part["step"])
                    if contender[0] == "alone":
                        worst = worst | {"timeline": find_slowest([part["timeline"] for part in parts])}
                    turns[contender].append(worst)
        call_all(actors, "close", timeout=timeout)
    return _make_rows(turns, cuts, (compute, size, rate), line, load)


def _check(hosts: int, compute: str, size: int, buckets: Sequence[str]) -> None:
    """Raise ConfigError if an argument of `bench_overlap` is not valid."""
    if hosts < 2:
        raise ConfigError(f"hosts is {hosts}: give at least 2", hosts=hosts)
    if compute not in COMPUTES:
        raise ConfigError(f"no compute {compute!r}; use one of {', '.join(COMPUTES)}", compute=compute)
    if size < 4 * LAYERS:
        raise ConfigError(f"size is {size} bytes: give at least {4 * LAYERS}, one number for each layer", size=size)
    for bucket in buckets:
        try:
            good = bucket == AUTO or 0 <= float(bucket) < float("inf")
        except ValueError:
            good = False
        if not good:
            raise ConfigError(
                f"buckets {bucket!r} cannot be read: write megabytes such as 4, 0 or auto", buckets=bucket
            )


def _make_rows(
    turns: dict[tuple[str, str], list[dict[str, Any]]],
    cuts: dict[str, list[list[int]]],
    given: tuple[str, int, str],
    line: float,
    load: float,
) -> list[OverlapRow]:
    compute, size, rate = given
    steps = {contender: statistics.median(turn["step"] for turn in found) for contender, found in turns.items()}
    alone = sorted(turns["alone", ""], key=lambda turn: turn["step"])[len(turns["alone", ""]) // 2]
    timeline: StepTimes = alone["timeline"]
    ddp = min((step for (name, _), step in steps.items() if name == "ddp"), default=None)
    rows = []
    for (name, bucket), step in steps.items():
        least = None
        if name == "own":
            members = cuts[bucket]
            lines = [line * len(some) / LAYERS for some in members]
            least = 1000 * compute_bound(timeline, members, lines, early=bucket != "0")
        trains = name in ("own", "ddp")
        rows.append(
            OverlapRow(
                contender=name,
                bucket=bucket,
                buckets=len(cuts[bucket]) if name == "own" else None,
                compute=compute,
                bytes=size,
                rate=rate,
                repeats=len(turns[name, bucket]),
                step=step,
                backward=1000 * (timeline.backward[1] - timeline.backward[0]),
                line=1000 * line,
                bound=least,
                of_bound=None if least is None else least / step,
                hidden=compute_hidden(step, steps["alone", ""], 1000 * line) if trains else None,
                times_ddp=ddp / step if ddp is not None and trains else None,
                cpu=statistics.median(turn["cpu"] for turn in turns[name, bucket]),
                load=load,
            )
        )
    return rows
