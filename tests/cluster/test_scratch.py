"""A process's private folder, and what is swept after a process that was killed."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rayps.cluster.code_folder import JobCode, enter_code
from rayps.cluster.local import until
from rayps.cluster.scratch import Scratch, kill_users, sweep
from rayps.service import processes
from rayps.service.code.code_files import pack_code

CHILD = """
import sys, time
from pathlib import Path
from rayps.cluster.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
print(scratch.path, flush=True)
time.sleep(60)
"""
RAY = """
import time
from pathlib import Path
import ray
from rayps.cluster.ray_cluster import RayCluster
cluster = RayCluster.local(cpus=1)
session = Path(ray._private.worker._global_node.get_session_dir_path())
print(next(path for path in session.parents if path.name.startswith("rayps-")), flush=True)
time.sleep(120)
"""


def start(code, *args):
    child = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)
    return child, child.stdout.readline().strip()


def test_a_folder_is_the_owners_alone_and_goes_with_it(tmp_path):
    scratch = Scratch(tmp_path)
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    assert sweep(tmp_path) == []
    assert scratch.path.is_dir()
    scratch.close()
    assert list(tmp_path.iterdir()) == []
    scratch.close()


def test_only_the_folders_of_the_dead_are_swept(tmp_path):
    child, path = start(CHILD, str(tmp_path))
    (tmp_path / "rayps-of-a-daemon").mkdir()  # without a lock: somebody else's to remove
    (tmp_path / "other").mkdir()
    assert sweep(tmp_path) == []
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    mine = Scratch(tmp_path)  # a start sweeps
    assert not Path(path).exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["other", "rayps-of-a-daemon", mine.path.name])
    mine.close()


def test_code_that_a_killed_process_has_unpacked_in_part_is_unpacked_again(tmp_path, monkeypatch):
    """Another process of the job waits for the folder meanwhile, so that it is not swept."""
    (tmp_path / "w.py").write_text("whole = True\n")
    packed = pack_code(tmp_path)
    held = Path("/tmp" if len(tempfile.gettempdir()) > 20 else tempfile.gettempdir())
    held /= f"rayps-code-part-{os.getpid()}-{packed.hash[:16]}"
    (held / "code").mkdir(parents=True)
    (held / "code" / "w.py").write_text("who")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    with (held / "owner.lock").open("a+") as waits:
        fcntl.flock(waits, fcntl.LOCK_SH)
        opened = enter_code(JobCode(f"part-{os.getpid()}", packed.archive))
        assert (Path(opened.folder) / "w.py").read_text() == "whole = True\n"
        opened.close()
    assert held in sweep(held.parent) and not held.exists()


@pytest.mark.ray
@pytest.mark.chaos
def test_a_private_ray_whose_owner_is_killed_leaves_nothing_after_the_next_start():
    child, path = start(RAY)
    assert path
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert until(lambda: not processes.find_left_by_ray(path, None), 60)  # Ray's processes end with their owner
    Scratch().close()
    assert not Path(path).exists()


def test_who_uses_a_folder_is_ended_and_nobody_else(tmp_path):
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    folder = tmp_path / "mine"
    folder.mkdir()
    named = subprocess.Popen([*wait, str(folder / "config")], stdin=subprocess.PIPE)
    with (folder / "log").open("w") as log, (tmp_path / "mine too").open("w") as other:
        writes = subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=log)
        neither = subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=other)
    kill_users(folder)
    assert (named.wait(20), writes.wait(20)) == (-signal.SIGKILL, -signal.SIGKILL)
    assert neither.poll() is None
    neither.communicate(timeout=20)
