"""Run chaos on a job: of a running service, or of a service that this run starts; return the report."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rayps_client.errors import CheckpointError, ClusterError, ConfigError, ServiceError
from rayps_client.values import JsonObject

from rayps.core.job.records import read_json
from rayps.service.client import Client, Job
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec
from rayps_chaos.campaign import ChaosSite, carry_out, kill_newborn
from rayps_chaos.compare_results import (
    check_slots,
    compare_metrics,
    compare_parameters,
    final_parameters,
    promises_bits,
)
from rayps_chaos.expected_processes import expected_facts, possible_facts
from rayps_chaos.faults import NEWBORN, FaultOn, Scope, hits_newborn
from rayps_chaos.history import HistoryBounds, HistoryCheck, JobHistory, check_history, read_history, read_lines
from rayps_chaos.inject import ChaosMeans, cannot_inject
from rayps_chaos.own_service import ChaosService
from rayps_chaos.plan import (
    USUAL_FAULTS,
    ChaosFacts,
    ChaosPlan,
    check_seconds,
    draw_newborn_plan,
    draw_plan,
    too_many_failures,
)
from rayps_chaos.report import ChaosReport, make_report
from rayps_chaos.targets import JobProcesses, NewbornProcesses

LEDGER = "rayps_chaos.ledger_work:LedgerWork"
_START_SECONDS = 300.0  # seconds in which a job must start to train
_POLL_SECONDS = 0.2
_TELL_SECONDS = 30.0  # seconds between two lines about a wait for a job's end


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What a run of chaos does. Times are in seconds; `seconds` is None for most of the time of the run without faults.

    `deadline`: after the last fault, the time in which the job must end. `longest_gap`: between two points of the job.

    Raises:
        ConfigError: a time is not finite and above 0.
    """

    seed: int
    wanted: tuple[FaultOn, ...]
    allowed: frozenset[Scope]
    every: float = 15.0
    seconds: float | None = None
    deadline: float = 1800.0
    longest_gap: float = 300.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        check_seconds("--every", self.every)
        if self.seconds is not None:
            check_seconds("--for", self.seconds)
        check_seconds("--deadline", self.deadline)
        check_seconds("--longest-gap", self.longest_gap)

    @property
    def newborn(self) -> bool:
        """Whether processes are killed in their first seconds, from the submission of the job on."""
        return hits_newborn(self.wanted)

    def draw(self, facts: ChaosFacts, max_failures: int) -> ChaosPlan:
        """Return the plan for a job that survives `max_failures`.

        Raises ConfigError if no wanted fault can be injected, or none fits into the time.
        """
        if self.newborn:
            return draw_newborn_plan(self.seed, self.wanted, facts, self.allowed, max_failures)
        plan = draw_plan(self.seed, self.wanted, facts, self.allowed, (self.every, self.seconds))
        if not plan.faults:
            raise ConfigError(
                f"no fault fits into --for {self.seconds:g} with --every {self.every:g}: give a longer --for, or a "
                "shorter --every",
                field="for",
            )
        return plan


