"""Decide what the scheduler does next: a pure function from facts to actions. No clock, no I/O, no state.

The function is level-triggered: the same facts give the same actions. A service that was killed at any moment
therefore continues where it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rayps.core.job.job_status import Status, may_move
from rayps.core.job.records import OutcomeRecord, ProgressRecord
from rayps.core.strategy.strategy import Phase
from rayps.strategies.job import JobSpec, gpus_of_servers

Bundle = dict[str, float]

UNSEEN_SECONDS = 30.0  # seconds without a list of the drivers after which their jobs become UNKNOWN
STOP_SECONDS = 60.0  # seconds in which a driver must stop after a request; then it is killed
STALL_SECONDS = 900.0  # seconds that a STARTING or RECOVERING job may show no progress; `Settings.stall` sets it


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Why a job cannot continue: reasons outside of its driver, in its server group or its remote clients."""

    group: str | None = None  # why the server group cannot serve the job yet; None if it can, or if there is no group
    group_ended: str | None = None  # why the server group was stopped and cannot serve the job any more
    clients: str | None = None  # why the job waits for federated clients outside of the cluster; None if it does not


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that has not ended: the facts in its row of the store and in its folder."""

    id: str
    name: str = "job"
    status: Status = Status.QUEUED
    reason: str | None = None
    needs: Bundle = field(default_factory=lambda: {"cpu": 1.0})  # what it reserves, or may reserve once it has started
    coming: Bundle = field(default_factory=dict)  # the part of it that a running job has not taken yet
    attempt: int = 0
    failures: int = 0  # losses of the job's driver or of an actor before this attempt
    max_failures: int = 3
    interrupted: bool = False  # the job's driver ended because the service stopped its own Ray on purpose
    stopping: float | None = None  # seconds since a stop was requested
    outcome: OutcomeRecord | None = None  # the content of outcome.json
    progress: ProgressRecord | None = None  # the content of progress.json, if this attempt wrote it
    crash: str | None = None  # why the driver ended without an outcome, or was killed
    moved: str | None = None  # why the driver has left its process on purpose: this is no failure
    launched: bool = True  # the call that starts this attempt's driver has returned, or the driver has begun
    silent: float = 0.0  # seconds in which a STARTING or RECOVERING job's folder showed no progress
    deadline: float = STALL_SECONDS  # the driver is killed when `silent` is greater
    outside: Dependencies = field(default_factory=Dependencies)
    version_conflict: str | None = None  # why no method of the driver may be called: rayps has another version


@dataclass(frozen=True, slots=True)
class Start:
    """The action: start the driver of a job. `reason` is given if an earlier driver was lost."""

    job: str
    attempt: int
    failures: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RequestStop:
    """The action: request a driver to stop."""

    job: str


@dataclass(frozen=True, slots=True)
class Kill:
    """The action: kill a driver that does not answer, or that has ended its run without an outcome."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetStatus:
    """The action: record a new status of a job that has not ended."""

    job: str
    status: Status
    reason: str | None = None
    has_event: bool = False  # the driver has written an event about the status, so the store writes none


@dataclass(frozen=True, slots=True)
class SetReason:
    """The action: record why a job waits."""

    job: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class EndJob:
    """The action: record how a job ended."""

    job: str
    status: Status
    message: str
    metrics: dict[str, float] | None = None
    checkpoint: str | None = None
    finished_at: float | None = None
    has_event: bool = False  # the driver has written an event about the end, so the store writes none


Action = Start | RequestStop | Kill | SetStatus | SetReason | EndJob


def find_cores(spec: JobSpec, cores: float | None) -> float | None:
    """Return the `cores` into which a job's workers must fit beside other jobs, or None if it waits for none.

    A job that branches from another one runs beside it in any case.
    """
    return None if spec.branch is not None else cores


def needs(spec: JobSpec, phases: Sequence[Phase] | None = None) -> Bundle:
    """Return the resources that a running job reserves for its (least) workers, and for servers on GPUs.

    Its driver, and servers on CPUs, reserve none. Servers of a user's own strategy are not counted, because its file is
    not read here. `phases`: those of its strategy, if it has been parsed.
    """
    found = {kind: spec.workers * spec.resources.get(kind, 0.0) for kind in ("cpu", "gpu")}
    return found | {"gpu": found["gpu"] + gpus_of_servers(spec, phases)}


