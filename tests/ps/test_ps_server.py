"""A server of an elastic group: what it answers, holds and refuses; over real links, under a scripted manager."""

import dataclasses
import json
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from ps_site import Manager, Site, error, space, values

from rayps.cluster.local import until
from rayps.comm.link import Message
from rayps.ps.protocol.messages import Event, GroupMessage, SegmentPayload, read_numbers, unpack
from rayps.ps.protocol.space import Quota
from rayps.ps.server.assignments import Assignments, SegmentReport
from rayps.ps.server.dense_segment import part_of, state_of
from rayps.ps.server.outbound import ManagerSession
from rayps.ps.server.replication import Replication

START = torch.arange(12.0)


@pytest.fixture
def site():
    with Site("s0", "s1") as made:
        yield made


def grad(value, size=4):
    return np.full(size, value, np.float32).tobytes()


def test_join_load_push_pull(site):
    one = space(staleness=None)
    places = ["s0", "s1", "s0"]
    site.open(one, places)
    site.load(one, places, START)
    worker = site.guest("s0")
    assert worker.marks == {0: 0, 2: 0}
    pieces = [SegmentPayload(0, 1, grad(1.0)), SegmentPayload(2, 1, grad(2.0))]
    answer = worker.ask(GroupMessage.PUSH, pieces, weight=3.0)
    assert answer.kind == GroupMessage.ACK
    empty = [SegmentPayload(2, 1, b""), SegmentPayload(0, 1, b"")]
    found = values(worker.ask(GroupMessage.PULL, empty, a=1))
    assert list(found) == [2, 0]
    assert np.allclose(found[0], np.arange(4) - 0.1 * 1.0 / 2)
    assert np.allclose(found[2], np.arange(8, 12) - 0.1 * 2.0 / 2)
    answer = worker.ask(GroupMessage.PUSH_PULL, pieces, a=1, weight=3.0)
    assert answer.kind == GroupMessage.VALUE
    assert answer.a == 2
    assert np.allclose(values(answer)[0], np.arange(4) - 0.1)
    reader = site.guest("s0", rank=-1)
    assert np.allclose(values(reader.ask(GroupMessage.READ, empty))[0], np.arange(4) - 0.1)
    assert error(reader.ask(GroupMessage.PUSH, pieces))["kind"] == "ValueError"
    stale = worker.ask(GroupMessage.PUSH, [SegmentPayload(0, 1, grad(1.0)), SegmentPayload(1, 1, grad(1.0))], a=2)
    assert stale.kind == GroupMessage.STALE
    assert read_numbers(stale.payload) == [1]


def test_one_copy_is_the_same(site):
    one = space(staleness=None)
    places = ["s0"] * 3
    site.open(one, places, copies=[["s1"]] * 3)
    site.load(one, places, START)
    worker = site.guest("s0")
    for step in range(5):
        pieces = [SegmentPayload(i, 1, grad(step + i)) for i in range(3)]
        assert worker.ask(GroupMessage.PUSH, pieces, a=step, weight=1.0).kind == GroupMessage.ACK
    for i in range(3):
        assert site.segment("s0", i).dump() == site.segment("s1", i).dump()
        assert site.segment("s1", i).marks() == {0: 5, 1: 0}


def test_a_space_pays_for_what_is_read_of_it_too(site):
    """Taking in a large push takes as long as applying it: a flood must not have that for nothing."""
    one = opened(site, staleness=None)
    worker, host = site.guest("s0"), site.hosts["s0"]
    for step in range(20):
        assert (
            worker.ask(GroupMessage.PUSH, [SegmentPayload(i, 1, grad(1.0)) for i in range(3)], a=step).kind
            == GroupMessage.ACK
        )
    served = host.facts()["spaces"][str(one.number)]["seconds"]
    assert host._fair._queue(one.number).clock > served + 1e-5 > 1e-5


def opened(site, places=("s0",) * 3, **more):
    one = space(**more)
    site.open(one, list(places))
    site.load(one, list(places), START)
    return one


