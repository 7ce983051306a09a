"""Measure what each kind of fault costs a job between hosts: pauses, repeated rounds, useful time.

The hosts are network namespaces with links of a given rate (`benchmarks.changes.hosts_cluster`). The job's workload
counts each push in a slot of its own (`rayps_chaos.ledger_work`); at the end every slot must have exactly one push.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from rayps_chaos.faults import FaultOn, FaultRole
from rayps_chaos.history import JobHistory
from rayps_chaos.inject import ChaosMeans, injected
from rayps_chaos.ledger_work import LedgerWork
from rayps_chaos.measure_recovery import FaultCost, InjectedFault, costs, quantile, usual_round
from rayps_chaos.plan import PlannedFault
from rayps_chaos.targets import ChaosProcess
from rayps_client.errors import ClusterError, ConfigError

import rayps.runtime.training
from benchmarks.changes.hosts_cluster import HostsCluster
from rayps.bench.netns import Hosts
from rayps.bench.table import BenchRow, BenchRun
from rayps.core.job.records import ActorSite, ProgressRecord
from rayps.service import processes
from rayps.strategies.catalogue import parse

FAULTS = {  # what a fault hits, and its seconds; 0: it has no duration
    "none:host": (FaultRole.MACHINE, 0.0),  # what the others are compared with: the noise of the machine
    "kill:worker": (FaultRole.WORKER, 0.0),
    "kill:server": (FaultRole.SERVER, 0.0),
    "stop:worker": (FaultRole.WORKER, 3.0),
    "throttle:worker": (FaultRole.WORKER, 3.0),
    "lose:host": (FaultRole.MACHINE, 0.0),
    "cut:host": (FaultRole.MACHINE, 3.0),
    "slow:host": (FaultRole.MACHINE, 3.0),
}
OFTEN, SELDOM = 15.0, 300.0  # seconds between two faults for which the useful share is computed
_SLOW_RATE = "1mbit"
_START_SECONDS = 240.0
_BEYOND = 8  # rounds that a job must complete after a fault before the next fault
_GO_ON_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class FaultCostRow(BenchRow):
    """The cost of one kind of fault. Times are in seconds; `recovery` is counted beyond the usual time of a round."""

    columns: ClassVar[str] = (
        "fault | times | recovery_median: pause s | recovery_p95: p95 s | recovery_worst: worst s | "
        "repeated: rounds again | lost: lost s | goodput_often: useful, 4 a minute | "
        "goodput_seldom: 1 in 5 minutes"
    )

    strategy: str
    fault: str
    times: int
    recovery_median: float
    recovery_p95: float
    recovery_worst: float
    repeated: float  # mean number of rounds that were computed again
    lost: float  # mean seconds of the job's time until the next fault, less the usual time of its new rounds
    goodput_often: float  # useful share of the time with a fault in each OFTEN seconds: 1 - lost / OFTEN, at least 0
    goodput_seldom: float  # the same with a fault in each SELDOM seconds


@dataclass(frozen=True, slots=True)
class FaultRun(BenchRun):
    """One job under faults. `goodput`: the useful share of the wall time, as measured at this rate of faults."""

    strategy: str
    hosts: int
    workers: int
    rate: str
    seed: int
    faults: int
    every: float  # mean seconds between two faults
    rounds: int
    usual_round: float  # median seconds of a round
    seconds: float  # from the first round to the last
    goodput: float
    ledger_exact: bool
    restarted: int  # events of restarts of all workers
    rows: list[FaultCostRow]

    @property
    def remark(self) -> str:
        """The facts of the whole run."""
        return (
            f"{self.strategy}, {self.workers} workers on {self.hosts} hosts: {self.faults} faults, one in "
            f"{self.every:g} s; {self.rounds} rounds of {self.usual_round:.3f} s in {self.seconds:.0f} s, useful "
            f"{self.goodput:.1%}; each push was applied {'exactly once' if self.ledger_exact else 'NOT exactly once'}"
        )


class RunningJob:
    """A job that runs in a thread, and the newest progress that its driver has reported."""

    def __init__(self, work: LedgerWork, strategy: str, workers: int, cluster: HostsCluster, timeout: float) -> None:
        self.progress: ProgressRecord = {}
        self.result: rayps.runtime.training.Result | None = None
        self.error: Exception | None = None
        self.begun = time.time()
        self._thread = threading.Thread(target=self._run, args=(work, strategy, workers, cluster, timeout), daemon=True)
        self._thread.start()

    def _run(self, work: LedgerWork, strategy: str, workers: int, cluster: HostsCluster, timeout: float) -> None:
        try:
            self.result = rayps.runtime.training.train(
                work,
                strategy=strategy,
                workers=workers,
                epochs=1,
                cluster=cluster,
                checkpoint_every=max(1, round(2.0 / max(work.pause, 0.01))),
                timeout=timeout,
                max_failures=1_000_000,
                progress=self._note,
            )
        except Exception as error:  # reported by the bench
            self.error = error

    def _note(self, progress: ProgressRecord) -> None:
        self.progress = progress

    @property
    def round(self) -> int:
        """The round that all workers have reached."""
        return int(self.progress.get("round", 0))

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return not self._thread.is_alive()

    def process(self, role: FaultRole, number: int) -> ChaosProcess | None:
        """Return a worker's or server's process, or None if it is not alive."""
        workers, shards = self.progress.get("workers", []), self.progress.get("shards", [])
        lines: Sequence[ActorSite] = workers if role is FaultRole.WORKER else shards
        pid = lines[number % len(lines)]["pid"] if lines else None
        since = None if pid is None else processes.start_time(pid)
        return None if pid is None or since is None else ChaosProcess(role, number, pid, since)

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until `ready()` or the end of the job; return whether `ready()` was true. Raises the job's error."""
        deadline = time.monotonic() + seconds
        while not self.over and time.monotonic() < deadline:
            if ready():
                return True
            time.sleep(0.05)
        if self.error is not None:
            raise self.error
        return False


