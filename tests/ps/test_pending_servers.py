"""Which servers of a group start now: gently one after the other, or at once."""

import pytest

from rayps.ps.manager import launcher
from rayps.ps.manager.launcher import PendingServers


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(launcher.time, "monotonic", lambda: now[0])
    return now


def test_servers_that_start_gently_wait_for_the_one_before(clock):
    pending = PendingServers()
    for name in ("a", "b"):
        pending.add(name, gently=True)
    assert pending.due() == [("a", True)] and pending.due() == [] and len(pending) == 2
    pending.add("replacement", gently=False)
    assert pending.due() == [("replacement", False)]  # at once, before those that wait
    assert pending.registered("replacement") and not pending.registered("replacement")
    assert pending.registered("a") and pending.due() == [("b", True)]
    assert pending.names == ["b"]


def test_a_server_that_is_late_is_given_up_and_the_next_does_not_wait(clock):
    pending = PendingServers()
    pending.add("a", gently=True)
    clock[0] += 1e6
    assert pending.late(clock[0]) == []  # its time begins when it is started
    assert pending.due() == [("a", True)]
    clock[0] += launcher.START_SECONDS - 1
    assert pending.late(clock[0]) == []
    clock[0] += 2
    assert pending.late(clock[0]) == ["a"] and not pending
    pending.add("b", gently=True)
    assert pending.due() == [("b", False)]
    pending.settled()
    pending.add("c", gently=True)
    assert pending.registered("b") and pending.due() == [("c", True)]


def test_a_start_that_failed_is_given_up_a_little_later(clock):
    pending = PendingServers()
    pending.add("a", gently=False)
    assert pending.due() == [("a", False)]
    assert pending.failed("a") and not pending.failed("other")
    assert pending.late(clock[0]) == []
    clock[0] += launcher.RETRY_SECONDS + 0.1
    assert pending.late(clock[0]) == ["a"] and not pending.failed("a")
