"""The routes of sessions, cluster, strategies, health and Prometheus, and the page that lists all routes."""

from __future__ import annotations

import asyncio
import html
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from rayps_client.errors import ConfigError

import rayps.strategies.catalogue
from rayps.core.job.job_status import Status
from rayps_api.guard import Guard
from rayps_api.openapi import interface
from rayps_api.schemas import ClusterOut, Login, Ready, StrategyOut, problems
from rayps_api.service import RunningService, SentBy, Service

router = APIRouter(responses=problems(401, 403))
_SILENT_SECONDS = 300.0  # seconds without a tick after which /healthz answers 503; a slow tick can take minutes


@router.post("/api/v1/session", status_code=204, tags=["session"], responses=problems(400, 413, 422, 429))
async def login(body: Login, request: Request) -> Response:
    """Exchange a one-time code or a token for the dashboard's session cookie."""
    running: Service = request.app.state.service
    if (body.code is None) == (body.token is None):
        raise ConfigError("give either code or token", field="code")
    session = None
    if body.code is not None:
        session = await running.store.login(body.code)
    elif body.token is not None and (sender := await running.store.holder(body.token)) is not None:
        session = await running.store.login(await running.store.login_code(most=sender.expires_at))
    if session is None:
        guard: Guard = request.scope["rayps_guard"]
        return guard.refuse_unauthenticated(
            request,
            "the code is wrong, used, or older than five minutes: `rayps open` prints an address with a new code"
            if body.code
            else None,
        )
    answer = Response(status_code=204)
    answer.set_cookie(
        running.cookie,
        session,
        max_age=30 * 86400,
        httponly=True,
        samesite="strict",
        path="/",
        secure=request.url.scheme == "https",
    )
    return answer


@router.delete("/api/v1/session", status_code=204, tags=["session"])
async def logout(request: Request, running: RunningService) -> Response:
    """End the cookie's session."""
    cookie = request.cookies.get(running.cookie)
    if cookie:
        await running.store.revoke(cookie)
    answer = Response(status_code=204)
    answer.delete_cookie(running.cookie, path="/")
    return answer


@router.post("/api/v1/codes", status_code=201, tags=["session"])
async def code(running: RunningService, sender: SentBy) -> dict[str, str]:
    """Create a one-time code for a browser, valid for five minutes.

    The session that a browser gets for it lives at most as long as the token of this request.
    """
    return {"code": await running.store.login_code(most=sender.expires_at)}


@router.get("/api/v1/cluster", response_model=ClusterOut, tags=["cluster"])
async def cluster(running: RunningService) -> Any:
    """Show the state of the Ray cluster that runs the jobs, as the scheduler last saw it."""
    view, place = running.scheduler.view, running.scheduler.place
    total = view.total or place.capacity() or {}
    return {
        "ready": view.ready,
        "address": place.address,
        "owned": place.owned,
        "cores": os.cpu_count() if place.owned else None,
        "together": running.scheduler.cores,
        "total": total,
        "free": view.free or {},
        "reason": view.reason,
        "warm": None if view.warm is None else asdict(view.warm),
    }


@router.get("/api/v1/strategies", response_model=list[StrategyOut], tags=["strategies"])
async def strategies(running: RunningService) -> Any:
    """List the strategies with their options."""
    return JSONResponse(rayps.strategies.catalogue.catalogue())


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", responses={503: {"description": "The scheduler's loop does not run"}}, tags=["health"])
async def healthz(request: Request, response: Response) -> dict[str, bool]:
    """Answer 200 while the scheduler runs, even if Ray does not answer, and 503 if the service should be restarted."""
    ok = request.app.state.service.scheduler.silent < _SILENT_SECONDS
    response.status_code = 200 if ok else 503
    return {"ok": ok}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", response_model=Ready, responses={503: {"model": Ready}}, tags=["health"])
async def readyz(request: Request) -> Any:
    """Answer 200 while jobs can be submitted and can start, and otherwise 503 with the reason."""
    running: Service = request.app.state.service
    view, full = running.scheduler.view, running.store.disk.error
    ready = view.ready and full is None
    reason = "; ".join(filter(None, [view.reason, full])) or None
    return JSONResponse({"ready": ready, "reason": reason}, 200 if ready else 503)


