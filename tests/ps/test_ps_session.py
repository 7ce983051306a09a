"""What a worker says to an elastic group, and says again when servers die, segments move, or nobody answers."""

import threading
import time

import numpy as np
import pytest
import torch
from ps_session_fakes import FakeGroup, space_of
from rayps_client.errors import ConfigError, LinkError, PeerLost, PeerTimeout

from rayps.ps.client.client import GroupServer
from rayps.ps.client.replay_buffer import LEAST_BLOCK, CopyMemory, ReplayBuffer
from rayps.ps.client.session import Session
from rayps.ps.protocol.messages import GroupMessage


@pytest.fixture
def make():
    made = []

    def build(size=12, segments=4, servers=2, staleness=None, **more):
        group = FakeGroup(space_of(size, segments, staleness), servers)
        made.append(group)
        session = Session(group.contact(), group.space, 0, timeout=more.pop("timeout", 10.0), **more)
        made.append(session)
        return group, session

    yield build
    for each in reversed(made):
        each.close()


def later(seconds, *works):
    def run():
        time.sleep(seconds)
        for work in works:
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def asked(group, kind):
    return [(name, sorted(segments)) for name, said, _, segments in group.heard if said == kind]


def test_one_request_for_each_server_and_exchange(make):
    group, session = make()
    server = GroupServer(session)
    server.push(torch.arange(12.0, dtype=torch.float64))
    assert not group.heard  # it leaves with what is said next
    assert torch.equal(server.pull(), torch.arange(12.0, dtype=torch.float64))
    assert sorted(asked(group, GroupMessage.PUSH_PULL)) == [("s0", [0, 2]), ("s1", [1, 3])]
    assert len(group.heard) == 2 and server.lead == 1 and server.version == 3


