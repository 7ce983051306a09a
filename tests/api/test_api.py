"""The REST interface: its contract, who may ask, bad input as a table, and streams that lose nothing."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx2
import pytest
from rayps_api import folder, pages
from rayps_api.guard import is_private
from rayps_api.rollup import Rollup, Rollups
from rayps_api.routes import routes_root
from rayps_api.service import Service
from service_site import Site

from rayps.cluster.warm import WarmState
from rayps.core.job.job_status import Status
from rayps.service import store
from rayps.service.scheduler import Scheduler, View


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("state"))
    yield site
    site.close()


def append(path: Path, *things: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(thing) + "\n" for thing in things)


def test_a_job_is_filed_shown_listed_and_stopped(site: Site) -> None:
    answer = site.http.post(
        "/api/v1/jobs",
        json={
            "workload": "digits:Digits",
            "workers": 4,
            "strategy": "parameter_server:staleness=3,shards=2",
            "epochs": 3,
            "name": "first",
        },
    )
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/api/v1/jobs/{job['id']}"
    assert job["spec"]["strategy"]["name"] == "parameter_server" and job["spec"]["strategy"]["staleness"] == 3
    assert set(job) == {
        "id",
        "name",
        "status",
        "reason",
        "spec",
        "attempt",
        "created_at",
        "started_at",
        "finished_at",
        "progress",
        "metrics",
        "lowest",
        "checkpoint",
        "stop_requested",
        "params",
        "sweep",
        "strategies",
        "elastic",
    }
    assert (job["name"], job["status"], job["spec"]["workers"]) == ("first", "QUEUED", 4)
    for _ in range(100):
        shown = site.http.get(answer.headers["location"]).json()
        if shown["reason"]:
            break
        time.sleep(0.05)
    assert shown["reason"] == "Ray is starting"
    assert site.http.get("/api/v1/jobs?status=QUEUED&limit=200").json()["jobs"][0]["id"]
    stopped = site.http.post(f"{answer.headers['location']}/stop")
    assert stopped.status_code == 202 and stopped.json()["stop_requested"]
    for _ in range(100):
        shown = site.http.get(answer.headers["location"]).json()
        if shown["status"] == "STOPPED":
            break
        time.sleep(0.05)
    assert shown["status"] == "STOPPED" and shown["finished_at"].endswith("Z")
    again = site.http.post(f"{answer.headers['location']}/stop")
    assert again.status_code == 409 and again.json()["code"] == "conflict"


def test_an_idempotency_key_gives_the_same_job(site: Site) -> None:
    body = {"workload": "digits:Digits", "seed": 5}
    first = site.http.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "k1"})
    second = site.http.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "k1"})
    other = site.http.post("/api/v1/jobs", json={**body, "seed": 6}, headers={"Idempotency-Key": "k1"})
    assert (first.status_code, second.status_code, other.status_code) == (201, 200, 422)
    assert first.json()["id"] == second.json()["id"]


def test_the_counts_are_of_all_pages_and_of_any_status(site: Site) -> None:
    """A failed job counts also if it is beyond the page, and if the page asks for others."""
    ids = [site.add(name=f"counted {number}", workers=8) for number in range(5)]
    site.start(ids[0])
    site.store("change_status", ids[0], Status.FAILED, message="it broke", reason="the disk is full")
    for query in ("", "&limit=1", "&status=QUEUED", "&status=SUCCEEDED"):
        found = site.http.get(f"/api/v1/jobs?text=counted{query}").json()
        assert found["counts"] == {"QUEUED": 4, "FAILED": 1}
    found = site.http.get("/api/v1/jobs?text=counted&status=FAILED&limit=1").json()
    assert [job["id"] for job in found["jobs"]] == [ids[0]] and found["next_cursor"] is None
    assert site.http.get("/api/v1/jobs?text=DISK%20full").json()["counts"] == {"FAILED": 1}
    assert site.http.get("/api/v1/jobs?text=counted&sweep=none").json()["counts"] == {}
    assert site.http.get(f"/api/v1/jobs?text={'x' * 501}").status_code == 422


def test_pages_of_jobs(site: Site) -> None:
    made = [site.add(seed=i) for i in range(5)]
    seen: list[str] = []
    cursor = None
    while True:
        page = site.http.get("/api/v1/jobs", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        seen += [job["id"] for job in page["jobs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [job for job in seen if job in made] == made[::-1] and len(seen) == len(set(seen))


BAD = [
    ({}, "/workload", "a job needs a workload"),
    ({"workload": "digits"}, "/workload", "digits:Digits"),
    ({"workload": "sweep.py:Sweep(lr=0.1)"}, "/workload", "write sweep.py:Sweep\nand give the arguments"),
    ({"workload": "a:B()"}, "/workload", "has arguments"),
    ({"workload": "a:B C"}, "/workload", "should name a module or file and a class"),
    ({"workload": "a:B", "wokers": 4}, "/wokers", "did you mean 'workers'?"),
    ({"workload": "a:B", "workers": 0}, "/workers", "greater than or equal to 1"),
    ({"workload": "a:B", "workers": -1}, "/workers", "greater"),
    ({"workload": "a:B", "workers": 1.5}, "/workers", "integer"),
    ({"workload": "a:B", "workers": "4"}, "/workers", "integer"),
    ({"workload": "a:B", "workers": True}, "/workers", "integer"),
    ({"workload": "a:B", "workers": 2**63}, "/workers", "less than"),
    ({"workload": "a:B", "epochs": 1, "steps": 1}, "/epochs", "give only one of them"),
    ({"workload": "a:B", "epochs": 0}, "/epochs", "greater"),
    ({"workload": "a:B", "strategy": "all_redcue"}, "/strategy", "did you mean 'all_reduce'?"),
    ({"workload": "a:B", "strategy": {"name": "parameter_server", "shrads": 2}}, "/strategy", "shards"),
    ({"workload": "a:B", "strategy": 7}, "/strategy", "all_reduce"),
    ({"workload": "a:B", "strategy": []}, "/strategy", "empty"),
    ({"workload": "a:B", "resources": {"cpu": -1}}, "/resources/cpu", "greater"),
    ({"workload": "a:B", "resources": {"tpu": 1}}, "/resources", "cpu, gpu or memory"),
    ({"workload": "a:B", "timeout": 0}, "/timeout", "greater than 0"),
    ({"workload": "a:B", "max_failures": -1}, "/max_failures", "greater"),
    ({"workload": "a:B", "name": ""}, "/name", "pattern"),
    ({"workload": "a:B", "name": "../x"}, "/name", "pattern"),
    ({"workload": "a:B", "name": "x" * 300}, "/name", "pattern"),
    ({"workload": "a:B", "name": "a\nb"}, "/name", "pattern"),
    ({"workload": "a:B", "name": "<script>"}, "/name", "pattern"),
    ({"workload": "a\u0000:B"}, "/workload", "printable"),
    ({"workload": "a.py:B"}, "/working_dir", "working_dir"),
    ({"workload": "a.py:B", "working_dir": "/nowhere"}, "/working_dir", "is not a directory"),
    ({"workload": "a.py:B", "working_dir": "."}, "/working_dir", "absolute"),
    ({"workload": "a.py:B", "working_dir": "/"}, "/workload", "no file a.py"),
    ({"workload": "a:B", "workers": 9}, "/workers", "has 8"),
    ({"workload": "a:B", "workers": 3, "strategy": "all_reduce:replica=pipeline(stages=2)"}, "/workers", "such as 2"),
    ({"workload": "a:B", "workers": 4, "strategy": "1*all_reduce > tensor_parallel:size=3"}, "/workers", "2 of 2"),
]


@pytest.mark.parametrize(("body", "pointer", "says"), BAD)
def test_bad_jobs_are_refused_with_the_way_out(site: Site, body: Any, pointer: str, says: str) -> None:
    answer = site.http.post("/api/v1/jobs", json=body)
    problem = answer.json()
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"
    assert says in problem["detail"] and problem["errors"][0]["pointer"] == pointer
    assert len(problem["detail"].splitlines()) <= 3 and problem["request_id"] == answer.headers["x-request-id"]
    assert "Traceback" not in answer.text


def test_a_job_larger_than_the_own_ray_has_a_code(site: Site) -> None:
    answer = site.http.post("/api/v1/jobs", json={"workload": "a:B", "workers": 4, "resources": {"cpu": 3}})
    assert answer.status_code == 422 and answer.json()["code"] == "too_large"
    assert "12 CPUs" in answer.json()["detail"] and "--cpus" in answer.json()["detail"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{} {}",
        b'{"workload": NaN}',
        b'{"workload":"a:B","timeout":NaN}',
        b'{"workload":"a:B","timeout":Infinity}',
        b"[" * 100_000,
        b'{"workload":"a:B","seed":' + b"9" * 10_000 + b"}",
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b'{"workload":"\\ud800:B"}',
        b'{"workload":"a:B","seed":-1}',
        b'{"workload":"a:B","strategy":{"name":"parameter_server","staleness":NaN}}',
    ],
)
def test_bodies_that_are_no_job(site: Site, content: bytes) -> None:
    answer = site.http.post("/api/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert answer.headers["content-type"] == "application/problem+json" and "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/jobs/nobody", 404),
        ("GET", "/api/v1/jobs/01J00000000000000000000000", 404),
        ("POST", "/api/v1/jobs/01J00000000000000000000000/stop", 404),
        ("GET", "/api/v1/jobs/01J00000000000000000000000/logs", 404),
        ("GET", "/api/v1/jobs/%2e%2e%2fetc/logs", 404),
        ("GET", "/api/v1/stream?job=nobody", 404),
        ("GET", "/api/v1/nothing", 404),
        ("DELETE", "/api/v1/jobs", 405),
        ("GET", "/api/v1/jobs?limit=0", 422),
        ("GET", "/api/v1/jobs?limit=1000000000", 422),
        ("GET", "/api/v1/jobs?cursor=x", 422),
        ("GET", "/api/v1/jobs?status=GREAT", 422),
        ("GET", "/api/v1/stream?cursor=x7", 422),
        ("POST", "/api/v1/session", 422),
    ],
)
def test_bad_requests(site: Site, method: str, path: str, status: int) -> None:
    answer = site.http.request(method, path)
    assert answer.status_code == status, answer.text
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["status"] == status and problem["code"] and problem["request_id"]


def test_other_content_types_and_large_bodies(site: Site) -> None:
    text = site.http.post("/api/v1/jobs", content=b'{"workload":"a:B"}', headers={"Content-Type": "text/plain"})
    assert text.status_code == 415
    large = site.http.post("/api/v1/jobs", content=b" " * 1_000_001)
    chunked = site.http.post(
        "/api/v1/jobs", content=iter([b" " * 600_000] * 2), headers={"Content-Type": "application/json"}
    )
    for answer in (large, chunked):
        assert answer.status_code == 413 and answer.headers["content-type"] == "application/problem+json"


# who may ask


def test_every_route_but_the_open_ones_needs_a_token(site: Site) -> None:
    openapi = site.http.get("/openapi.json").json()
    routes = {(method.upper(), path) for path, verbs in openapi["paths"].items() for method in verbs}
    routes |= {("GET", "/openapi.json"), ("GET", "/docs")}
    assert len(routes) >= 15
    public = set()
    for method, path in sorted(routes):
        url = site.url + path.replace("{job_id}", "01J00000000000000000000000")
        answers = [
            httpx2.request(method, url, headers=headers)
            for headers in (
                {},
                {"Authorization": "Bearer"},
                {"Authorization": "Basic eDp5"},
                {"Cookie": f"{site.service.cookie}=rps_x"},
            )
        ]
        if any(answer.status_code not in (401, 429) for answer in answers):
            public.add((method, path))
        else:
            assert answers[0].headers["www-authenticate"] == "Bearer"
        site.app.state.failures.clear()
    assert public == {("GET", "/healthz"), ("GET", "/readyz"), ("POST", "/api/v1/session")}
    assert all(is_private(path) for _, path in routes - public)


def test_wrong_tokens_are_slowed_down_and_right_ones_are_not(site: Site) -> None:
    statuses = [
        httpx2.get(f"{site.url}/api/v1/jobs", headers={"Authorization": f"Bearer {i}"}).status_code for i in range(70)
    ]
    assert statuses[0] == 401 and statuses[-1] == 429
    assert site.http.get("/api/v1/jobs").status_code == 200
    site.app.state.failures.clear()


def test_a_code_is_exchanged_once_for_a_strict_cookie(site: Site) -> None:
    code = site.http.post("/api/v1/codes").json()["code"]
    with httpx2.Client(base_url=site.url) as browser:
        answer = browser.post("/api/v1/session", json={"code": code})
        cookie = answer.headers["set-cookie"].lower()
        assert answer.status_code == 204 and "httponly" in cookie and "samesite=strict" in cookie
        assert browser.get("/api/v1/jobs").status_code == 200
        job = {"workload": "a:B"}
        for origin in (None, "http://evil.example", "http://127.0.0.1:1", "null"):
            headers = {} if origin is None else {"Origin": origin}
            refused = browser.post("/api/v1/jobs", json=job, headers=headers)
            assert refused.status_code == 403 and refused.json()["code"] == "bad_origin"
        assert browser.post("/api/v1/jobs", json=job, headers={"Origin": site.url}).status_code == 201
        assert httpx2.post(f"{site.url}/api/v1/session", json={"code": code}).status_code == 401
        assert browser.delete("/api/v1/session", headers={"Origin": site.url}).status_code == 204
        browser.cookies.update(answer.cookies)
        assert browser.get("/api/v1/jobs").status_code == 401


def test_the_token_itself_also_opens_a_session(site: Site) -> None:
    assert httpx2.post(f"{site.url}/api/v1/session", json={"token": site.token}).status_code == 204
    assert httpx2.post(f"{site.url}/api/v1/session", json={"token": "rps_x"}).status_code == 401
    assert httpx2.post(f"{site.url}/api/v1/session", json={"token": "x", "code": "y"}).status_code == 422


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "169.254.169.254", ""])
def test_other_host_names_are_not_answered(site: Site, host: str) -> None:
    answer = site.http.get("/api/v1/jobs", headers={"Host": host})
    assert answer.status_code == 400


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:8420", "LOCALHOST:1"])
def test_loopback_names_are_answered_whatever_the_port(site: Site, host: str) -> None:
    assert site.http.get("/healthz", headers={"Host": host}).status_code == 200


def test_headers_and_open_probes(site: Site) -> None:
    answer = httpx2.get(f"{site.url}/healthz")
    assert answer.status_code == 200 and "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
    ready = httpx2.get(f"{site.url}/readyz")
    assert ready.status_code == 503 and ready.json() == {"ready": False, "reason": "Ray is starting"}
    assert site.http.get("/api/v1/jobs").headers["cache-control"] == "no-store"


def test_probes_answer_head_and_a_wrong_method_names_the_right_ones(site: Site) -> None:
    for path, status in (("/healthz", 200), ("/readyz", 503)):
        answer = httpx2.head(f"{site.url}{path}")
        assert answer.status_code == status and answer.content == b""
    for method, path, allowed in (
        ("PUT", "/api/v1/jobs", "GET, POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PATCH", "/api/v1/tokens", "GET, POST"),
        ("GET", "/api/v1/tokens/x", "DELETE"),
        ("PUT", "/api/v1/server-groups/x", "GET, PATCH, DELETE"),
    ):
        answer = site.http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed), path


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", None])
def test_a_body_that_is_not_sent_as_json_is_a_415(site: Site, kind: str | None) -> None:
    for path in ("/api/v1/jobs", "/api/v1/session", "/api/v1/tokens", "/api/v1/server-groups", "/api/v1/client-tokens"):
        answer = site.http.post(path, content=b'{"a": 1}', headers={} if kind is None else {"Content-Type": kind})
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type"), path


def test_the_interface_says_who_may_ask_and_what_happens_to_who_guesses(site: Site) -> None:
    found = site.http.get("/openapi.json").json()
    schemes = found["components"]["securitySchemes"]
    kinds = {(scheme["type"], scheme.get("scheme", scheme.get("in"))) for scheme in schemes.values()}
    assert kinds == {("http", "bearer"), ("apiKey", "cookie")}
    assert schemes["session"]["name"] == site.service.cookie
    for path, verbs in found["paths"].items():
        for verb, operation in verbs.items():
            open_to_all = path in ("/healthz", "/readyz", "/api/v1/session") and verb != "delete"
            assert (operation["security"] == []) is open_to_all, path
            assert {name for each in operation["security"] for name in each} <= set(schemes)
            assert "429" in operation["responses"] or path in ("/healthz", "/readyz"), path
            json_body = "application/json" in operation.get("requestBody", {}).get("content", {})
            assert ("415" in operation["responses"]) is json_body, path
    for path, verbs in found["paths"].items():
        if path.startswith("/api/v1/client/"):
            assert all(operation["security"] == [{"client": []}] for operation in verbs.values())


def test_two_services_of_a_host_do_not_sign_each_other_out(site: Site, tmp_path: Path) -> None:
    other = Site(tmp_path / "other")
    try:
        jar: dict[str, str] = {}
        for each in (site, other):  # a browser has one jar for all ports of a host
            answer = httpx2.post(f"{each.url}/api/v1/session", json={"token": each.token}, cookies=jar)
            jar |= dict(answer.cookies)
        assert len(jar) == 2
        for each in (site, other):
            assert httpx2.get(f"{each.url}/api/v1/jobs", cookies=jar).status_code == 200
    finally:
        other.close()


@pytest.mark.parametrize(
    ("path", "query", "expected"),
    [
        ("/jobs", "", "./#/jobs"),
        ("/jobs/", "", "../#/jobs"),
        ("/jobs/ID", "", "../#/jobs/ID"),
        ("/jobs/ID", "smooth=0.9&q=a%20b", "../#/jobs/ID?smooth=0.9&q=a%20b"),
        ("/servers/a b", "", "../#/servers/a%20b"),
        ("/jobs/ID/more/", "", "../../../#/jobs/ID/more"),
        ("/jobs//evil.example", "", "../../#/jobs/evil.example"),
        ("/jobs/\r\nSet-Cookie: x", "\r\n<", "../#/jobs/%0D%0ASet-Cookie%3A%20x?%0D%0A%3C"),
    ],
)
def test_a_plain_path_leads_into_the_page(path: str, query: str, expected: str) -> None:
    assert pages.in_page(path, query) == expected


@pytest.mark.parametrize("prefix", ["", "/team/rayps"])
def test_a_deep_link_leads_to_the_page_and_a_missing_file_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    dist = tmp_path / "dist"
    (dist / "assets").mkdir(parents=True)
    (dist / "index.html").write_text('<script src="./assets/main.js"></script>')
    (dist / "assets/main.js").write_text("1")
    monkeypatch.setattr(pages, "built", lambda: dist)
    site = Site(tmp_path / "state")
    try:
        for path in ("/jobs/01J00000000000000000000000?smooth=0.9", "/jobs", "/servers/one"):
            answer = httpx2.get(f"{site.url}{path}", follow_redirects=False)
            assert answer.status_code == 307
            seen = urljoin(f"http://proxy.example{prefix}{path}", answer.headers["location"])  # by the browser
            assert seen == f"http://proxy.example{prefix}/#{path}"
        assert "assets/main.js" in httpx2.get(f"{site.url}/").text
        assert httpx2.get(f"{site.url}/assets/main.js").text == "1"
        for path in ("/assets/gone.js", "/jobs.js", "/nothing"):
            answer = httpx2.get(f"{site.url}{path}")
            assert answer.status_code == 404 and answer.headers["content-type"] == "application/problem+json"
    finally:
        site.close()


def test_cluster_strategies_metrics_docs(site: Site) -> None:
    assert site.http.get("/api/v1/cluster").json() == {
        "ready": False,
        "address": None,
        "owned": True,
        "cores": os.cpu_count(),
        "together": os.cpu_count(),
        "total": {"cpu": 8.0},
        "free": {},
        "reason": "Ray is starting",
        "warm": None,
    }
    names = {strategy["name"] for strategy in site.http.get("/api/v1/strategies").json()}
    assert {"all_reduce", "parameter_server"} <= names
    text = site.http.get("/metrics").text
    assert 'rayps_jobs{status="QUEUED"}' in text and "rayps_ray_ready 0.0" in text
    assert "/api/v1/jobs" in site.http.get("/docs").text
    assert "rayps_warm" not in text


def test_a_waiting_job_costs_metrics_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of jobs may wait: none of their rows is read, and none of their folders."""
    for _ in range(3):
        site.add()
    started = site.add()
    site.start(started)
    rows, folders = [], []
    monkeypatch.setattr(store, "_read_record", lambda row: rows.append(row))
    monkeypatch.setattr(Service, "progress", lambda self, job: folders.append(job))
    try:
        asyncio.run_coroutine_threadsafe(routes_root.prometheus(site.service), site.loop).result(60)
    finally:
        monkeypatch.undo()
    assert rows == [] and started in folders
    assert set(folders) == {job["id"] for job in site.http.get("/api/v1/jobs?status=STARTING").json()["jobs"]}


