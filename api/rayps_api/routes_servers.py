"""The routes of server groups. What a group is and does is its manager's to say; these ask, refuse and show."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse

from rayps.core.errors import Conflict, NotFound
from rayps.service.groups import NAME
from rayps_api.schemas import (
    DrainIn,
    GroupIn,
    GroupOut,
    GroupsOut,
    QuotaIn,
    ResizeIn,
    finite,
    group_out,
    group_row,
    problems,
)
from rayps_api.service import Known, Service

router = APIRouter(
    prefix="/api/v1/server-groups", tags=["server groups"], responses=problems(400, 401, 403, 404, 409, 413, 422, 507)
)

Name = Annotated[str, Path(pattern=NAME, description="The group's name.")]

Space = Annotated[str, Path(min_length=1, max_length=200, description="A space's name: that of its job.")]


@router.post("", status_code=201, response_model=GroupOut)
async def start(body: GroupIn, known: Known) -> Any:
    """Start a server group; it lives as long as the cluster, or until it is stopped."""
    await known.groups.start(body.name, body.servers, body.replicas, body.silence)
    place = {"Location": f"/api/v1/server-groups/{body.name}"}
    return JSONResponse(await show_group(known, body.name), 201, place)


@router.get("", response_model=GroupsOut)
async def page(known: Known) -> Any:
    """Every server group, in short."""
    return JSONResponse(await list_groups(known))


@router.get("/{name}", response_model=GroupOut)
async def show(name: Name, known: Known) -> Any:
    """One group: its servers, what they hold for whom, and what moves."""
    return JSONResponse(await show_group(known, name))


@router.patch("/{name}", status_code=202, response_model=GroupOut)
async def resize(name: Name, body: ResizeIn, known: Known) -> Any:
    """Grow or shrink a group; segments move while jobs go on. 409 during a resize."""
    await known.groups.resize(name, body.servers)
    return JSONResponse(await show_group(known, name), 202)


@router.post("/{name}/drain", status_code=202, response_model=GroupOut)
async def drain(name: Name, body: DrainIn, known: Known) -> Any:
    """Move everything off one server, which then leaves."""
    await known.groups.drain(name, body.server)
    return JSONResponse(await show_group(known, name), 202)


@router.delete("/{name}", status_code=202, response_model=GroupOut)
async def stop(
    name: Name,
    known: Known,
    force: Annotated[bool, Query(description="Also when jobs use it: they will fail.")] = False,
) -> Any:
    """End a group and all parameters on it; 409 while jobs use it."""
    group = await show_group(known, name)
    if group["jobs"] and not force:
        jobs = ", ".join(f"{job['id']} ({job['name']})" for job in group["jobs"][:3])
        more = ", ..." if len(group["jobs"]) > 3 else ""
        raise Conflict(
            f"server group {name!r} is used by {jobs}{more}: stop them first (`rayps stop ID`), or stop the "
            "group with --force, which fails them",
            status=409,
        )
    await known.groups.stop(name)
    known.scheduler.wake()  # its jobs fail now, not when a worker has waited long enough
    with contextlib.suppress(NotFound):  # it may be gone already
        group = await show_group(known, name)
    return JSONResponse({**group, "status": "stopping"}, 202)


@router.patch("/{name}/spaces/{space}", status_code=202, response_model=GroupOut)
async def limit(name: Name, space: Space, body: QuotaIn, known: Known) -> Any:
    """Set what a job's space may take; null = no limit."""
    await known.groups.limit(name, space, {"bytes": body.bytes, "operations": body.operations})
    return JSONResponse(await show_group(known, name), 202)


@router.delete("/{name}/spaces/{space}", status_code=202, response_model=GroupOut)
async def drop(name: Name, space: Space, known: Known) -> Any:
    """Forget a space, such as a branch that is not wanted any more; 409 while its job runs."""
    group = await show_group(known, name)
    space = known.groups.space(name, space)
    if any(job["id"] == space for job in group["jobs"]):
        raise Conflict(
            f"space {space!r} is of a job that has not ended: stop it first with `rayps stop {space}`", status=409
        )
    await known.groups.drop(name, space)
    return JSONResponse(await show_group(known, name), 202)


async def show_group(known: Service, name: str) -> dict[str, Any]:
    """A group with the jobs that use it, as JSON-ready data. Raises NotFound."""
    shown: dict[str, Any] = finite(group_out(known.groups.get(name), await known.store.live()))
    return shown


async def list_groups(known: Service) -> dict[str, Any]:
    """Every group in short, as JSON-ready data."""
    live = await known.store.live()
    return {"groups": [finite(group_row(group_out(group, live))) for group in known.groups.all()]}
