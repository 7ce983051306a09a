"""The job service as one FastAPI app: routes, authentication, and the loops of the scheduler and server groups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import Depends, FastAPI
from rayps_client.exchange.signed_orders import Key

from rayps.service import adoption
from rayps.service.code.code_store import CodeStore
from rayps.service.drivers import RayHome
from rayps.service.groups import Groups
from rayps.service.local_ray.ray_place import choose_place as choose
from rayps.service.scheduler import Scheduler
from rayps.service.settings import Settings
from rayps.service.store import Store
from rayps.service.tokens.client_tokens import ClientTokens
from rayps.service.tokens.user_tokens import UserTokens
from rayps_api import pages, problems, stream
from rayps_api.guard import Guard
from rayps_api.routes import (
    routes_clients,
    routes_code,
    routes_files,
    routes_jobs,
    routes_notices,
    routes_root,
    routes_secure,
    routes_servers,
    routes_statements,
    routes_sweeps,
    routes_tokens,
)
from rayps_api.schemas import FIELDS, GROUP_FIELDS, NOTICE_FIELDS, SWEEP_FIELDS
from rayps_api.schemas_clients import CLIENT_FIELDS
from rayps_api.schemas_tokens import TOKEN_FIELDS
from rayps_api.service import Service
from rayps_api.strict_requests import refuse_ignored

log = logging.getLogger(__name__)


def create_app(
    settings: Settings,
    *,
    place: RayHome | None = None,
    keep: bool = False,
    started: Callable[[Service], Awaitable[None]] | None = None,
    ended: Callable[[int, bool], None] | None = None,
) -> FastAPI:
    """Build the FastAPI app of the job service.

    `place`: the Ray in which drivers run; None means the Ray in the settings. With `keep`, the Ray that rayps owns and
    its jobs continue when the service stops. `started` is called before the first request is answered. `ended` is
    called at the end, with the number of jobs that were running and whether they continue.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings.prepare()
        store = await Store.open(settings.database)
        await adoption.adopt(store, settings.jobs_dir)
        scheduler = _scheduler(settings, store, place or choose(settings))
        groups = Groups(scheduler, settings.servers_dir)
        scheduler.group_wait_reason, scheduler.group_end_reason = groups.wait_reason, groups.end_reason
        code = CodeStore(settings.state_dir, settings.code_bytes)
        code.remove_unused(await store.code_in_use())
        tokens = ClientTokens(store, Key.load_or_create(settings.client_key))
        users = UserTokens(store, settings.token_file)
        app.state.service = Service(settings, store, scheduler, groups, tokens, users, code)
        if started is not None:
            await started(app.state.service)
        ticking = [asyncio.create_task(loop) for loop in app.state.service.loops()]
        try:
            yield
        finally:
            app.state.service.closing.set()
            while going := [task for task in ticking if not task.done()]:
                for task in going:
                    task.cancel()  # repeated, because wait_for can lose a cancellation that arrives as its wait ends
                await asyncio.wait(going, timeout=1.0)
            groups.close()
            running = await scheduler.close(end=not keep)
            if ended is not None:
                ended(running, keep or not scheduler.place.owned)
            await store.close()

    app = FastAPI(
        title="rayps",
        version="1",
        summary="Distributed training jobs on Ray.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.failures = deque()
    app.add_middleware(Guard, settings=settings, failures=app.state.failures)
    problems.install(
        app,
        {
            "/api/v1/jobs": FIELDS,
            "/api/v1/sweeps": SWEEP_FIELDS,
            "/api/v1/server-groups": GROUP_FIELDS,
            "/api/v1/client": CLIENT_FIELDS,
            "/api/v1/tokens": TOKEN_FIELDS,
            "/api/v1/notices": NOTICE_FIELDS,
        },
    )
    for router in (
        routes_jobs.router,
        routes_files.router,
        routes_sweeps.router,
        routes_code.router,
        routes_servers.router,
        routes_clients.router,
        routes_secure.router,
        routes_statements.router,
        routes_tokens.router,
        routes_notices.router,
        routes_root.router,
        stream.router,
    ):
        app.include_router(router, dependencies=[Depends(refuse_ignored)])
    pages.install(app)
    return app


def _scheduler(settings: Settings, store: Store, place: RayHome) -> Scheduler:
    return Scheduler(
        store,
        place,
        settings.jobs_dir,
        stall=settings.stall,
        warm=settings.warm,
        anywhere=settings.shared_state,
        cores=settings.cores,
    )
