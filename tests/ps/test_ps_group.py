"""A group of real servers: threads of a `LocalCluster`, or processes that are killed."""

import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ActorDied, ConfigError, Conflict, NotFound

from rayps.cluster.local import LocalCluster, until
from rayps.core.job.user_module import pack
from rayps.ps import group as elastic
from rayps.ps.client.client import GroupServer
from rayps.ps.client.session import Session
from rayps.ps.manager import launcher
from rayps.ps.manager.launcher import name_actor
from rayps.ps.protocol.rows import cut
from rayps.ps.protocol.space import Space
from rayps.ps.server_group import OwnSpace
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout

SIZE, SECONDS = 4000, 60.0


def plain(params):
    return torch.optim.SGD(params, lr=1.0)


@pytest.fixture
def cluster():
    found = LocalCluster()
    yield found
    found.close()


def names(group, state="alive"):
    return [server["name"] for server in group.facts()["servers"] if server["state"] == state]


def opened(group, name="job", workers=1, segments=16):
    layout = Layout.of([("w", torch.empty(SIZE))])
    space = Space(name, 0, workers, ParameterServer(staleness=None), layout, cut(layout, segments), pack(plain))
    return OwnSpace.open(
        group, space, torch.arange(SIZE, dtype=torch.float32), SECONDS, private=False, marks=[0] * workers
    )


def push(server, value):
    server.push(torch.full((SIZE,), float(value)))
    server.settle()


def test_start_find_and_stop(cluster):
    group = elastic.start(cluster, "prod", 3, 1)
    try:
        assert names(group) == ["server-0", "server-1", "server-2"] and group.settled()
        assert elastic.names(cluster) == ["prod"]
        found = elastic.find(cluster, "prod")
        assert found.contact() == group.contact() and pickle.loads(pickle.dumps(group)).name == "prod"
        with pytest.raises(Conflict, match="'prod' already: give another name"):
            elastic.start(cluster, "prod")
        with pytest.raises(
            ConfigError, match=r"no server group 'prud'; running groups: 'prod'.*rayps servers start prud"
        ):
            elastic.find(cluster, "prud")
    finally:
        group.stop()
    assert elastic.names(cluster) == []
    assert all(cluster.find(name_actor("prod", f"server-{i}")) is None for i in range(3))
    with pytest.raises(ActorDied, match="has no manager"):
        group.open(None)
    for servers, replicas in ((0, 0), (1, 1), (2, -1), (2, 2), ("2", 1)):
        with pytest.raises(ConfigError):
            elastic.start(cluster, "bad", servers, replicas)
    with pytest.raises(ConfigError, match="cannot name"):
        elastic.start(cluster, "a/b")


def test_a_space_lives_through_growing_shrinking_and_draining(cluster):
    with elastic.start(cluster, "grow", 2, 1, detached=False) as group:
        own = opened(group)
        server = own.server(0)
        group.wait_settled(SECONDS)
        total = 0.0
        for action in (lambda: group.resize(4), lambda: group.drain("server-0"), lambda: group.resize(2)):
            before = group.facts()["counts"]
            action()
            for _ in range(20):
                push(server, 1)
                total += 1
            group.wait_settled(SECONDS)
            after = group.facts()["counts"]
            assert after["moves"] > before["moves"] and after["moved_bytes"] > before["moved_bytes"]
            assert after["deaths"] == after["promotions"] == after["lost"] == 0
            assert torch.equal(server.pull(), torch.arange(SIZE, dtype=torch.float32) - total)
        assert "server-0" not in names(group) and len(names(group)) == 2
        server.close()
        assert until(lambda: sum(s["bytes"] for s in group.facts()["spaces"][0]["segments"]) >= SIZE * 4, 60)
        group.drop("job")
        assert until(lambda: sum(server["bytes"] for server in group.facts()["servers"]) == 0, 60)
        with pytest.raises(NotFound):
            group.space("job")


