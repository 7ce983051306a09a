"""The OpenAPI document: what FastAPI derives from the routes, plus authentication and common errors."""

from __future__ import annotations

import copy
from typing import Any

from rayps_api.guard import CLIENTS, OPEN
from rayps_api.schemas import problems

_TOKENS = "/api/v1/tokens"


def interface(derived: dict[str, Any], cookie: str) -> dict[str, Any]:
    """Complete the derived OpenAPI document: authentication schemes, and the answers 400, 412, 415, 422 and 429.

    429 is added to routes that need authentication, 415 to routes whose requests have a JSON body, the others to all.
    """
    found = copy.deepcopy(derived)
    found.setdefault("components", {})["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "A user's token, rps_... (`rayps token`)."},
        "session": {
            "type": "apiKey",
            "in": "cookie",
            "name": cookie,
            "description": "A browser's session (POST /api/v1/session). A write needs an Origin header.",
        },
        "client": {"type": "http", "scheme": "bearer", "description": "A federated client's token, rpc...."},
    }
    for path, verbs in found["paths"].items():
        for verb, operation in verbs.items():
            operation["security"] = security(verb.upper(), path)
            for status in (400, 412, 422):
                _add(operation, status)
            if operation["security"]:
                _add(operation, 429)
                operation["responses"]["429"].setdefault(
                    "headers", {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
                )
            if "application/json" in operation.get("requestBody", {}).get("content", {}):
                _add(operation, 415)
    return found


def security(method: str, path: str) -> list[dict[str, list[str]]]:
    """Return the authentication schemes of a route, of which a request uses one; an empty list if it needs none."""
    if (method, path) in OPEN:
        return []
    if path.startswith(CLIENTS):
        return [{"client": []}]
    if path == _TOKENS or path.startswith(f"{_TOKENS}/"):
        return [{"token": []}]
    return [{"token": []}, {"session": []}]


def _add(operation: dict[str, Any], status: int) -> None:
    operation["responses"].setdefault(str(status), problems(status)[status])
