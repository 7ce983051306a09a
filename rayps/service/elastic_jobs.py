"""The facts of elastic jobs: from a job's row and its driver's progress to those that `elastic_plan.allot` needs."""

from __future__ import annotations

from dataclasses import dataclass

from rayps.cluster.local import Bundle
from rayps.core.job.job_status import Status
from rayps.core.job.records import ProgressRecord
from rayps.service.elastic_plan import ElasticJob, add_up_reserved
from rayps.service.plan import find_cores, needs
from rayps.service.store import JobRecord
from rayps.service.waiting import with_cores


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The numbers of workers of an elastic job, as answers show them."""

    least: int
    most: int
    now: int  # its workers now, also those that start or leave; 0 before it has started
    allowed: int  # the number that it may have now
    requested: int | None  # the most workers that the user wants now; None: `most`


def count_workers(record: JobRecord, progress: ProgressRecord | None) -> WorkerCounts | None:
    """Return the numbers of workers of a job, or None if its number is fixed. `progress`: what its driver wrote."""
    spec = record.spec
    if spec.elastic is None:
        return None
    started = record.status is not Status.QUEUED
    now = len((progress or {}).get("workers") or ()) if started else 0
    allowed = spec.workers if record.allowed is None else record.allowed
    return WorkerCounts(spec.workers, spec.elastic.most, now, allowed, record.scale_to)


def describe_elastic_job(
    record: JobRecord, progress: ProgressRecord | None, now: float, *, reachable: bool, cores: float | None = None
) -> ElasticJob | None:
    """Return the facts of a started job, or None if its number of workers is fixed.

    `progress`: what the driver of the current attempt wrote. `now` is in seconds since the epoch. `reachable`: whether
    the driver can be called. `cores`: see `rayps.service.waiting.with_cores`.
    """
    counts, elastic = count_workers(record, progress), record.spec.elastic
    if counts is None or elastic is None:
        return None
    steady = reachable and record.stop_requested_at is None
    return ElasticJob(
        record.id,
        record.name,
        counts.least,
        counts.most,
        with_cores(each_worker(record), find_cores(record.spec, cores)),
        max(counts.least, counts.now),  # a job that starts reserves its least number
        counts.allowed,
        counts.requested,
        (progress or {}).get("wanted"),
        settled=float("inf") if record.allowed_at is None else max(0.0, now - record.allowed_at),
        cooldown=elastic.cooldown,
        grows=steady and record.status is Status.RUNNING,
        gives=steady,
    )


def each_worker(record: JobRecord) -> Bundle:
    """Return what one more worker of a job reserves."""
    return {kind: record.spec.resources.get(kind, 0.0) for kind in ("cpu", "gpu")}


def find_job_needs(record: JobRecord, job: ElasticJob | None, cores: float | None = None) -> tuple[Bundle, Bundle]:
    """Return what a job reserves or may reserve, and the part of it that it has not taken yet, if it is running.

    `job`: its facts if it is elastic and has started. `cores`: see `rayps.service.waiting.with_cores`.
    """
    least = with_cores(needs(record.spec), find_cores(record.spec, cores))
    if job is None:
        return least, {}
    held = add_up_reserved(least, job.each, max(job.members, job.allowed) - job.least)
    return held, add_up_reserved({}, job.each, max(0, job.allowed - job.members))