def plan(
    jobs: Sequence[OpenJob],
    drivers: Collection[str] | None,
    free: Bundle | None,
    total: Bundle | None,
    *,
    unseen: float = 0.0,
    why: str = "Ray is starting",
) -> list[Action]:
    """Decide what the scheduler does next; return the actions.

    `jobs`: the jobs that have not ended, oldest first. `drivers`: the ids of the jobs whose driver is alive; None if
    Ray has not listed the drivers for `unseen` seconds, for the reason `why`. `free`, `total`: the cluster's resources.
    Jobs start first in, first out: no job overtakes a large job that waits for resources. Jobs overtake only a job that
    is larger than the whole cluster, or whose server group is not ready.
    """
    actions: list[Action] = []
    for job in jobs:
        if job.outside.group_ended is not None and job.outcome is None:
            actions += _end_by_force(job, job.outside.group_ended, drivers)
        elif job.status is not Status.QUEUED:
            actions += _plan_running(job, drivers, unseen, why)
    return actions + _queue([job for job in jobs if job.outside.group_ended is None], drivers, free, total, why)


def _end_by_force(job: OpenJob, why: str, drivers: Collection[str] | None) -> list[Action]:
    kill: list[Action] = [Kill(job.id, why)] if drivers is not None and job.id in drivers else []
    return [*kill, EndJob(job.id, Status.FAILED if job.stopping is None else Status.STOPPED, why)]


def _plan_running(job: OpenJob, drivers: Collection[str] | None, unseen: float, why: str) -> list[Action]:
    if job.outcome is not None:
        return [_end_by_outcome(job, job.outcome)]
    if drivers is None:
        return _plan_unseen(job, unseen, why)
    if job.id not in drivers:
        # without its server group, whose manager may be restarting too, a new driver would fail
        return (
            [_end_lost(job)] if job.outside.group is None or job.stopping is not None else _wait(job, job.outside.group)
        )
    if job.crash is not None:
        return [Kill(job.id, job.crash)]
    if job.stopping is not None:
        return _plan_stopping(job, job.stopping)
    if job.status in (Status.STARTING, Status.RECOVERING) and job.silent > job.deadline:
        return [
            Kill(
                job.id,
                f"no sign of progress for {job.deadline:g} s while {job.status}: the limit is RAYPS_STALL, or 5 times "
                "the job's timeout if that is longer",
            )
        ]
    return _copy_progress(job)


def _plan_unseen(job: OpenJob, unseen: float, why: str) -> list[Action]:
    if job.stopping is not None and min(unseen, job.stopping) > job.deadline:
        return [
            EndJob(
                job.id,
                Status.STOPPED,
                f"stopped: the job's driver could not be reached for {job.deadline:g} s ({why}); "
                "a driver that is found later is killed",
                _find_last_metrics(job),
            )
        ]
    if unseen < UNSEEN_SECONDS or job.status is Status.UNKNOWN:
        return []
    return [SetStatus(job.id, Status.UNKNOWN, f"the job's driver cannot be reached: {why}")]


def _end_by_outcome(job: OpenJob, outcome: OutcomeRecord) -> EndJob:
    try:
        status = Status(outcome.get("status", ""))
    except ValueError:
        status = Status.FAILED
    if not status.terminal:
        status = Status.FAILED
    return EndJob(
        job.id,
        status,
        str(outcome.get("message", "")),
        outcome.get("metrics") if status is not Status.STOPPED else _find_last_metrics(job),
        outcome.get("checkpoint"),
        outcome.get("finished_at"),
        has_event=True,
    )


def _find_last_metrics(job: OpenJob) -> dict[str, float] | None:
    """Return the last metrics of a job that was stopped, or None if it has none."""
    told = (job.outcome or {}).get("metrics") or {}
    return {**told, **((job.progress or {}).get("metrics") or {})} or None


def _end_lost(job: OpenJob) -> Action:
    if job.stopping is not None:
        why = f"was killed ({job.crash})" if job.crash else "ended without an outcome"
        return EndJob(job.id, Status.STOPPED, f"stopped: the job's driver {why}", _find_last_metrics(job))
    failures = max(job.failures, int((job.progress or {}).get("failures", 0)))
    if job.interrupted:
        return Start(job.id, job.attempt + 1, failures, "the service had stopped its own Ray: the driver is restarted")
    if job.moved is not None:
        return Start(job.id, job.attempt + 1, failures, f"the driver is started again: {job.moved}")
    if not job.launched:
        return Start(
            job.id,
            job.attempt + 1,
            failures,
            "the service was killed before the driver had started: the driver is restarted",
        )
    failures += 1
    cause = f" ({job.crash})" if job.crash else ""
    if failures <= job.max_failures:
        return Start(
            job.id,
            job.attempt + 1,
            failures,
            f"the driver was lost{cause}: it is restarted (failure {failures} of max_failures {job.max_failures})",
        )
    return EndJob(
        job.id, Status.FAILED, f"the driver was lost{cause}: failure {failures} exceeds max_failures {job.max_failures}"
    )


