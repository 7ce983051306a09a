"""Run jobs for hours on a service of its own, several at a time, under faults; watch what the service and Ray use.

Each job's workload is the ledger (`rayps_chaos.ledger_work`), under another strategy than the job before. Some
are elastic, and grow and shrink with the room that the others leave. When a job has ended, its records and its result
are checked, the job is deleted, and the next one is submitted.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rayps_client.errors import ClusterError, ConfigError, ServiceError
from rayps_client.values import JsonObject

from rayps.core.job.records import read_json
from rayps.service import processes
from rayps.service.local_ray.ray_daemon import read_record
from rayps_chaos.campaign import ChaosSite, carry_out
from rayps_chaos.curves import (
    CurveVerdict,
    UseSample,
    judge,
    own_shared_memory,
    sample_place,
    sample_process,
    tree_of,
    write_samples,
)
from rayps_chaos.draw_curves import svg
from rayps_chaos.faults import FaultOn, FaultRole, Scope, hits_newborn
from rayps_chaos.history import HistoryBounds, HistoryCheck, JobHistory, check_history
from rayps_chaos.measure_recovery import InjectedFault, KindCost, by_kind, costs
from rayps_chaos.own_service import ChaosService
from rayps_chaos.plan import ChaosFacts, check_seconds, draw_plan
from rayps_chaos.run import LEDGER, JobUnderChaos, check_results
from rayps_chaos.targets import ChaosProcess


@dataclass(frozen=True, slots=True)
class SoakKind:
    """A kind of job of a soak. `least` and `most` workers; the job is elastic if they differ."""

    strategy: JsonObject
    least: int = 2
    most: int = 2

    def fields(self, number: int, seconds: float) -> JsonObject:
        """Return the fields of the job with this number, which takes `seconds` with two workers and without faults."""
        elastic, in_step = self.most > self.least, self.strategy.get("staleness", 0) == 0
        rows = math.ceil(2 * seconds / _PAUSE / _STEP_ROWS) * _STEP_ROWS
        step_rows = _STEP_ROWS if elastic and in_step else self.least
        params = {"rows": rows, "pause": _PAUSE, "step_rows": step_rows, "steps": rows // step_rows}
        return {
            "workload": LEDGER,
            "working_dir": None,
            "strategy": dict(self.strategy),
            "workers": [self.least, self.most] if elastic else self.least,
            "elastic": {"global_batch": step_rows} if elastic and in_step else {"cooldown": 15.0} if elastic else None,
            "epochs": 1,
            "checkpoint_every": 40,
            "max_failures": 1000,
            "seed": number,
            "params": {**params, "signs": elastic and not in_step},
        }


_PAUSE = 0.05  # seconds of each row
_STEP_ROWS = 6  # the rows of a round of an elastic job in step: a multiple of each number of its workers
_ASYNCHRONOUS: JsonObject = {"name": "parameter_server", "staleness": None, "shards": 2}
_BOUNDED: JsonObject = {"name": "parameter_server", "staleness": 2, "shards": 2}
KINDS = (
    SoakKind({"name": "all_reduce"}),
    SoakKind(_ASYNCHRONOUS, 1, 3),
    SoakKind({"name": "all_reduce"}, 1, 3),
    SoakKind(_BOUNDED, 1, 3),
    SoakKind(_ASYNCHRONOUS),
    SoakKind({"name": "parameter_server", "staleness": 0, "shards": 2}),
    SoakKind(_BOUNDED),
)
_WORKERS = 2  # of a job, usually
_LOOK_SECONDS = 1.0
_PATIENCE = 1200.0  # seconds without a new round after which a job counts as hanging
_FEWEST_SAMPLES, _MOST_SECONDS = 400, 30.0  # samples of a whole soak, and the most seconds between two
_SERVICE_ROLES = (FaultRole.SERVICE, FaultRole.RAYLET, FaultRole.GCS)
_COMMON_ROLES = (*_SERVICE_ROLES, FaultRole.MACHINE)


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """What a soak does. Times are in seconds.

    `every` is between two faults on jobs, `every_service` between two faults on the service and on Ray.

    Raises:
        ConfigError: a time is not finite and above 0.
    """

    seconds: float
    seed: int
    wanted: tuple[FaultOn, ...]
    jobs: int = 4
    job_seconds: float = 90.0  # of a job without faults
    every: float = 30.0
    every_service: float = 3600.0
    out: Path = Path("soak")

    def __post_init__(self) -> None:
        check_seconds("--soak", self.seconds)
        check_seconds("--every", self.every)
        check_seconds("--every-service", self.every_service)
        if hits_newborn(self.wanted):
            raise ConfigError("--soak has no newborn faults: give --faults newborn with a job file", field="faults")


@dataclass(slots=True)
class SoakReport:
    """What a soak found. `failed`: the job, the strategy and the check of each check that did not hold."""

    seconds: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)  # number of jobs by status
    faults: list[InjectedFault] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    kinds: list[KindCost] = field(default_factory=list)
    curves: list[CurveVerdict] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether every check of every job holds, and every curve is flat."""
        return not self.failed and all(curve.good for curve in self.curves) and set(self.ended) <= {"SUCCEEDED"}

    def to_dict(self) -> JsonObject:
        """Return the report as JSON-ready data."""
        return {
            "good": self.good,
            "seconds": self.seconds,
            "ended": dict(self.ended),
            "faults": dict(Counter(str(f.planned.fault) for f in self.faults if f.skipped is None)),
            "skipped": dict(Counter(str(f.planned.fault) for f in self.faults if f.skipped is not None)),
            "failed": list(self.failed),
            "kinds": [asdict(kind) for kind in self.kinds],
            "curves": [asdict(curve) | {"good": curve.good} for curve in self.curves],
        }


