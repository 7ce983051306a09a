"""A group that scales itself: load, notices, kills meanwhile; and servers that are forked from a template.

Every push adds 1 to slots of its own, one in each segment, so a push that is lost or applied twice is seen.
"""

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from process_cluster import ProcessCluster
from ps_session_fakes import slot
from rayps_client.errors import ConfigError

from rayps.cluster.local import LocalCluster, until
from rayps.cluster.notices import Notice
from rayps.core.job.user_module import pack
from rayps.ps import group as elastic
from rayps.ps.manager import members
from rayps.ps.manager.decide_scale import ScaleRule
from rayps.ps.manager.launcher import ActorStarter
from rayps.ps.manager.scaling import GroupScaling
from rayps.ps.protocol.rows import cut
from rayps.ps.protocol.space import Space
from rayps.ps.server.server_host import name_host_actor, name_reservation
from rayps.ps.server_group import OwnSpace
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout

SEGMENTS, WORKERS, SECONDS = 8, 2, 60.0
# a rule for which the least load is high, and that waits for nothing
EAGER = ScaleRule(
    2, 4, high=0.004, goal=0.0015, low=0.001, memory=1.0, patience=0.2, calm=0.3, cooldown=0.5, every=0.05
)


def plain(params):
    return torch.optim.SGD(params, lr=1.0)


class TwoHosts(LocalCluster):
    """Two hosts, "a" and "b", that are really this one: the servers of each are forked from a template of their own."""

    node = "a"

    def __init__(self, cpus=64.0):
        super().__init__()
        self.cpus, self.taken = {"a": cpus, "b": cpus}, {}

    def hosts(self, free=True):
        used = dict.fromkeys(self.cpus, 0.0)
        for name, (node, cpus) in self.taken.items():
            used[node] += cpus if self.reservation(name) is not None else 0.0
        return {node: {"cpu": cpus - free * used[node]} for node, cpus in self.cpus.items()}

    def reserve_named(self, name, bundle, node, timeout, *, detached):
        self.taken[name] = node, bundle["cpu"]
        return super().reserve_named(name, bundle, node, timeout, detached=detached)


@pytest.fixture
def cluster():
    found = TwoHosts()
    yield found
    found.close()


@pytest.fixture
def threads():
    found = LocalCluster()
    yield found
    found.close()


def opened(group, pushes, workers=WORKERS, staleness=None):
    layout = Layout.of([("slots", torch.zeros(SEGMENTS * workers * pushes, dtype=torch.float64))])
    strategy = ParameterServer(staleness=staleness)
    space = Space("slots", 0, workers, strategy, layout, cut(layout, SEGMENTS), pack(plain))
    zeros = torch.zeros(layout.size, dtype=torch.float64)
    return OwnSpace.open(group, space, zeros, SECONDS, private=False, marks=[0] * workers)


class Pushers:
    """Threads that push one slot in each segment after the other, all as many, until `pushes` or `stop`."""

    def __init__(self, own, pushes, workers=WORKERS):
        self.own, self.pushes, self.workers, self.limit = own, pushes, workers, pushes
        self.done, self.failed = [0] * workers, []
        self._threads = [threading.Thread(target=self._work, args=(rank,), daemon=True) for rank in range(workers)]
        for thread in self._threads:
            thread.start()

    def _work(self, rank):
        try:
            server = self.own.server(rank)
            while server.step < self.limit:
                server.push(slot(SEGMENTS, self.workers, self.pushes, rank, server.step))
                server.pull()
                self.done[rank] += 1
            server.flush()
            server.close()
        except Exception as error:
            self.failed.append(error)

    def end(self, *, now=False):
        if now:
            self.limit = min(self.pushes, max(self.done) + 2)  # no rank has begun this push
        for thread in self._threads:
            thread.join(2 * SECONDS)
        assert not self.failed, self.failed

    def check(self):
        """Each push counts once, in each segment; what was not pushed counts nothing."""
        server = self.own.server(0)
        slots = server.read().view(SEGMENTS, self.workers, self.pushes)
        server.close()
        for rank, done in enumerate(self.done):
            assert torch.equal(slots[:, rank, :done], torch.ones(SEGMENTS, done, dtype=torch.float64))
            assert not slots[:, rank, done:].any()


