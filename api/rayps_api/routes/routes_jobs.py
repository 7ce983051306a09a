"""The routes of jobs: validate, store and show jobs. The scheduler starts and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import posixpath
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse
from rayps_client.errors import ConfigError, Conflict, NotFound
from rayps_client.workload_name import misnamed

from rayps.core.failpoint import passing
from rayps.core.job.job_status import Status
from rayps.core.job.warm_start import StartFrom
from rayps.core.refusals.table import refuse
from rayps.core.time.goodput import FILE as TIME_FILE
from rayps.core.time.goodput import read_job_time
from rayps.core.time.time_report import report_of
from rayps.core.urls import is_url, is_web
from rayps.service import job_folders, strategy_check
from rayps.service.code.code_store import ORIGIN_FILE
from rayps.service.job_folders import JobRow
from rayps.service.settings import private_write
from rayps.service.store import JobRecord
from rayps.service.strategy_check import CheckedStrategy, PhaseFacts, check_phases
from rayps.strategies.catalogue import federations_in, own_names, parse
from rayps.strategies.job import LOOP_TIMEOUT, JobSpec
from rayps_api import folder
from rayps_api.client_terms import terms_in
from rayps_api.job_code import JobCodes
from rayps_api.membership import refuse_without_authority
from rayps_api.schemas import (
    Events,
    JobIn,
    JobOut,
    JobsOut,
    Lines,
    OriginIn,
    Points,
    ScaleIn,
    Series,
    TimeReport,
    finite,
    problems,
)
from rayps_api.service import RunningService, Service

log = logging.getLogger(__name__)

_MANIFEST = (
    "manifest.json"  # in a checkpoint; not imported from `rayps.tensors.checkpoints.checkpoint`, which loads torch
)
router = APIRouter(
    prefix="/api/v1/jobs", tags=["jobs"], responses=problems(400, 401, 403, 404, 409, 413, 422, 503, 507)
)

LONGEST_FILTER = 500  # letters of the text by which jobs are filtered
Cursor = Annotated[int, Query(ge=0, lt=2**53)]


@router.post("", status_code=201, response_model=JobOut, responses={200: {"model": JobOut}})
async def submit(
    body: JobIn,
    running: RunningService,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Any:
    """Submit a job. A repeated identical request with the same Idempotency-Key returns the first job, with 200.

    A job that resumes another with the same workload or function has the parameters that were given to that job, except
    those that `params` gives.
    """
    async with JobCodes(running.code) as codes:
        spec, name = await accepted(body, running, codes)
        await refuse_params([spec], codes)
    unchecked = await refuse_budgets([spec])
    passing("submit: checked, not stored")
    async with running.code.lock:
        if spec.code is not None:
            running.code.path(spec.code)
        record, created = await running.store.add(spec, name=name, key=idempotency_key)
    if created:
        passing("submit: stored, folder not written")
        await write_rows([record.id], running, body.origin)
        await note_unchecked([record.id], unchecked, running)
        given = body.model_dump(include={"params", "resume"})
        if taken := {name: value for name, value in spec.params.items() if name not in given["params"]}:
            text = ", ".join(f"{name}={json.dumps(value)}" for name, value in taken.items())
            await running.store.add_event(record.id, "parameters_taken", f"{text}: as given to {given['resume']}")
    passing("submit: stored, not acknowledged")
    running.scheduler.wake()
    place = {"Location": f"/api/v1/jobs/{record.id}"}
    return JSONResponse(running.show(record), 201 if created else 200, place)


async def accepted(body: JobIn, running: Service, codes: JobCodes) -> tuple[JobSpec, str]:
    """Return the specification of a job that the service can store, and the job's name.

    Raises:
        ConfigError: the job can never run. The error names the field.
        NotFound: the service does not have the job's code.
    """
    spec, name, found = await _spec(body, codes)
    terms = terms_in(federations_in(found.parsed or ()))
    if terms.remote or spec.statement is not None:
        refuse_without_authority(spec, terms, running.members)
    spec.environment.must_have(await asyncio.to_thread(spec.environment.looked_up, os.environ))
    if spec.server_group is not None:
        running.groups.must_exist(spec.server_group)
        _refuse_without_servers(spec, found.phases)
    if spec.branch is not None:  # a space's name is its job's id; the beginning of the id is enough
        with contextlib.suppress(NotFound):
            spec = replace(spec, branch=(await running.store.find(spec.branch)).id)
        await _check_branch(spec, running)
    if spec.resume is not None:
        resumed = await _resumed_job(spec.resume, spec.working_dir, running)
        params = resumed.spec.params if resumed is not None and _is_same_target(resumed.spec, spec) else {}
        resume = await _checkpoint(spec.resume, spec.working_dir, running)
        spec = replace(spec, resume=resume, params={**params, **spec.params})
    if spec.start_from is not None:
        spec = replace(spec, start_from=await _start(spec.start_from, spec.working_dir, running))
    running.scheduler.refuse_too_large(spec, found.parsed)
    return spec, name


async def refuse_params(specs: list[JobSpec], codes: JobCodes, fields: Sequence[str] = ()) -> None:
    """Check the parameters of jobs with one target and one folder or archive of code.

    `fields` are names that no parameter may have. Nothing is checked if no job has parameters, and `fields` is empty.

    Raises:
        ConfigError: the workload or the function refuses a parameter, or has one with a name of `fields`.
    """
    first, params = specs[0], [spec.params for spec in specs]
    if not any(params) and not fields:
        return
    folder = await codes.folder(first)
    if folder is not None:
        loop = first.run is not None
        await strategy_check.refuse_params_in_child(first.target, folder, params, fields, loop=loop)


async def refuse_budgets(specs: list[JobSpec]) -> str | None:
    """Check the privacy budgets of jobs, as far as their specifications decide them.

    Return why they could not be checked here, or None. Raises ConfigError if a budget allows no round.
    """
    return await strategy_check.refuse_budgets_in_child([spec.strategy for spec in specs])


async def note_unchecked(jobs: list[str], why: str | None, running: Service) -> None:
    """Write an event of each job whose privacy budget could not be checked at its submission because of `why`."""
    for job in jobs if why is not None else ():
        text = f"the privacy budget is checked at the start of the job, and was not at its submission: {why}"
        await running.store.add_event(job, "warning", text)


@router.get("", response_model=JobsOut)
async def page(
    running: RunningService,
    status: Annotated[list[Status] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(pattern=r"^[0-9A-Z]{26}$")] = None,
    sweep: Annotated[str | None, Query(max_length=64)] = None,
    text: Annotated[str, Query(max_length=LONGEST_FILTER)] = "",
) -> Any:
    """List jobs, newest first; with `sweep`, only those of the sweep of this name.

    With `text`, only those in which each of its words is found: in the id, name, status, reason, strategy, workload,
    function or sweep, in any case. `counts` is by status and counts all such jobs, of any status and on any page.
    """
    records = await running.store.page(status=status or (), limit=limit + 1, before=cursor, sweep=sweep, text=text)
    counts = await running.store.counts(sweep=sweep, text=text)
    more = len(records) > limit
    jobs = [running.show(record) for record in records[:limit]]
    return JSONResponse({"jobs": jobs, "next_cursor": jobs[-1]["id"] if more else None, "counts": counts})


@router.get("/{job_id}", response_model=JobOut)
async def show(job_id: str, running: RunningService) -> Any:
    """Show one job."""
    return JSONResponse(running.show(await running.record(job_id)))


@router.patch("/{job_id}", status_code=202, response_model=JobOut)
async def scale(job_id: str, body: ScaleIn, running: RunningService) -> Any:
    """Set the most workers that an elastic job should have now; it grows as resources are free.

    A repeated request changes nothing. 422 if the number of the job's workers is fixed, or the number is outside of the
    job's range; 409 if the job has ended or is stopping.
    """
    record = await running.store.scale((await running.record(job_id)).id, body.workers)
    await write_rows([record.id], running)
    running.scheduler.wake()
    return JSONResponse(running.show(record), 202)


@router.post("/{job_id}/stop", status_code=202, response_model=JobOut)
async def stop(job_id: str, running: RunningService) -> Any:
    """Request a job to stop. 409 if the job has ended."""
    record = await running.store.request_stop((await running.record(job_id)).id)
    passing("stop: stored, not acknowledged")
    running.scheduler.wake()
    return JSONResponse(running.show(record), 202)


@router.delete("/{job_id}", response_model=JobOut)
async def delete(job_id: str, running: RunningService) -> Any:
    """Delete an ended job with its logs, metrics and checkpoints.

    409 if the job has not ended, or if another job that has not ended resumes one of its checkpoints.
    """
    record = await running.record(job_id)
    if not record.status.terminal:
        raise Conflict(
            f"job {record.id} is {record.status}: stop it first (`rayps stop {record.id}`)", job=record.id, status=409
        )
    users = await running.store.jobs_resuming_from(running.folder(record.id))
    if users:
        raise Conflict(
            f"job {users[0].id} ({users[0].name}) resumes a checkpoint of job {record.id}: wait until it "
            f"has ended, or stop it (`rayps stop {users[0].id}`)",
            job=record.id,
            status=409,
        )
    shown = running.show(record)
    # the folder is deleted before the row: this frees space on a full disk, and an ended job may lack its folder
    await asyncio.to_thread(job_folders.remove_folder, running.settings.jobs_dir, record.id)
    async with running.code.lock:
        await running.store.delete(record.id)
        code = record.spec.code
        if code is not None and not await running.store.code_in_use(code):
            await asyncio.to_thread(running.code.remove, code)
    return JSONResponse(shown)


@router.get("/{job_id}/metrics", response_model=Points | Series)
async def metrics(
    job_id: str,
    running: RunningService,
    cursor: Cursor = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 2000,
    max_points: Annotated[int | None, Query(ge=2, le=5000)] = None,
) -> Any:
    """Show metric points from a cursor, or the whole run in at most `max_points` buckets of consecutive rounds.

    After a return to an earlier state rounds are repeated: a point of the kind "returned" then comes first, and says
    from which `round` on earlier points do not count.
    """
    job_id = (await running.record(job_id)).id
    path = running.folder(job_id) / "metrics.jsonl"
    if max_points is not None:
        return JSONResponse(await asyncio.to_thread(running.rollups.read, path, max_points))
    points, after = await asyncio.to_thread(folder.points, path, cursor, limit)
    return JSONResponse({"points": points, "cursor": after})


@router.get("/{job_id}/logs", response_model=Lines)
async def logs(
    job_id: str,
    running: RunningService,
    cursor: Cursor = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    tail: Annotated[int | None, Query(ge=1, le=10_000)] = None,
) -> Any:
    """Show log lines from a cursor, or the last `tail` lines."""
    job_id = (await running.record(job_id)).id
    path = running.folder(job_id) / "log.txt"
    if tail is not None:
        cursor, limit = await asyncio.to_thread(folder.tail, path, tail), tail
    found, after = await asyncio.to_thread(folder.log_lines, path, cursor, limit)
    return JSONResponse({"lines": found, "cursor": after})


@router.get("/{job_id}/report", response_model=TimeReport)
async def report(job_id: str, running: RunningService) -> Any:
    """Show where the time of a job's workers and servers went, what costs most of it, and what to change."""
    record = await running.record(job_id)
    try:
        time = await asyncio.to_thread(read_job_time, running.folder(record.id) / TIME_FILE)
    except FileNotFoundError:
        raise NotFound(f"job {record.id} has no record of its time: it has not started", status=404) from None
    return JSONResponse(finite(report_of(time, record.name)))