def all_of(value=None, generation=1):
    return [SegmentPayload(i, generation, b"" if value is None else grad(value)) for i in range(3)]


def test_a_stale_request_has_no_effect_at_all(site):
    opened(site, ["s0", "s0", "s1"])
    worker = site.guest("s0")
    for pieces, wrong in [
        ([SegmentPayload(0, 1, grad(1.0)), SegmentPayload(1, 0, grad(1.0))], [1]),  # of an older map
        (
            [SegmentPayload(0, 2, grad(1.0)), SegmentPayload(1, 1, grad(1.0))],
            [0],
        ),  # of a map that this server has not heard of yet
        (
            [SegmentPayload(0, 1, grad(1.0)), SegmentPayload(2, 1, grad(1.0)), SegmentPayload(9, 1, b"")],
            [2, 9],
        ),  # not here; nowhere
    ]:
        for kind in (
            GroupMessage.PUSH,
            GroupMessage.PUSH_PULL,
            GroupMessage.PULL,
            GroupMessage.READ,
            GroupMessage.FLUSH,
        ):
            answer = worker.ask(kind, pieces, weight=1.0)
            assert (answer.kind, read_numbers(answer.payload)) == (GroupMessage.STALE, wrong)
    for i in range(2):
        assert site.segment("s0", i).marks() == {0: 0, 1: 0}
        assert np.array_equal(np.frombuffer(site.segment("s0", i).read(), np.float32), START[4 * i : 4 * i + 4].numpy())


def test_a_push_that_cannot_be_changes_no_segment(site):
    opened(site)
    worker = site.guest("s0")
    good, short = SegmentPayload(0, 1, grad(1.0)), SegmentPayload(1, 1, grad(1.0)[:-4])
    assert "does not fit" in error(worker.ask(GroupMessage.PUSH, [good, short], weight=1.0))["message"]
    assert "may be skipped" in error(worker.ask(GroupMessage.PUSH, all_of(1.0), a=5000, weight=1.0))["message"]
    assert error(worker.ask(GroupMessage.PUSH, all_of(1.0), weight=float("nan")))["kind"] == "ValueError"
    for payload in (b"", b"x" * 9, np.int64(7).tobytes()):
        tag = worker.say(GroupMessage.PUSH, payload=payload)
        assert error(worker.hear(tag))["kind"] == "ValueError"
    reader = site.guest("s0", rank=-1)
    assert "READ" in error(reader.ask(GroupMessage.PULL, all_of()))["message"]
    assert reader.ask(GroupMessage.FLUSH, all_of()).kind == GroupMessage.ACK
    assert "kind 19" in error(worker.ask(19))["message"]
    for i in range(3):
        assert site.segment("s0", i).marks() == {0: 0, 1: 0}
    assert worker.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0).kind == GroupMessage.ACK


def test_nothing_is_served_before_it_is_loaded(site):
    one = space()
    site.open(one, ["s0"] * 3)
    worker = site.guest("s0")
    assert worker.marks == {}
    for kind in (GroupMessage.PUSH, GroupMessage.PULL, GroupMessage.READ):
        assert read_numbers(worker.ask(kind, all_of()).payload) == [0, 1, 2]
    assert error(worker.ask(GroupMessage.LOAD, all_of()))["kind"] == "ValueError"
    site.load(one, ["s0"] * 3, START)
    assert worker.ask(GroupMessage.PULL, all_of()).kind == GroupMessage.VALUE


def test_pulls_wait_for_the_clock_and_say_whom_they_wait_for(site):
    opened(site, staleness=0, workers=3)
    guests = [site.guest("s0", rank=rank) for rank in range(3)]
    for guest in guests[:2]:
        assert guest.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0).kind == GroupMessage.ACK
    late = guests[0].ask(GroupMessage.PULL, all_of(), a=1, b=50)
    assert error(late)["kind"] == "PeerTimeout"
    assert "rank 2" in error(late)["message"]
    assert "s0" in error(late)["message"]
    tags = [guest.say(GroupMessage.PULL, all_of(), a=1) for guest in guests[:2]]
    assert guests[0].silent()
    assert guests[2].ask(GroupMessage.PUSH, all_of(1.0), weight=1.0).kind == GroupMessage.ACK
    found = [guest.hear(tag) for guest, tag in zip(guests, tags, strict=False)]
    assert [answer.a for answer in found] == [1, 1]
    assert bytes(found[0].payload) == bytes(found[1].payload)


