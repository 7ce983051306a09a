"""A wakeup wakes a sleeping thread, and never writes to a descriptor that it has closed."""

import contextlib
import os
import select
import threading
from pathlib import Path

import pytest

from rayps.comm.link import Listener
from rayps.comm.link.wakeup import Wakeup
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap
from rayps.ps.server.server import GroupServerLoop

SECRET = b"s" * 32


def eventfds():
    """The numbers of this process's eventfds."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "eventfd" in str(each.readlink()):
                found.add(int(each.name))
    return found


@contextlib.contextmanager
def taken(numbers):
    """Another use of descriptors that were closed: within the block, what was written to them is an error."""
    other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    copies = [number for number in numbers if number != other]
    for number in copies:
        os.dup2(other, number, inheritable=False)
    try:
        yield
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        for number in {other, *copies}:
            os.close(number)


def test_it_wakes_a_thread_once():
    wakeup, poll, woken = Wakeup(), select.poll(), []
    poll.register(wakeup, select.POLLIN)
    sleeper = threading.Thread(target=lambda: woken.append(poll.poll(60_000)))
    sleeper.start()
    wakeup.wake()
    sleeper.join(60)
    assert woken == [[(wakeup.fileno(), select.POLLIN)]]
    wakeup.wake()
    wakeup.clear()
    wakeup.clear()
    assert poll.poll(0) == []
    wakeup.close()


def test_a_descriptor_of_another_process_is_owned():
    wakeup = Wakeup(mine := os.eventfd(0, os.EFD_NONBLOCK))
    wakeup.wake()
    assert os.eventfd_read(mine) == 1
    del wakeup
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(mine)


def test_a_closed_wakeup_writes_to_no_descriptor():
    wakeup = Wakeup()
    number = wakeup.fileno()
    wakeup.close()
    assert wakeup.fileno() == -1
    with taken({number}):
        wakeup.wake()
        wakeup.clear()
        wakeup.close()


def test_a_server_that_has_ended_writes_to_no_descriptor():
    """Its number may be a connection of another server by now, which would read the bytes as a message's header."""
    before = eventfds()
    with Listener("one", SECRET) as listener:
        server = GroupServerLoop("one", listener, None, SECRET)
        mine = eventfds() - before
        assert mine
        server.close()
        with taken(mine):
            server.close()
            with pytest.raises(TimeoutError):
                server.do(lambda: None, timeout=0.01)


def test_a_subscription_that_is_closed_writes_to_no_descriptor():
    before = eventfds()
    subscription = StaticMap(SpaceMap(1, (), {}), SECRET).subscribe()
    mine = eventfds() - before
    assert mine
    subscription.close()
    with taken(mine):
        subscription.hang_up()
        subscription.close()