class JobUnderChaos:
    """One job of a service on this machine: its processes, its records, and the service's answers."""

    def __init__(self, client: Client, job: Job, state_dir: Path) -> None:
        self._client, self.job = client, job
        self.processes = JobProcesses(state_dir, job.id)
        self.begun = time.time()

    @property
    def folder(self) -> Path:
        """The job's folder."""
        return self.processes.folder

    @property
    def over(self) -> bool:
        """Whether the job has ended, as its folder says: the service may be away."""
        return (self.folder / "outcome.json").exists()

    def wait_training(self, seconds: float = _START_SECONDS) -> None:
        """Wait until the job has completed a round and names its workers, or has ended.

        Raises ClusterError if that takes too long.
        """
        deadline = time.monotonic() + seconds
        while not self.over and not self._trains():
            if time.monotonic() > deadline:
                raise ClusterError(f"job {self.job.id} did not complete a round within {seconds:g} s", job=self.job.id)
            time.sleep(_POLL_SECONDS)

    def _trains(self) -> bool:
        """Return whether the folder has a round and the workers' processes: these two are not written at once."""
        named = (read_json(self.folder / "progress.json") or {}).get("workers")
        return bool(named) and any(point["kind"] == "round" for point in read_lines(self.folder / "metrics.jsonl"))

    def wait_end(self, seconds: float, tell: Callable[[str], None]) -> bool:
        """Wait until the service reports the job's end; return whether it did within `seconds`.

        `tell` is called with what is waited for, now and every `_TELL_SECONDS`.
        """
        begun = time.monotonic()
        while (left := begun + seconds - time.monotonic()) > 0:
            tell(f"waiting for the end of job {self.job.id}, {self.job.data['status']}, for at most {left:.0f} s")
            try:
                self.job.wait(timeout=min(left, _TELL_SECONDS))
                return True
            except TimeoutError:
                continue
            except ServiceError:
                return False
        return False

    def facts(self, means: ChaosMeans) -> ChaosFacts:
        """Return what there is to disturb."""
        processes = self.processes
        return ChaosFacts(processes.counts(), processes.shared_group, means.cannot())

    def history(self) -> JobHistory:
        """Read what the job has left so far."""
        try:
            row: Mapping[str, object] | None = self.job.refresh().data
            events = list(self.job.events())
        except ServiceError:
            row, events = None, []
        outcome = read_json(self.folder / "outcome.json") or {}
        ended = float(outcome.get("finished_at") or time.time())
        return read_history(self.folder, row, events, begun=self.begun, ended=max(ended, self.begun))


def chaos_on_job(
    client: Client, job_id: str, state_dir: Path, options: ChaosOptions, tell: Callable[[str], None]
) -> ChaosReport | ChaosPlan:
    """Inject faults into a job of a running service on this machine. With `dry_run`, return only the plan.

    Raises:
        NotFound: the service has no such job.
        ConfigError: the job has ended, runs elsewhere, or no wanted fault can be injected.
    """
    job = client.job(job_id)
    if job.status.terminal:
        raise ConfigError(f"job {job.id} has ended already ({job.status}): give a job that runs", field="job")
    under = JobUnderChaos(client, job, state_dir)
    if not under.folder.is_dir():
        raise ConfigError(
            f"the folder of job {job.id} is not in {state_dir}: run the command on the service's machine, and give the "
            "service's --state-dir",
            field="state_dir",
        )
    under.wait_training()
    site = ChaosSite(under.processes, ChaosMeans(), tell, lambda: under.over)
    return _campaign(under, site, options, None, under.facts(site.means))


def chaos_on_file(fields: JsonObject, options: ChaosOptions, tell: Callable[[str], None]) -> ChaosReport | ChaosPlan:
    """Start a service, run a job once without faults and once with faults, and compare.

    `fields`: the job's specification, as `rayps.service.job_file.read` returns it. With `dry_run`, nothing is started,
    and only the plan for the processes that the job will have is returned.

    Raises:
        ConfigError: the service refused the job, or no wanted fault can be injected.
        ClusterError: the service, or the job without faults, did not run.
    """
    spec = JobSpec.from_dict({key: value for key, value in fields.items() if value is not None})
    strategies = [phase.strategy for phase in parse(spec.strategy, spec.working_dir or Path.cwd())]
    facts = expected_facts(spec, strategies, cannot_inject(own_service=True))
    if options.dry_run:
        plan = options.draw(facts, spec.max_failures)
        if options.seconds is None and not options.newborn:
            tell(
                "faults are injected for about as long as the job without faults takes, unless --for is given: the "
                f"first {USUAL_FAULTS} are planned here"
            )
        tell_plan(plan, facts, spec.max_failures, tell)
        return plan
    options.draw(
        possible_facts(spec, facts), spec.max_failures
    )  # refuses faults that the job can never have, before anything starts
    with ChaosService(cpus=max(4, 2 * spec.workers)) as service:
        service.start()
        tell(f"a service runs in {service.state}")
        client = service.client()
        law = JobUnderChaos(client, client.submit(**dict(fields)), service.state)  # type: ignore[arg-type]
        tell(f"job {law.job.id} runs without faults")
        if not law.wait_end(_START_SECONDS + options.deadline, tell) or law.job.data["status"] != "SUCCEEDED":
            reason = law.job.data.get("reason") or law.job.data["status"]
            raise ClusterError(f"the job without faults did not succeed: {reason}", job=law.job.id)
        trained = law.history()
        if options.seconds is None and not options.newborn:
            times = [point["time"] for point in trained.points]
            options = replace(options, seconds=max(0.8 * (max(times) - min(times)), options.every))
        under = JobUnderChaos(client, client.submit(**dict(fields)), service.state)  # type: ignore[arg-type]
        tell(f"job {under.job.id} runs with faults")
        return chaos_from_submission(under, service, options, law, facts, tell)


