"""Answer every error with RFC 9457 problem details (application/problem+json): code, pointers, request id."""

from __future__ import annotations

import difflib
import http
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from rayps_client.errors import ConfigError, Conflict, NotFound, RaypsError, Unauthorized, UserError
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from rayps.core.strategy.elastic import ElasticWorkers, explain_misplaced
from rayps.service.state_disk import StateDisk, is_full
from rayps.service.store import LOCKED_SECONDS, is_locked

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_BUSY_SECONDS = 5  # seconds after which a client may repeat a request that found the store locked
log = logging.getLogger(__name__)

_STATUS: dict[type[RaypsError], tuple[int, str]] = {
    NotFound: (404, "not_found"),
    Conflict: (409, "conflict"),
    Unauthorized: (401, "unauthorized"),
    ConfigError: (422, "invalid"),
    UserError: (422, "invalid"),
}
# the forms that a value of `workers` may have; pydantic adds the form's name to the place of an error
ONE_NUMBER, A_RANGE = "one number", "a range"
_CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    412: "precondition_failed",
    413: "too_large_body",
    415: "unsupported_media_type",
    422: "invalid",
    429: "too_many_requests",
    500: "internal",
    503: "busy",
    507: "disk_full",
}


def problem(
    request: Request,
    status: int,
    detail: str,
    *,
    code: str | None = None,
    errors: Sequence[dict[str, str]] = (),
    headers: dict[str, str] | None = None,
    ended: dict[str, str] | None = None,
) -> JSONResponse:
    """Build an error answer with RFC 9457 problem details. `ended`: how the job has ended, if this is the reason."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": request.url.path,
        "code": code or _CODES.get(status, "error"),
        "errors": list(errors),
        "request_id": request.scope.get("request_id", ""),
    }
    if ended is not None:
        body["ended"] = ended
    return JSONResponse(body, status, headers, media_type="application/problem+json")


def install(app: FastAPI, fields: Mapping[str, Sequence[str]]) -> None:
    """Add the handlers that answer every error of the app with problem details.

    `fields`: a dict from path prefix to the names of the fields of request bodies. The error of a misspelt field names
    the nearest of them.
    """

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        detail, path = str(error.detail), request.url.path
        if error.status_code == 404 and detail == http.HTTPStatus.NOT_FOUND.phrase and path.startswith("/api"):
            detail = f"there is no route {path[:200]}: /docs lists the routes"
        elif error.status_code == 405:
            allowed = ", ".join(_allowed(app, request))
            detail = f"{request.method} is not allowed for {path[:200]}: use {allowed}"
            return problem(request, 405, detail, headers={"Allow": allowed})
        return problem(request, error.status_code, detail, headers=dict(error.headers or {}))

    @app.exception_handler(RaypsError)
    async def _ours(request: Request, error: RaypsError) -> JSONResponse:
        for kind in type(error).__mro__:
            if kind in _STATUS:
                status, code = _STATUS[kind]
                field = error.data.get("field")
                errors = [{"pointer": f"/{field}", "message": str(error)}] if field else []
                code = error.data.get("code", code)
                return problem(request, status, str(error), code=code, errors=errors, ended=error.data.get("ended"))
        log.error("request %s: %s", request.scope.get("request_id"), error)
        return problem(request, 500, str(error))

    @app.exception_handler(OSError)
    @app.exception_handler(DBAPIError)
    async def _written(request: Request, error: Exception) -> JSONResponse:
        if is_locked(error):
            log.error(
                "request %s: the store is locked: %s", request.scope.get("request_id"), getattr(error, "orig", error)
            )
            detail = f"another program has locked the store for {LOCKED_SECONDS:g} s; this request has changed nothing"
            return problem(request, 503, detail, headers={"Retry-After": str(_BUSY_SECONDS)})
        if not is_full(error):
            raise error
        disk: StateDisk = request.app.state.service.store.disk
        disk.record_failure()
        log.error(
            "request %s: the disk is full: %s", request.scope.get("request_id"), getattr(error, "orig", error)
        )  # without the SQL statement, which contains the user's values
        return problem(request, 507, f"{disk.full_message()}; this request has changed nothing")

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        known = next((names for path, names in fields.items() if request.url.path.startswith(path)), ())
        errors = [_explain(e, known) for e in error.errors()[:20]]
        status = 415 if any(_not_json(e) for e in error.errors()) else 422
        return problem(request, status, "; ".join(e["message"] for e in errors[:3]), errors=errors)


def _allowed(app: FastAPI, request: Request) -> list[str]:
    """Return the methods that the routes of the request's path allow."""
    found = [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in app.routes)
    ]
    return found or ["GET", "HEAD"]  # the path is a file of the dashboard


def _not_json(error: Any) -> bool:
    """Return whether the body was not parsed as JSON, as after `curl -d` without a Content-Type header."""
    return tuple(error["loc"]) == ("body",) and isinstance(error.get("input"), bytes)


def _explain(error: Any, fields: Sequence[str]) -> dict[str, str]:
    skipped = ("body", "query", "path", "header", ONE_NUMBER, A_RANGE)
    where = [str(part) for part in error["loc"] if part not in skipped]
    name = where[-1] if where else "the body"
    kind = error["type"]
    if A_RANGE in error["loc"]:
        message = (
            f"workers has {error.get('input')!r:.60}: give a whole number of at least 1, or the least and the most "
            "of an elastic job, such as [2, 8]"
        )
    elif kind == "extra_forbidden" and (reason := explain_misplaced(name)) is not None and len(where) == 1:
        message = reason
    elif kind == "extra_forbidden":
        fields = tuple(ElasticWorkers.__dataclass_fields__) if where[0] == "elastic" else fields
        near = difflib.get_close_matches(name, fields, 1)
        hint = f": did you mean {near[0]!r}?" if near else f": the fields are {', '.join(fields)}"
        message = f"{name!r} cannot be set by this request" if near == [name] else f"there is no field {name!r}{hint}"
    elif kind == "missing":
        message = f"{name} is missing" if where else "the request has no JSON body"
    elif kind == "json_invalid":
        name, message = "", f"the body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}"
        where = []
    elif _not_json(error):
        message = "the body was not read as JSON: send 'Content-Type: application/json'"
    else:
        given = repr(error.get("input"))
        short = given if len(given) <= 60 else given[:57] + "..."
        message = f"{name} is {short}: {error['msg'].removeprefix('Value error, ')}"
    pointer = "/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in where)
    return {"pointer": pointer if where else "", "message": message}
