"""The routes of notices: a cloud's agent announces here that a host will end (`rayps.cluster.notices`)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from rayps_client.errors import ConfigError

from rayps.cluster.notices import Notice
from rayps_api.schemas import NoticeIn, NoticeOut, NoticesOut, notice_out, problems
from rayps_api.service import RunningService

router = APIRouter(prefix="/api/v1/notices", tags=["notices"], responses=problems(400, 401, 403, 404, 413, 422, 507))


@router.post("", status_code=202, response_model=NoticeOut)
async def announce(body: NoticeIn, running: RunningService) -> Any:
    """Announce that a host will end. Jobs then move what they have there, before the deadline if there is one.

    A later notice about the same node, or the same host, replaces the earlier one.
    """
    if not (body.node or body.host):
        raise ConfigError("give node, a Ray node id, or host, a host's name or IP address", field="node")
    notice = Notice(body.node, body.host, body.seconds, body.reason)
    await running.scheduler.notices.add(notice)
    running.scheduler.wake()
    return JSONResponse(notice_out(notice), 202)


@router.get("", response_model=NoticesOut)
async def page(running: RunningService) -> Any:
    """List the notices: those that were sent here, Ray's draining nodes, and processes that received SIGTERM."""
    sent = await running.scheduler.notices.current()
    own = {one.key for one in sent}
    others = [one for one in running.scheduler.view.notices if one.key not in own]
    return JSONResponse({"notices": [notice_out(one) for one in [*sent, *others]]})


@router.delete("", response_model=NoticeOut)
async def withdraw(
    running: RunningService,
    node: Annotated[str, Query(max_length=100)] = "",
    host: Annotated[str, Query(max_length=253)] = "",
) -> Any:
    """Withdraw a notice that was sent here, by the node or host that it names. 404 if there is none."""
    notice = await running.scheduler.notices.withdraw(node, host)
    running.scheduler.wake()
    return JSONResponse(notice_out(notice))