def alive(group):
    return {each["name"]: each for each in group.facts()["servers"] if each["state"] == "alive"}


def events(group, kind):
    return [each for each in group.facts()["events"] if each["kind"] == kind]


def test_servers_are_forked_on_hosts_with_room_and_their_cpus_are_free_when_they_end(cluster):
    cluster.cpus = {"a": 2.0, "b": 2.0}
    with elastic.start(cluster, "forks", 2, 1, detached=False, cpus=1.0) as group:
        assert sorted(each["node"] for each in alive(group).values()) == ["a", "b"]
        assert len({each["pid"] for each in alive(group).values()} - {os.getpid()}) == 2
        work = Pushers(opened(group, 4000), 4000)
        group.resize(4)
        group.wait_settled(SECONDS)
        assert sorted(each["node"] for each in alive(group).values()) == ["a", "a", "b", "b"]
        assert not any(has["cpu"] for has in cluster.hosts().values())
        group.resize(5)
        assert until(lambda: events(group, "server_not_started"), SECONDS)
        assert "0 reserves none" in events(group, "server_not_started")[0]["message"]
        group.resize(4)
        group.wait_settled(SECONDS)
        group.resize(3)
        group.wait_settled(SECONDS)
        assert until(lambda: sum(has["cpu"] for has in cluster.hosts().values()) == 1.0, SECONDS)
        died = {name: each["pid"] for name, each in alive(group).items() if each["node"] == "b"}
        os.kill(parent(*died.values()), signal.SIGKILL)  # the template: its server ends with it
        assert until(lambda: group.facts()["counts"]["deaths"] == 1, SECONDS)
        group.wait_settled(SECONDS)
        assert not died.keys() & alive(group).keys() and group.facts()["counts"]["lost"] == 0
        assert all(cluster.reservation(name_reservation("forks", name)) is None for name in died)
        work.end(now=True)
        work.check()
        pids = [each["pid"] for each in alive(group).values()]
    assert until(lambda: not any(runs(pid) for pid in pids), SECONDS)
    assert all(cluster.find(name_host_actor("forks", node)) is None for node in "ab")
    assert not any(cluster.reservation(name_reservation("forks", f"server-{i}")) for i in range(10))


def stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def runs(pid):
    with contextlib.suppress(OSError):
        return stat(pid)[0] != "Z"
    return False


def parent(pid):
    return int(stat(pid)[1])


@pytest.mark.parametrize("staleness", [0, None], ids=["sync", "async"])
def test_the_load_adds_servers_and_its_end_removes_them(threads, monkeypatch, staleness):
    monkeypatch.setattr(members, "RATE_SECONDS", 0.4)
    monkeypatch.setattr(members, "STEP_SECONDS", 0.05)
    with elastic.start(threads, "loaded", (2, 4), 1, detached=False, scale=EAGER, balance=None) as group:
        assert group.facts()["range"] == [2, 4] and not group.facts()["pinned"]
        work = Pushers(opened(group, 4000, staleness=staleness), 4000)
        assert until(lambda: len(alive(group)) == 4, SECONDS), group.facts()
        assert "busy" in events(group, "resizing")[0]["reason"]
        assert work.done != [4000] * WORKERS
        work.end(now=True)
        assert until(lambda: len(alive(group)) == 2 and group.settled(), SECONDS), group.facts()
        assert "one less suffices" in events(group, "resizing")[-1]["reason"]
        work.check()


