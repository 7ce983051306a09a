"""The routes of sweeps: start the jobs of a sweep together, show and stop them, and compare jobs."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, cast

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from rayps_client.errors import ConfigError, Conflict, NotFound
from rayps_client.values import JsonObject

from rayps.service.store import JobRecord
from rayps.service.sweeps.comparison import MOST_JOBS, compare_jobs
from rayps.service.sweeps.sweep import check_name, find_bare_fields, make_sweep_jobs, name_job
from rayps.strategies.job import JobSpec
from rayps_api.job_code import JobCodes
from rayps_api.routes.routes_jobs import accepted, note_unchecked, refuse_budgets, refuse_params, write_rows
from rayps_api.schemas import ComparisonOut, JobIn, SweepIn, SweepOut, finite, problems
from rayps_api.service import RunningService, Service

router = APIRouter(prefix="/api/v1", tags=["sweeps"], responses=problems(400, 401, 403, 404, 409, 413, 422, 503, 507))


@router.post("/sweeps", status_code=201, response_model=SweepOut, responses={200: {"model": SweepOut}})
async def start_sweep(
    body: SweepIn,
    running: RunningService,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Any:
    """Start a sweep: all its jobs, or none if one is refused.

    A repeated identical request with the same Idempotency-Key returns the first sweep, with 200.
    """
    name = check_name(body.name)
    given = body.job.model_dump(exclude_unset=True)
    jobs: list[tuple[JobSpec, str]] = []
    async with JobCodes(running.code) as codes:
        for each in make_sweep_jobs(given, body.over):
            spec, base = await accepted(_job(each.fields, each.label), running, codes)
            jobs.append((spec, name_job(base, each.label)))
        await refuse_params([spec for spec, _ in jobs], codes, find_bare_fields(body.over))
    unchecked = await refuse_budgets([spec for spec, _ in jobs])
    async with running.code.lock:
        if (code := given.get("code")) is not None:
            running.code.path(code)
        records, created = await running.store.add_all(jobs, sweep=name, key=idempotency_key)
    if created:
        ids = [record.id for record in records]
        await write_rows(ids, running, body.job.origin)
        await note_unchecked(ids, unchecked, running)
    running.scheduler.wake()
    place = {"Location": f"/api/v1/sweeps/{name}"}
    return JSONResponse(_shown(name, records, running), 201 if created else 200, place)


@router.get("/sweeps/{name}", response_model=SweepOut)
async def show_sweep(name: str, running: RunningService) -> Any:
    """Show a sweep and its jobs."""
    return JSONResponse(_shown(name, await _jobs_of(name, running), running))


@router.post("/sweeps/{name}/stop", status_code=202, response_model=SweepOut)
async def stop_sweep(name: str, running: RunningService) -> Any:
    """Request all jobs of a sweep that have not ended to stop. 409 if all have ended."""
    if not await running.store.request_stops([record.id for record in await _jobs_of(name, running)]):
        raise Conflict(f"all jobs of the sweep {name!r} have ended already", status=409)
    running.scheduler.wake()
    return JSONResponse(_shown(name, await _jobs_of(name, running), running), 202)


@router.get("/comparison", response_model=ComparisonOut)
async def compare(
    running: RunningService,
    job: Annotated[list[str] | None, Query(max_length=MOST_JOBS)] = None,
    sweep: Annotated[str | None, Query(max_length=64)] = None,
    max_points: Annotated[int, Query(ge=2, le=2000)] = 200,
) -> Any:
    """Compare the jobs of a sweep, or those with these ids: the values in which they differ, metrics and curves.

    A curve of rounds has at most `max_points` points.
    """
    if (job is None) == (sweep is None):
        raise ConfigError("give the ids of jobs, or the name of one sweep", field="job")
    records = await _jobs_of(sweep, running) if sweep is not None else []
    for text in job or ():
        found = await running.record(text)
        if found.id not in [record.id for record in records]:
            records.append(found)
    series = {}
    for record in records:
        path = running.folder(record.id) / "metrics.jsonl"
        series[record.id] = await asyncio.to_thread(running.rollups.read, path, max_points)
    shown = [cast("Any", running.show(record)) for record in records]
    return JSONResponse(finite(compare_jobs(shown, cast("Any", series), time.time())))


async def _jobs_of(name: str, running: Service) -> list[JobRecord]:
    """Return the jobs of a sweep in the order of their submission. Raises NotFound if there is no such sweep."""
    records = await running.store.page(sweep=name, limit=MOST_JOBS)
    if not records:
        raise NotFound(f"there is no sweep {name[:100]!r}: `rayps get JOB` shows the sweep of a job", status=404)
    return records[::-1]


def _job(fields: JsonObject, label: str) -> JobIn:
    """Return a job of a sweep as a request of its own. Raises ConfigError if a field is invalid."""
    try:
        return JobIn.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"the job with {label}: {field}: {first['msg']}", field="over") from None


def _shown(name: str, records: list[JobRecord], running: Service) -> dict[str, Any]:
    return {"name": name, "jobs": [running.show(record) for record in records]}
