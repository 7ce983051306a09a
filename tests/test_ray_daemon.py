"""The own Ray: apart from the service, private, found again, and gone without a trace."""

from __future__ import annotations

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

from rayps.errors import ClusterError
from rayps.service import processes
from rayps.service.ray_daemon import RayRecord, environment, last_seen, make_token, read_record, sweep
from rayps.service.ray_place import JoinedRay, OwnRay, place
from rayps.service.settings import Settings


def until(ready: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


# processes


def test_a_process_is_known_by_id_and_start() -> None:
    child = subprocess.Popen(["sleep", "30"])
    since = processes.started(child.pid)
    assert processes.alive(child.pid, since) and not processes.alive(child.pid, (since or 0) + 1)
    assert child.pid in processes.below(os.getpid())
    child.kill()
    until(lambda: processes.started(child.pid) is None)  # a zombie is no living process
    child.wait()
    assert not processes.alive(child.pid, since) and processes.started(2**22 + 1) is None


def test_what_a_tree_left_is_found_and_a_client_is_not(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w")
    of_session = subprocess.Popen(["sleep", "30"], stdout=log, start_new_session=True)
    by_name = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", str(tmp_path)])
    client = subprocess.Popen(["sleep", "30"], stdout=log)
    wanted = {of_session.pid, by_name.pid}
    try:
        until(lambda: set(processes.left_in(str(tmp_path), of_session.pid)) == wanted, 5)
    finally:
        for child in (of_session, by_name, client):
            child.kill()
            child.wait()


TREE = """
import os, subprocess, sys
from rayps.service import processes
processes.adopt_orphans()
sleep = "subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3, start_new_session=True).pid"
made = subprocess.run([sys.executable, "-c", f"import subprocess; print({sleep})"], capture_output=True, text=True)
orphan = int(made.stdout)
subprocess.Popen(["sleep", "61"])
assert len(processes.below(os.getpid())) == 2
processes.end_tree(os.getpid())
assert not processes.below(os.getpid()) and not processes.started(orphan)
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
    assert environment(tmp_path)["RAY_AUTH_MODE"] == "token"


def test_a_sweep_takes_only_what_is_ours(tmp_path: Path) -> None:
    ours, other = tmp_path / "rayps-x", tmp_path / "precious"
    for folder in (ours, other):
        folder.mkdir()
    sweep(record(tmp_path))
    sweep(record(tmp_path, temp_dir=str(other)))
    assert not ours.exists() and other.exists()


def test_when_something_was_last_seen(tmp_path: Path) -> None:
    now = time.time()

    def touch(name: str, age: float) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        os.utime(path, (now - age, now - age))

    assert last_seen(tmp_path, 10) == 0
    touch("ray_heartbeat", 100)
    touch("jobs/a/progress.json", 5)
    touch("jobs/b/progress.json", 1)
    touch("jobs/b/outcome.json", 7)  # how long ago it ended counts, not what its driver did afterwards
    assert now - last_seen(tmp_path, 10) == pytest.approx(5, abs=0.1)
    assert now - last_seen(tmp_path, 1000) == pytest.approx(100, abs=0.1)


def test_a_cluster_that_does_not_answer() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    where = place(Settings(address=f"127.0.0.1:{port}"))
    assert isinstance(where, JoinedRay) and not where.owned and where.capacity() is None
    with pytest.raises(ClusterError, match=str(port)):
        where.cluster()
    where.leave(end=True)


# with a real Ray


class Apart:
    """An OwnRay whose process is another one, so that ray is not joined from the tests' process."""

    def __init__(self, path: Path, idle: float = 60.0) -> None:
        self.settings = Settings(state_dir=path, cpus=3, idle=idle).prepare()
        self.own = OwnRay(self.settings)

    def up(self) -> RayRecord:
        return self.own._ensure()

    def ask(self) -> dict[str, float]:
        code = ("import json, sys; from pathlib import Path; from rayps.service.settings import Settings\n"
                "from rayps.service.ray_place import OwnRay\n"
                "own = OwnRay(Settings(state_dir=Path(sys.argv[1]), cpus=3))\n"
                "print(json.dumps(own.cluster().total())); own.leave(end=False)")
        done = subprocess.run([sys.executable, "-c", code, str(self.settings.state_dir)], capture_output=True,
                              text=True, check=True)
        found: dict[str, float] = json.loads(done.stdout)
        return found


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    apart = Apart(tmp_path)
    yield apart
    apart.own.leave(end=True)
    assert read_record(tmp_path) is None


def ours(found: RayRecord) -> list[int]:
    return processes.left_in(found.temp_dir, found.session)


@pytest.mark.ray
def test_it_is_private_found_again_and_ends_without_a_trace(apart: Apart) -> None:
    found = apart.up()
    assert found.alive and found.address is not None and found.address.startswith("127.0.0.1:")
    assert Path(found.temp_dir).stat().st_mode & 0o777 == 0o700
    assert apart.ask()["cpu"] == 3 and apart.up() == found
    tree = [*processes.below(found.pid), found.pid]
    assert len(tree) > 3 and _listens_only_on_loopback(tree)
    apart.own.leave(end=True)
    assert not Path(found.temp_dir).exists() and not ours(found)
    until(lambda: not any(processes.started(pid) for pid in tree), 5)


@pytest.mark.ray
@pytest.mark.chaos
def test_a_daemon_that_was_killed_is_replaced_and_swept(apart: Apart) -> None:
    first = apart.up()
    tree = processes.below(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not first.alive, 5)
    second = apart.up()
    assert second.pid != first.pid and second.alive and not Path(first.temp_dir).exists()
    until(lambda: not ours(first) and not any(processes.started(pid) for pid in tree), 5)


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
    until(lambda: not found.alive, 20)
    assert not Path(found.temp_dir).exists() and read_record(tmp_path) is None and not ours(found)


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
