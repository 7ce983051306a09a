"""The service and a Ray that hangs or dies: whatever Ray's client does, it costs a child process and no more."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import PYTHONPATH, TESTS
from rayps_client.errors import ActorDied, ClusterError
from service_site import Site

from rayps.cluster.local import PROTOCOL
from rayps.service import processes
from rayps.service.local_ray.ray_place import OwnRay
from rayps.service.local_ray.ray_process import ClusterProcess
from rayps.service.settings import Settings

HURT = "faulty_cluster:Hurt"
HANGS = ["hang", "hang with the interpreter's lock"]
DEATHS = ["abort", "exit"]


def until(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 100
    while not (found := ready()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., ClusterProcess]]:
    made: list[ClusterProcess] = []

    def join(**options: Any) -> ClusterProcess:
        made.append(ClusterProcess(str(tmp_path), cluster=HURT, **options))
        return made[-1]

    yield join
    for each in made:
        each.close()
        assert processes.start_time(each.pid) is None


def hurt(tmp_path: Path, mode: str) -> None:
    (tmp_path / "mode").write_text(mode)


def test_sigterm_to_the_whole_service_does_not_end_the_child_before_it(
    join: Callable[..., ClusterProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """As systemd sends it: the service ends the child itself, and no stack of Ray is in its log."""
    first = join()
    os.kill(first.pid, signal.SIGTERM)
    assert first.free() == {"cpu": 4.0, "gpu": 0.0} and first.alive
    first.close()
    assert processes.start_time(first.pid) is None and "ended with code" not in caplog.text


def test_actors_are_known_by_name(join: Callable[..., ClusterProcess], tmp_path: Path) -> None:
    first = join()
    handle = first.spawn("module:Class", 1, {"two": 2}, name="a", detached=True, here=True, more=[3])
    assert (tmp_path / "a.json").read_text() == (
        '["module:Class", [1, {"two": 2}], {"cpus": 0.0, "gpus": 0.0, "detached": true, "here": true, "avoid": [], '
        '"restarts": 0, "warm": false, "node": null, "more": [3]}]'
    )
    assert handle.call("run", 1, 2).result(timeout=60) == ["run", [1, 2], {}]
    assert first.free() == first.total() == first.hosts()["here"] == {"cpu": 4.0, "gpu": 0.0}
    with pytest.raises(ClusterError, match="'a': it lives"):
        first.spawn("module:Class", name="a", detached=True)
    second = join()
    found = second.find("a")
    assert found is not None and second.find("b") is None
    with pytest.raises(ActorDied, match="oom") as caught:
        found.call("die").result(timeout=60)
    assert caught.value.data["actor"] == "a"
    with pytest.raises(ClusterError, match="cannot be sent"):
        found.call("odd").result(timeout=60)
    second.kill(found)
    assert first.find("a") is None and first.totals == 1 and first.alive


@pytest.mark.parametrize("mode", [*HANGS, "stopped"])
def test_what_hangs_is_given_up(join: Callable[..., ClusterProcess], tmp_path: Path, mode: str) -> None:
    cluster = join(answer_seconds=1.0)
    assert cluster.free()
    pending = cluster.find("a") or cluster.request("call", "a", "hang")
    if mode == "stopped":
        os.kill(cluster.pid, signal.SIGSTOP)
    else:
        hurt(tmp_path, mode)
    with pytest.raises(ClusterError, match="Ray did not answer the request 'free' within 1 s"):
        cluster.free()
    assert not cluster.alive and processes.start_time(cluster.pid) is None
    with pytest.raises(ClusterError):
        pending.result(timeout=60)  # type: ignore[union-attr]
    with pytest.raises(ClusterError, match="Ray cannot be called: Ray did not answer the request 'free'"):
        cluster.find("a")  # at once
    hurt(tmp_path, "")
    assert join().free()


@pytest.mark.parametrize("mode", [*DEATHS, "killed"])
def test_what_dies_is_told(
    join: Callable[..., ClusterProcess], tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = join()
    if mode == "killed":
        os.kill(cluster.pid, signal.SIGKILL)
    else:
        hurt(tmp_path, mode)
    with pytest.raises(ClusterError, match=r"has ended|takes no requests"):
        cluster.free()
    assert not cluster.alive
    code = {"abort": -6, "exit": 7, "killed": -9}[mode]
    assert until(lambda: f"the process that calls Ray ended with code {code}" in caplog.text)
    assert ("Fatal Python error: Aborted" in caplog.text) == (mode == "abort")  # where it stood


def test_nobody_waits_for_a_ray_that_has_ended(join: Callable[..., ClusterProcess], tmp_path: Path) -> None:
    ended: list[str] = []
    cluster = join(answer_seconds=1e6, give_up_reason=lambda: ended[0] if ended else None)
    hurt(tmp_path, "hang")
    ended.append("Ray has ended")
    with pytest.raises(ClusterError, match="Ray has ended"):
        cluster.free()


def test_a_join_that_fails_or_hangs(join: Callable[..., ClusterProcess], tmp_path: Path) -> None:
    hurt(tmp_path, "join refuse")
    with pytest.raises(ClusterError, match="no route") as caught:
        join()
    assert caught.value.data["address"] == "there"
    for mode in [*HANGS, *DEATHS]:
        hurt(tmp_path, f"join {mode}")
        with pytest.raises(ClusterError, match=r"request 'join' within 3 s|has ended"):
            join(join_seconds=3.0)


def test_a_pipe_that_nobody_reads_blocks_nobody(join: Callable[..., ClusterProcess]) -> None:
    cluster = join(answer_seconds=1.0)
    os.kill(cluster.pid, signal.SIGSTOP)
    replies = []
    while cluster.alive:  # as many as the pipe takes
        replies.append(cluster.request("call", "a", "x" * 100_000))
    for reply in replies:
        with pytest.raises(ClusterError):
            reply.result(timeout=60)


OWNER = """
import sys, time
from rayps.service.local_ray.ray_process import ClusterProcess
print(ClusterProcess(sys.argv[1], cluster=sys.argv[2]).pid, flush=True)
time.sleep(600)
"""


def test_the_child_ends_with_the_service(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), HURT], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert processes.start_time(pid) is not None
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: processes.start_time(pid) is None)


@pytest.mark.parametrize("mode", ["", "join hang with the interpreter's lock"])
def test_a_child_that_hears_nothing_ends_itself(tmp_path: Path, mode: str) -> None:
    hurt(tmp_path, mode)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rayps.service.local_ray.ray_child",
                "--pipe",
                str(theirs.fileno()),
                "--cluster",
                HURT,
                "--address",
                str(tmp_path),
                "--dead-man",
                "2",
                "--protocol",
                str(PROTOCOL),
            ],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{PYTHONPATH}:{TESTS.parent}"},
        )
        _, said = child.communicate(timeout=100)
    assert child.returncode == 1 and "Timeout (0:00:02)!" in said


class HurtPlace:
    """A place whose cluster is joined through a child, as Ray is."""

    owned = False
    address = "there"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: ClusterProcess | None = None

    def capacity(self) -> None:
        return None

    def cluster(self) -> ClusterProcess:
        if self._held is None or not self._held.alive:
            self._held = ClusterProcess(str(self._folder), cluster=HURT, answer_seconds=1.0)
        return self._held

    def renew_lease(self) -> None:
        pass

    def disconnect(self, *, end: bool) -> None:
        if self._held is not None:
            self._held.close()


@pytest.mark.parametrize("mode", [*HANGS, *DEATHS])
def test_the_service_outlives_a_hurt_ray_and_says_so(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    site = Site(tmp_path / "state", place=HurtPlace(folder))
    try:
        until(lambda: site.http.get("/readyz").status_code == 200)
        job = site.add()
        until(lambda: (folder / f"driver-{job}.json").exists())
        hurt(folder, mode)
        until(lambda: site.http.get("/readyz").status_code == 503)
        assert site.http.get("/readyz").json()["reason"].startswith(("Ray ", "the process that calls Ray"))
        waits = site.add()  # it is taken, and waits with the reason
        until(lambda: "Ray" in (site.http.get(f"/api/v1/jobs/{waits}").json()["reason"] or ""))
        assert site.http.get("/healthz").json() == {"ok": True}
        hurt(folder, "")
        until(lambda: site.http.get("/readyz").status_code == 200)
        until(lambda: (folder / f"driver-{waits}.json").exists())
        assert site.http.get(f"/api/v1/jobs/{job}").json()["attempt"] == 1  # its driver lived all the time
    finally:
        site.close()


def test_healthz_tells_when_the_scheduler_does_not_come_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path / "state")
    try:
        assert site.http.get("/healthz").json() == {"ok": True}
        monkeypatch.setattr(type(site.service.scheduler), "silent", 301.0)
        answer = site.http.get("/healthz")
        assert (answer.status_code, answer.json()) == (503, {"ok": False})
    finally:
        site.close()


def test_a_mute_ray_is_given_up_only_when_no_job_gets_on(tmp_path: Path) -> None:
    own = OwnRay(Settings(state_dir=tmp_path).prepare(), unresponsive_seconds=10.0)
    now = [0.0]
    mute = own._unresponsive
    mute._quiet._clock = lambda: now[0]

    def after(seconds: int, answers: int) -> bool:
        for _ in range(seconds):
            now[0] += 1.0
            mute.observe(answers)
        return mute.expired()

    assert after(30, 1)
    mute.reset()
    mute._quiet._clock = lambda: now[0]
    progress = tmp_path / "jobs" / "a" / "progress.json"
    progress.parent.mkdir(parents=True)
    for count in range(5):  # answers count
        assert not after(9, count)
    for _ in range(5):  # progress counts
        progress.write_text("{}")
        os.utime(progress, ns=(1, int(now[0] * 1e9) + 5))
        assert not after(9, 4)
    assert after(21, 4)
