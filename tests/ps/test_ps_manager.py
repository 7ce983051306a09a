"""The manager over real links, with servers that hold nothing (`ps_fakes`)."""

import json
import threading
import time

import ps_fakes
import pytest
import torch
from ps_fakes import HOSTS, FakeHost
from rayps_client.errors import ConfigError, Conflict, NotFound

from rayps.cluster.local import LocalCluster, until
from rayps.comm.link import Message, connect, parse_address
from rayps.ps.manager import group_state, launcher, members
from rayps.ps.manager.assign_segments import Balance
from rayps.ps.manager.manager import Manager
from rayps.ps.protocol.messages import Event, GroupMessage, Role
from rayps.ps.protocol.segment_map import SpaceMap
from rayps.ps.protocol.space import Quota, Space
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Managers on a cluster of threads, with fake servers."""
    monkeypatch.setattr(launcher, "HOST", "ps_fakes:FakeHost")
    monkeypatch.setattr(group_state, "BROKEN_SECONDS", 0.3)
    monkeypatch.setattr(ps_fakes.FakeHost, "hold", set())
    monkeypatch.setattr(ps_fakes.FakeHost, "machines", {})
    made, cluster = [], LocalCluster()

    def one(servers=3, replicas=1, name="g", **more):
        manager = Manager(name, servers, replicas, tmp_path / name, cluster=cluster, **more)
        made.append(manager)
        alive = [s for s in manager.facts()["servers"] if s["state"] == "alive"]
        assert until(lambda: len(list_alive(manager)) == manager.facts()["wanted"], 60), alive
        return manager

    one.cluster, one.made = cluster, made
    yield one
    for manager in made:
        manager.close()
    cluster.close()
    HOSTS.clear()


def list_alive(manager):
    return [s["name"] for s in manager.facts()["servers"] if s["state"] == "alive"]


def a_space(name="job", segments=16, workers=2, **more):
    layout = Layout.of([("w", torch.empty(4 * segments))])
    cuts = tuple((4 * i, 4 * i + 4) for i in range(segments))
    return Space(name, 0, workers, ParameterServer(), layout, cuts, **more)


def settle(manager, timeout=60):
    assert until(manager.settled, timeout), manager.facts()


def by(manager, number):
    return SpaceMap.from_json(manager.map(number))


def kill(manager, make, server):
    make.cluster.kill(make.cluster.find(launcher.name_actor("g", server)))


def test_a_space_is_placed_and_gets_its_copies(make):
    manager = make()
    space = manager.open(a_space())
    assert space.number == 1 and manager.space("job") == space
    assert all(holding.primary and holding.copies for holding in by(manager, 1).holders)
    found = by(manager, 1)
    assert all(
        h.primary and len(h.copies) == 1 and h.copies[0] != h.primary and h.generation == 1 for h in found.holders
    )
    assert set(found.addresses) == {"server-0", "server-1", "server-2"}
    for index, holding in enumerate(found.holders):
        assert HOSTS[holding.primary].orders[1, index][:2] == (Role.PRIMARY, 1)
        copy = HOSTS[holding.copies[0]].orders  # the fake primary says SYNCED whatever the copy has heard
        assert until(lambda c=copy, i=index: (1, i) in c, 60) and copy[1, index][:2] == (Role.COPY, 1)
    facts = manager.facts()
    json.dumps(facts)
    assert facts["status"] == "ready" and facts["spaces"][0]["segments"][3]["state"] == "ready"
    assert facts["counts"]["moves"] == facts["counts"]["deaths"] == 0
    assert facts["spaces"][0]["rejected"] == facts["spaces"][0]["throttled"] == 0
    assert sum(s["primaries"] for s in facts["servers"]) == sum(s["copies"] for s in facts["servers"]) == 16


def test_copies_are_on_other_machines(make):
    FakeHost.machines = {"server-0": "a", "server-1": "a", "server-2": "b", "server-3": "b"}
    manager = make(4)
    manager.open(a_space())
    settle(manager)
    machine = FakeHost.machines
    assert all(machine[h.primary] != machine[h.copies[0]] for h in by(manager, 1).holders)


def watch(manager, number):
    contact = manager.contact()
    link = connect(contact["address"], name="worker-0", secret=contact["secret"], generation=0, timeout=60)
    link.send(Message(GroupMessage.WATCH, a=number), timeout=60)
    return link


def read_map(link):
    message = link.recv(5)
    assert message.kind == GroupMessage.MAP
    return SpaceMap.from_json(json.loads(bytes(message.payload)))


def test_a_dead_servers_segments_are_promoted_and_workers_hear_of_it(make):
    manager = make()
    manager.open(a_space())
    settle(manager)
    before = by(manager, 1)
    link = watch(manager, 1)
    assert read_map(link) == before
    kill(manager, make, "server-1")
    newest = before
    while any(h.primary in (None, "server-1") for h in newest.holders):
        newer = read_map(link)
        assert newer.version > newest.version
        newest = newer
    for old, new in zip(before.holders, newest.holders, strict=True):
        if old.primary == "server-1":
            assert new.primary == old.copies[0] and new.generation == old.generation + 1
        else:
            assert new.primary == old.primary and new.generation == old.generation
    assert until(lambda: "server-3" in list_alive(manager), 60)
    settle(manager)  # replaced, and copied to
    facts = manager.facts()
    assert "server-3" in list_alive(manager) and facts["counts"]["deaths"] == 1
    assert facts["counts"]["promotions"] == sum(h.primary == "server-1" for h in before.holders) > 0
    assert facts["counts"]["lost"] == 0
    assert {"server_lost", "server_dead"} <= {event["kind"] for event in facts["events"]}
    assert [s["state"] for s in facts["servers"] if s["name"] == "server-1"] == ["dead"]
    link.close()


def test_a_primary_is_named_once_it_says_that_it_is_ready(make):
    manager = make()
    manager.open(a_space(segments=4))
    settle(manager)
    FakeHost.hold = {Event.READY}
    gone = by(manager, 1).holders[0]
    kill(manager, make, gone.primary)
    assert until(lambda: by(manager, 1).holders[0].generation == 2, 60)
    assert by(manager, 1).holders[0].primary is None
    FakeHost.hold = set()
    HOSTS[gone.copies[0]].say_all()
    assert until(lambda: by(manager, 1).holders[0].primary == gone.copies[0], 60)


def test_a_silent_server_is_taken_for_dead_and_may_come_back(make):
    manager = make(silence=0.4)
    manager.open(a_space())
    settle(manager)
    before = by(manager, 1)
    HOSTS["server-0"].mute = True
    assert until(lambda: all(h.primary not in (None, "server-0") for h in by(manager, 1).holders), 60)
    facts = manager.facts()
    assert facts["counts"]["deaths"] == 1
    dead = next(server for server in facts["servers"] if server["name"] == "server-0")
    assert [dead[key] for key in ("state", "bytes", "rows", "operations_s", "cpu")] == ["dead", None, None, None, None]
    HOSTS["server-0"].mute = False
    settle(manager)
    assert manager.facts()["counts"]["deaths"] == 0  # one that came back was not lost
    assert list_alive(manager) == ["server-0", "server-1", "server-2"]
    after = by(manager, 1)
    assert [h.primary for h in after.holders] == [h.primary for h in before.holders]
    assert all(
        h.generation >= 3 for h, b in zip(after.holders, before.holders, strict=True) if b.primary == "server-0"
    )  # promoted away, and moved back


def test_grow_and_shrink(make):
    manager = make(2)
    manager.open(a_space(segments=32))
    settle(manager)
    before = by(manager, 1)
    manager.resize(4)
    settle(manager)
    after = by(manager, 1)
    moved = sum(a.primary != b.primary for a, b in zip(before.holders, after.holders, strict=True))
    assert 10 <= moved <= 22  # half of 32
    assert manager.facts()["counts"]["moves"] == moved
    assert {event["kind"] for event in manager.facts()["events"]} >= {"resizing", "resized"}
    manager.resize(3)
    settle(manager)
    assert list_alive(manager) == ["server-0", "server-1", "server-2"]
    assert until(lambda: "server-3" not in HOSTS, 60)
    assert all(len(h.copies) == 1 for h in by(manager, 1).holders)
    assert manager.facts()["counts"]["deaths"] == manager.facts()["counts"]["promotions"] == 0


def test_a_group_whose_first_servers_come_is_starting_and_one_that_lost_some_heals(make, monkeypatch):
    assert make(2).facts()["status"] == "ready"
    monkeypatch.setattr(launcher.Launcher, "start", lambda *args, **more: None)
    manager = Manager("slow", 2, 1, cluster=make.cluster)
    assert manager.facts()["status"] == "starting"
    manager.close()
    manager = make.made[0]
    kill(manager, make, "server-0")
    assert until(lambda: manager.facts()["status"] == "healing", 60)


def test_drain_empties_that_server_and_ends_it(make):
    manager = make(3)
    manager.open(a_space())
    settle(manager)
    FakeHost.hold = {Event.HANDED}
    manager.drain("server-0")
    assert until(lambda: any(m["phase"] == "handing" for m in manager.facts()["moves"]), 60)
    assert "server-0" in HOSTS and manager.facts()["status"] == "resizing"
    FakeHost.hold = set()
    HOSTS["server-0"].say_all()
    settle(manager)
    assert list_alive(manager) == ["server-1", "server-2"] and until(lambda: "server-0" not in HOSTS, 5)
    assert manager.facts()["wanted"] == 2
    with pytest.raises(NotFound, match="server-1, server-2"):
        manager.drain("server-9")
    with pytest.raises(ConfigError, match="at least 2 servers"):
        manager.drain("server-1")


def test_sizes_that_cannot_be(make):
    manager = make(2)
    for servers, text in (
        (0, "at least 1"),
        (-1, "at least 1"),
        (1, "at least 2 servers: servers=1 is too few"),
        (True, "whole number"),
        ("3", "whole number"),
    ):
        with pytest.raises(ConfigError, match=text):
            manager.resize(servers)
    with pytest.raises(ConfigError, match="too few"):
        Manager("h", 1, 1)
    manager.resize(2)  # as it is
    assert manager.facts()["resizing"] is None


def test_a_server_that_the_group_does_not_know_is_ended(make):
    """A manager that died may have started it: the next one has no record of it, and it would run for ever."""
    manager = make(2)
    contact = manager.contact()
    make.cluster.spawn(
        "ps_fakes:FakeHost",
        "server-9",
        "g",
        contact["secret"],
        contact["address"],
        name=launcher.name_actor("g", "server-9"),
    )
    assert until(lambda: make.cluster.find(launcher.name_actor("g", "server-9")) is None, 60)
    assert list_alive(manager) == ["server-0", "server-1"]


def test_a_resize_during_a_resize(make):
    manager = make(2)
    manager.open(a_space())
    settle(manager)
    FakeHost.hold = {Event.SYNCED}
    manager.resize(3)
    with pytest.raises(Conflict, match=r"from 2 to 3 servers: .* of 16 segments .* resize.2."):
        manager.resize(4)
    with pytest.raises(Conflict, match="from 2 to 3"):
        manager.drain("server-0")
    manager.resize(3)  # the same again
    manager.resize(2)  # and back
    FakeHost.hold = set()
    for host in list(HOSTS.values()):
        host.say_all()
    settle(manager)
    assert len(list_alive(manager)) == 2


def test_spaces_by_name(make):
    manager = make()
    manager.open(a_space())
    with pytest.raises(Conflict, match="open on server group 'g' already: drop it"):
        manager.open(a_space())
    with pytest.raises(Conflict, match="another number of workers, another shape, another cut"):
        manager.open(a_space(workers=5, segments=3))
    with pytest.raises(NotFound, match=r"no space 'jib'.*the open spaces are: 'job'"):
        manager.space("jib")
    with pytest.raises(NotFound, match="number 7"):
        manager.map(7)
    link = watch(manager, 1)
    read_map(link)
    manager.drop("job")
    said = link.recv(5)
    while said.kind == GroupMessage.MAP:  # from before
        said = link.recv(5)
    assert said.kind == GroupMessage.ERROR and json.loads(bytes(said.payload))["kind"] == "NotFound"
    link.close()
    assert until(lambda: all(1 in host.forgotten and not host.orders for host in HOSTS.values()), 60)
    again = manager.open(a_space())
    assert again.number == 2  # never twice
    link = watch(manager, 1)
    assert link.recv(5).kind == GroupMessage.ERROR
    link.close()


def test_nonsense_is_refused_and_changes_nothing(make):
    manager = make()
    before = manager.facts()["spaces"]
    for space, text in (
        (a_space(name=" "), "name of a space is ' '"),
        (a_space(workers=0), "at least 1"),
        (Space("x", 0, 1, ParameterServer()), "neither a dense vector nor a table"),
        (a_space(quota=Quota(bytes=-1)), "above 0"),
        (a_space(quota=Quota(operations=0.0)), "above 0"),
        (a_space(quota=Quota(bytes=float("nan"))), "above 0"),
        (a_space(quota="much"), "not a quota"),
    ):
        with pytest.raises(ConfigError, match=text):
            manager.open(space)
    assert manager.facts()["spaces"] == before
    manager.open(a_space())
    with pytest.raises(ConfigError, match="no field 'rows'"):
        manager.set_quota("job", {"rows": 3})
    with pytest.raises(ConfigError, match="rank 2"):
        manager.join(1, 2)
    manager.set_quota("job", {"bytes": 1000, "operations": None})
    assert manager.facts()["spaces"][0]["quota"] == {"bytes": 1000, "operations": None}
    assert until(lambda: all(host.spaces[1].quota == Quota(1000) for host in HOSTS.values() if host.spaces), 60)


def test_incarnations_count_up_by_space_and_rank(make):
    manager = make()
    manager.open(a_space())
    manager.open(a_space("other"))
    assert [manager.join(1, 0), manager.join(1, 0), manager.join(1, 1), manager.join(2, 0), manager.join(1, -1)] == [
        1,
        2,
        1,
        1,
        1,
    ]


def test_a_branch_begins_where_its_parent_is(make):
    manager = make()
    manager.open(a_space())
    settle(manager)
    made = manager.branch("job", "twig", workers=5)
    assert made.branch_of == "job" and made.workers == 5 and made.number == 2
    settle(manager)
    parent, branch = by(manager, 1), by(manager, 2)
    assert [h.primary for h in parent.holders] == [h.primary for h in branch.holders]
    told = {
        (index, host.name)
        for host in HOSTS.values()
        for new, old, rows in host.branches
        for index, _ in rows
        if (new, old) == (2, 1)
    }
    assert told == {(i, h.primary) for i, h in enumerate(branch.holders)}
    manager.drop("twig")
    assert [s["name"] for s in manager.facts()["spaces"]] == ["job"]
    with pytest.raises(NotFound):
        manager.branch("twig", "leaf")


def test_a_manager_that_begins_again_moves_nothing(make):
    manager = make()
    manager.open(a_space())
    settle(manager)
    manager.join(1, 0)
    before, contact, counts = by(manager, 1), manager.contact(), manager.facts()["counts"]
    # a primary says that its backup is synced, whether or not the backup has read its own order
    assert until(lambda: sum(len(host.orders) for host in HOSTS.values()) == 2 * len(before.holders), 60)
    logs = {name: list(host.log) for name, host in HOSTS.items()}
    manager.close()
    again = make()
    assert again.contact()["secret"] == contact["secret"]
    assert parse_address(again.contact()["address"]).port == parse_address(contact["address"]).port
    settle(again)
    after = by(again, 1)
    assert after.holders == before.holders and after.version > before.version
    assert again.facts()["counts"] == counts
    assert again.join(1, 0) == 2 and again.space("job").number == 1
    for name, host in HOSTS.items():  # what they are told again is what they are
        assert set(host.log[len(logs[name]) :]) <= set(logs[name])


def test_a_manager_that_begins_again_finds_a_server_dead(make, monkeypatch):
    monkeypatch.setattr(group_state, "AWAY_SECONDS", 0.5)
    manager = make()
    manager.open(a_space())
    settle(manager)
    before = by(manager, 1)
    manager.close()
    kill(manager, make, "server-2")
    again = make()
    settle(again)
    assert list_alive(again) == ["server-0", "server-1", "server-3"]
    for old, new in zip(before.holders, by(again, 1).holders, strict=True):
        assert old.primary != "server-2" or (new.generation > old.generation and new.primary != "server-2")
    assert again.facts()["counts"]["lost"] == 0


def test_without_copies_a_dead_servers_segments_are_lost_and_said_to_be(make):
    manager = make(3, replicas=0)
    manager.open(a_space())
    settle(manager)
    gone = [i for i, h in enumerate(by(manager, 1).holders) if h.primary == "server-0"]
    kill(manager, make, "server-0")
    assert until(lambda: manager.facts()["counts"]["lost"] == len(gone), 60)
    assert until(lambda: all(by(manager, 1).holders[i].primary for i in gone), 60)
    facts = manager.facts()
    assert facts["status"] == "degraded"
    assert [s["index"] for s in facts["spaces"][0]["segments"] if s["state"] == "lost"] == gone
    said = [event["message"] for event in facts["events"] if event["kind"] == "segment_lost"]
    assert "'job' is lost" in said[0] and "replicas=1" in said[0]
    assert all(by(manager, 1).holders[i].generation >= 2 for i in gone)
    manager.restored(1, gone)
    settle(manager)
    assert manager.facts()["status"] == "ready"


def test_a_server_that_cannot_be_started_is_tried_again(make, monkeypatch):
    monkeypatch.setattr(launcher, "RETRY_SECONDS", 0.2)
    manager = make(2)
    spawn, tries = make.cluster.spawn, []

    def failing(*args, **more):
        tries.append(more["name"])
        if len(tries) < 3:
            raise RuntimeError("no room")
        return spawn(*args, **more)

    monkeypatch.setattr(make.cluster, "spawn", failing)
    manager.resize(3)
    settle(manager)
    assert len(tries) == 3 and len(list_alive(manager)) == 3
    assert any("no room" in event["message"] for event in manager.facts()["events"])


def test_servers_that_come_on_top_start_gently_one_after_the_other_and_one_that_replaces_another_at_once(
    make, monkeypatch
):
    manager = make(2)
    manager.open(a_space())
    spawn, ordered, may = make.cluster.spawn, [], threading.Event()

    def slow(target, server, *args, **more):
        ordered.append((server, more.get("gently", False)))
        begin = threading.Thread(target=lambda: may.wait(10) and spawn(target, server, *args, **more), daemon=True)
        begin.start()

    monkeypatch.setattr(make.cluster, "spawn", slow)
    manager.resize(4)
    assert not until(lambda: len(ordered) > 1, 0.5)
    may.set()
    settle(manager)
    assert ordered == [("server-2", True), ("server-3", True)]
    kill(manager, make, "server-0")
    assert until(lambda: len(ordered) == 3, 60)
    assert ordered[2] == ("server-4", False)
    settle(manager)


def test_a_gentle_start_that_does_not_come_in_time_is_done_again_at_once(make, monkeypatch):
    monkeypatch.setattr(launcher, "START_SECONDS", 0.3)
    manager = make(2)
    spawn, ordered = make.cluster.spawn, []

    def starved(target, server, *args, **more):
        ordered.append(more.get("gently", False))
        return None if more.get("gently") else spawn(target, server, *args, **more)

    monkeypatch.setattr(make.cluster, "spawn", starved)
    manager.resize(3)
    settle(manager)
    assert ordered == [True, False] and len(list_alive(manager)) == 3


def test_load_moves_nothing_while_the_group_is_resized(make, monkeypatch):
    """A server that has just come has no load, because nothing has moved to it yet."""
    monkeypatch.setattr(members, "RATE_SECONDS", 0.6)
    monkeypatch.setattr(members, "STEP_SECONDS", 0.1)
    manager = make(2, balance=Balance(hot=1.2, patience=2, every=0.1, floor=1.0, rest=60.0))
    space = manager.open(a_space())
    spawn, may = make.cluster.spawn, threading.Event()
    monkeypatch.setattr(
        make.cluster,
        "spawn",
        lambda *args, **more: threading.Thread(
            target=lambda: may.wait(10) and spawn(*args, **more), daemon=True
        ).start(),
    )
    manager.resize(3)
    first = by(manager, space.number).holders[0].primary
    mine = [i for i, h in enumerate(by(manager, space.number).holders) if h.primary == first]
    for count in range(15):  # one server has all the load
        segments = {str(i): [100, 10, 100 * count, count] for i in mine}
        HOSTS[first].load = {
            "cpu": 0.5,
            "bytes": 1,
            "connections": 0,
            "spaces": {
                "1": {
                    "bytes": 1,
                    "rows": 1,
                    "operations": count,
                    "rejected": 0,
                    "throttled": 0,
                    "seconds": 0.1,
                    "segments": segments,
                }
            },
        }
        time.sleep(0.1)
    said = [event["kind"] for event in manager.facts()["events"]]
    may.set()
    assert "hot_segment" not in said
    settle(manager)


def test_a_copy_that_is_lost_is_made_again(make):
    manager = make()
    manager.open(a_space(segments=4))
    settle(manager)
    holding = by(manager, 1).holders[2]
    host = HOSTS[holding.primary]
    host.log.clear()
    host.report(1, 0, [Event.COPY_LOST, 2, holding.generation, holding.copies[0]])
    assert until(lambda: len(host.log) >= 2, 60)
    settle(manager)
    assert by(manager, 1).holders[2].copies == holding.copies
    told = [copies for _, index, _, _, copies in host.log if index == 2]
    assert told[0] == () and told[-1] == holding.copies  # first without it, then anew
    HOSTS[holding.copies[0]].report(1, 0, [Event.ASKED, 2, holding.generation, ""])
    assert until(lambda: len([1 for _, index, *_ in host.log if index == 2]) >= 4, 60)
    settle(manager)
    assert by(manager, 1).holders[2].copies == holding.copies


def test_reports_of_another_generation_and_nonsense_change_nothing(make):
    manager = make()
    manager.open(a_space(segments=4))
    settle(manager)
    before = by(manager, 1)
    host = HOSTS[before.holders[0].primary]
    host.report(1, 0, [Event.COPY_LOST, 0, 7, before.holders[0].copies[0]], [Event.READY, 99, 1, ""])
    host.report(55, 0, [Event.READY, 0, 1, ""])
    link = watch(manager, 1)
    read_map(link)
    link.send(Message(GroupMessage.REPORT), b"{", timeout=60)
    time.sleep(0.1)
    assert by(manager, 1) == before and manager.settled()
    stranger = FakeHost("server-77", "g", manager.contact()["secret"], manager.contact()["address"])
    time.sleep(0.1)
    assert "server-77" not in [s["name"] for s in manager.facts()["servers"]]
    stranger.close()


def test_a_rate_is_of_some_seconds():
    rate = members.Rate()
    for tenth in range(20):
        rate.observe(10.0 * tenth, tenth / 10)
    assert rate.per_second == pytest.approx(100.0)
    for tenth in range(20, 200):
        rate.observe(1000.0 * (tenth // 10), tenth / 10)  # in bursts
        if tenth > 60:
            assert rate.per_second == pytest.approx(1000.0, rel=0.35)
    rate.observe(5.0, 20.0)  # another process counts
    assert rate.per_second == 0.0
    for tenth in range(1, 30):
        rate.observe(5.0, 20 + tenth / 10)
    assert rate.per_second == 0.0


def test_hot_segments_move(make, monkeypatch):
    monkeypatch.setattr(members, "RATE_SECONDS", 0.6)
    monkeypatch.setattr(members, "STEP_SECONDS", 0.1)
    manager = make(2, balance=Balance(hot=1.2, patience=2, every=0.1, floor=1.0, rest=60.0))
    manager.open(a_space())
    settle(manager)
    holdings = by(manager, 1).holders
    hot = [i for i, h in enumerate(holdings) if h.primary == "server-0"]
    for count in range(1, 60):
        segments = {str(i): [100, 10, count * (100 if i in hot else 1), count] for i in range(16)}
        for host in list(HOSTS.values()):
            mine = {
                k: v
                for k, v in segments.items()
                if (1, int(k)) in host.orders and host.orders[1, int(k)][0] == Role.PRIMARY
            }
            host.load = {
                "cpu": 0.5,
                "bytes": 1,
                "connections": 0,
                "spaces": {
                    "1": {
                        "bytes": 1,
                        "rows": 1,
                        "operations": count,
                        "rejected": 0,
                        "throttled": 2,
                        "seconds": 0.1,
                        "segments": mine,
                    }
                },
            }
        if manager.facts()["counts"]["moves"] >= 2:
            break
        time.sleep(0.1)
    settle(manager)
    facts = manager.facts()
    moved = [i for i in hot if by(manager, 1).holders[i].primary == "server-1"]
    assert len(moved) >= 2 and facts["counts"]["moved_bytes"] == 100 * facts["counts"]["moves"]
    assert any(event["kind"] == "hot_segment" for event in facts["events"])
    assert facts["spaces"][0]["throttled"] == 4  # of two servers
