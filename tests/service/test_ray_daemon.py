"""The own Ray: apart from the service, private, found again, and gone without a trace."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rayps_client.errors import ClusterError

from rayps.service import processes
from rayps.service.drivers import DRIVER
from rayps.service.local_ray import ray_daemon, ray_logs
from rayps.service.local_ray.ray_daemon import (
    Lease,
    RayRecord,
    is_expired,
    make_environment,
    make_token,
    read_record,
    remove_leftovers,
    service_is_alive,
)
from rayps.service.local_ray.ray_logs import LogFile, list_removable
from rayps.service.local_ray.ray_place import JoinedRay, OwnRay, choose_place
from rayps.service.settings import SERVICE_LOCK, Settings


def until(ready: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


# processes


def test_a_process_is_known_by_id_and_start() -> None:
    child = subprocess.Popen(["sleep", "30"])
    since = processes.start_time(child.pid)
    assert processes.is_alive(child.pid, since) and not processes.is_alive(child.pid, (since or 0) + 1)
    assert child.pid in processes.list_descendants(os.getpid())
    child.kill()
    until(lambda: processes.start_time(child.pid) is None)  # a zombie is no living process
    child.wait()
    assert not processes.is_alive(child.pid, since) and processes.start_time(2**22 + 1) is None


def test_what_a_tree_left_is_found_and_a_client_is_not(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w")
    of_session = subprocess.Popen(["sleep", "30"], stdout=log, start_new_session=True)
    by_name = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", str(tmp_path)])
    client = subprocess.Popen(["sleep", "30"], stdout=log)
    wanted = {of_session.pid, by_name.pid}
    try:
        until(lambda: set(processes.find_left_by_ray(str(tmp_path), of_session.pid)) == wanted, 5)
    finally:
        for child in (of_session, by_name, client):
            child.kill()
            child.wait()


TREE = """
import os, subprocess, sys
from rayps.service import processes
from rayps.service.local_ray import ray_daemon
processes.adopt_orphans()
sleep = "subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3, start_new_session=True).pid"
made = subprocess.run([sys.executable, "-c", f"import subprocess; print({sleep})"], capture_output=True, text=True)
orphan = int(made.stdout)
subprocess.Popen(["sleep", "61"])
assert len(processes.list_descendants(os.getpid())) == 2
processes.kill_descendants(os.getpid())
assert not processes.list_descendants(os.getpid()) and not processes.start_time(orphan)
"""


def test_a_whole_tree_ends_with_its_orphans() -> None:
    done = subprocess.run([sys.executable, "-c", TREE], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


# what is written down


def record(tmp_path: Path, **facts: object) -> RayRecord:
    known = {"state": "ready", "pid": 2**22 + 1, "started": 1, "temp_dir": str(tmp_path / "rayps-x"), "cpus": 4}
    return RayRecord(**{**known, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"state": "ready"}', '{"odd": 1}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    assert read_record(tmp_path) is None
    (tmp_path / "ray.json").write_text(text)
    assert read_record(tmp_path) is None


def test_a_record_comes_back_and_is_private(tmp_path: Path) -> None:
    written = record(tmp_path, address="127.0.0.1:1")
    written.write(tmp_path)
    assert read_record(tmp_path) == written and not written.alive
    assert (tmp_path / "ray.json").stat().st_mode & 0o777 == 0o600


def test_the_token_is_made_private_and_kept(tmp_path: Path) -> None:
    make_token(tmp_path)
    token = (tmp_path / "ray_token").read_text()
    assert len(token) == 64 and (tmp_path / "ray_token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "ray_token").chmod(0o644)
    make_token(tmp_path)
    assert (tmp_path / "ray_token").read_text() == token
    assert (tmp_path / "ray_token").stat().st_mode & 0o777 == 0o600
    assert make_environment(tmp_path)["RAY_AUTH_MODE"] == "token"


def test_a_sweep_takes_only_what_is_ours(tmp_path: Path) -> None:
    ours, other = tmp_path / "rayps-x", tmp_path / "precious"
    for folder in (ours, other):
        folder.mkdir()
    remove_leftovers(record(tmp_path))
    remove_leftovers(record(tmp_path, temp_dir=str(other)))
    assert not ours.exists() and other.exists()


class Kept:
    """A lease of 10 seconds on a state directory, with a clock of our own; looked at as often as the daemon does."""

    def __init__(self, tmp_path: Path) -> None:
        self.path, self.now, self.drivers, self.stamp = tmp_path, 0.0, False, 0
        self.lease = Lease(tmp_path, 10.0, clock=lambda: self.now, drivers=lambda: self.drivers)

    def touch(self, name: str) -> None:
        self.stamp += 1
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        os.utime(path, (self.stamp, self.stamp))  # a wall clock that has gone mad

    def over_after(self, most: float = 100.0) -> float | None:
        """The seconds until the lease is over; None: it is not."""
        began = self.now
        while self.now - began < most:
            if self.lease.expired():
                return self.now - began
            self.now += 0.25
        return None


def test_a_lease_that_nobody_renews_is_over(tmp_path: Path) -> None:
    assert Kept(tmp_path).over_after() == pytest.approx(10, abs=0.5)


def test_a_lease_is_renewed_by_the_service_and_by_jobs(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for name in (
        "ray_heartbeat",
        "ray_heartbeat",
        "jobs/a/progress.json",
        "jobs/b/progress.json",
        "ray_heartbeat",
        "jobs/a/outcome.json",
    ):
        assert kept.over_after(9.0) is None, name
        kept.touch(name)
    kept.touch("jobs/a/progress.json")  # what it says after its end does not count
    assert kept.over_after() == pytest.approx(11, abs=2.5)  # jobs are looked at once all was silent; that renews it


@pytest.mark.parametrize("name", ["ray_heartbeat", "jobs/a/progress.json"])
def test_a_suspend_longer_than_the_lease_ends_nothing(tmp_path: Path, name: str) -> None:
    """Neither one that the monotonic clock counts (all processes stopped) nor one in which the daemon wakes first."""
    kept = Kept(tmp_path)
    for _ in range(5):
        kept.touch(name)
        assert kept.over_after(4.0) is None
        kept.now += 86400.0
        assert not kept.lease.expired()  # nobody else ran since
        kept.now += 0.25
        assert not kept.lease.expired()


@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_a_clock_that_is_set_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    kept = Kept(tmp_path)
    kept.touch("ray_heartbeat")
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    assert not kept.lease.expired() and kept.over_after(9.0) is None
    assert kept.over_after() == pytest.approx(1, abs=0.75)  # no sooner and no later than without


def test_the_daemon_asks_before_it_ends_ray(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.drivers = True  # a job that says nothing: its driver's process lives
    assert kept.over_after(10_000.0) is None
    kept.drivers = False
    with (tmp_path / SERVICE_LOCK).open("w") as lock:  # a service that says nothing
        assert not service_is_alive(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert service_is_alive(tmp_path)
        kept = Kept(tmp_path)
        assert kept.over_after(300.0) is None
        assert kept.over_after() == pytest.approx(10, abs=2.5)  # 10 + 300 seconds: it has another Ray, or hangs
        kept = Kept(tmp_path)
        assert kept.over_after(300.0) is None
    assert not service_is_alive(tmp_path) and kept.over_after() == pytest.approx(0, abs=2.5)


def test_when_an_own_ray_may_end() -> None:
    silences = (0.0, 10.0, 10.1, 309.0, 311.0, 1e9)
    for silent, service, drivers in itertools.product(silences, (True, False), (True, False)):
        expected = not drivers and silent > (310.0 if service else 10.0)
        assert is_expired(silent, 10.0, service=service, drivers=drivers) is expected


def test_a_driver_is_known_by_the_title_of_its_process(tmp_path: Path) -> None:
    """The title that Ray gives: the actor's class."""
    name = DRIVER.rpartition(":")[2]
    assert not ray_daemon._are_drivers_alive()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", f"ray::{name}"])
    try:
        until(lambda: name in " ".join(processes.read_command(child.pid)))
        assert ray_daemon._are_drivers_alive()
    finally:
        child.kill()
        child.wait()
    assert not ray_daemon._are_drivers_alive() and processes.read_command(child.pid) == []