def chaos_from_submission(
    under: JobUnderChaos,
    service: ChaosService,
    options: ChaosOptions,
    law: JobUnderChaos | None,
    expected: ChaosFacts,
    tell: Callable[[str], None],
) -> ChaosReport | ChaosPlan:
    """Inject faults into a job that was just submitted to `service`, and return the report.

    Faults on newborn processes begin at once, with the plan for the `expected` processes. Others begin when the job
    trains. `law`: the same job without faults; None if there was none.
    """
    facts = expected
    if not options.newborn:
        under.wait_training()
        facts = under.facts(service.means)
    site = ChaosSite(under.processes, service.means, tell, lambda: under.over, service.start)
    return _campaign(under, site, options, law, facts)


def _campaign(
    under: JobUnderChaos, site: ChaosSite, options: ChaosOptions, law: JobUnderChaos | None, facts: ChaosFacts
) -> ChaosReport | ChaosPlan:
    max_failures = int(under.job.data["spec"]["max_failures"])
    plan = options.draw(facts, max_failures)
    tell_plan(plan, facts, max_failures, site.tell)
    if options.dry_run:
        return plan
    if options.newborn:
        newborn = NewbornProcesses(under.processes.state_dir, under.begun)
        done = kill_newborn(plan.faults, site, newborn, _START_SECONDS)
    else:
        done = carry_out(plan.faults, site)
    site.revive()
    ended = under.wait_end(options.deadline, site.tell)
    history = under.history()
    whole = plan.faults[-1].at if options.seconds is None else options.seconds
    bounds = HistoryBounds(whole + _START_SECONDS + options.deadline, options.longest_gap, frozenset([under.job.id]))
    checks = check_history(history, bounds)
    if ended and history.status == "SUCCEEDED":
        checks += check_results(under, law)
    return make_report(
        history,
        done,
        checks,
        seed=options.seed,
        strategy=str(under.job.data["spec"]["strategy"]),
        left_out=[f"{fault}: {reason}" for fault, reason in plan.left_out.items()],
        without_faults=None if law is None else law.history(),
    )


def tell_plan(plan: ChaosPlan, facts: ChaosFacts, max_failures: int, tell: Callable[[str], None]) -> None:
    """Tell which faults are left out and why, what is planned, and whether the job survives so many failures."""
    by_reason = defaultdict[str, list[str]](list)
    for fault, reason in plan.left_out.items():
        by_reason[reason].append(str(fault))
    for reason, faults in by_reason.items():
        tell(f"not injected, because {reason}: {', '.join(faults)}")
    for planned in plan.faults:
        when = "at an age of" if planned.fault.kind == NEWBORN else "at"
        tell(f"planned: {when} {planned.at:7.1f} s {planned.words}")
    if (warning := too_many_failures(plan, facts, max_failures)) is not None:
        tell(warning)


def check_results(under: JobUnderChaos, law: JobUnderChaos | None) -> list[HistoryCheck]:
    """Compare the job's result with that of the run without faults, and check the slots of the ledger's workload."""
    spec = JobSpec.from_dict({**under.job.data["spec"], "env": None})  # of variables only the names are known
    place, found = under.job.data.get("checkpoint"), list[HistoryCheck]()
    try:
        if spec.workload == LEDGER and place is not None:
            found.append(check_slots(final_parameters(Path(place)), spec.epochs or 1))
        if law is not None and promises_bits(spec):
            theirs = law.job.data.get("checkpoint")
            if place is None or theirs is None:
                return [*found, HistoryCheck("result of the law", False, "a run has saved no checkpoint")]
            found.append(compare_parameters(final_parameters(Path(place)), final_parameters(Path(theirs))))
        elif law is not None:
            found.append(compare_metrics(under.job.data.get("metrics"), law.job.data.get("metrics")))
    except CheckpointError as error:
        found.append(HistoryCheck("result of the law", False, error.message.splitlines()[0]))
    return found