def bench_fault_costs(
    strategy: str,
    kinds: Sequence[str],
    *,
    hosts: int = 2,
    workers: int = 2,
    rate: str = "1gbit",
    repeats: int = 5,
    every: float = OFTEN,
    pause: float = 0.05,
    timeout: float = 60.0,
    seed: int = 0,
) -> FaultRun:
    """Run a job on `hosts` hosts, and inject each of `kinds` `repeats` times in random order, one in `every` seconds.

    `pause` is the seconds of a round in which a worker sleeps; `timeout` is the job's.

    Raises:
        ConfigError: there is no such kind, or there are too few hosts or workers.
        ClusterError: this machine cannot make network namespaces, or the job did not go on after a fault.
    """
    if wrong := [kind for kind in kinds if kind not in FAULTS]:
        raise ConfigError(f"there is no fault {wrong[0]!r}: give some of {', '.join(FAULTS)}", field="kinds")
    if hosts < 2 or workers < 2 or repeats < 1:
        raise ConfigError(
            f"hosts is {hosts}, workers {workers}, repeats {repeats}: give at least 2 hosts, 2 workers and 1 repeat",
            field="hosts",
        )
    servers = getattr(parse(strategy)[0].strategy, "shards", 0)
    chance = random.Random(seed)
    order = [kind for kind in dict.fromkeys(["none:host", *kinds]) if servers or kind != "kill:server"] * repeats
    chance.shuffle(order)
    rounds = round(every * (len(order) + 1) / max(pause, 0.01))
    work = LedgerWork()
    work.step_rows, work.rows, work.pause = workers, workers * rounds, pause
    with Hosts(hosts, rate) as net, HostsCluster(net) as cluster:
        job = RunningJob(work, strategy, workers, cluster, timeout)
        if not job.wait(lambda: job.round >= _BEYOND, _START_SECONDS):
            raise ClusterError(f"the job completed no round within {_START_SECONDS:g} s", strategy=strategy)
        done = _inject_all(job, order, net, cluster, (every, rate), chance)
        job.wait(lambda: False, every * (len(order) + 2) + _GO_ON_SECONDS)
        if job.result is None:
            raise ClusterError("the job did not end", strategy=strategy)
        return _summarize(job, done, FaultSetting(strategy, hosts, workers, rate, seed, every))


@dataclass(frozen=True, slots=True)
class FaultSetting:
    """What a run was made with."""

    strategy: str
    hosts: int
    workers: int
    rate: str
    seed: int
    every: float