def test_the_memory_of_warm_processes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = View(True, None, {}, {}, WarmState(3, 2, 1, 700))
    monkeypatch.setattr(Scheduler, "view", property(lambda self: seen, lambda self, value: None), raising=False)
    assert site.http.get("/api/v1/cluster").json()["warm"] == {"wanted": 3, "ready": 2, "starting": 1, "memory": 700}
    lines = site.http.get("/metrics").text.splitlines()
    assert 'rayps_warm_processes{state="ready"} 2.0' in lines and 'rayps_warm_processes{state="starting"} 1.0' in lines
    assert "rayps_warm_bytes 700.0" in lines


def test_the_dashboard_is_found_or_says_how_to_build_it(site: Site) -> None:
    answer = httpx2.get(f"{site.url}/")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.status_code == (200 if pages.built() else 503)


# reading folders


def test_points_logs_and_events_by_cursor(site: Site) -> None:
    job = site.add()
    home = site.start(job)
    url = f"/api/v1/jobs/{job}"
    assert site.http.get(f"{url}/metrics").json() == {"points": [], "cursor": 0}
    append(home / "metrics.jsonl", {"kind": "round", "round": 0, "loss": float("nan")}, {"round": 1})
    with (home / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "lo')  # torn: not yet there
    page = site.http.get(f"{url}/metrics").json()
    assert [p["round"] for p in page["points"]] == [0, 1] and page["points"][0]["loss"] is None
    with (home / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.5}\n')
    rest = site.http.get(f"{url}/metrics?cursor={page['cursor']}").json()
    assert rest["points"] == [{"round": 2, "loss": 0.5}]
    one = site.http.get(f"{url}/metrics?limit=1").json()
    assert len(one["points"]) == 1 and site.http.get(f"{url}/metrics?cursor={one['cursor']}").json()["points"][0] == {
        "round": 1
    }
    with (home / "log.txt").open("w") as file:
        file.writelines(f"2026-11-21T06:41:00.{i:03d}Z worker-0 line {i}\n" for i in range(300))
    tail = site.http.get(f"{url}/logs?tail=2").json()
    assert [line["text"] for line in tail["lines"]] == ["line 298", "line 299"]
    assert tail["lines"][0] == {"time": "2026-11-21T06:41:00.298Z", "source": "worker-0", "text": "line 298"}
    assert tail["cursor"] == (home / "log.txt").stat().st_size
    append(home / "events.jsonl", {"seq": 0, "time": time.time() + 1, "kind": "started", "message": "m"})
    events = site.http.get(f"{url}/events").json()
    kinds = [e["kind"] for e in events["events"] if e["kind"] != "unknown"]  # said once Ray was away for long enough
    assert kinds == ["queued", "starting", "started"]
    assert [e["seq"] for e in events["events"]] == sorted({e["seq"] for e in events["events"]})
    later = site.http.get(f"{url}/events?cursor={events['cursor']}").json()["events"]
    assert [e for e in later if e["kind"] != "unknown"] == []


def test_where_the_time_of_a_job_went(site: Site) -> None:
    job = site.add()
    home = site.start(job)
    url = f"/api/v1/jobs/{job}/report"
    missing = site.http.get(url)
    assert missing.status_code == 404 and "has not started" in missing.json()["detail"]
    slow = {"parts": {"compute": 9.0, "waiting": 1.0}, "machine": {"cpu": 9.0}, "rounds": 10}
    fast = {
        "parts": {"compute": 3.0, "waiting": 7.0},
        "waits": {"worker-1": 7.0},
        "machine": {"cpu": 3.0},
        "rounds": 10,
    }
    append(
        home / "time.jsonl",
        {"name": "worker-0", "began": 0.0, "wall": 10.0, **fast},
        {"name": "worker-1", "began": 0.0, "wall": 10.0, **slow},
        {"event": "restarted", "time": 5.0, "message": "again"},
    )
    with (home / "time.jsonl").open("a") as file:
        file.write('{"name": "worker-0", "be')  # torn
    found = site.http.get(url).json()
    assert found["goodput"] == 0.6 and found["seconds"] == 10.0
    assert [member["name"] for member in found["members"]] == ["worker-0", "worker-1"]
    assert found["verdict"]["guilty"] == ["worker-1"] and found["verdict"]["cause"] == "code"
    assert [event["event"] for event in found["events"]] == ["restarted"]


def test_the_goodput_of_running_jobs_is_a_metric(site: Site) -> None:
    job = site.add()
    home = site.start(job)
    account = {"goodput": 0.75, "seconds": {"compute": 6.0, "idle": 2.0}, "members": {}}
    (home / "progress.json").write_text(json.dumps({"account": account}))
    lines = site.http.get("/metrics").text.splitlines()
    assert f'rayps_job_goodput{{job="{job}"}} 0.75' in lines
    assert f'rayps_job_seconds{{job="{job}",part="compute"}} 6.0' in lines


def test_events_by_small_pages_are_all_there_once(tmp_path: Path) -> None:
    noted = [{"kind": f"s{i}", "time": float(i * 3)} for i in range(5)]
    append(tmp_path / "e", *({"kind": f"d{i}", "time": float(i)} for i in range(12)))
    seen: list[str] = []
    cursor = 0
    while True:
        page, cursor = folder.events(tmp_path / "e", noted, cursor, 2)
        if not page:
            break
        seen += [event["kind"] for event in page]
    assert sorted(seen) == sorted({*seen}) and len(seen) == 17
    assert cursor < 2**53


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (3, 3), (10, 10), (99, 10)])
def test_tail(tmp_path: Path, count: int, expected: int) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(10)))
    found, after = folder.log_lines(path, folder.tail(path, count), count)
    assert len(found) == expected and found[-1]["text"] == "line 9" and after == path.stat().st_size


