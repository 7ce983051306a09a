"""The answers of the job service to HTTP requests: their JSON, or the error that belongs to their status."""

from __future__ import annotations

from typing import Any

import httpx2

from rayps_client.errors import ConfigError, Conflict, NotFound, RaypsError, ServiceError, Unauthorized

_ERRORS: dict[int, type[RaypsError]] = {
    400: ConfigError,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    413: ConfigError,
    422: ConfigError,
}


def checked(answer: httpx2.Response, *, of_user: bool = True) -> Any:
    """Return the JSON of a response, or raise the error that belongs to the response's HTTP status.

    `of_user`: whether the request says what a user has given. If not, a request that the service cannot use is no
    mistake of the user's: the error is then a ServiceError, and no ConfigError.
    """
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        problem = answer.json()
    except ValueError:
        problem = {}
    detail = str(problem.get("detail") or f"the service answered {answer.status_code}")
    kind = _ERRORS.get(answer.status_code, ServiceError)
    if kind is ConfigError and not of_user:
        kind = ServiceError
    facts = {name: problem.get(name) for name in ("code", "request_id", *(["ended"] if "ended" in problem else []))}
    raise kind(detail, status=answer.status_code, **facts)
