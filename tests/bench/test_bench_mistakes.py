"""The command that commits mistakes on Ray: its rows, and what it sees of what a run leaves."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rayps_client.errors import ConfigError, WorkloadError

from benchmarks.__main__ import main
from benchmarks.runs.leftovers import Leftovers
from benchmarks.runs.mistakes import MISTAKES, Base, Mistake, bench_mistakes
from rayps.cluster.local import LocalCluster
from rayps.comm.link.memory import Memory


@pytest.fixture
def cluster():
    found = LocalCluster(cpus=2)
    yield found
    found.close()


def test_rows_of_mistakes_on_threads(cluster):
    seen = []
    names = ["missing column", "100 workers", "parameter of a wrong type", "wrong shapes"]
    rows = bench_mistakes(cluster, names, report=seen.append)
    assert seen == rows and [row.mistake for row in rows] == names
    for row in rows:
        assert row.remedy and 1 <= row.lines <= 3 and row.seconds > 0 and not row.left, row


def test_no_error_is_no_remedy(cluster, monkeypatch):
    monkeypatch.setitem(MISTAKES, "none", Mistake(Base, WorkloadError, ()))
    [row] = bench_mistakes(cluster, ["none"])
    assert row.error == "no error" and not row.remedy


def test_an_unknown_mistake_is_refused(cluster):
    with pytest.raises(ConfigError, match="no mistake 'typo'; use some of wrong shapes, labels out of range"):
        bench_mistakes(cluster, ["typo"])


def test_what_is_left_is_seen():
    seen = Leftovers()
    assert seen.left(0) == []
    folder = tempfile.mkdtemp(prefix="rayps-test-left-")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0rayps-left-{os.getpid()}")
    shared = Memory.create(100)
    file = Path(f"/dev/shm/torch_{os.getpid()}_left")
    file.write_bytes(b"1")
    try:
        found = "\n".join(seen.left(0))
    finally:
        child.kill()
        child.wait()
        listening.close()
        abstract.close()
        file.unlink()
        Path(folder).rmdir()
        shared.close()
    for part in (
        "memfd:rayps",
        folder,
        f"process {child.pid}",
        f"socket tcp port {port}",
        f"rayps-left-{os.getpid()}",
        file.name,
    ):
        assert part in found
    assert seen.left() == []


@pytest.mark.ray
def test_the_command_on_ray(capsys):
    assert main(["mistakes", "--mistakes", "100 workers,labels out of range", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["mistake"], row["remedy"], row["left"]) for row in rows] == [
        ("100 workers", True, ""),
        ("labels out of range", True, ""),
    ]
