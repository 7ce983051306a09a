"""`rayps serve` as a user starts it, with a Ray of its own: the one that tests share, and those that tests kill."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayps_client.errors import Conflict

from rayps.core.failpoint import VARIABLE
from rayps.service.client import Client, Job
from rayps.service.local_ray.ray_daemon import read_record
from rayps.service.tokens.user_tokens import LOCAL


def until(ready: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for what `ready` gives; after `seconds` it was in vain."""
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def stop_running(job: Job) -> None:
    """Stop a job that has not ended."""
    if not job.status.terminal:
        with contextlib.suppress(Conflict):  # it has ended meanwhile
            job.stop()


class Serve:
    """A process of `rayps serve`, and its state directory."""

    def __init__(self, state: Path, *options: str, cpus: int = 4) -> None:
        self.state = state
        self.options = ("--cpus", str(cpus), "--idle", "120", *options)
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.log = state.parent / "service.log"
        self.shared = shared_memory()

    def start(self, failpoint: str = "") -> Serve:
        (self.state / "service.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "rayps.cli", "serve", "--state-dir", str(self.state), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *self.options],
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, VARIABLE: failpoint},
        )
        until(self._answers, 240)
        self.url = json.loads((self.state / "service.json").read_text())["url"]
        return self

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log.read_text()
        return (self.state / "service.json").exists()

    @property
    def token(self) -> str:
        return (self.state / "token").read_text().strip()

    def client(self) -> Client:
        return Client(self.url, self.token)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(120)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


class SharedService:
    """The service of all tests of this process that only submit and look; see the fixture `ray_service`."""

    def __init__(self, folder: Path) -> None:
        (folder / "state").mkdir()
        self._serve = Serve(folder / "state", cpus=8).start()

    @contextmanager
    def lent(self) -> Iterator[Serve]:
        """The service, in which there is nothing of an earlier test."""
        with self._serve.client() as client:
            assert not any(holdings(client).values())
            yield self._serve
            clear(client)

    def end(self) -> None:
        assert self._serve.end() == 0, self._serve.log.read_text()
        assert read_record(self._serve.state) is None
        shutil.rmtree(self._serve.state.parent)


def holdings(client: Client) -> dict[str, list[str]]:
    """What tests leave in a service: the ids of jobs and of valid tokens but its own, the names of server groups."""

    def tokens(path: str) -> list[str]:
        found = client.call("GET", f"/api/v1/{path}")["tokens"]
        return [each["id"] for each in found if each["revoked_at"] is None and each["name"] != LOCAL]

    return {
        "jobs": [job.id for job in client.jobs(limit=200)],
        "server-groups": [row["name"] for row in client.server_groups()],
        "tokens": tokens("tokens"),
        "client-tokens": tokens("client-tokens"),
    }


def clear(client: Client) -> None:
    """Stop and delete what tests left in a service; its workers are gone afterwards."""
    jobs = client.jobs(limit=200)  # the newest first: a job that resumes another is deleted before that
    for job in jobs:
        stop_running(job)
    for job in jobs:
        job.wait(240)
        job.delete()
    found = holdings(client)
    for name in found["server-groups"]:
        client.call("DELETE", f"/api/v1/server-groups/{name}?force=true")
    for path in ("tokens", "client-tokens"):
        for token in found[path]:
            client.call("DELETE", f"/api/v1/{path}/{token}")
    until(lambda: not any(holdings(client).values()), 120)
    cluster = client.cluster()
    if cluster["ready"]:  # Ray has started
        until(lambda: client.cluster()["free"].get("cpu") == cluster["total"]["cpu"], 120)