@router.get(
    "/metrics",
    tags=["health"],
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
)
async def prometheus(running: RunningService) -> Response:
    """Show the service's metrics in Prometheus' format."""
    registry = CollectorRegistry()
    jobs = Gauge("rayps_jobs", "Jobs by status", ["status"], registry=registry)
    counts = await running.store.counts()
    for status in Status:
        jobs.labels(status.value).set(counts.get(status.value, 0))
    view = running.scheduler.view
    Gauge("rayps_ray_ready", "Whether Ray can start jobs", registry=registry).set(view.ready)
    Gauge("rayps_streams", "Open event streams", registry=registry).set(running.streams)
    for name, bundle in (("total", view.total), ("free", view.free)):
        gauge = Gauge(f"rayps_ray_{name}", f"Ray's {name} resources", ["kind"], registry=registry)
        for kind, amount in (bundle or {}).items():
            gauge.labels(kind).set(amount)
    if view.warm is not None:
        processes = Gauge("rayps_warm_processes", "Warm processes by state", ["state"], registry=registry)
        for state, number in (("ready", view.warm.ready), ("starting", view.warm.starting)):
            processes.labels(state).set(number)
        Gauge("rayps_warm_bytes", "Memory of the warm processes", registry=registry).set(view.warm.memory)
    _of_groups(running, registry)
    started = [status for status in Status if not status.terminal and status is not Status.QUEUED]
    await _of_times(running, await running.store.ids(started), registry)
    return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)


def _of_groups(running: Service, registry: CollectorRegistry) -> None:
    servers = Gauge("rayps_group_servers", "Servers of a group by state", ["group", "state"], registry=registry)
    gauges = {
        key: Gauge(f"rayps_space_{key}", what, ["group", "space"], registry=registry)
        for key, what in (
            ("bytes", "Bytes of a job on a server group"),
            ("rows", "Rows of a job's tables on a server group"),
            ("operations_s", "Operations per second of a job on a server group"),
            ("throttled", "Operations of a job that waited because of the quota of its space"),
        )
    }
    for group in running.groups.all():
        for state in ("alive", "leaving", "dead"):
            servers.labels(group["name"], state).set(sum(each.get("state") == state for each in group["servers"]))
        for space in group["spaces"]:
            for key, gauge in gauges.items():
                gauge.labels(group["name"], str(space.get("name"))).set(space.get(key) or 0)


async def _of_times(running: Service, jobs: Sequence[str], registry: CollectorRegistry) -> None:
    goodput = Gauge("rayps_job_goodput", "Useful share of the time of a job's workers", ["job"], registry=registry)
    seconds = Gauge("rayps_job_seconds", "Seconds of a job's workers by part", ["job", "part"], registry=registry)
    for job in jobs:
        await asyncio.sleep(0)  # each reads a file
        account = (running.progress(job) or {}).get("account") or {}
        if account.get("goodput") is not None:
            goodput.labels(job).set(account["goodput"])
        for part, amount in (account.get("seconds") or {}).items():
            seconds.labels(job, part).set(amount)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request, running: RunningService) -> JSONResponse:
    """Show the interface as OpenAPI 3.1."""
    return JSONResponse(interface(request.app.openapi(), running.cookie))


@router.get("/docs", include_in_schema=False)
async def docs(request: Request, running: RunningService) -> HTMLResponse:
    """List the routes of the OpenAPI document on one page without scripts."""
    rows = [
        f"<tr><td>{verb.upper()}</td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(what.get('description') or what.get('summary', ''))}</td></tr>"
        for path, verbs in request.app.openapi()["paths"].items()
        for verb, what in verbs.items()
    ]
    return HTMLResponse(
        "<!doctype html><html lang=en><meta charset=utf-8><title>rayps: routes</title><h1>Routes</h1>"
        "<p>Schemas: <a href=openapi.json>openapi.json</a>. "
        "Send <code>Authorization: Bearer rps_...</code>.</p>"
        f"<table>{''.join(rows)}</table></html>"
    )