@router.get("/{job_id}/events", response_model=Events)
async def events(
    job_id: str, running: RunningService, cursor: Cursor = 0, limit: Annotated[int, Query(ge=1, le=2000)] = 500
) -> Any:
    """List a job's events, the driver's and the scheduler's."""
    job_id = (await running.record(job_id)).id
    scheduler_events = await running.store.events(job_id)
    path = running.folder(job_id) / "events.jsonl"
    found, after = await asyncio.to_thread(folder.events, path, scheduler_events, cursor, limit)
    return JSONResponse({"events": found, "cursor": after})


async def write_rows(jobs: Collection[str], running: Service, origin: OriginIn | None = None) -> None:
    """Write each job's row into its folder, from which the job can be restored if the store is lost.

    The origin of the jobs' code is written into a file of its own.
    """
    text = None if origin is None else origin.model_dump_json(exclude_none=True)
    rows = await running.store.json_rows(jobs)
    await asyncio.gather(*(asyncio.to_thread(_write_row, running.folder(row["id"]), row, text) for row in rows))


def _write_row(folder: Path, row: JobRow, origin: str | None) -> None:
    try:
        if origin is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            private_write(folder / ORIGIN_FILE, origin)
        job_folders.write_row(folder, row)
    except OSError as error:  # the job is in the store: the service's next start writes the file
        log.warning("job %s: %s cannot be written: %s", row["id"], job_folders.ROW_FILE, error)