def test_a_number_stays_until_a_range_is_given(threads, monkeypatch):
    monkeypatch.setattr(members, "RATE_SECONDS", 0.4)
    ticks, tick = [], GroupScaling.tick
    monkeypatch.setattr(GroupScaling, "tick", lambda self, now: (ticks.append(now), tick(self, now)))

    rule = ScaleRule(1, 4, memory=1.0, patience=0.0, calm=0.1, cooldown=0.1, every=0.02)
    with elastic.start(threads, "pinned", (1, 4), 0, detached=False, scale=rule) as group:
        group.resize(3)
        group.wait_settled(SECONDS)
        assert group.facts()["pinned"] and group.facts()["range"] == [1, 4]
        seen = len(ticks)
        assert until(lambda: len(ticks) > seen + 20, SECONDS)  # nothing is asked of it: without the pin it would shrink
        assert len(alive(group)) == 3 and group.settled()
        group.resize((2, 4))
        assert until(lambda: len(alive(group)) == 2 and group.settled(), SECONDS)
        assert group.facts()["range"] == [2, 4] and not group.facts()["pinned"]
        for wrong in ((4, 2), (0, 4), (2,), (2, 3, 4), ("2", 4)):
            with pytest.raises(ConfigError, match="servers is"):
                group.resize(wrong)


class Noticed(ProcessCluster):
    """Processes of this host, and the notices about them."""

    def __init__(self):
        super().__init__()
        self.found = []

    def notices(self):
        return tuple(self.found)


@contextlib.contextmanager
def processes(servers, replicas, **options):
    """A group whose servers are processes of this host, and the cluster that gets the notices."""
    local, hosts = LocalCluster(), Noticed()
    try:
        name = f"noticed-{os.urandom(4).hex()}"
        with elastic.start(local, name, servers, replicas, detached=False, hosts=hosts, **options) as group:
            yield group, hosts
    finally:
        local.close()
        hosts.close()


def notice(server, seconds=None):
    return Notice("", server["host"], seconds, "SIGTERM", server["pid"])


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_server_under_notice_hands_its_segments_over_and_leaves(replicas):
    with processes(2, replicas) as (group, hosts):
        work = Pushers(opened(group, 400), 400)
        assert until(lambda: min(work.done) > 10, SECONDS)
        name, gone = next(iter(alive(group).items()))
        hosts.found.append(notice(gone, 20.0))
        assert until(lambda: len(alive(group)) == 2 and name not in alive(group) and group.settled(), SECONDS)
        counts = group.facts()["counts"]
        assert counts["deaths"] == counts["lost"] == counts["promotions"] == 0 < counts["moves"]
        assert [event["server"] for event in events(group, "notice")] == [name]
        work.end()
        work.check()


def test_without_room_for_a_replacement_the_other_servers_take_the_segments(monkeypatch):
    monkeypatch.setattr(ActorStarter, "room", lambda *_: 0)
    with processes((1, 2), 0, scale=ScaleRule(1, 2, memory=1.0, every=0.02, cooldown=0.0)) as (group, hosts):
        group.resize(2)
        group.wait_settled(SECONDS)
        group.resize((1, 2))
        work = Pushers(opened(group, 300), 300)
        assert until(lambda: min(work.done) > 10, SECONDS)
        name, gone = next(iter(alive(group).items()))
        hosts.found.append(notice(gone, 8.0))
        assert until(lambda: len(group.facts()["servers"]) == 1 and group.settled(), SECONDS)
        assert name not in alive(group) and group.facts()["counts"]["lost"] == 0
        work.end()
        work.check()


@pytest.mark.chaos
@pytest.mark.parametrize("staleness", [0, None], ids=["sync", "async"])
def test_a_new_server_dies_in_the_middle_of_a_growth_by_load(staleness, monkeypatch):
    monkeypatch.setattr(members, "RATE_SECONDS", 0.4)
    monkeypatch.setattr(members, "STEP_SECONDS", 0.05)
    with processes((2, 4), 1, scale=EAGER, balance=None) as (group, _):
        work = Pushers(opened(group, 4000, staleness=staleness), 4000)
        old = alive(group)
        assert until(lambda: len(group.facts()["servers"]) > 2, SECONDS, pause=0.001)
        new = next(each for each in group.facts()["servers"] if each["name"] not in old)
        os.kill(new["pid"], signal.SIGKILL)
        assert until(lambda: group.facts()["counts"]["deaths"] == 1, SECONDS)
        assert until(lambda: len(alive(group)) == 4, SECONDS)
        work.end(now=True)
        assert until(lambda: len(alive(group)) == 2 and group.settled(), SECONDS)
        assert group.facts()["counts"]["lost"] == 0
        work.check()