def test_requests_of_one_reader_are_granted_together(site):
    """They were divided, or repeated one by one: a reader that waited for its own hold would wait for its patience."""
    opened(site)
    one, two = site.guest("s0", rank=0), site.guest("s0", rank=1)
    assert one.ask(GroupMessage.HOLD, all_of()[:1], a=1).kind == GroupMessage.VALUE
    tags = [two.say(GroupMessage.HOLD, [piece], a=1) for piece in all_of()]
    assert two.silent()
    one.say(GroupMessage.RELEASE)
    assert [two.hear(tag).kind for tag in tags] == [GroupMessage.VALUE] * 3
    push = one.say(GroupMessage.PUSH, all_of(1.0)[2:], weight=1.0)
    assert one.silent()  # the last of them is held too
    again = two.ask(GroupMessage.HOLD, all_of()[:1], a=1)  # it begins anew
    assert again.kind == GroupMessage.VALUE and one.hear(push).kind == GroupMessage.ACK


def test_patience_is_said_when_joining(site):
    opened(site, staleness=0)
    worker = site.guest("s0", join=False)
    worker.join(patience=0.1)
    worker.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0)
    found = error(worker.ask(GroupMessage.PULL, all_of(), a=1))
    assert found["kind"] == "PeerTimeout"
    assert "waited 0.1 s on s0" in found["message"]


def test_a_newer_incarnation_fences_the_older(site):
    opened(site, staleness=0)
    old, reader = site.guest("s0", incarnation=3), site.guest("s0", incarnation=3)
    assert old.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0).kind == GroupMessage.ACK
    parked = old.say(GroupMessage.PULL, all_of(), a=1)
    assert old.silent()
    assert reader.ask(GroupMessage.READ, all_of()).kind == GroupMessage.VALUE  # another link of the same one
    new = site.guest("s0", incarnation=4)
    assert new.marks == {0: 0, 1: 0, 2: 0}  # what is filed in an open round is not durable
    assert error(old.hear(parked))["kind"] == "StaleGeneration"
    for guest in (old, reader):
        assert error(guest.ask(GroupMessage.PUSH, all_of(1.0), a=1, weight=1.0))["kind"] == "StaleGeneration"
    late = site.guest("s0", incarnation=3, join=False)
    assert error(late.join())["kind"] == "StaleGeneration"
    assert (
        new.ask(GroupMessage.PUSH, all_of(5.0), weight=1.0).kind == GroupMessage.ACK
    )  # known already: the first one counts
    assert site.guest("s0", rank=1).ask(GroupMessage.PUSH, all_of(3.0), weight=1.0).kind == GroupMessage.ACK
    assert np.allclose(values(new.ask(GroupMessage.PULL, all_of(), a=1))[0], np.arange(4) - 0.1 * 2.0)


def test_a_space_that_is_heard_of_late_and_one_that_is_not(site, monkeypatch):
    monkeypatch.setattr("rayps.ps.server.server.UNKNOWN_SPACE_SECONDS", 1.0)
    early = site.guest("s0", join=False)
    joining = early.say(GroupMessage.JOIN, a=1, b=0, payload=b"")
    assert early.silent(0.3)
    opened(site)
    assert early.hear(joining).kind == GroupMessage.JOINED
    lost = site.guest("s0", number=77, join=False)
    assert error(lost.join())["kind"] == "NotFound"
    nobody = site.guest("s0", join=False)
    assert "JOIN" in error(nobody.ask(GroupMessage.PULL, all_of()))["message"]
    wrong = site.guest("s0", rank=2, join=False)
    assert "2 workers" in error(wrong.join())["message"]
    worker = site.guest("s0")
    site.manager.tell("s0", GroupMessage.FORGET, b"", a=1)
    assert until(lambda: 1 not in site.hosts["s0"]._assignments.spaces, 60)
    assert error(worker.ask(GroupMessage.PULL, all_of()))["kind"] == "NotFound"


