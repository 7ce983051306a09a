"""A server's process begins without taking the cores from others."""

import os
import subprocess
import sys
import threading

import pytest

from rayps.ps.server import server_actor
from rayps.ps.server.server_actor import LOWEST, quietly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness belongs to a thread on Linux alone")


def niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_what_is_done_quietly_has_the_lowest_rank_and_what_comes_after_it_the_usual_one():
    before, during = niceness(), []
    quietly(lambda: during.append(niceness()))
    assert during == [LOWEST] and niceness() == before < LOWEST


def test_what_fails_quietly_is_left_to_who_needs_it(caplog):
    quietly(lambda: 1 // 0)
    assert "ZeroDivisionError" in caplog.text


def test_what_does_not_end_is_left_alone(monkeypatch):
    monkeypatch.setattr(server_actor, "QUIET_SECONDS", 0.05)
    end = threading.Event()
    quietly(lambda: end.wait(30))
    assert not end.is_set()
    end.set()


def test_nothing_heavy_is_imported_before_the_thread_is_there():
    said = "import sys, rayps.ps.server.server_actor; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout == "False\n"