def test_a_closed_bucket_never_changes() -> None:
    rollup = Rollup()
    closed: dict[tuple[int, int], Any] = {}
    for number in range(3000):
        rollup.add(
            {"kind": "round", "round": number, "loss": float(number % 7), "samples": 4, "seconds": 0.5, "own": 3}
        )
        if number % 97 == 0:
            series = rollup.series(16)
            assert len(series) <= 16 and sum(b["count"] for b in series) == number + 1
            for bucket in series[:-1]:
                key = (bucket["round"], bucket["round_end"])
                assert closed.setdefault(key, bucket) == bucket
                assert (key[1] - key[0] + 1).bit_count() == 1 and key[0] % (key[1] - key[0] + 1) == 0
    assert rollup.series(16)[0]["loss"] == {"min": 0.0, "mean": pytest.approx(3.0, abs=0.1), "max": 6.0}
    assert rollup.series(16)[0]["samples_per_second"] == 8.0
    assert rollup.series(16)[0]["numbers"] == {"own": 3.0}


def test_the_whole_run_in_buckets(site: Site) -> None:
    job = site.add()
    home = site.start(job)
    append(
        home / "metrics.jsonl",
        *({"kind": "round", "round": i, "loss": 1.0} for i in range(100)),
        {"kind": "evaluation", "round": 99, "metrics": {"accuracy": 0.9}},
    )
    found = site.http.get(f"/api/v1/jobs/{job}/metrics?max_points=10").json()
    assert [b["count"] for b in found["series"]] == [16] * 6 + [4] and len(found["evaluations"]) == 1
    assert site.http.get(f"/api/v1/jobs/{job}/metrics?max_points=1").status_code == 422