def test_growing_moves_about_its_share_of_the_bytes(cluster):
    with elastic.start(cluster, "share", 3, 1, detached=False) as group:
        own = opened(group, segments=32)
        group.wait_settled(SECONDS)
        assert until(lambda: group.facts()["spaces"][0]["bytes"] >= SIZE * 4, 60)
        whole = group.facts()["spaces"][0]["bytes"]
        group.resize(4)
        group.wait_settled(SECONDS)
        share = group.facts()["counts"]["moved_bytes"] / whole
        print(f"3 -> 4 servers: {share:.3f} of the bytes moved")
        assert 0.12 < share < 0.45
        own.server(0).close()


def test_a_manager_that_dies_is_begun_again_while_pushes_go_on(cluster, tmp_path):
    group = elastic.start(cluster, "again", 2, 1, folder=tmp_path / "record")
    try:
        own = opened(group)
        server = own.server(0)
        group.wait_settled(SECONDS)
        push(server, 1)
        before = group.map(1)
        cluster.kill(cluster.find("rayps-servers-again"))
        for _ in range(5):
            push(server, 1)  # nobody needs it for this
        with pytest.raises(ConfigError):
            elastic.find(cluster, "again")
        group = elastic.start(cluster, "again", 7, 3, folder=tmp_path / "record")  # the record knows better
        assert group.facts()["wanted"] == 2 and group.facts()["replicas"] == 1
        group.wait_settled(SECONDS)
        after = group.map(1)
        assert after.holders == before.holders and after.version > before.version
        push(server, 1)
        gone = before.holders[0].primary
        cluster.kill(cluster.find(name_actor("again", gone)))
        for _ in range(5):
            push(server, 1)  # the worker heard of the new manager, and of the new primaries from it
        assert torch.equal(server.pull(), torch.arange(SIZE, dtype=torch.float32) - 12)
        assert group.facts()["counts"]["lost"] == 0
        server.close()
    finally:
        group.stop()
    assert not list((tmp_path / "record").iterdir())


def test_a_record_of_another_group_is_refused(cluster, tmp_path):
    elastic.start(cluster, "one", 2, 1, folder=tmp_path)
    cluster.kill(cluster.find("rayps-servers-one"))
    with pytest.raises(ConfigError, match="record of group 'one', not of 'two'"):
        elastic.start(cluster, "two", 2, 1, folder=tmp_path)
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(ConfigError, match="not the record of a server group"):
        elastic.start(cluster, "one", 2, 1, folder=tmp_path)


@pytest.mark.chaos
def test_processes_that_are_killed_one_after_the_other(monkeypatch):
    """Each of the first servers dies, under pushes; each push is applied once, and each server is replaced."""
    local, hosts = LocalCluster(), ProcessCluster()
    group = elastic.start(local, "killed", 3, 1, detached=False, hosts=hosts)
    try:
        own = opened(group)
        server = own.server(0)
        group.wait_settled(SECONDS)
        total, gaps = 0, []
        for victim in list(hosts.handles):
            victim.kill()
            for _ in range(30):
                begun = time.monotonic()
                push(server, 1)
                gaps.append(time.monotonic() - begun)
                total += 1
            group.wait_settled(SECONDS)
            assert torch.equal(server.pull(), torch.arange(SIZE, dtype=torch.float32) - total)
        counts = group.facts()["counts"]
        print(f"longest gap {max(gaps):.3f} s, median {np.median(gaps):.5f} s; {counts}")
        assert counts["deaths"] == 3 and counts["lost"] == 0 and counts["promotions"] >= 3
        assert names(group) == ["server-3", "server-4", "server-5"]
        server.close()
    finally:
        group.stop()
        hosts.close()
        local.close()


