"""A staleness bound that moves while workers train: servers follow at once, and jobs under staleness=auto."""

import dataclasses
import pickle

import pytest
import torch
from ps_site import Site, space
from rayps_client.errors import ConfigError, NotFound
from small_work import Small, distance, kinds, plain, train
from static_servers import House, vector_layout
from torch.optim import SGD

import rayps
from rayps import Hybrid, ParameterServer
from rayps.cluster.local import LocalCluster, until
from rayps.core.job.user_module import pack
from rayps.core.strategy.adaptive_staleness import BoundMove
from rayps.core.strategy.staleness_bound import MovedBound
from rayps.core.strategy.topology import is_adaptive
from rayps.ps.group import start
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload
from rayps.ps.protocol.space import Space
from rayps.ps.server.shard_actor import ShardActor
from rayps.runtime.driver import bound_mover
from rayps.strategies.catalogue import parse, parse_for_loop, wire

EXACT = 1e-12
AUTO = "parameter_server:staleness=auto"
START = torch.arange(12, dtype=torch.float32)


def all_of(value=None):
    return [SegmentPayload(i, 1, b"" if value is None else torch.full((4,), value).numpy().tobytes()) for i in range(3)]


def step_of_one(params):
    return SGD(params, lr=1.0)


@pytest.fixture
def site():
    with Site("s0") as found:
        yield found


# ---- on servers


@pytest.mark.parametrize("bound", [1, None])
def test_a_parked_pull_is_served_when_the_bound_moves(site, bound):
    one = space(strategy=ParameterServer(staleness="auto"))
    one = dataclasses.replace(one, bound=MovedBound(0, (0, 0)))
    site.open(one, ["s0"] * 3)
    site.load(one, ["s0"] * 3, START)
    fast, slow = site.guest("s0", rank=0), site.guest("s0", rank=1)
    assert fast.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0).kind == GroupMessage.ACK
    parked = fast.say(GroupMessage.PULL, all_of(), a=1)
    assert fast.silent()
    moved = dataclasses.replace(one, bound=MovedBound(bound, (0, 0)))
    site.manager.tell("s0", GroupMessage.SPACE, pickle.dumps(moved), a=one.number)
    assert fast.hear(parked).kind == GroupMessage.VALUE
    assert slow.ask(GroupMessage.PULL, all_of()).kind == GroupMessage.VALUE


def test_a_reader_of_one_moment_is_served_when_the_bound_moves(site):
    one = dataclasses.replace(space(strategy=ParameterServer(staleness="auto")), bound=MovedBound(0, (0, 0)))
    site.open(one, ["s0"] * 3)
    site.load(one, ["s0"] * 3, START)
    fast = site.guest("s0", rank=0)
    assert fast.ask(GroupMessage.PUSH, all_of(1.0), weight=1.0).kind == GroupMessage.ACK
    held = fast.say(GroupMessage.HOLD, all_of(), a=2)
    assert fast.silent()
    moved = dataclasses.replace(one, bound=MovedBound(None, (0, 0)))
    site.manager.tell("s0", GroupMessage.SPACE, pickle.dumps(moved), a=one.number)
    assert fast.hear(held).kind == GroupMessage.VALUE


def test_a_loaded_segment_and_a_backup_keep_the_bound(site):
    site.add("s1")
    one = dataclasses.replace(space(strategy=ParameterServer(staleness="auto")), bound=MovedBound(7, (3, 0)))
    site.open(one, ["s0"] * 3, copies=[["s1"]] * 3)
    site.load(one, ["s0"] * 3, START)
    for name in ("s0", "s1"):
        clocks = [site.segment(name, index).shard.clock for index in range(3)]
        assert [clock.staleness for clock in clocks] == [7] * 3
        assert [clock.may_pull(0) for clock in clocks] == [True] * 3


def test_a_space_in_the_manager_s_record_has_its_bound():
    one = dataclasses.replace(space(strategy=ParameterServer(staleness="auto")), bound=MovedBound(None, (3, 5)))
    found = Space.from_json(one.to_json())
    assert found.bound == one.bound and found.servers.adaptive


def test_with_the_bound_at_zero_pushes_apply_the_mean_of_each_round():
    """N pushes of g / N at the same parameters are one step of their mean, if steps are linear in the gradient."""
    layout, start, found = vector_layout(6), torch.zeros(6, dtype=torch.float64), {}
    for staleness in (0, "auto"):
        house = House(layout, start, 2, 3, ParameterServer(staleness=staleness), step_of_one)
        try:
            if staleness == "auto":
                bound = MovedBound(0, (0, 0, 0))
                for served in house.loops:
                    served.actor.move_bound(dataclasses.replace(house.space, bound=bound))
            workers = [house.join(rank) for rank in range(3)]
            for step in range(4):
                for rank in (2, 0, 1):
                    pulled = None if step == 0 else workers[rank].pull()
                    assert pulled is None or pulled.eq(found.setdefault(step, pulled)).all() or staleness == "auto"
                    workers[rank].push(torch.full((6,), float(rank + step), dtype=torch.float64))
            found[staleness] = workers[0].pull()
        finally:
            house.close()
    assert distance(found[0], found["auto"]) < EXACT
    assert found[0].abs().min() > 1