# streams


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    for line in lines:
        if line == "":
            if event:
                yield event
            event = {}
        elif not line.startswith(":"):
            key, _, value = line.partition(": ")
            event[key] = json.loads(value) if key == "data" else value


def test_a_return_takes_back_the_last_and_the_extremes(tmp_path: Path) -> None:
    points = [{"kind": "round", "round": at, "loss": float(at), "skill": -float(at)} for at in range(10)]
    again = {"kind": "round", "round": 6, "loss": 6.5, "skill": 0.5}
    append(tmp_path / "m", *points, {"kind": "returned", "round": 6}, again)
    found = Rollups().read(tmp_path / "m", 2)["summaries"]
    assert found == {
        "loss": {"last": 6.5, "least": 0.0, "most": 6.5},
        "skill": {"last": 0.5, "least": -5.0, "most": 0.5},
    }
    append(tmp_path / "m", {"kind": "round", "round": 7, "loss": float("nan")})
    found = Rollups().read(tmp_path / "m", 2)["summaries"]
    assert found["loss"] == {"last": None, "least": 0.0, "most": 6.5} and found["skill"]["last"] == 0.5


def test_of_many_evaluations_the_last_and_the_extremes_are_kept() -> None:
    rollup = Rollup()
    for at in range(12_345):
        value = {777: -5.0, 9_001: 5.0}.get(at, at / 1e5)
        rollup.add({"kind": "evaluation", "round": at, "metrics": {"skill": value, "odd": None}})
    kept = [each["metrics"]["skill"] for each in rollup.evaluations]
    assert len(kept) <= 5000 and rollup.evaluations[-1]["round"] == 12_344 and (min(kept), max(kept)) == (-5.0, 5.0)


