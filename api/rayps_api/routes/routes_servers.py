"""The routes of server groups: validate, call the group's manager, show its facts."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse
from rayps_client.errors import Conflict, NotFound

from rayps.core.job.job_fields import GROUP_NAME
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
from rayps_api.service import RunningService, Service

router = APIRouter(
    prefix="/api/v1/server-groups",
    tags=["server groups"],
    responses=problems(400, 401, 403, 404, 409, 413, 422, 503, 507),
)

Name = Annotated[str, Path(pattern=GROUP_NAME, description="The group's name.")]

Space = Annotated[
    str,
    Path(
        min_length=1,
        max_length=200,
        description="A space's name: its job's id, or ID/1, ID/2, ... for the further columns of a divided model.",
    ),
]


@router.post("", status_code=201, response_model=GroupOut)
async def start(body: GroupIn, running: RunningService) -> Any:
    """Start a server group, which runs until it is stopped or the cluster ends."""
    await running.groups.start(body.name, body.servers, body.replicas, body.silence, most=body.most, cpus=body.cpus)
    place = {"Location": f"/api/v1/server-groups/{body.name}"}
    return JSONResponse(await show_group(running, body.name), 201, place)


@router.get("", response_model=GroupsOut)
async def page(running: RunningService) -> Any:
    """List the server groups."""
    return JSONResponse(await list_groups(running))


@router.get("/{name}", response_model=GroupOut)
async def show(name: Name, running: RunningService) -> Any:
    """Show one group: its servers, spaces, segment moves, events and jobs."""
    return JSONResponse(await show_group(running, name))


@router.patch("/{name}", status_code=202, response_model=GroupOut)
async def resize(name: Name, body: ResizeIn, running: RunningService) -> Any:
    """Grow or shrink a group, or let its load choose the number of servers from a range.

    Jobs continue while segments move. 409 if the group is resizing already.
    """
    await running.groups.resize(name, body.servers, body.most)
    return JSONResponse(await show_group(running, name), 202)


@router.post("/{name}/drain", status_code=202, response_model=GroupOut)
async def drain(name: Name, body: DrainIn, running: RunningService) -> Any:
    """Move all segments from one server to the others, then stop this server."""
    await running.groups.drain(name, body.server)
    return JSONResponse(await show_group(running, name), 202)


@router.delete("/{name}", status_code=202, response_model=GroupOut)
async def stop(
    name: Name,
    running: RunningService,
    force: Annotated[bool, Query(description="Stop the group also if jobs use it; these jobs fail.")] = False,
) -> Any:
    """Stop a group. Its parameters are lost. 409 if jobs use the group and `force` is not set."""
    group = await show_group(running, name)
    if group["jobs"] and not force:
        jobs = ", ".join(f"{job['id']} ({job['name']})" for job in group["jobs"][:3])
        more = ", ..." if len(group["jobs"]) > 3 else ""
        raise Conflict(
            f"server group {name!r} is used by {jobs}{more}: stop these jobs first (`rayps stop ID`), or stop the "
            "group with --force, which makes them fail",
            status=409,
        )
    await running.groups.stop(name)
    running.scheduler.wake()  # so that the group's jobs fail now, not only at a worker's time-out
    with contextlib.suppress(NotFound):  # the group may have ended already
        group = await show_group(running, name)
    return JSONResponse({**group, "status": "stopping"}, 202)


@router.patch("/{name}/spaces/{space:path}", status_code=202, response_model=GroupOut)
async def limit(name: Name, space: Space, body: QuotaIn, running: RunningService) -> Any:
    """Set the quota of a job's space. null means no limit."""
    await running.groups.set_quota(name, space, {"bytes": body.bytes, "operations": body.operations})
    return JSONResponse(await show_group(running, name), 202)


@router.delete("/{name}/spaces/{space:path}", status_code=202, response_model=GroupOut)
async def drop(name: Name, space: Space, running: RunningService) -> Any:
    """Delete a space, e.g. an unused branch. 409 if the job of the space has not ended."""
    group = await show_group(running, name)
    space = running.groups.space(name, space)
    if any(job["id"] == space.partition("/")[0] for job in group["jobs"]):
        raise Conflict(f"the job of space {space!r} has not ended: stop it first with `rayps stop {space}`", status=409)
    await running.groups.drop_space(name, space)
    return JSONResponse(await show_group(running, name), 202)


async def show_group(running: Service, name: str) -> dict[str, Any]:
    """Return a group and the jobs that use it, as JSON data. Raises NotFound if there is no such group."""
    shown: dict[str, Any] = finite(group_out(running.groups.get(name), await running.store.unfinished()))
    return shown


async def list_groups(running: Service) -> dict[str, Any]:
    """Return a summary of every group, as JSON data."""
    live = await running.store.unfinished()
    return {"groups": [finite(group_row(group_out(group, live))) for group in running.groups.all()]}
