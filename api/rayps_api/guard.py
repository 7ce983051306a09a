"""Check every request before its route: Host, body size, Origin, token or session. Set headers on every answer.

A path needs authentication unless it is listed here or is a page of the dashboard. Neither a loopback address
nor a forwarding header authenticates a caller.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from urllib.parse import urlsplit

from fastapi import Request
from rayps_client.errors import RaypsError, Unauthorized
from rayps_client.exchange.signed_orders import is_client_token
from rayps_client.members.signed_requests import HEADER
from starlette.datastructures import MutableHeaders
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayps.service.settings import LOOPBACK, Settings
from rayps.service.tokens.client_tokens import Grant
from rayps_api.connections import STATE, ConnectionFacts
from rayps_api.membership import admit, receive_of
from rayps_api.problems import problem
from rayps_api.service import Service

log = logging.getLogger(__name__)

BODY_LIMIT = 1_000_000
UPDATE_LIMIT = 16 * 2**30
CLIENTS = "/api/v1/client/"
OPEN = {("GET", "/healthz"), ("HEAD", "/healthz"), ("GET", "/readyz"), ("HEAD", "/readyz"), ("POST", "/api/v1/session")}
_PRIVATE = ("/metrics", "/openapi.json", "/docs")
_READS = ("GET", "HEAD", "OPTIONS")
_GUESSES, _GUESS_SECONDS = 60, 60.0
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


def is_private(path: str) -> bool:
    """Return whether a path needs authentication, unless it is in `OPEN`."""
    return path == "/api" or path.startswith("/api/") or any(path == p or path.startswith(f"{p}/") for p in _PRIVATE)


class Guard:
    """The ASGI layer that authenticates every request before the app gets it."""

    def __init__(self, app: ASGIApp, settings: Settings, failures: deque[float]) -> None:
        self._app = RequestBodyLimitMiddleware(app, BODY_LIMIT)
        # the limit for updates of federated clients; the route then checks the round's own limit
        self._updates = RequestBodyLimitMiddleware(app, UPDATE_LIMIT)
        self._code_limit = settings.code_bytes + 64_000_000  # the files of an archive, and their headers
        self._code = RequestBodyLimitMiddleware(app, self._code_limit)
        self._hosts = {*LOOPBACK, settings.host, *settings.allowed_hosts}
        self._failures = failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate a request and pass it to the app, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        scope["request_id"] = secrets.token_hex(8)
        scope["rayps_guard"] = self
        request = Request(scope, receive)
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers["X-Request-Id"] = scope["request_id"]
                if is_private(scope["path"]) and "cache-control" not in headers:
                    headers["Cache-Control"] = "no-store"
            await send(message)

        try:
            refused = await self._refuse(request)
            if refused is not None:
                await refused(scope, receive, with_headers)
            else:
                app = self._updates if "rayps_grant" in scope and _is_update(request) else self._app
                app = self._code if "rayps_user" in scope and _is_code(request) else app
                await app(scope, receive_of(request, receive), with_headers)
        except Exception:  # the answer must not contain a traceback
            log.exception("request %s %s %s failed", scope["request_id"], request.method, scope["path"])
            if not started:
                detail = f"the service failed: its log has the error of request {scope['request_id']}"
                answer = problem(request, 500, detail)
                await answer(scope, receive, with_headers)

    async def _refuse(self, request: Request) -> Response | None:
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            return problem(  # RFC 9112, section 6.1: a proxy may have read another end of this request
                request,
                400,
                "the request has both Content-Length and Transfer-Encoding: send one of them",
                headers={"Connection": "close"},
            )
        host = _host(request.headers.get("host", ""))
        if host not in self._hosts:
            return problem(
                request,
                400,
                code="bad_host",
                detail=f"Host {host[:100]!r} is not accepted: allow this host with `rayps serve --allow-host`",
            )
        length = request.headers.get("content-length", "0")
        limit = UPDATE_LIMIT if _is_update(request) else self._code_limit if _is_code(request) else BODY_LIMIT
        if not length.isdigit() or int(length) > limit:
            return problem(request, 413, f"a body may have {limit} bytes at most")
        path = request.scope["path"]
        origin = request.headers.get("origin")
        writes = request.method not in _READS
        if writes and origin is not None and not _same_origin(origin, request.headers.get("host", "")):
            return problem(request, 403, f"pages of {origin[:100]} may not write to this service", code="bad_origin")
        if (request.method, path) in OPEN or not is_private(path):
            return None
        refused = await self._authenticate(request, writes and origin is None)
        connection = request.scope.get("state", {}).get(STATE)
        if isinstance(connection, ConnectionFacts):
            connection.known = refused is None
        return refused

    async def _authenticate(self, request: Request, no_origin: bool) -> Response | None:
        running: Service = request.app.state.service
        store = running.store
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        cookie = request.cookies.get(running.cookie)
        if scheme.lower() == "bearer" and is_client_token(token.strip()):
            return await self._client(request, token.strip())
        if HEADER in request.headers:
            return await self._member(request, None)
        if scheme.lower() == "bearer" and token:
            if (holder := await store.holder(token.strip())) is not None:
                request.scope.update(rayps_user=holder, rayps_bearer=True, rayps_secret=token.strip())
                return None
        elif cookie and (holder := await store.holder(cookie)) is not None:
            if no_origin:
                return problem(request, 403, "a write with a session cookie needs an Origin header", code="bad_origin")
            request.scope.update(rayps_user=holder, rayps_secret=cookie)
            return None
        return self.refuse_unauthenticated(request)

    async def _client(self, request: Request, token: str) -> Response | None:
        """Authenticate a federated client, whose token is valid only for the routes of clients."""
        running = request.app.state.service
        grant = await running.client_tokens.grant(token)
        if grant is None:
            return self.refuse_unauthenticated(
                request,
                "this client token is wrong, was revoked or has expired: ask its issuer for another token "
                "(`rayps token create`)",
            )
        if not request.scope["path"].startswith(CLIENTS):
            return problem(request, 403, f"a client token is valid for {CLIENTS}* only", code="client_only")
        if HEADER in request.headers:
            return await self._member(request, grant)
        request.scope["rayps_grant"] = grant
        return None

    async def _member(self, request: Request, token: Grant | None) -> Response | None:
        """Authenticate a member of the federation by its certificate, and by its token if it has one too."""
        if not request.scope["path"].startswith(CLIENTS):
            return problem(request, 403, f"a certificate is valid for {CLIENTS}* only", code="client_only")
        try:
            members = request.app.state.service.members
            request.scope["rayps_grant"] = await admit(request, members, token, BODY_LIMIT)
        except Unauthorized as error:
            return self.refuse_unauthenticated(request, error.message, str(error.data.get("code", "unauthorized")))
        except RaypsError as error:
            status = int(error.data.get("status", 400))
            return problem(request, status, error.message, code=str(error.data.get("code", "bad_request")))
        return None

    def refuse_unauthenticated(self, request: Request, detail: str | None = None, code: str | None = None) -> Response:
        """Return the refusal of an unauthenticated request: 401, or 429 after many such requests in a minute.

        Authenticated requests are not affected.
        """
        now = time.monotonic()
        self._failures.append(now)
        if len(self._failures) > _GUESSES:
            self._failures.popleft()
        if len(self._failures) == _GUESSES and now - self._failures[0] < _GUESS_SECONDS:
            retry = {"Retry-After": "60"}
            return problem(request, 429, "too many wrong tokens: wait a minute", headers=retry)
        return problem(
            request,
            401,
            detail
            or "the token is missing, wrong or revoked: send `Authorization: Bearer "
            "rps_...`; the token is in the file `token` of the service's state directory",
            code=code,
            headers={"WWW-Authenticate": "Bearer"},
        )


def _is_update(request: Request) -> bool:
    """Return whether a body is an update or the message of a stage, which the order limits (`most_bytes`)."""
    path = request.scope["path"]
    sent = path.endswith("/update") or "/stages/" in path
    return request.method == "PUT" and path.startswith(f"{CLIENTS}rounds/") and sent


def _is_code(request: Request) -> bool:
    return request.method == "PUT" and request.scope["path"].startswith("/api/v1/code/")


def _host(header: str) -> str:
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and ":" in host else host


def _same_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.strip().lower()
    except ValueError:
        return False