class _RunningJobs:
    """The jobs that run now, as one set of processes with numbers of their own; found by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[JobUnderChaos] = []
        self.job_of: dict[int, str] = {}  # from the id of a job's process to the job's id

    def set(self, jobs: Sequence[JobUnderChaos]) -> None:
        """Replace the jobs."""
        with self._lock:
            self._jobs = list(jobs)

    def find(self, role: FaultRole) -> list[ChaosProcess]:
        """Return the processes of a role of all jobs; those of the service and of Ray once."""
        with self._lock:
            jobs = list(self._jobs)
        found: dict[int, ChaosProcess] = {}
        for job in jobs:
            mine = {each.pid: each for each in job.processes.find(role)}
            found |= mine
            if role not in _COMMON_ROLES:
                self.job_of |= dict.fromkeys(mine, job.job.id)
        return [ChaosProcess(role, number, each.pid, each.started) for number, each in enumerate(found.values())]


class _UseRecorder:
    """Samples what the service, Ray and their places use, in a thread, until `close`."""

    def __init__(self, service: ChaosService, pause: float) -> None:
        self.samples: list[UseSample] = []
        self._service, self._pause, self._begun = service, pause, time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-samples", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            self.sample()

    def sample(self) -> None:
        """Add a sample of each process and place."""
        at, state = time.monotonic() - self._begun, self._service.state
        record = read_record(state)
        named = {} if record is None or not record.alive else tree_of(record.pid)
        pid = (read_json(state / "service.json") or {}).get("pid")
        if pid is not None:
            named["service"] = pid
        self.samples += filter(None, (sample_process(at, name, number) for name, number in named.items()))
        self.samples.append(sample_place(at, "state directory", _files(state)))
        if record is not None:
            below = processes.list_descendants(record.pid) if record.alive else []
            self.samples.append(sample_place(at, "Ray's folder", _files(Path(record.temp_dir))))
            self.samples.append(sample_place(at, "shared memory", own_shared_memory(below)))

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names)


def soak(options: SoakOptions, tell: Callable[[str], None]) -> SoakReport:
    """Run jobs under faults for `options.seconds`; write curves into the folder `options.out`; return the report.

    Raises:
        ConfigError: the folder exists and has files, or no wanted fault can be injected.
        ClusterError: the service did not start.
    """
    out = options.out
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} has files already: give a new folder with --out", field="out")
    out.mkdir(parents=True, exist_ok=True)
    report, begun = SoakReport(), time.monotonic()
    with ChaosService(cpus=options.jobs * _WORKERS) as service:
        service.start()
        recorder = _UseRecorder(service, min(_MOST_SECONDS, options.seconds / _FEWEST_SAMPLES))
        try:
            _run_jobs(service, options, report, tell)
        finally:
            recorder.close()
            report.seconds = time.monotonic() - begun
            report.curves = judge(recorder.samples)
            write_samples(out / "curves.csv", recorder.samples)
            title = f"{report.seconds / 60:.0f} minutes, {sum(report.ended.values())} jobs, {len(report.faults)} faults"
            (out / "curves.svg").write_text(svg(recorder.samples, title), encoding="utf-8")
    return report


def _run_jobs(service: ChaosService, options: SoakOptions, report: SoakReport, tell: Callable[[str], None]) -> None:
    running, there, over = list[JobUnderChaos](), _RunningJobs(), threading.Event()
    turn, deadline = itertools.count(), time.monotonic() + options.seconds
    client = service.client()
    site = ChaosSite(there, service.means, tell, over.is_set, service.start)
    threads = [
        threading.Thread(target=_inject, args=(group, pace, options, site, report), daemon=True, name="soak-faults")
        for group, pace in (
            ([fault for fault in options.wanted if fault.role not in _SERVICE_ROLES], options.every),
            ([fault for fault in options.wanted if fault.role in _SERVICE_ROLES], options.every_service),
        )
        if group
    ]
    costs_found = []
    try:
        while time.monotonic() < deadline or running:
            while len(running) < options.jobs and time.monotonic() < deadline:
                job = client.submit(**_fields(next(turn), options))  # type: ignore[arg-type]
                running.append(JobUnderChaos(client, job, service.state))
                there.set(running)
            if not any(thread.ident for thread in threads):
                running[0].wait_training()
                for thread in threads:
                    thread.start()
            time.sleep(_LOOK_SECONDS)
            for each in [each for each in running if _has_ended(each)]:
                running.remove(each)
                there.set(running)
                history = each.history()
                costs_found += costs(history, faults_on(history, report.faults, there.job_of))
                _check(each, history, report, tell)
            if time.monotonic() >= deadline:
                over.set()
            if time.monotonic() >= deadline + _PATIENCE:
                raise ClusterError(f"{len(running)} jobs have not ended {_PATIENCE:g} s after the last fault")
    finally:
        over.set()
        for thread in threads:
            if thread.ident:
                thread.join()
    report.kinds = by_kind(costs_found)


def _inject(wanted: Sequence[FaultOn], pace: float, options: SoakOptions, site: ChaosSite, report: SoakReport) -> None:
    counts = {role: len(site.processes.find(role)) for role in FaultRole}
    counts = {role: max(count, 1) for role, count in counts.items()}  # the next jobs may have servers
    facts = ChaosFacts(counts, cannot=site.means.cannot())
    plan = draw_plan(options.seed, wanted, facts, frozenset(Scope), (pace, options.seconds))
    for planned in plan.faults:
        site.tell(f"planned: at {planned.at:8.1f} s {planned.words}")
    carry_out(plan.faults, site, report.faults)


def _fields(number: int, options: SoakOptions) -> JsonObject:
    return KINDS[number % len(KINDS)].fields(number, options.job_seconds)


def _has_ended(job: JobUnderChaos) -> bool:
    """Return whether the service reports the job's end; False while the service does not answer."""
    try:
        return job.job.status.terminal
    except ServiceError:
        return False