def _refuse_without_servers(spec: JobSpec, phases: list[PhaseFacts]) -> None:
    """Raise ConfigError if the strategy cannot use the job's server group or branch: it stores nothing on servers."""
    if not any(each.servers or each.tables for each in phases):
        names = " and ".join(dict.fromkeys(each.name for each in phases))
        raise ConfigError(
            f"server_group is {spec.server_group!r}, and {names} stores nothing on servers: omit server_group, or use "
            "parameter_server, downpour or hybrid",
            field="server_group",
        )
    # the specification has asked the table already, unless the strategy is of a user's own
    if spec.branch is not None and not phases[0].servers:
        refuse({"branch": spec.branch, "no servers": True, "strategy": phases[0].name})


async def _check_branch(spec: JobSpec, running: Service) -> None:
    """Raise ConfigError if the server group does not have the space from which the job branches."""
    assert spec.server_group is not None and spec.branch is not None
    spaces = running.groups.spaces(spec.server_group)
    if spaces is None or spec.branch in spaces:
        return
    there = f"the spaces of server group {spec.server_group!r} are {', '.join(spaces) or 'none'}"
    try:
        job = await running.store.get(spec.branch)
    except NotFound:
        raise ConfigError(
            f"branch is {spec.branch!r}: there is no such job and no such space; {there}", field="branch"
        ) from None
    if job.status.terminal or job.spec.server_group != spec.server_group:
        why = "and its space have ended" if job.status.terminal else "is not on that group"
        raise ConfigError(f"branch is {spec.branch!r}: that job {why}; {there}", field="branch")


