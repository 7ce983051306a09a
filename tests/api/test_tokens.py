"""Tokens of users: made, listed, rotated and revoked, at once and for good; and no secret in a log or a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from folders import TESTS
from rayps_api.stream import TOPICS
from real_service import until
from service_site import Site

from rayps.cli.main import main
from rayps.core.job.job_status import Status

SECRET = re.compile(r"rps_[\w-]{20,}|#code=[\w-]+")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    running = Site(tmp_path / "state")
    yield running
    running.close()


@pytest.fixture
def say(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_STATE_DIR", str(site.settings.state_dir))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


def status(site: Site, token: str) -> int:
    return httpx2.get(f"{site.url}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"}).status_code


def again(site: Site) -> Site:
    """The same state with another service."""
    site.close()
    return Site(site.settings.state_dir)


def session(site: Site, token: str) -> dict[str, str]:
    answer = httpx2.post(f"{site.url}/api/v1/session", json={"token": token})
    assert answer.status_code == 204
    return dict(answer.cookies)


def test_a_token_whose_file_was_deleted_is_worthless_after_the_restart(tmp_path: Path) -> None:
    site = Site(tmp_path / "state")
    leaked, cookies = site.token, session(site, site.token)
    code = site.http.post("/api/v1/codes").json()["code"]
    site.settings.token_file.unlink()
    site = again(site)
    try:
        assert site.token != leaked and status(site, site.token) == 200 and status(site, leaked) == 401
        assert httpx2.get(f"{site.url}/api/v1/jobs", cookies=cookies).status_code == 401
        assert httpx2.post(f"{site.url}/api/v1/session", json={"code": code}).status_code == 401
    finally:
        site.close()


def test_a_store_with_several_tokens_of_an_earlier_version_keeps_the_one_in_the_file(tmp_path: Path) -> None:
    site = Site(tmp_path / "state")
    old = "rps_" + "x" * 43
    site.store("_add_token", "bearer", None)
    minted = site.store("_add_token", "bearer", None)
    assert status(site, minted) == 200 and status(site, old) == 401
    kept = site.token
    site = again(site)
    try:
        assert site.token == kept and status(site, kept) == 200 and status(site, minted) == 401
    finally:
        site.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_rotated_and_a_revoked_token_are_refused_at_once_and_for_good(tmp_path: Path, restarted: bool) -> None:
    site = Site(tmp_path / "state")
    try:
        made = site.http.post("/api/v1/tokens", json={"name": "laptop", "days": 2}).json()
        assert status(site, made["token"]) == 200
        cookies = session(site, made["token"])
        assert httpx2.get(f"{site.url}/api/v1/jobs", cookies=cookies).status_code == 200
        rotated = site.http.post(f"/api/v1/tokens/{made['id']}/rotate").json()
        gone = site.http.post("/api/v1/tokens", json={"name": "leaked"}).json()
        assert site.http.delete(f"/api/v1/tokens/{gone['id']}").status_code == 200
        own = site.http.post("/api/v1/tokens/local/rotate").json()
        if restarted:
            site = again(site)
        for token in (made["token"], gone["token"]):
            assert status(site, token) == 401
        assert httpx2.get(f"{site.url}/api/v1/jobs", cookies=cookies).status_code == 401
        for token in (rotated["token"], own["token"]):
            assert status(site, token) == 200
        assert site.settings.token_file.read_text() == own["token"]
        assert site.settings.token_file.stat().st_mode & 0o777 == 0o600
        http = httpx2.Client(base_url=site.url, headers={"Authorization": f"Bearer {own['token']}"})
        listed = {each["id"]: each for each in http.get("/api/v1/tokens").json()["tokens"]}
        assert listed[rotated["id"]]["name"] == "laptop" and listed[rotated["id"]]["revoked_at"] is None
        assert listed[rotated["id"]]["expires_at"] == made["expires_at"]
        assert listed[made["id"]]["revoked_at"] and listed[gone["id"]]["revoked_at"]
        assert not SECRET.search(json.dumps(listed))
        assert http.delete("/api/v1/tokens/local").json()["code"] == "conflict"
        assert http.delete(f"/api/v1/tokens/{gone['id']}").status_code == 409
        assert http.post(f"/api/v1/tokens/{gone['id']}/rotate").status_code == 409
        assert http.delete("/api/v1/tokens/nothing").status_code == 404
        assert http.post("/api/v1/tokens", json={"name": "local"}).status_code == 422
        http.close()
    finally:
        site.close()


def test_a_stream_ends_with_its_token(site: Site) -> None:
    made = site.http.post("/api/v1/tokens", json={"name": "reader"}).json()
    job = site.add()
    with httpx2.stream(
        "GET",
        f"{site.url}/api/v1/stream?job={job}&topics=job",
        timeout=60,
        headers={"Authorization": f"Bearer {made['token']}"},
    ) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("data"))
        site.http.delete(f"/api/v1/tokens/{made['id']}")
        site.store("change_status", job, Status.STOPPED, message="secret", reason="secret")
        assert "STOPPED" not in "".join(lines)


STREAMS = ["", "?job={job}", *[f"?job={{job}}&topics={topic}" for topic in TOPICS], "?group=*", "?group=g"]


def test_every_stream_ends_when_its_token_expires(site: Site) -> None:
    """Also one in which nothing happens, and without a change of the store."""
    job, group = site.add(), {"name": "g"}
    assert site.http.post("/api/v1/server-groups", json=group).status_code == 201
    made = site.http.post("/api/v1/tokens", json={"name": "reader", "days": 5 / 86400}).json()

    def read(query: str) -> tuple[int, bool]:
        """Return the status, and whether the service ended the stream."""
        url = f"{site.url}/api/v1/stream{query.format(job=job)}"
        headers = {"Authorization": f"Bearer {made['token']}"}
        with httpx2.stream("GET", url, timeout=60, headers=headers) as answer:
            for _ in answer.iter_lines():
                if time.time() > datetime.fromisoformat(made["expires_at"]).timestamp() + 10:
                    return answer.status_code, False
            return answer.status_code, True

    with ThreadPoolExecutor(len(STREAMS)) as pool:
        found = dict(zip(STREAMS, pool.map(read, STREAMS), strict=True))
    assert set(found.values()) == {(200, True)}, found
    until(lambda: site.service.streams == 0)  # the service counts after the answer


# what a token is given: (method, path, body), and where the answer has the secret
MINTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "/api/v1/tokens": ("token", {"name": "made"}),
    "/api/v1/tokens/{token_id}/rotate": ("token", None),
    "/api/v1/client-tokens": ("token", {"name": "made"}),
    "/api/v1/client-tokens/{token_id}/rotate": ("token", None),
    "/api/v1/codes": ("code", None),
    "/api/v1/session": ("cookie", {}),
}


def test_the_mints_are_all_routes_that_give_a_secret(site: Site) -> None:
    interface = site.http.get("/openapi.json").json()

    def gives(what: Any) -> bool:
        text = json.dumps([each.get("content") for each in what["responses"].values()])
        names = re.findall(r"#/components/schemas/(\w+)", text)
        return any("token" in interface["components"]["schemas"][name].get("properties", {}) for name in names)

    found = {path for path, verbs in interface["paths"].items() for what in verbs.values() if gives(what)}
    assert found | {"/api/v1/codes", "/api/v1/session"} == set(MINTS)


@pytest.mark.parametrize("path", MINTS)
@pytest.mark.parametrize("lives", [40.0, None])
def test_no_secret_lives_longer_than_the_token_that_asked_for_it(site: Site, path: str, lives: float | None) -> None:
    where, body = MINTS[path]
    days = {} if lives is None else {"days": lives / 86400}
    sender = site.http.post("/api/v1/tokens", json={"name": "sender", **days}).json()
    ends = None if lives is None else datetime.fromisoformat(sender["expires_at"]).timestamp()
    http = httpx2.Client(base_url=site.url, headers={"Authorization": f"Bearer {sender['token']}"}, timeout=60)
    if "{token_id}" in path:
        given = {"name": "old"} if lives is None else {"name": "old", "days": 20 / 86400}
        base = path.partition("/{")[0]
        shorter = site.http.post(base, json=given).json()["id"]
        longer = site.http.post(base, json={"name": "longer"}).json()["id"]
        assert http.post(path.format(token_id=longer)).status_code == (201 if lives is None else 403)
        path = path.format(token_id=shorter)
    if where == "cookie":
        http.headers.pop("Authorization")
        body = {"token": sender["token"]}
    answer = http.post(path, json=body)
    assert answer.is_success, answer.text
    if where == "token":
        found = answer.json()["expires_at"]
        found = None if found is None else datetime.fromisoformat(found).timestamp()
    else:
        if where == "code":
            answer = http.post("/api/v1/session", json={"code": answer.json()["code"]})
        secret = next(iter(answer.cookies.values()))
        found = asyncio.run_coroutine_threadsafe(site.service.store.holder(secret), site.loop).result(60).expires_at
    if ends is None:
        assert found is None or found > time.time() + 29 * 86400
    else:
        assert found is not None and found <= ends
    if ends is not None and body is not None and "name" in body:
        refused = http.post(path, json={**body, "days": 1})
        assert refused.status_code == 422 and refused.json()["errors"][0]["pointer"] == "/days"
    http.close()


def test_a_changed_code_opens_no_session(site: Site) -> None:
    sender = site.http.post("/api/v1/tokens", json={"name": "sender", "days": 1}).json()
    headers = {"Authorization": f"Bearer {sender['token']}"}
    code = httpx2.post(f"{site.url}/api/v1/codes", headers=headers).json()["code"]
    head, _, end = code.rpartition(".")
    for changed in (head, f"{head}.{int(end) + 86400}", f"{head}.inf"):
        assert httpx2.post(f"{site.url}/api/v1/session", json={"code": changed}).status_code == 401
    assert httpx2.post(f"{site.url}/api/v1/session", json={"code": code}).status_code == 204


@pytest.mark.parametrize("name", ["local", "id"])
def test_only_the_services_own_token_replaces_itself(site: Site, name: str) -> None:
    listed = site.http.get("/api/v1/tokens").json()["tokens"]
    own = next(each["id"] for each in listed if each["name"] == "local") if name == "id" else "local"
    other = site.http.post("/api/v1/tokens", json={"name": "other"}).json()["token"]
    before = site.settings.token_file.read_text()
    url = f"{site.url}/api/v1/tokens/{own}/rotate"
    refused = httpx2.post(url, headers={"Authorization": f"Bearer {other}"})
    assert refused.status_code == 403 and "itself" in refused.json()["detail"] and not SECRET.search(refused.text)
    assert site.settings.token_file.read_text() == before and status(site, site.token) == 200
    assert site.http.post(url).status_code == 201
    assert status(site, site.token) == 401 and site.settings.token_file.read_text() != before


def test_a_browser_makes_no_tokens(site: Site) -> None:
    with httpx2.Client(base_url=site.url, cookies=session(site, site.token), headers={"Origin": site.url}) as browser:
        assert browser.get("/api/v1/jobs").status_code == 200
        for method, path in (("GET", ""), ("POST", ""), ("POST", "/local/rotate"), ("DELETE", "/x")):
            assert browser.request(method, f"/api/v1/tokens{path}", json={"name": "x"}).status_code == 403


def test_the_commands(site: Site, say: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    for command in (
        ("open",),
        ("token", "create", "--user", "laptop"),
        ("token", "rotate", "x"),
        ("token", "create", "--user", "laptop", "-o", "json"),
    ):
        code, said, note = say(*command)
        assert code == 2 and "--to" in note and said == ""
    assert len(json.loads(say("token", "ls", "-o", "json")[1])) == 1
    path = tmp_path / "laptop"
    code, said, note = say("token", "create", "--user", "laptop", "--to", str(path))
    assert code == 0 and said == "" and path.stat().st_mode & 0o777 == 0o600 and not SECRET.search(note)
    token = path.read_text().strip()
    assert status(site, token) == 200
    for command in (("token", "create", "--user", "other"), ("token", "rotate", "x")):  # the file has the only copy
        code, said, note = say(*command, "--to", str(path))
        assert code == 2 and said == "" and "exists and is not overwritten" in note
    assert say("token", "create", "--user", "other", "--to", str(tmp_path / "no" / "file"))[0] == 2
    assert path.read_text().strip() == token and len(json.loads(say("token", "ls", "-o", "json")[1])) == 2
    code, said, _ = say("token", "ls")
    assert "the user laptop" in said and "the service's own command line" in said and not SECRET.search(said)
    code, said, _ = say("open", "--to", "-")
    assert code == 0 and re.fullmatch(rf"{site.url}/#code=[\w-]+\n", said)
    before = site.settings.token_file.read_text()
    code, said, note = say("token", "rotate", "local")
    assert code == 0 and not SECRET.search(said + note)
    assert site.settings.token_file.read_text() != before and status(site, before) == 401
    identity = next(each["id"] for each in json.loads(say("token", "ls", "-o", "json")[1]) if each["name"] == "laptop")
    assert say("token", "revoke", identity)[0] == 0 and status(site, token) == 401
    assert say("token", "create", "--user", "laptop", "--job", "x", "--to", "-")[0] == 2


@pytest.mark.parametrize("terminal", [False, True])
def test_a_service_prints_its_secrets_on_a_terminal_only(tmp_path: Path, terminal: bool) -> None:
    state, script = tmp_path / "state", TESTS / "serve_without_ray.py"
    log = tmp_path / "service.log"
    ours, theirs = pty.openpty() if terminal else (-1, os.open(log, os.O_WRONLY | os.O_CREAT, 0o600))
    serve = subprocess.Popen(
        [sys.executable, str(script), str(state), "256"], stdout=theirs, stderr=log.open("a"), text=True
    )
    os.close(theirs)
    said = ""
    try:
        end = time.monotonic() + 60
        while not (state / "service.json").exists():
            assert serve.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        while terminal and not re.search(r"#code=[\w-]+\s", said):
            said += os.read(ours, 4096).decode()
    finally:
        serve.terminate()
        serve.wait(60)
    if terminal:
        assert (state / "token").read_text().strip() in said
        with contextlib.suppress(OSError):
            os.close(ours)
        return
    said = log.read_text()
    assert not SECRET.search(said)
    assert str(state / "token") in said and "rayps open" in said and str(state) in said


def test_a_leaked_secret_is_in_no_problem_and_no_log(site: Site, caplog: Any) -> None:
    secret = "rps_" + "s" * 43
    head = {"Authorization": f"Bearer {secret}"}
    for path in ("/api/v1/jobs", f"/api/v1/tokens/{'x' * 12}"):
        assert secret not in httpx2.get(f"{site.url}{path}", headers=head).text
    assert secret not in caplog.text