def test_a_stream_resumes_without_a_hole_and_ends(site: Site) -> None:
    job = site.add()
    home = site.start(job)
    seen: list[int] = []
    cursor = ""
    for part in range(4):
        append(home / "metrics.jsonl", *({"kind": "round", "round": part * 10 + i} for i in range(10)))
        with (home / "log.txt").open("a") as file:
            file.write(f"2026-11-21T06:41:00.000Z worker-0 part {part}\n")
        headers = {"Last-Event-ID": cursor} if part % 2 else {}
        with site.http.stream("GET", f"/api/v1/stream?job={job}&cursor={cursor}", headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for event in events_of(answer.iter_lines()):
                cursor = event.get("id", cursor)
                if event["event"] == "metrics":
                    seen += [p["round"] for p in event["data"]["points"]]
                    break  # the connection is lost before the logs of this part came
    assert seen == list(range(40))
    with site.http.stream("GET", f"/api/v1/stream?job={job}&cursor={cursor}") as answer:
        kinds: list[str] = []
        texts: list[str] = []
        for event in events_of(answer.iter_lines()):
            kinds.append(event["event"])
            if event["event"] == "logs":
                texts += [line["text"] for line in event["data"]["lines"]]
                site.store("change_status", job, Status.SUCCEEDED, message="done", reason="done")
        assert kinds[0] == "job" and kinds[-1] == "end" and "metrics" not in kinds
        assert event["data"] == {"status": "SUCCEEDED", "reason": "done"}
        assert texts == [f"part {i}" for i in range(4)]


def test_the_list_streams_jobs_that_change(site: Site) -> None:
    job = site.add()
    with site.http.stream("GET", "/api/v1/stream") as answer:
        messages = events_of(answer.iter_lines())
        assert job in [j["id"] for j in next(messages)["data"]["jobs"]]
        site.start(job)
        for message in messages:
            changed = {j["id"]: j["status"] for j in message["data"]["jobs"]}
            if changed.get(job) in ("STARTING", "UNKNOWN"):  # UNKNOWN where no Ray was seen for half a minute
                break


def test_the_list_streams_what_a_filter_chooses(site: Site) -> None:
    """A job that matches no more is told of, if it changed or was deleted, and also if that was before the stream."""
    one, two = site.add(name="streamed one"), site.add(name="streamed two")
    query = "/api/v1/stream?status=QUEUED&status=STARTING&text=streamed"
    with site.http.stream("GET", query) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        whole = next(lines)
        assert whole["whole"] and {job["id"] for job in whole["jobs"]} == {one, two}
        assert whole["counts"] == {"QUEUED": 2}
        site.add(name="another")
        site.start(one)
        site.store("change_status", one, Status.FAILED, message="")
        while not (left := next(lines))["jobs"] or left["jobs"][-1]["status"] != "FAILED":
            assert not left["whole"] and {job["id"] for job in left["jobs"]} <= {one, two}
        assert left["counts"] == {"QUEUED": 1, "FAILED": 1}
        site.http.post(f"/api/v1/jobs/{two}/stop")
        while two not in [job["id"] for job in left["jobs"]] or left["jobs"][-1]["status"] != "STOPPED":
            left = next(lines)
    with site.http.stream("GET", "/api/v1/stream?status=FAILED&text=streamed") as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        assert [job["id"] for job in next(lines)["jobs"]] == [one]
        assert site.http.delete(f"/api/v1/jobs/{one}").is_success
        while one not in (last := next(lines))["gone"]:
            assert not last["jobs"]
        assert last["counts"] == {"STOPPED": 1}
    with site.http.stream("GET", query) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        found = next(lines)
        assert found == {"jobs": [], "gone": [], "whole": True, "counts": {"STOPPED": 1}}


def test_streams_are_bounded(site: Site) -> None:
    site.service.streams = 1000
    answer = site.http.get("/api/v1/stream")
    assert answer.status_code == 429 and answer.headers["retry-after"]
    site.service.streams = 0


def test_what_a_newcomer_sends_with_curl_is_answered_with_the_way_out(site: Site) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d says by itself
    answer = site.http.post("/api/v1/jobs", content='{"workload": "a:B"}', headers=form)
    assert answer.status_code == 415 and answer.json()["detail"].endswith("send 'Content-Type: application/json'")
    answer = site.http.get("/api/v1/job")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "there is no route /api/v1/job: /docs lists the routes"
    assert site.http.put("/api/v1/jobs").json()["detail"] == "PUT is not allowed for /api/v1/jobs: use GET, POST"


def test_the_last_bucket_ends_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"kind": "round", "round": i, "loss": 1.0}) + "\n" for i in range(1, 396)))
    series = Rollups().read(path, 20)["series"]
    assert (series[-1]["round"], series[-1]["round_end"]) == (384, 395)
    assert (series[-2]["round"], series[-2]["round_end"]) == (352, 383)


