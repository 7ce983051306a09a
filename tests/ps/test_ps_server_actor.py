"""A server's process begins without taking the cores from others."""

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rayps_client.errors import ClusterError

from rayps.cluster.local import until
from rayps.ps.server import server_actor
from rayps.ps.server.server_actor import LOWEST, run_quietly
from rayps.ps.server.server_host import TemplateProcess
from rayps.ps.server.server_template import ServerOrder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness belongs to a thread on Linux alone")


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_what_is_done_quietly_has_the_lowest_rank_and_what_comes_after_it_the_usual_one():
    before, during = niceness(), []
    run_quietly(lambda: during.append(niceness()))
    assert during == [LOWEST] and niceness() == before < LOWEST


def test_what_fails_quietly_is_left_to_who_needs_it(caplog):
    run_quietly(lambda: 1 // 0)
    assert "ZeroDivisionError" in caplog.text


def test_what_does_not_end_is_left_alone(monkeypatch):
    monkeypatch.setattr(server_actor, "QUIET_SECONDS", 0.05)
    end = threading.Event()
    run_quietly(lambda: end.wait(30))
    assert not end.is_set()
    end.set()


def test_nothing_heavy_is_imported_before_the_thread_is_there():
    said = "import sys, rayps.ps.server.server_actor; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_forked_server_that_gets_sigterm_says_so_and_ends_after_its_grace(monkeypatch):
    monkeypatch.setenv("RAYPS_TERM_GRACE", "0.2")
    ended, ending = queue.SimpleQueue(), queue.SimpleQueue()
    template = TemplateProcess(ended.put, lambda *found: ending.put(found))
    try:
        orders = [ServerOrder(f"server-{i}", "00" * 32, "manager@127.0.0.1:9/", "127.0.0.1", "here", "") for i in "01"]
        first, second = map(template.start, orders)
        assert template.servers == {"server-0": first, "server-1": second}
        os.kill(parent(first), signal.SIGTERM)  # the template stays
        os.kill(first, signal.SIGTERM)
        assert ending.get(timeout=60) == (first, 0.2)
        assert ended.get(timeout=60) == "server-0" and template.servers == {"server-1": second}
        template.send({"end": "server-1"})
        assert ended.get(timeout=60) == "server-1" and template.alive
    finally:
        template.close()
    assert until(lambda: not template.alive, 60)
    with pytest.raises(ClusterError, match=r"server-0 was not started: the process .* has ended"):
        template.start(orders[0])