def test_a_private_group_ends_with_its_manager(cluster):
    group = elastic.start(cluster, "private", 2, 0, detached=False)
    assert len(names(group)) == 2
    cluster.kill(cluster.find("rayps-servers-private"))
    assert all(cluster.find(name_actor("private", f"server-{i}")) is None for i in range(2))


def test_servers_that_do_not_come_are_said(cluster, monkeypatch):
    monkeypatch.setattr(launcher, "RETRY_SECONDS", 0.2)

    def refuse(target, *args, **more):
        if "ServerActor" in target:
            raise OSError("no room on this machine")
        return LocalCluster.spawn(cluster, target, *args, **more)

    monkeypatch.setattr(cluster, "spawn", refuse)
    with pytest.raises(Exception, match=r"0 of 2 servers of group 'none' .*no room on this machine"):
        elastic.start(cluster, "none", 2, 1, timeout=1.0)


def rows_by_server(group):
    facts = group.facts()
    segments = [segment for space in facts["spaces"] for segment in space["segments"]]
    return [
        {"operations_s": sum(s["operations_s"] for s in segments if s["primary"] == server["name"])}
        for server in facts["servers"]
    ]


def test_a_branch_goes_its_own_way(cluster):
    with elastic.start(cluster, "branch", 3, 1, detached=False) as group:
        own = opened(group)
        server = own.server(0)
        push(server, 5)
        group.wait_settled(SECONDS)
        began = torch.arange(SIZE, dtype=torch.float32) - 5
        twig = group.branch("job", "twig")
        assert twig.branch_of == "job"
        number = group.join(twig.number, 0)
        session = Session(group.contact(), twig, 0, incarnation=number, timeout=SECONDS, name="worker-0")
        other = GroupServer(session)
        assert torch.equal(other.pull(), began)
        push(server, 1)
        push(other, 10)
        assert torch.equal(server.pull(), began - 1) and torch.equal(other.pull(), began - 10)
        group.wait_settled(SECONDS)
        gone = group.map(twig.number).holders[0].primary
        cluster.kill(cluster.find(name_actor("branch", gone)))
        push(other, 10)
        assert torch.equal(other.pull(), began - 20) and torch.equal(server.pull(), began - 1)
        group.wait_settled(SECONDS)
        other.close()
        group.drop("twig")
        push(server, 1)
        assert torch.equal(server.pull(), began - 2) and group.facts()["counts"]["lost"] == 0
        server.close()


@pytest.mark.ray
@pytest.mark.chaos
def test_on_ray_servers_and_the_manager_are_killed(ray_cluster, tmp_path):
    with elastic.start(ray_cluster, "on-ray", 2, 1, folder=tmp_path) as group:
        own = opened(group)
        server = own.server(0)
        group.wait_settled(60.0)
        push(server, 1)
        os.kill(group.facts()["servers"][0]["pid"], signal.SIGKILL)
        push(server, 1)
        group.wait_settled(120.0)
        assert group.facts()["counts"]["promotions"] > 0 and "server-2" in names(group)
        before, pid = group.map(1), ray_cluster.find("rayps-servers-on-ray").call("ping").result(30.0)
        os.kill(pid, signal.SIGKILL)  # Ray makes it anew, and it goes on from its record
        push(server, 1)
        group.wait_settled(120.0)
        assert group.map(1).holders == before.holders
        assert ray_cluster.find("rayps-servers-on-ray").call("ping").result(30.0) != pid
        assert {event["kind"] for event in group.facts()["events"]} >= {"manager_back"}
        group.resize(3)
        push(server, 1)
        group.wait_settled(120.0)
        assert torch.equal(server.pull(), torch.arange(SIZE, dtype=torch.float32) - 4)
        assert group.facts()["counts"]["lost"] == 0
        server.close()
        pids = [each["pid"] for each in group.facts()["servers"] if each["state"] == "alive"]
        assert len(pids) == 3
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)
    with pytest.raises(ConfigError):
        elastic.find(ray_cluster, "on-ray")