def _inject_all(
    job: RunningJob,
    order: Sequence[str],
    net: Hosts,
    cluster: HostsCluster,
    pace: tuple[float, str],
    chance: random.Random,
) -> list[InjectedFault]:
    every, rate = pace
    done = list[InjectedFault]()
    begun = time.monotonic()
    for number, kind in enumerate(order):
        due = begun + every * (number + 0.5)
        job.wait(lambda due=due: time.monotonic() >= due, every + _GO_ON_SECONDS)  # type: ignore[misc]
        if job.over:
            break
        role, seconds = FAULTS[kind]
        planned = PlannedFault(0.0, FaultOn(kind.partition(":")[0], role), chance.randrange(1000), seconds)
        at, reached = time.time(), job.round
        with _fault(planned, job, net, cluster, rate) as words:
            job.wait(lambda: time.time() >= at + seconds, seconds + 1.0)  # noqa: B023  called at once
        done.append(InjectedFault(planned, at, time.time(), words))
        beyond = min(reached + _BEYOND, int(job.progress.get("rounds") or 0))
        if not job.wait(lambda: job.round >= beyond, _GO_ON_SECONDS) and not job.over:  # noqa: B023  called at once
            raise ClusterError(f"the job did not go on within {_GO_ON_SECONDS:g} s after {kind}", fault=kind)
    return done


@contextlib.contextmanager
def _fault(planned: PlannedFault, job: RunningJob, net: Hosts, cluster: HostsCluster, rate: str) -> Iterator[str]:
    """Inject a fault for the time of the block."""
    if planned.fault.role is not FaultRole.MACHINE:
        target = job.process(planned.fault.role, planned.number)
        if target is None:
            raise ClusterError(f"{planned.target} is not there", fault=str(planned.fault))
        with injected(planned, target, [], ChaosMeans()) as words:
            yield words
        return
    host = planned.number % len(net.addresses)
    match planned.fault.kind:
        case "none":
            yield "nothing"
        case "lose":
            yield f"{len(cluster.lose_host(host))} processes of host {host} are killed"
            cluster.return_host(host)
        case "cut":
            net.cut(host)
            try:
                yield f"the link of host {host} is cut"
            finally:
                net.join(host)
        case _:
            net.shape(host, _SLOW_RATE)
            try:
                yield f"the link of host {host} has {_SLOW_RATE}"
            finally:
                net.shape(host, rate)


def _summarize(job: RunningJob, done: list[InjectedFault], setting: FaultSetting) -> FaultRun:
    result = job.result
    assert result is not None
    table = result.history
    names = ("round", "generation", "time")
    points = [{"kind": "round", **row} for row in table.select(names).to_pylist() if row["generation"] is not None]
    ended = max([point["time"] for point in points], default=job.begun)
    rounds = max(point["round"] for point in points) + 1
    history = JobHistory("bench", "SUCCEEDED", result.events, points, None, rounds, job.begun, ended)
    found, usual = costs(history, done), usual_round(history)
    seconds = ended - points[0]["time"]
    slots = result.snapshot.loaded().params
    return FaultRun(
        setting.strategy,
        setting.hosts,
        setting.workers,
        setting.rate,
        setting.seed,
        len(done),
        setting.every,
        rounds,
        usual,
        seconds,
        min(1.0, rounds * usual / seconds) if seconds else 1.0,
        bool(torch.equal(slots, torch.ones_like(slots))),
        sum(event["kind"] == "restarted" for event in result.events),
        _make_rows(setting.strategy, found, usual),
    )


def _make_rows(strategy: str, found: Sequence[FaultCost], usual: float) -> list[FaultCostRow]:
    groups: dict[str, list[FaultCost]] = {}
    for cost in found:
        on = cost.fault.planned.fault
        label = f"{on.kind}:host" if on.role is FaultRole.MACHINE else str(on)
        groups.setdefault(label, []).append(cost)
    rows = []
    for label, group in sorted(groups.items()):
        seconds = [cost.recovery for cost in group if cost.recovery is not None]
        lost = sum(cost.lost for cost in group) / len(group)
        repeated = sum(cost.repeated for cost in group) / len(group)
        rows.append(
            FaultCostRow(
                strategy,
                label,
                len(seconds),
                quantile(seconds, 0.5),
                quantile(seconds, 0.95),
                max(seconds),
                repeated,
                lost,
                max(0.0, 1 - lost / OFTEN),
                max(0.0, 1 - lost / SELDOM),
            )
        )
    return rows