async def _resumed_job(resume: str, working_dir: str | None, running: Service) -> JobRecord | None:
    """Return the job that `resume` names by its id, or by a checkpoint in its folder; None if it names none."""
    place, home = Path(working_dir or "/") / resume, running.settings.jobs_dir
    name = place.relative_to(home).parts[0] if place.is_relative_to(home) and place != home else resume
    try:
        return await running.store.find(name.partition(":")[0])
    except NotFound:
        return None


def _is_same_target(one: JobSpec, other: JobSpec) -> bool:
    """Return whether two jobs have the workload or the function of one name, whatever its file."""
    named = one.target.rpartition(":")[2] == other.target.rpartition(":")[2]
    return named and (one.run is None) == (other.run is None)


async def _checkpoint(resume: str, working_dir: str | None, running: Service) -> str:
    """Return the folder of the checkpoint that `resume` names.

    This is an ended job's id or its beginning, the same with ":best" for the job's best checkpoint, or a path or URL.
    """
    with contextlib.suppress(NotFound):
        job_id, _, which = resume.partition(":")
        job = await running.store.find(job_id)
        if which == "best":
            best = (running.progress(job.id) or {}).get("best")
            if best is None:
                raise ConfigError(
                    f"resume is {resume!r}: job {job.id} has kept no best checkpoint (rayps.BestCheckpoint)",
                    field="resume",
                )
            return str(best)
        if job.checkpoint is None:
            why = "has no checkpoint" if job.status.terminal else "has not ended: wait, or stop it"
            raise ConfigError(f"resume is {resume!r}: job {job.id} {why}", field="resume")
        return job.checkpoint
    if is_url(resume) and is_web(resume):
        raise ConfigError(
            f"resume is {resume!r}: a checkpoint cannot be read from a web server: give the id of an ended job, "
            "ID:best, a checkpoint's folder, or its URL in an object store such as s3://bucket/run",
            field="resume",
        )
    if is_url(resume):  # the driver reads it: the service has no credentials of a job's places
        return resume
    path = Path(working_dir or "/") / resume
    if not os.path.isdir(path):  # noqa: PTH112  Path.is_dir raises for a name that is too long
        raise ConfigError(
            f"resume is {resume!r}: there is no such job, and no folder {path} on the service's machine: "
            "give the id of an ended job, ID:best, or a checkpoint's folder, as `rayps get ID` shows it",
            field="resume",
        )
    if not (path / _MANIFEST).is_file():
        raise ConfigError(
            f"resume is {resume!r}: the folder {path} is not a checkpoint (it has no {_MANIFEST}): give a "
            "checkpoint's own folder, e.g. .../step-00000100",
            field="resume",
        )
    return resume


async def _start(given: Any, working_dir: str | None, running: Service) -> Any:
    """Return the option `start_from` of a job, in which an ended job's id is replaced by its newest checkpoint."""
    start = StartFrom.parse(given)
    path = Path(working_dir or "/") / start.path
    if os.path.exists(path):  # noqa: PTH110  Path.exists raises for a name that is too long
        return given
    try:
        job = await running.store.find(start.path)
    except NotFound:
        raise ConfigError(
            f"start_from is {start.path!r}: there is no file or folder {path} on the service's machine, and no such "
            "job: give a .safetensors file, a folder with one, a checkpoint, or the id of an ended job",
            field="start_from",
        ) from None
    if job.checkpoint is None:
        why = "has no checkpoint" if job.status.terminal else "has not ended: wait, or stop it"
        raise ConfigError(f"start_from is {start.path!r}: job {job.id} {why}", field="start_from")
    return job.checkpoint if isinstance(given, str) else given | {"path": job.checkpoint}


