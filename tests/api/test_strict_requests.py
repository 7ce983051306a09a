"""What a request asks for and its route does not have is answered, on every route of the app: nothing is ignored."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from service_site import Site

UNKNOWN = ("limitt", "Limit", "_")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    running = Site(tmp_path_factory.mktemp("strict") / "state")
    running.service.scheduler.refuse_too_large = lambda *given: None
    yield running
    running.close()


def operations(site: Site) -> list[tuple[str, str, dict[str, Any]]]:
    """All routes, as (method, path with values, what the interface says): a new one joins by itself."""
    paths = site.http.get("/openapi.json").json()["paths"]
    found = [(verb.upper(), path, what) for path, verbs in paths.items() for verb, what in verbs.items()]
    hidden: list[tuple[str, str, dict[str, Any]]] = [("GET", path, {}) for path in ("/openapi.json", "/docs")]
    found += [*hidden, ("HEAD", "/healthz", {}), ("HEAD", "/readyz", {})]
    values = {"code": "0" * 64, "stage": "advertise_keys", "serial": "1", "step": "1"}
    return [
        (method, re.sub(r"{(\w+)}", lambda name: values.get(name[1], "01JZZZZZZZ"), path), what)
        for method, path, what in found
    ]


@pytest.fixture(scope="module")
def client_headers(site: Site) -> dict[str, str]:
    made = site.http.post("/api/v1/client-tokens", json={"name": "a"}).json()
    return {"Authorization": f"Bearer {made['token']}", "Rayps-Client": f"{'0' * 26}:1:{'k' * 20}"}


def ask(site: Site, client: dict[str, str], method: str, path: str, **more: Any) -> httpx2.Response:
    own = client if path.startswith("/api/v1/client/") else {}
    return site.http.request(method, path, headers={**own, **more.pop("headers", {})}, **more)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_query_parameter_is_refused_on_every_route(
    site: Site, client_headers: dict[str, str], name: str
) -> None:
    for method, path, _ in operations(site):
        answer = ask(site, client_headers, method, path, params={name: "2"})
        assert answer.status_code == 422, (method, path, answer.text)
        if method != "HEAD":
            assert answer.json()["errors"][0]["pointer"] == f"/{name}", (method, path, answer.text)
            assert f"no query parameter {name!r}" in answer.json()["detail"], (method, path, answer.text)


def test_every_known_query_parameter_is_known(site: Site, client_headers: dict[str, str]) -> None:
    seen = 0
    for method, path, what in operations(site):
        for parameter in what.get("parameters", []):
            if parameter["in"] == "query" and path != "/api/v1/stream":  # it has no end
                seen += 1
                answer = ask(site, client_headers, method, path, params={parameter["name"]: "1"})
                assert "no query parameter" not in answer.text, (method, path, parameter["name"])
    assert seen >= 15
    answer = site.http.get("/api/v1/jobs", params={"limitt": "2"})
    assert "did you mean 'limit'?" in answer.json()["detail"]


@pytest.mark.parametrize("header", ["If-Match", "If-Unmodified-Since"])
def test_a_precondition_is_refused_on_every_route(site: Site, client_headers: dict[str, str], header: str) -> None:
    jobs = len(site.http.get("/api/v1/jobs").json()["jobs"])
    for method, path, _ in operations(site):
        answer = ask(site, client_headers, method, path, headers={header: '"x"'})
        assert answer.status_code == 412, (method, path, answer.text)
        assert method == "HEAD" or (
            answer.json()["code"] == "precondition_failed" and header in answer.json()["detail"]
        )
    assert len(site.http.get("/api/v1/jobs").json()["jobs"]) == jobs


def test_a_request_with_two_ends_is_answered_and_the_connection_closed(site: Site) -> None:
    """What one reader takes for the next request, another takes for the body of this one."""
    inner = f"GET /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {site.token}\r\n\r\n"
    body = f"0\r\n\r\n{inner}"
    for method, path, _ in operations(site):
        with socket.create_connection(("127.0.0.1", site.port)) as peer:
            peer.settimeout(60)
            peer.sendall(
                f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {site.token}\r\n"
                f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n\r\n{body}".encode()
            )
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while block := peer.recv(65536):  # until it is closed
                    found += block
        assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1") == 1, (method, path, found)
        assert b"connection: close" in found.lower()
        if method != "HEAD":
            assert json.loads(found.partition(b"\r\n\r\n")[2])["code"] == "bad_request"


@pytest.mark.parametrize(
    "resume", ["http://127.0.0.1:1/step-1", "https://a.example/x", "HTTP://a/x", "simplecache::http://a/x"]
)
def test_a_checkpoint_of_a_web_server_is_refused_at_submission(site: Site, tmp_path: Path, resume: str) -> None:
    answer = site.http.post("/api/v1/jobs", json={"workload": "digits:Digits", "resume": resume})
    assert answer.status_code == 422 and answer.json()["errors"][0]["pointer"] == "/resume", answer.text
    sweep = {"name": "s", "job": {"workload": "digits:Digits", "resume": resume}, "over": {"seed": [1, 2]}}
    assert site.http.post("/api/v1/sweeps", json=sweep).status_code == 422
    kept = site.http.post("/api/v1/jobs", json={"workload": "digits:Digits", "resume": "s3://bucket/http/run"})
    assert kept.status_code == 201, kept.text