def test_states_are_kept_given_and_made_durable(site):
    opened(site, staleness=0)
    driver = site.guest("s0", rank=-1)
    waiting = driver.say(GroupMessage.PART, all_of(), a=2)
    guests = [site.guest("s0", rank=rank) for rank in range(2)]
    for step in range(3):
        answers = [guest.ask(GroupMessage.PUSH, all_of(1.0), a=step, weight=1.0) for guest in guests]
        assert answers[-1].weight == 0.0  # there are no copies, and nothing is kept elsewhere yet
    states = unpack(driver.hear(waiting).payload)
    assert [piece.segment for piece in states] == [0, 1, 2]
    for piece in states:
        kept = part_of(piece.data, 2, 4 * piece.segment)
        assert kept.done == {0: 2, 1: 2}
        assert torch.allclose(kept.params, START[kept.lo : kept.lo + 4] - 0.2)
    driver.say(GroupMessage.SAVED, a=2, payload=b"")
    assert driver.ask(GroupMessage.READ, all_of()).kind == GroupMessage.VALUE
    assert guests[0].ask(GroupMessage.PULL, all_of(), a=3).weight == 2.0
    assert "no state after round 1" in error(driver.ask(GroupMessage.PART, all_of(), a=1))["message"]
    now = unpack(driver.ask(GroupMessage.PART, all_of(), a=3).payload)
    assert part_of(now[0].data, 3, 0).done == {0: 3, 1: 3}
    assert unpack(driver.ask(GroupMessage.PART, all_of(), a=-1).payload)[0].segment == 0


def test_flush_waits_until_all_is_applied(site):
    opened(site, staleness=0)
    one, other = site.guest("s0"), site.guest("s0", rank=1)
    assert one.ask(GroupMessage.FLUSH, all_of()).kind == GroupMessage.ACK
    one.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0)
    flush = one.say(GroupMessage.FLUSH, all_of())
    assert one.silent()
    other.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0)
    assert one.hear(flush).kind == GroupMessage.ACK


def test_a_quota_of_operations_waits_and_one_of_bytes_refuses(site):
    opened(site, quota=Quota(operations=20.0))
    worker = site.guest("s0")
    began = time.monotonic()
    pushes = [worker.say(GroupMessage.PUSH, all_of(1.0), a=step, weight=1.0) for step in range(25)]
    for push in pushes:
        assert worker.hear(push).kind == GroupMessage.ACK
    assert time.monotonic() - began > 0.9  # 5 at once, then 20 a second
    assert until(lambda: site.manager.loads["s0"]["spaces"]["1"]["throttled"] > 15, 60)
    small = space(number=2, quota=Quota(bytes=40))
    site.open(small, ["s0"] * 3)
    opener = site.guest("s0", number=2, rank=-1)
    states = [
        SegmentPayload(i, 1, state_of(START[lo:hi], small.layout, lo, marks=[0, 0]))
        for i, (lo, hi) in enumerate(small.cuts)
    ]
    refused = error(opener.ask(GroupMessage.LOAD, states))
    assert refused["kind"] == "ConfigError"
    assert refused["data"]["field"] == "quota.bytes"
    assert opener.ask(GroupMessage.LOAD, states[:2]).kind == GroupMessage.ACK  # and nothing was lost
    assert until(lambda: site.manager.loads["s0"]["spaces"].get("2", {}).get("rejected") == 1, 60)