def test_a_cluster_that_does_not_answer() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    where = choose_place(Settings(address=f"127.0.0.1:{port}"))
    assert isinstance(where, JoinedRay) and not where.owned and where.capacity() is None
    with pytest.raises(ClusterError, match=str(port)):
        where.cluster()
    where.disconnect(end=True)


# with a real Ray


class Apart:
    """An OwnRay whose process is another one, so that ray is not joined from the tests' process."""

    def __init__(self, path: Path, idle: float = 60.0) -> None:
        self.settings = Settings(state_dir=path, cpus=3, idle=idle).prepare()
        self.own = OwnRay(self.settings)

    def up(self) -> RayRecord:
        return self.own._ensure()

    def ask(self) -> dict[str, float]:
        code = (
            "import json, sys; from pathlib import Path; from rayps.service.settings import Settings\n"
            "from rayps.service.local_ray.ray_place import OwnRay\n"
            "own = OwnRay(Settings(state_dir=Path(sys.argv[1]), cpus=3))\n"
            "print(json.dumps(own.cluster().total())); own.disconnect(end=False)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(self.settings.state_dir)], capture_output=True, text=True, check=True
        )
        found: dict[str, float] = json.loads(done.stdout)
        return found


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    apart = Apart(tmp_path)
    yield apart
    apart.own.disconnect(end=True)
    assert read_record(tmp_path) is None


def ours(found: RayRecord) -> list[int]:
    return processes.find_left_by_ray(found.temp_dir, found.session)


@pytest.mark.ray
def test_it_is_private_found_again_and_ends_without_a_trace(apart: Apart) -> None:
    found = apart.up()
    assert found.alive and found.address is not None and found.address.startswith("127.0.0.1:")
    assert Path(found.temp_dir).stat().st_mode & 0o777 == 0o700
    assert apart.ask()["cpu"] == 3 and apart.up() == found
    tree = [*processes.list_descendants(found.pid), found.pid]
    assert len(tree) > 3 and _listens_only_on_loopback(tree)
    apart.own.disconnect(end=True)
    assert not Path(found.temp_dir).exists() and not ours(found)
    until(lambda: not any(processes.start_time(pid) for pid in tree), 5)