def faults_on(history: JobHistory, faults: Sequence[InjectedFault], job_of: Mapping[int, str]) -> list[InjectedFault]:
    """Return the faults that hit a job while it trained: its own processes, the service, Ray, or the machine."""
    return [
        fault
        for fault in faults
        if history.begun < fault.at < history.ended and job_of.get(fault.pid, history.job) == history.job
    ]


def _check(job: JobUnderChaos, history: JobHistory, report: SoakReport, tell: Callable[[str], None]) -> None:
    """Check an ended job, and delete it."""
    bounds = HistoryBounds(float("inf"), _PATIENCE, frozenset([job.job.id]))
    checks: list[HistoryCheck] = check_history(history, bounds)
    if history.status == "SUCCEEDED":
        checks += check_results(job, None)
    report.ended[str(history.status)] += 1
    wrong = [check for check in checks if not check.good]
    spec = job.job.data["spec"]
    strategy = f"{spec['strategy']}{', elastic' if spec.get('elastic') else ''}"
    report.failed += [f"{job.job.id} {strategy}: {check.name}: {check.words}" for check in wrong]
    tell(
        f"job {job.job.id} ({strategy}) ended {history.status} after {history.ended - history.begun:.0f} s: "
        + ("; ".join(f"{check.name}: {check.words}" for check in wrong) or "all checks hold")
    )
    if not wrong:
        job.job.delete()
