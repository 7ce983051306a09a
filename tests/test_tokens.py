"""Tokens of users: made, listed, rotated and revoked, at once and for good; and no secret in a log or a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from service_site import Site

from rayps.cli.main import main
from rayps.core.job_status import Status

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
    state, script = tmp_path / "state", Path(__file__).with_name("serve_without_ray.py")
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