async def _spec(body: JobIn, codes: JobCodes) -> tuple[JobSpec, str, CheckedStrategy]:
    """Return the job in the request's body, its name, and its strategy, which is parsed here and nowhere else."""
    data = body.model_dump(exclude={"origin"})
    if data["elastic"] is not None:
        data["elastic"] = {name: value for name, value in data["elastic"].items() if value is not None}
    if data["run"] is not None and "timeout" not in body.model_fields_set:
        data["timeout"] = LOOP_TIMEOUT
    given = _finite_strategy(data["strategy"])
    own = own_names(given)
    found = None if own else check_phases(parse(given))
    if found is not None:
        data["strategy"] = found.strategy
    data["resources"] = {"cpu": 1.0} | data["resources"]
    spec = JobSpec.from_dict(data, None if found is None else found.parsed)
    if spec.run is None and (reason := misnamed(spec.workload)) is not None:
        raise ConfigError(reason, field="workload")
    if spec.code is None:
        _check_files(spec)
    else:
        await _check_code(spec, spec.code, codes)
    if found is None:
        if spec.working_dir is None and spec.code is None:
            raise ConfigError(
                f"strategy {own[0]!r} is a class of your own: give working_dir, the absolute path of the directory in "
                "which its file is",
                field="working_dir",
            )
        found = await _own_strategy(given, spec, codes)
        spec = replace(spec, strategy=found.strategy)
    return spec, spec.name or spec.target.rpartition(":")[2][:64], found


def _finite_strategy(given: Any) -> Any:
    if not isinstance(given, str | dict | list) or len(repr(given)) > 10_000:
        raise ConfigError(
            'strategy must be a name, e.g. \'all_reduce\', or {"name": "parameter_server", "staleness": 3}',
            field="strategy",
        )
    return given


async def _own_strategy(given: Any, spec: JobSpec, codes: JobCodes) -> CheckedStrategy:
    """Check a strategy whose class is in the job's code, in a child process."""
    folder = await codes.folder(spec)
    assert folder is not None, "checked before"
    key = json.dumps([given, spec.workers], sort_keys=True)  # the jobs of a sweep may have one strategy
    if key not in codes.strategies:
        codes.strategies[key] = await strategy_check.check_in_child(given, folder, spec.workers)
    return codes.strategies[key]


async def _check_code(spec: JobSpec, code: str, codes: JobCodes) -> None:
    """Raise ConfigError if the job names a folder beside its archive, or if the archive lacks the file of its target.

    The target is the workload or the function.
    """
    if spec.working_dir is not None:
        raise ConfigError(
            f"working_dir is {spec.working_dir!r} and code is given: give code alone, which is the packed directory",
            field="working_dir",
        )
    paths = await codes.paths(code)
    what, file = _target_field(spec), spec.target.rpartition(":")[0]
    if file.endswith(".py") and posixpath.normpath(file) not in paths:
        raise ConfigError(
            f"{what} {spec.target!r}: there is no file {file} in the packed working directory: give a path from "
            "that directory, and check that no pattern of .gitignore or .raypsignore leaves it out",
            field=what,
        )


def _target_field(spec: JobSpec) -> str:
    """Return the name of the field that names the job's code."""
    return "workload" if spec.run is None else "run"


def _check_files(spec: JobSpec) -> None:
    """Raise ConfigError if the file of the workload or function, or the working directory does not exist."""
    home = None if spec.working_dir is None else Path(spec.working_dir)
    if home is not None and not (home.is_absolute() and home.is_dir()):
        raise ConfigError(
            f"working_dir {spec.working_dir!r} is not a directory on the service's machine: give an absolute path",
            field="working_dir",
        )
    what, file = _target_field(spec), Path(spec.target.rpartition(":")[0])
    if file.suffix == ".py":
        if not file.is_absolute() and home is None:
            raise ConfigError(
                f"{what} {spec.target!r} is a file: give working_dir, the absolute path of its directory",
                field="working_dir",
            )
        if not ((home or Path("/")) / file).is_file():
            raise ConfigError(f"{what} {spec.target!r}: there is no file {file} in {home or '/'}", field=what)