def test_a_flood_of_one_space_leaves_half_to_the_other(site):
    """Unpaced and many against one at a time: the one's requests are never behind all of the flood's."""
    opened(site)
    opened(site, number=2)
    stop = threading.Event()

    def flood(rank):
        guest, step = site.guest("s0", number=2, rank=rank), 0
        while not stop.is_set():
            tags = [guest.say(GroupMessage.PUSH, all_of(1.0), a=step + i, weight=1.0) for i in range(400)]
            step += 400
            for tag in tags:
                assert guest.hear(tag).kind == GroupMessage.ACK

    threads = [threading.Thread(target=flood, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    worker, step, others = site.guest("s0"), 0, []  # the flood's requests that were served during one of the worker's
    served = site.hosts["s0"]._assignments.spaces
    while step < 30:
        before = served[2].operations
        assert worker.ask(GroupMessage.PUSH, all_of(1.0), a=step, weight=1.0).kind == GroupMessage.ACK
        others.append(served[2].operations - before)
        step += 1
    stop.set()
    for thread in threads:
        thread.join(60)
    assert served[2].operations > 400
    assert sorted(others)[15] < 400  # of the 800 that were there before it, most of the time


def test_links_of_a_space_with_much_waiting_are_not_read(site):
    opened(site)
    host = site.hosts["s0"]
    host._fair.limit = 20_000
    site.manager.tell("s0", GroupMessage.SPACE, pickle.dumps(space(quota=Quota(operations=1.0))))
    worker = site.guest("s0")
    for step in range(300):
        worker.say(GroupMessage.PUSH, all_of(1.0), a=step, weight=1.0)
    assert until(lambda: host._paused, 60)
    assert host._fair.queued(1) < 25_000
    site.manager.tell("s0", GroupMessage.SPACE, pickle.dumps(space()))
    for tag in range(2, 302):
        assert worker.hear(tag).kind == GroupMessage.ACK
    assert site.segment("s0", 0).marks()[0] == 300


def test_a_branch_on_a_server(site):
    opened(site)
    worker = site.guest("s0")
    worker.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0)
    child = dataclasses.replace(space(number=2, workers=3), branch_of="space-1")
    site.manager.tell("s0", GroupMessage.SPACE, pickle.dumps(child))
    site.manager.tell("s0", GroupMessage.BRANCH, {"segments": [[0, 1], [1, 1], [2, 1]]}, a=2, b=1)
    site.manager.orders("s0", 2, [[i, "primary", 1, {}] for i in range(3)])
    for i in range(3):
        site.manager.heard("s0", "ready", 2, i, 1, "")
    assert site.segment("s0", 0, 2).nbytes == 0
    other = site.guest("s0", number=2, rank=2)
    assert np.array_equal(
        values(other.ask(GroupMessage.PULL, all_of()))[1], np.float32([4, 5, 6, 7]) - np.float32(0.05)
    )
    other.ask(GroupMessage.PUSH, all_of(3.0), weight=1.0)
    assert np.allclose(values(other.ask(GroupMessage.PULL, all_of(), a=1))[1], np.arange(4, 8) - 0.05 - 0.1)
    assert np.allclose(values(worker.ask(GroupMessage.PULL, all_of(), a=1))[1], np.arange(4, 8) - 0.05)
    site.manager.tell("s0", GroupMessage.FORGET, b"", a=1)
    assert until(lambda: 1 not in site.hosts["s0"]._assignments.spaces, 60)
    assert other.ask(GroupMessage.PULL, all_of(), a=1).kind == GroupMessage.VALUE
    # what is to begin from nothing does not begin
    site.manager.tell("s1", GroupMessage.SPACE, pickle.dumps(child))
    site.manager.tell("s1", GroupMessage.BRANCH, {"segments": [[0, 1]]}, a=2, b=1)
    site.manager.orders("s1", 2, [[0, "primary", 1, {}]])
    site.manager.heard("s1", "asked", 2, 0, 1, "")
    assert ("s1", "ready", 2, 0, 1, "") not in site.manager.facts


def test_memory_is_given_back_when_a_space_ends(site):
    one = opened(site)
    segment = weakref.ref(site.segment("s0", 0).shard)
    site.manager.tell("s0", GroupMessage.FORGET, b"", a=one.number)
    assert until(lambda: segment() is None, 60)


def test_the_manager_goes_and_comes_back(site):
    """The server serves on; then it registers again and says everything that is so."""
    one = space()
    site.open(one, ["s0"] * 3, copies=[["s1"]] * 3)
    site.load(one, ["s0"] * 3, START)
    worker, host = site.guest("s0"), site.hosts["s0"]
    assert host.alone == 0
    assert host.alone == 0.0
    first = site.manager
    first.close()
    assert until(lambda: host.alone > 0, 60)
    assert host.alone > 0
    assert worker.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0).kind == GroupMessage.ACK
    site.manager = Manager()
    for each in site.hosts.values():
        each._outbound._manager = site.manager.listener.address
    assert until(lambda: set(site.manager.links) == {"s0", "s1"}, 60)
    for i in range(3):
        site.manager.heard("s0", "ready", 1, i, 1, "")
        site.manager.heard("s0", "synced", 1, i, 1, "s1")
    site.manager.orders("s0", 1, [[i, "primary", 1, site.copies("s1")] for i in range(3)])  # repeated: nothing changes
    assert worker.ask(GroupMessage.PUSH, all_of(1.0), a=1, weight=1.0).kind == GroupMessage.ACK
    assert site.hosts["s0"]._replication.bytes == site.hosts["s0"]._replication.bytes