def test_a_job_that_resumes_another_takes_the_parameters_that_were_given_to_it(site: Site) -> None:
    first = site.add(params={"lr": 0.3, "width": 8}, name="first")
    place = site.start(first) / "checkpoints/step-00000100"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    site.store("change_status", first, Status.STOPPED, message="", checkpoint=str(place))

    def params(**fields: Any) -> Any:
        job = site.add(**fields)
        kinds = [event["kind"] for event in site.http.get(f"/api/v1/jobs/{job}/events").json()["events"]]
        return site.http.get(f"/api/v1/jobs/{job}").json()["spec"]["params"], "parameters_taken" in kinds

    for resume in (first, first[:-2].lower(), str(place)):
        assert params(resume=resume) == ({"lr": 0.3, "width": 8}, True)
        assert params(resume=resume, params={"lr": 0.1}) == ({"lr": 0.1, "width": 8}, True)
    assert params(resume=first, params={"lr": 0.1, "width": 4}) == ({"lr": 0.1, "width": 4}, False)
    assert params(resume=first, workload="digits:Other") == ({}, False), "another workload has parameters of its own"
    again = site.add(resume=first, params={"lr": 0.2})
    site.start(again)
    site.store("change_status", again, Status.SUCCEEDED, message="", checkpoint=str(place))
    assert params(resume=again)[0] == {"lr": 0.2, "width": 8}
    assert params() == ({}, False)