def test_a_bound_of_another_generation_moves_nothing():
    house = House(
        vector_layout(4), torch.zeros(4, dtype=torch.float64), 1, 2, ParameterServer(staleness=3), step_of_one
    )
    try:
        other = dataclasses.replace(house.space, name="generation-9", bound=MovedBound(0, (0, 0)))
        house.loops[0].actor.move_bound(other)
        assert house.loops[0].do(lambda shard: shard.clock.staleness) == 3
    finally:
        house.close()


# ---- jobs


@pytest.mark.parametrize("strategy", [AUTO, AUTO + ",shards=2", AUTO + ",shards=2,replicas=1"])
def test_one_worker_trains_as_plain_torch(strategy):
    work = Small(n=30, optimizer="momentum")
    result = train(work, strategy, workers=1, epochs=2)
    law, losses, _ = plain(work, 1, epochs=2)
    assert distance(result.model(), law) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)
    assert "staleness" not in kinds(result)  # nobody waits


@pytest.mark.parametrize("shards", ["", ",shards=2,replicas=1"])
def test_a_job_whose_bound_moves_at_each_interval_applies_each_push_once(monkeypatch, shards):
    """The bound goes up and down the ladder: no worker stops for good, and no row is lost."""
    control = script_bounds(monkeypatch, [0, 16, 1, None, 0, None, 2])
    result = train(Small(n=240), AUTO + shards, workers=3, epochs=3)
    assert len(control) >= 2
    moved = [event for event in result.events if event["kind"] == "staleness"]
    assert [event["new"] for event in moved] == control
    assert sum(result.history.column("samples").to_pylist()) == 3 * 240
    assert result.metrics["error"] < 1.0


def script_bounds(monkeypatch, bounds):
    """Let the bound follow `bounds`, one after each two rounds; return the list of the bounds that it had."""
    used, waiting = [], list(bounds)

    class Scripted:
        bound = 8

        def after(self, cost):
            if not waiting:
                return None
            old, self.bound = self.bound, waiting.pop(0)
            used.append(self.bound)
            return BoundMove(old, self.bound, cost)

    monkeypatch.setattr(bound_mover, "BoundControl", Scripted)
    monkeypatch.setattr(bound_mover, "is_complete", lambda facts, workers: len(facts) >= 2 * workers)
    return used


def test_the_bound_reaches_the_servers_of_a_job(monkeypatch):
    script_bounds(monkeypatch, [1])
    seen = []
    moved = ShardActor.move_bound

    def watch(self, space):
        moved(self, space)
        seen.append((self._index, self._segment.shard.clock.staleness, space.bound.staleness))

    monkeypatch.setattr(ShardActor, "move_bound", watch)
    train(Small(n=240, pause=0.002), AUTO + ",shards=2", workers=2, epochs=1)
    assert sorted(seen) == [(0, 1, 1), (1, 1, 1)]


# ---- what is refused


def test_auto_in_its_forms():
    for given in (AUTO, {"name": "parameter_server", "staleness": "auto"}, ParameterServer(staleness="auto")):
        strategy = parse(given)[0].strategy
        assert is_adaptive(strategy) and not strategy.topology.in_step
        assert wire(parse(given))["staleness"] == "auto"
        half = strategy.server_half
        assert type(half).from_wire(half.to_wire()) == half
    assert not is_adaptive(ParameterServer(staleness=3))


@pytest.mark.parametrize("given", ["often", -1, True, 1.5])
def test_another_staleness_is_refused(given):
    with pytest.raises(ConfigError, match=r"none \(asynchronous\), or auto \(a bound that moves\)"):
        ParameterServer(staleness=given)


def test_where_nothing_moves_the_bound_auto_is_refused():
    with pytest.raises(ConfigError, match=r"hybrid, whose workers are in step, cannot move the bound: give 0"):
        Hybrid(staleness="auto")
    with pytest.raises(ConfigError, match="a server group without a job cannot move the bound"):
        rayps.ServerGroup(torch.zeros(3), staleness="auto", cluster=LocalCluster())
    with pytest.raises(ConfigError, match="a loop of your own cannot move the bound"):
        parse_for_loop(AUTO)


def test_the_manager_passes_a_bound_on():
    cluster = LocalCluster()
    try:
        with start(cluster, "bounded", servers=1, replicas=0, detached=False) as group:
            layout = vector_layout(4)
            strategy = ParameterServer(staleness="auto")
            opened = group.open(Space("job", 0, 2, strategy, layout, ((0, 4),), pack(step_of_one)))
            group.move_bound(opened.number, MovedBound(None, (1, 2)))
            assert until(lambda: group.space("job").bound == MovedBound(None, (1, 2)), 30)
            with pytest.raises(NotFound):
                group.move_bound(99, MovedBound(0, (0, 0)))
    finally:
        cluster.close()