def _plan_stopping(job: OpenJob, seconds: float) -> list[Action]:
    if job.version_conflict is not None:
        return [Kill(job.id, job.version_conflict)]
    if seconds > STOP_SECONDS:
        return [Kill(job.id, f"the driver did not stop within {STOP_SECONDS:g} s")]
    shown: list[Action] = []
    if may_move(job.status, Status.STOPPING):
        shown = [SetStatus(job.id, Status.STOPPING, "stop requested", has_event=True)]
    return [*shown, RequestStop(job.id)] if job.launched else shown  # before that, the driver's version is unknown


def _copy_progress(job: OpenJob) -> list[Action]:
    progress = job.progress or {}
    try:
        status = Status(progress.get("status", ""))
    except ValueError:
        status = Status.STARTING if job.status is Status.UNKNOWN else job.status
    steady = status is Status.RUNNING
    wait_reason = (progress.get("server_group") or {}).get("held_back") or job.outside.clients
    reason = wait_reason if steady else str(progress["message"]) if progress.get("message") else job.reason
    if status is not job.status and may_move(job.status, status) and not status.terminal:
        return [SetStatus(job.id, status, reason, has_event=job.status is not Status.UNKNOWN)]
    return [SetReason(job.id, reason)] if reason != job.reason else []


def _queue(
    jobs: Sequence[OpenJob], drivers: Collection[str] | None, free: Bundle | None, total: Bundle | None, why: str
) -> list[Action]:
    actions: list[Action] = []
    room = _find_room(jobs, free or {}, total or {})
    head: OpenJob | None = None
    for job in jobs:
        if job.status is not Status.QUEUED:
            continue
        reason = _wait_reason(job, room, total or {}, head)
        if job.stopping is not None:
            actions.append(EndJob(job.id, Status.STOPPED, "stopped before it started"))
        elif drivers is None or total is None:
            actions += _wait(job, why)
        elif reason is None:
            actions.append(Start(job.id, job.attempt + 1))
            room = {kind: amount - job.needs.get(kind, 0.0) for kind, amount in room.items()}
        else:
            actions += _wait(job, reason)
            head = head or (job if _fits(job, total) and job.outside.group is None else None)
    return actions


def _wait(job: OpenJob, reason: str) -> list[Action]:
    return [SetReason(job.id, reason)] if reason != job.reason else []


def _find_room(jobs: Sequence[OpenJob], free: Bundle, total: Bundle) -> Bundle:
    # subtract what jobs will reserve from the free resources; the result is at most the total less the needs
    # of all started jobs, because a recovering job reserves its resources again
    room = {}
    for kind, amount in total.items():
        started = [job for job in jobs if job.status is not Status.QUEUED]
        held = sum(job.needs.get(kind, 0.0) for job in started)
        coming = sum((job.needs if job.status is Status.STARTING else job.coming).get(kind, 0.0) for job in started)
        room[kind] = max(0.0, min(amount - held, free.get(kind, 0.0) - coming))
    return room


def _wait_reason(job: OpenJob, room: Bundle, total: Bundle, head: OpenJob | None) -> str | None:
    for kind, amount in job.needs.items():
        if amount > total.get(kind, 0.0):
            return f"needs {_format_amount(amount, kind)}, the whole cluster has {total.get(kind, 0.0):g}"
    if job.outside.group is not None:
        return job.outside.group
    if head is not None:
        return f"waits behind {head.name} ({head.id}), which was submitted before"
    for kind, amount in job.needs.items():
        if amount > room.get(kind, 0.0):
            return f"needs {_format_amount(amount, kind)}, {room.get(kind, 0.0):g} free"
    return None


def _fits(job: OpenJob, total: Bundle) -> bool:
    return all(amount <= total.get(kind, 0.0) for kind, amount in job.needs.items())


def _format_amount(amount: float, kind: str) -> str:
    return f"{amount:g} {kind.upper()}{'' if amount == 1 else 's'}"
