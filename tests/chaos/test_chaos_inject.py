"""The injectors, on small processes of this test: each fault happens, ends, and hits nothing else."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rayps_chaos import inject, lines, shifted_service
from rayps_chaos.campaign import ChaosSite, carry_out
from rayps_chaos.faults import FaultOn, FaultRole
from rayps_chaos.inject import ChaosMeans, injected
from rayps_chaos.plan import PlannedFault
from rayps_chaos.targets import ChaosProcess, ProcessFacts, process_facts, refusal
from rayps_client.errors import ClusterError

from rayps.service import processes

LINE = """
import socket, sys
family, address = sys.argv[1], sys.argv[2]
if family == "unix":
    line = socket.socket(socket.AF_UNIX); line.connect("\\0" + address)
else:
    line = socket.create_connection(("127.0.0.1", int(address)))
print("up", flush=True)
try:
    print(len(line.recv(1)), flush=True)
except OSError:
    print(0, flush=True)
sys.stdin.read()
"""

WRITE = """
import sys
for name in sys.stdin:
    try:
        open(name.strip(), "wb", buffering=0).write(b"x")
        print("ok", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


@contextlib.contextmanager
def process(*arguments):
    found = subprocess.Popen(
        [sys.executable, "-S", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield found
    finally:
        found.kill()
        found.wait()
        found.stdin.close()
        found.stdout.close()


def target(pid, role=FaultRole.WORKER):
    return ChaosProcess(role, 0, pid, processes.start_time(pid))


def planned(kind, role=FaultRole.WORKER, seconds=0.0, amount=0.0, at=0.0):
    return PlannedFault(at, FaultOn(kind, role), 0, seconds, amount)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_killed_process_is_dead_and_is_not_hit_again():
    with process("-c", "input()") as victim:
        one = target(victim.pid)
        with injected(planned("kill"), one, [], ChaosMeans()) as words:
            assert str(victim.pid) in words
        assert victim.wait(60) == -signal.SIGKILL
        with pytest.raises(ClusterError, match="has ended"), injected(planned("kill"), one, [], ChaosMeans()):
            pass


def test_a_fault_that_kills_is_over_when_the_process_is_dead(monkeypatch):
    """Else the service would be found alive after the fault, and would not be started again."""
    with process("-c", "import sys; sys.stdin.read()") as there:
        late = threading.Timer(0.3, there.kill)
        monkeypatch.setattr(inject, "_signal", lambda *_: late.start())
        with injected(planned("kill"), found := target(there.pid), [], ChaosMeans()):
            assert not found.alive


def test_a_process_with_the_same_id_but_another_start_is_not_hit():
    with process("-c", "input()") as other:
        stale = ChaosProcess(FaultRole.WORKER, 0, other.pid, target(other.pid).started - 1)
        with pytest.raises(ClusterError, match="has ended"), injected(planned("kill"), stale, [], ChaosMeans()):
            pass
        assert other.poll() is None


def test_a_stopped_process_continues():
    with process("-c", "print(input(), flush=True)") as victim:
        with injected(planned("stop"), target(victim.pid), [], ChaosMeans()):
            while state(victim.pid) != "T":
                time.sleep(0.001)
        victim.stdin.write("on\n")
        victim.stdin.flush()
        assert victim.stdout.readline() == "on\n"


def test_a_throttled_process_runs_and_is_not_left_stopped():
    with process("-c", "while True: pass") as victim:
        seen = set()
        with injected(planned("throttle"), target(victim.pid), [], ChaosMeans()):
            deadline = time.monotonic() + 60
            while seen != {"R", "T"} and time.monotonic() < deadline:
                seen.add(state(victim.pid))
        assert seen == {"R", "T"} and state(victim.pid) != "T"


def test_burners_end():
    with injected(planned("burn", FaultRole.MACHINE), target(os.getpid()), [], ChaosMeans()):
        assert len(
            [pid for pid in processes.list_descendants(os.getpid()) if "while True" in str(processes.read_command(pid))]
        )
    assert not [
        pid for pid in processes.list_descendants(os.getpid()) if "while True" in str(processes.read_command(pid))
    ]


def connected(family):
    """A listening socket, the arguments of LINE that connect to it."""
    if family == "unix":
        listener, name = socket.socket(socket.AF_UNIX), f"rayps-test-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.listen()
        return listener, [family, name]
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, [family, str(listener.getsockname()[1])]


needs_rights = pytest.mark.skipif(bool(lines.cannot_change()), reason=f"lines: {lines.cannot_change()}")


@needs_rights
@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_only_lines_among_the_named_processes_are_cut(family):
    listener, arguments = connected(family)
    with listener, process("-c", LINE, *arguments) as one, process("-c", LINE, *arguments) as other:
        ours = [listener.accept()[0] for _ in range(2)]
        assert one.stdout.readline() == other.stdout.readline() == "up\n"
        here = target(os.getpid())
        assert lines.connections_among([one.pid, other.pid]) == []  # their other ends are here
        with injected(planned("cut_line"), target(one.pid), [here], ChaosMeans()) as words:
            assert words.startswith("1 connections")
            assert one.stdout.readline() == "0\n"
        for end in ours:
            with contextlib.suppress(OSError):
                end.send(b"x")
        assert other.stdout.readline() == "1\n"
        for end in ours:
            end.close()


@needs_rights
def test_a_line_is_slowed_for_the_time_of_the_fault():
    listener, arguments = connected("tcp")
    with listener, process("-c", LINE, *arguments) as one:
        end, _ = listener.accept()
        assert one.stdout.readline() == "up\n"
        here, there = target(os.getpid()), target(one.pid)
        with injected(planned("slow_line"), here, [there], ChaosMeans()):
            assert end.getsockopt(socket.SOL_SOCKET, 47, 8)[:4] == (125_000).to_bytes(4, sys.byteorder)
        assert end.getsockopt(socket.SOL_SOCKET, 47, 8)[:4] == b"\xff\xff\xff\xff"
        end.close()


@needs_rights
def test_without_a_line_nothing_is_said_to_be_cut():
    with process("-c", "input()") as alone:
        for kind in ("cut_line", "slow_line"):
            with pytest.raises(ClusterError, match="no"), injected(planned(kind), target(alone.pid), [], ChaosMeans()):
                pass


def test_a_full_disk_is_one_process_that_may_not_write(tmp_path):
    with process("-c", WRITE) as victim:

        def ask(name):
            victim.stdin.write(f"{tmp_path / name}\n")
            victim.stdin.flush()
            return victim.stdout.readline().strip()

        assert ask("a") == "ok"
        with injected(planned("full_disk", FaultRole.DRIVER), target(victim.pid), [], ChaosMeans()):
            assert ask("b") == "27"  # EFBIG
            assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0  # this process may
        assert ask("c") == "ok"


def test_a_disk_of_its_own_is_filled_and_emptied(tmp_path):
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        fault = injected(planned("full_disk", FaultRole.DRIVER), target(os.getpid()), [], ChaosMeans(disk))
        with fault, pytest.raises(OSError, match="No space"):
            (disk / "more").write_bytes(bytes(8192))
        (disk / "more").write_bytes(bytes(8192))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_clock_is_shifted_and_set_right(tmp_path):
    clock = tmp_path / "clock"
    shifted_service.create_clock(clock)
    now = shifted_service.shifted(clock, lambda: 100.0)
    means = ChaosMeans(set_clock=lambda seconds: shifted_service.set_clock(clock, seconds))
    fault = planned("clock", FaultRole.SERVICE, amount=-60.0)
    assert now() == 100.0
    with injected(fault, target(os.getpid()), [], means):
        assert now() == 40.0
    assert now() == 100.0
    assert FaultOn("clock", FaultRole.SERVICE) in ChaosMeans().cannot()
    assert FaultOn("clock", FaultRole.SERVICE) not in means.cannot()


GOOD = ProcessFacts(100.0, "ray::WorkerActor.poll", 7, under_ray=True, named_at=200.0)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (GOOD, None),
        (ProcessFacts(None, "", -1, True, 200.0), "has ended"),
        (ProcessFacts(100.0, "ray::WorkerActor", 8, True, 200.0), "user 8"),
        (ProcessFacts(100.0, "vim notes", 7, True, 200.0), "another program"),
        (ProcessFacts(300.0, "ray::WorkerActor", 7, True, 200.0), "later process"),
        (ProcessFacts(100.0, "ray::WorkerActor", 7, False, 200.0), "this service's Ray"),
    ],
)
def test_only_the_process_that_was_named_may_be_touched(facts, words):
    found = refusal(FaultRole.WORKER, facts, 7)
    assert (found is None) if words is None else words in found


def test_the_facts_of_a_process_are_those_of_the_system():
    mine = process_facts(os.getpid(), time.time(), under_ray=False)
    assert mine.started_at < time.time() and mine.owner == os.geteuid() and "python" in mine.command
    with process("-c", "") as gone:
        gone.wait(60)
        assert process_facts(gone.pid, 0.0, under_ray=False).started_at is None


class There:
    """In place of JobProcesses: processes by role."""

    def __init__(self, **found):
        self.found = found

    def find(self, role):
        return [each for each in self.found.get(role, []) if each.alive]


def test_a_campaign_tells_first_and_goes_on_after_what_it_cannot_do(monkeypatch):
    monkeypatch.setattr("rayps_chaos.campaign._FIND_SECONDS", 0.0)
    told, revived = [], []
    with process("-c", "input()") as victim:
        plan = [planned("stop", seconds=0.01), planned("kill", FaultRole.SERVER, at=0.02), planned("kill", at=0.03)]
        there = There(worker=[target(victim.pid)])
        site = ChaosSite(there, ChaosMeans(), told.append, lambda: False, lambda: revived.append(1))
        done = carry_out(plan, site)
        assert victim.wait(60) == -signal.SIGKILL
    assert [each.skipped is None for each in done] == [True, False, True] and len(revived) == 3
    assert "worker-0 is stopped" in told[0] and "left out" in told[1] and "is killed" in told[2]
    assert carry_out(plan, ChaosSite(there, ChaosMeans(), told.append, lambda: True)) == []