@pytest.mark.ray
@pytest.mark.chaos
def test_a_daemon_that_was_killed_is_replaced_and_swept(apart: Apart) -> None:
    first = apart.up()
    tree = processes.list_descendants(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not first.alive, 5)
    second = apart.up()
    assert second.pid != first.pid and second.alive and not Path(first.temp_dir).exists()
    until(lambda: not ours(first) and not any(processes.start_time(pid) for pid in tree), 5)


@pytest.mark.ray
def test_a_service_that_starts_while_the_old_ray_stops_gets_a_new_one(apart: Apart) -> None:
    first = apart.up()
    os.kill(first.pid, signal.SIGTERM)
    second = apart.up()
    until(lambda: not first.alive)
    assert apart.up().pid in (second.pid, read_record(apart.settings.state_dir).pid)  # type: ignore[union-attr]
    assert apart.ask()["cpu"] == 3


@pytest.mark.ray
def test_it_ends_by_itself_when_nobody_needs_it(tmp_path: Path) -> None:
    apart = Apart(tmp_path, idle=2.0)
    found = apart.up()
    until(lambda: not found.alive, 100)
    assert not Path(found.temp_dir).exists() and read_record(tmp_path) is None and not ours(found)


@pytest.mark.ray
@pytest.mark.chaos
def test_a_ray_that_answers_nothing_is_ended_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gcs is stopped, not killed: every process lives, and nobody answers."""
    own = OwnRay(Settings(state_dir=tmp_path, cpus=3, idle=120.0).prepare(), unresponsive_seconds=1e6)
    end = own._end
    monkeypatch.setattr(
        own, "_end", lambda: (end(), setattr(own._unresponsive, "seconds", 1e6))
    )  # a join takes a while
    try:
        assert own.cluster().total()["cpu"] == 3
        first = read_record(tmp_path)
        assert first is not None
        [gcs] = [
            pid
            for pid in processes.list_descendants(first.pid)
            if "gcs_server" in " ".join(processes.read_command(pid)[:1])
        ]
        os.kill(gcs, signal.SIGSTOP)
        own._unresponsive.seconds = 3.0

        def answers() -> bool:
            try:
                return own.cluster().total()["cpu"] == 3 and read_record(tmp_path) != first
            except ClusterError:
                return False

        until(answers, 400)
        assert not Path(first.temp_dir).exists() and processes.start_time(gcs) is None
    finally:
        own.disconnect(end=True)


def _listens_only_on_loopback(tree: list[int]) -> bool:
    wanted = set()
    for pid in tree:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                name = str(link.readlink())
            except OSError:
                continue
            if name.startswith("socket:["):
                wanted.add(name[8:-1])
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "0000000000000000FFFF00000100007F")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in wanted and fields[1].split(":")[0] not in (loopback,):
                return False
    return True


def log_name(pid: int, kind: str = "out") -> str:
    return f"python-core-worker-{'0a' * 14}_{pid}.log" if kind == "log" else f"worker-{'0a' * 14}-01000000-{pid}.{kind}"


def test_only_old_log_files_of_ended_workers_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_logs, "KEPT_FILES", 2)
    files = [LogFile(log_name(pid, kind), 10.0 * pid) for pid in (1, 2, 3, 4) for kind in ("out", "log")]
    others = [LogFile(name, 0.0) for name in ("gcs_server.out", "raylet.err", "worker-x-1.out", "dashboard_agent.log")]
    now = 40.0 + ray_logs.KEPT_SECONDS + 1
    assert list_removable([*files, *others], {1}, now) == [
        log_name(pid, kind) for pid in (2, 3) for kind in ("out", "log")
    ]
    assert list_removable(files, {1}, 25.0 + ray_logs.KEPT_SECONDS) == [log_name(2), log_name(2, "log")]
    assert list_removable(files, {1, 2, 3, 4}, now) == list_removable([], set(), now) == []


def test_files_of_events_of_ended_workers_are_removed_too() -> None:
    names = ["events/event_CORE_WORKER_{}.log", "export_events/event_EXPORT_TASK_{}.log"]
    files = [LogFile(name.format(pid), float(pid)) for pid in range(1, 201) for name in names]
    files.append(LogFile("events/event_GCS.log", 0.0))
    found = list_removable(files, {1}, 1000.0)
    assert len(found) == 2 * 199 - ray_logs.KEPT_FILES and found[:2] == [name.format(2) for name in names]


def test_ray_keeps_no_events_of_calls_for_nobody(tmp_path: Path) -> None:
    """Without this, the gcs grew by 4 MB a minute under two jobs."""
    found = make_environment(tmp_path)
    assert found["RAY_task_events_report_interval_ms"] == "0"
    assert int(found["RAY_maximum_gcs_destroyed_actor_cached_count"]) <= 1000
