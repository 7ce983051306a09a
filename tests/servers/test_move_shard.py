"""A fixed server's segment moves to a new process while workers push: the law is the run in which nothing moves."""

import threading
from typing import ClassVar

import pytest
import torch
from static_servers import SECRET, House, Served, vector_layout

from rayps.cluster.local import LocalCluster, until
from rayps.cluster.members import ActorHost
from rayps.cluster.notices import Notice
from rayps.core.job.user_module import pack
from rayps.ps.server.shard_actor import ShardActor, ShardPlan
from rayps.runtime.driver import job_servers
from rayps.runtime.driver.job_servers import FixedServers
from rayps.strategies.parameter_server import ParameterServer

SIZE, ROUNDS, WORKERS, SHARDS = 24, 60, 2, 3


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain(params):
    return torch.optim.SGD(params, lr=1.0)


class Moved(Served):
    """A server that continues with the segment of another one."""

    def __init__(self, house, index, generation, state):
        self.actor = ShardActor(index, SECRET, pack(house.factory), device=self.device)
        self.actor.resume(ShardPlan(house.space, index, generation, house.boundary), state)
        self.address = self.actor.place().address


def move(house, index):
    old = house.loops[index]
    state = old.actor.hand_over()
    house.loops[index] = Moved(house, index, house.now.holders[index].generation + 1, state)
    for each in house.maps:
        each.publish(each.moved(index, house.loops[index].address))
    house.now = house.maps[0].map
    old.close()


def run(staleness, factory, gradient, moves, resident):
    """The parameters after all rounds, with the shards `moves` moved one after the other meanwhile."""
    house = House(
        vector_layout(SIZE),
        torch.arange(SIZE, dtype=torch.float64),
        SHARDS,
        WORKERS,
        ParameterServer(shards=SHARDS, staleness=staleness),
        factory,
    )
    servers = [house.join(rank, resident=resident) for rank in range(WORKERS)]
    done, failed = [0] * WORKERS, []

    def work(rank):
        try:
            params = servers[rank].pull().clone()
            for step in range(ROUNDS):
                servers[rank].push(gradient(rank, step, params))
                params = servers[rank].pull().clone()
                done[rank] = step + 1
            servers[rank].settle()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    try:
        for count, index in enumerate(moves):
            assert until(lambda c=count: failed or min(done) >= 5 + 10 * c, 60, pause=0.001)
            move(house, index)
        for thread in threads:
            thread.join(120)
        assert not failed, failed
        assert done == [ROUNDS] * WORKERS
        return servers[0].read().clone()
    finally:
        house.close()


@pytest.mark.parametrize("resident", [True, False], ids=["memory", "messages"])
def test_in_step_the_moved_run_has_the_same_bits(resident):
    def gradient(rank, step, params):
        return params * 0.01 + (rank + 1) * (step % 3 - 1)

    still = run(0, momentum, gradient, [], resident)
    assert torch.equal(run(0, momentum, gradient, [0, 2, 0], resident), still)


@pytest.mark.parametrize("resident", [True, False], ids=["memory", "messages"])
def test_asynchronous_pushes_count_once_each(resident):
    found = run(None, plain, lambda rank, step, _: torch.full((SIZE,), 1.0, dtype=torch.float64), [0, 1, 2], resident)
    assert torch.equal(found, torch.arange(SIZE, dtype=torch.float64) - ROUNDS)


def test_a_shard_that_serves_nothing_hands_nothing_over():
    actor = ShardActor(0, SECRET, pack(plain))
    assert actor.hand_over() is None
    actor.close()


class Shard:
    """An actor in place of a shard, at a place that the test sets."""

    places: ClassVar = []

    def __init__(self, *_, **__):
        self.where = Shard.places.pop(0)

    def place(self):
        return ActorHost("here", self.where, "127.0.0.1:1", "")


def test_shards_under_notice_are_found_once_and_stay_if_there_is_no_better_place(monkeypatch):
    cluster = LocalCluster()
    spawn = cluster.spawn
    monkeypatch.setattr(cluster, "spawn", lambda _, *args, **more: spawn("test_move_shard:Shard", *args, **more))
    monkeypatch.setattr(Shard, "places", [1, 2, 2])
    servers = FixedServers(cluster, b"", SECRET, None)
    servers.prepare(2)
    job_servers.place(servers.members)
    notices = (Notice("", "here", 30.0, "SIGTERM", 2),)
    assert servers.noticed(()) == [] and servers.noticed(notices) == [1]
    assert servers.noticed((Notice("", "here", None, "the host drains"),)) == [0, 1]
    before = servers.members[1]
    assert servers.move(1, notices, 10.0) is None  # the new process would end too
    assert servers.members[1] is before and servers.noticed(notices) == []
    servers.members[0].dead = "killed"
    assert servers.noticed((Notice("", "here", None, "again"),)) == [1]
    servers.close()
    cluster.close()