def test_orders_of_the_past_and_a_copy_without_a_state(site):
    opened(site)
    site.manager.orders("s0", 1, [[0, "none", 0, {}]])
    site.manager.orders("s1", 1, [[0, "copy", 1, {}]])
    site.manager.orders("s1", 1, [[0, "primary", 2, {}]])
    site.manager.heard("s1", "asked", 1, 0, 2, "")
    assert ("s1", "ready", 1, 0, 2, "") not in site.manager.facts
    worker = site.guest("s0")
    assert worker.marks == {0: 0, 1: 0, 2: 0}


def test_what_a_server_says_of_its_load(site):
    opened(site)
    worker = site.guest("s0")
    for step in range(4):
        worker.ask(GroupMessage.PUSH, all_of(1.0), a=step, weight=1.0)
    assert until(lambda: site.manager.loads.get("s0", {}).get("spaces", {}).get("1", {}).get("operations") == 4, 60)
    load = site.manager.loads["s0"]
    assert load["bytes"] == 48
    assert load["connections"] >= 1
    assert load["cpu"] >= 0
    of_space = load["spaces"]["1"]
    assert of_space["bytes"] == 48
    assert of_space["rows"] == 12
    assert of_space["segments"]["2"] == [16, 4, 4, 5]  # 4 pushes, and one load before
    assert of_space["seconds"] > 0


class Written:
    """A link that only records the messages."""

    def __init__(self):
        self.messages = []

    def queue(self, message, payload):
        self.messages.append((message.kind, message.tag, json.loads(payload)))


class Receiver:
    name, address, where = "server-0", "server-0@127.0.0.1:1/", "here"

    def space_changed(self, space):
        """Nothing waits for the space."""

    def facts(self):
        return {}


def test_a_report_has_the_tag_of_the_orders_that_it_is_about():
    """The manager drops a backup and orders it again: it must not count a report on the former one for the new one."""
    assignments = Assignments(None)
    session = ManagerSession(Receiver(), assignments, Replication(None), 0.1)
    link = session.link = Written()
    orders = json.dumps({"space": 7, "holdings": []}).encode()
    session.apply_message(Message(GroupMessage.ORDERS, tag=1, payload=orders))
    session.add_report(SegmentReport(7, Event.SYNCED, 0, 1, "server-1"))
    session.apply_message(Message(GroupMessage.ORDERS, tag=2, payload=orders))
    session.add_report(SegmentReport(7, Event.SYNCED, 1, 1, "server-1"))
    session.send_due(0.0)
    reports = [
        (tag, [row[1] for row in body["events"]]) for kind, tag, body in link.messages if kind == GroupMessage.REPORT
    ]
    assert reports == [(1, [0]), (2, [1])]