def test_ranges(make):
    _group, session = make(size=10, segments=3)
    server = GroupServer(session)
    server.push(torch.ones(4, dtype=torch.float64), lo=2)
    expected = torch.tensor([0.0, 0, 1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.float64)
    assert torch.equal(server.pull(1, 7), expected[1:7])
    assert torch.equal(server.read(), expected)
    assert server.pull(4, 4).numel() == 0
    out = torch.empty(10, dtype=torch.float64)
    assert server.pull(out=out) is out and torch.equal(out, expected)
    for call in (lambda: server.pull(3, 11), lambda: server.push(torch.ones(11)), lambda: server.pull(out=out[1:])):
        with pytest.raises(ConfigError):
            call()
    assert server.step == 1


def test_a_segment_that_moves_is_asked_for_where_it_is(make):
    group, session = make()
    server = GroupServer(session)
    for turn in range(6):
        group.give(turn % 4, f"s{turn % 2}")
        server.push(torch.ones(12, dtype=torch.float64))
        server.settle()
    assert torch.equal(server.pull(), torch.full((12,), 6.0, dtype=torch.float64))


def test_a_server_that_dies_is_left_for_whoever_holds_its_segments(make):
    group, session = make()
    server = GroupServer(session)
    server.push(torch.ones(12, dtype=torch.float64))
    server.settle()
    group.kill("s1")
    later(0.2, lambda: group.give(1, "s0"), lambda: group.give(3, "s0"))
    server.push(torch.ones(12, dtype=torch.float64))
    assert torch.equal(server.pull(), torch.full((12,), 2.0, dtype=torch.float64))


def test_an_answer_that_is_lost_is_no_second_push(make):
    group, session = make()
    server = GroupServer(session)
    group.parks = True

    def cut():
        group.kill("s1")  # it has applied the push, and not answered
        group.parks = False
        group.give(1, "s0"), group.give(3, "s0")

    later(0.1, cut)
    server.push(torch.ones(12, dtype=torch.float64))
    assert torch.equal(server.pull(), torch.full((12,), 1.0, dtype=torch.float64))


def test_a_server_that_is_silent_is_left_when_the_map_says_so(make):
    group, session = make()
    server = GroupServer(session)
    group.servers["s1"].mute = True
    later(0.2, lambda: group.give(1, "s0"), lambda: group.give(3, "s0"))
    server.push(torch.ones(12, dtype=torch.float64))
    assert torch.equal(server.pull(), torch.full((12,), 1.0, dtype=torch.float64))


@pytest.mark.parametrize("found_by", ["the next call", "a pull that waits"])
@pytest.mark.parametrize("size", [12, 24000])  # of the larger ones memory is used again
def test_pushes_that_only_the_former_holder_knew_are_said_again(make, found_by, size):
    group, session = make(size=size)
    group.files = True
    server = GroupServer(session)
    for step in range(3):
        server.push(torch.full((size,), float(step), dtype=torch.float64))
        server.settle()
    assert [push.step for push in session.replay_buffer.of(range(4))] == [0, 1, 2]
    group.parks = found_by == "a pull that waits"

    def move():
        group.give(1, "s0")
        time.sleep(0.2)
        group.parks = False

    thread = later(0.1 if group.parks else 0.0, move)
    if not group.parks:
        thread.join()
    server.pull()
    with group.lock:
        said = sorted(key for key in group.servers["s0"].filed if key[0] == 1)
        values = [group.servers["s0"].filed[key] for key in said]
    assert said == [(1, 0, 0), (1, 0, 1), (1, 0, 2)]
    assert [set(value.tolist()) for value in values] == [{0.0}, {1.0}, {2.0}]
    pulls = {step for _, kind, step, _ in group.heard if kind == GroupMessage.PULL}
    assert pulls == {3}  # so that nobody answers who lacks one of the three


@pytest.mark.parametrize("orders", ["are there", "come later"])
def test_a_new_holder_is_told_only_what_it_lacks(make, orders):
    """Thousands may be kept, of a time without copies, and the new holder have all but the last few."""
    group, session = make()
    group.files = True
    server = GroupServer(session)
    for step in range(5):
        server.push(torch.full((12,), float(step), dtype=torch.float64))
        server.settle()
    group.marks[1][0] = 3  # the steps that came along
    if orders == "come later":
        group.unheard.add(1)
        thread = later(0.3, lambda: group.unheard.clear())
    group.give(1, "s0")
    time.sleep(0.05)
    server.pull()
    if orders == "come later":
        thread.join()
    assert sorted(key for key in group.servers["s0"].filed if key[0] == 1) == [(1, 0, 3), (1, 0, 4)]
    assert [push.step for push in session.replay_buffer.of([1])] == [0, 1, 2, 3, 4]  # no answer says that it is durable


def test_gradients_may_change_once_a_push_has_returned(make):
    group, session = make()
    group.files = True
    server = GroupServer(session, defer=False)
    grad = torch.ones(12, dtype=torch.float64)
    server.push(grad)
    grad.fill_(9.0)
    group.give(1, "s0")
    time.sleep(0.05)
    server.pull()
    assert group.servers["s0"].filed[1, 0, 0].tolist() == [1.0] * 3


def test_past_the_deadline_the_server_the_segments_and_the_knob_are_named(make):
    group, session = make(timeout=0.2)
    server = GroupServer(session)
    group.servers["s1"].mute = True
    session._connections.deadline = 0
    import rayps.ps.client.session as module

    module.GRACE_SECONDS, before = 0.1, module.GRACE_SECONDS
    try:
        with pytest.raises(PeerTimeout, match=r"'s1' did not answer requests to segments 1, 3.*0\.2 s.*timeout"):
            server.pull()
        group.kill("s1")
        with pytest.raises(PeerTimeout, match=r"no request could be sent to segments 1, 3 \(held by s1\)"):
            server.pull()
        server.push(torch.ones(12, dtype=torch.float64))
        with pytest.raises(PeerTimeout):
            server.settle()
    finally:
        module.GRACE_SECONDS = before
    group.give(1, "s0"), group.give(3, "s0")
    time.sleep(0.05)
    assert torch.equal(server.pull(), torch.ones(12, dtype=torch.float64))  # what could not be said has been by now


def test_the_rank_that_is_waited_for_is_named(make):
    group, session = make(timeout=0.2)
    group.parks = True
    with pytest.raises(PeerTimeout, match="rank 3"):
        GroupServer(session).pull()


def test_what_is_lost_is_said(make):
    group, session = make(lost=lambda: [1, 3])
    server = GroupServer(session)
    group.kill("s1")
    group.give(1, None), group.give(3, None)
    with pytest.raises(PeerLost, match=r"segments 1, 3 of space 'job' had no backup.*replicas"):
        server.pull()


def test_a_hang_up_ends_what_waits(make):
    group, session = make()
    server = GroupServer(session)
    group.parks = True
    later(0.1, server.hang_up)
    with pytest.raises(LinkError):
        server.pull()


def test_joining_waits_for_those_who_are_to_hold_something(make):
    group, session = make()
    group.give(2, None)
    with group.lock:
        group.marks[0][0], group.marks[1][0], group.marks[2][0], group.marks[3][0] = 5, 4, 5, 5
    later(0.2, lambda: group.give(2, "s1"))
    assert GroupServer(session).step == 4


def test_a_manager_that_is_lost_is_found_again_when_it_is_needed(make):
    group, session = make()
    server = GroupServer(session)
    group.manager.close()
    time.sleep(0.05)
    assert server.pull().sum() == 0  # nothing to ask it
    from ps_session_fakes import Manager

    group.give(1, "s0")
    group.manager = Manager(group)
    session._connections.map_subscription._find = group.contact
    assert server.pull().sum() == 0


def test_a_reader_has_links_of_its_own(make):
    _group, session = make()
    server, other = GroupServer(session), session.reader()
    server.push(torch.ones(12, dtype=torch.float64))
    server.settle()
    other.join()
    places = {i: np.empty(3) for i in range(4)}
    other.exchange(GroupMessage.PULL, dict.fromkeys(range(4), b""), outputs=places)
    other.close()
    assert all(place.tolist() == [1.0] * 3 for place in places.values())
    assert server.pull().sum() == 12


def test_memory_of_copies_is_reused_once_they_are_dropped(monkeypatch):
    memory, pieces = CopyMemory(), [bytes([i]) * (LEAST_BLOCK + 999 * i) for i in range(8)]
    held = [memory.copy(piece) for piece in pieces]
    assert [bytes(copy) for copy in held] == pieces
    first = np.frombuffer(held.pop(0), np.uint8).ctypes.data
    copy = memory.copy(pieces[7][:LEAST_BLOCK])
    assert np.frombuffer(copy, np.uint8).ctypes.data == first  # the block of the dropped copy
    assert [bytes(each) for each in held] == pieces[1:] and bytes(copy) == pieces[7][:LEAST_BLOCK]
    monkeypatch.setattr("rayps.ps.client.replay_buffer.COPY_LIMIT", 0)  # then copies lie in ordinary memory
    more = [CopyMemory().copy(piece) for piece in [*pieces, b"small", b""]]
    assert [bytes(each) for each in more] == [*pieces, b"small", b""]


def test_what_is_kept_is_bounded_and_counted():
    kept = ReplayBuffer(100)
    for step in range(5):
        kept.retain(step, 1.0, {0: memoryview(bytes(20)), 1: memoryview(bytes(10))})
    assert [push.step for push in kept.of([0])] == [2, 3, 4] and kept.dropped == 2 and kept.bytes == 90
    kept.durable([0], 4)
    assert [(push.step, sorted(push.pieces)) for push in kept.of([0, 1])] == [(2, [1]), (3, [1]), (4, [0, 1])]
    kept.durable([0, 1], 5)
    assert kept.bytes == 0 and kept.of([0, 1]) == []