def test_a_job_goes_on_from_where_another_ended(site: Site, tmp_path: Path) -> None:
    first = site.add()
    site.start(first)
    asked = {"workload": "digits:Digits", "resume": first[:-2]}
    refused = site.http.post("/api/v1/jobs", json=asked)
    assert refused.status_code == 422 and refused.json()["errors"][0]["pointer"] == "/resume"
    assert f"job {first} has not ended: wait, or stop it" in refused.text
    kept = tmp_path / "step-00000007"
    kept.mkdir()
    site.store("change_status", first, Status.STOPPED, message="", checkpoint=str(kept))
    assert site.http.post("/api/v1/jobs", json=asked).json()["spec"]["resume"] == str(kept)
    asked["resume"] = str(kept)
    refused = site.http.post("/api/v1/jobs", json=asked)
    assert refused.status_code == 422 and "is not a checkpoint (it has no manifest.json)" in refused.text
    (kept / "manifest.json").touch()
    assert site.http.post("/api/v1/jobs", json=asked).json()["spec"]["resume"] == str(kept)
    url = "s3://bucket/run/step-00000007"  # the driver reads it
    assert site.http.post("/api/v1/jobs", json=asked | {"resume": url}).json()["spec"]["resume"] == url
    for resume in ("01JZZZZZZZ", str(tmp_path / "elsewhere"), "true"):
        answer = site.http.post("/api/v1/jobs", json=asked | {"resume": resume})
        assert answer.status_code == 422 and "give the id of an ended job" in answer.text
    bare = site.add()
    site.start(bare)
    site.store("change_status", bare, Status.FAILED, message="")
    assert "has no checkpoint" in site.http.post("/api/v1/jobs", json=asked | {"resume": bare}).text
