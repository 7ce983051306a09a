"""Shards served over real links in threads: jitter, fences, deadlines, peers that vanish."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import static_servers
import torch
from rayps_client.errors import ConfigError, LinkError, PeerLost, PeerTimeout, StaleGeneration, WorkloadError
from torch.optim import SGD

from rayps.cluster.local import until
from rayps.core.job.repeated_pushes import WINDOW
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Gradient, Layout

N = 11
LAYOUT = Layout.of([("w", torch.empty(N, dtype=torch.float64))])
START = torch.arange(float(N), dtype=torch.float64)


class House(static_servers.House):
    """Some shards of `N` elements."""

    def __init__(self, shards, workers, staleness, factory=lambda p: SGD(p, lr=0.1)):
        strategy = ParameterServer(shards=shards, staleness=staleness)
        super().__init__(LAYOUT, START, shards, workers, strategy, factory)


@pytest.fixture
def house():
    with ExitStack() as stack:

        def make(*args, **more):
            made = House(*args, **more)
            stack.callback(made.close)
            return made

        yield make


def every(work, count):
    with ThreadPoolExecutor(count) as pool:
        return [call.result(60) for call in [pool.submit(work, rank) for rank in range(count)]]


def pushed(rank, step):
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


@pytest.mark.parametrize("shards", [1, 2, 5, N + 2])
def test_jittered_workers_in_step_see_the_same_parameters(house, shards):
    one = house(shards, 3, 0)

    def work(rank):
        server, seen = one.join(rank), []
        for step in range(12):
            time.sleep(random.random() * 0.005)
            seen.append(server.pull())
            server.push(pushed(rank, step), weight=rank + 1.0)
        return [*seen, server.pull()]

    found = every(work, 3)
    law = START.clone()
    for step in range(12):
        for seen in found:
            assert torch.allclose(seen[step], law, atol=1e-12, rtol=0)
        law -= 0.1 * sum((r + 1) * pushed(r, step) for r in range(3)) / 6
    assert torch.allclose(found[0][-1], law, atol=1e-12, rtol=0)
    assert [loop.facts().version for loop in one.loops if loop.facts().bytes] == [12] * min(shards, N)


@pytest.mark.parametrize("staleness", [1, 3, None])
def test_jittered_workers_out_of_step_keep_the_bound(house, staleness):
    one = house(2, 4, staleness)

    def work(rank):
        server, leads = one.join(rank), []
        for step in range(20):
            time.sleep(random.random() * 0.004 * (1 + 3 * (rank == 0)))
            server.pull()
            leads.append(server.lead)
            server.push(pushed(rank, step))
        return leads

    leads = [lead for found in every(work, 4) for lead in found]
    assert max(leads) > 0
    if staleness is not None:
        assert max(leads) <= staleness
        for loop in one.loops:
            assert max(loop.facts().staleness) <= staleness
    final = one.join(0).read()
    law = START - 0.1 / 4 * sum(pushed(r, s) for r in range(4) for s in range(20))
    assert torch.allclose(final, law, atol=1e-12, rtol=0)


def test_a_gradient_brings_its_samples(house):
    one = house(2, 1, 0)
    server = one.join(0)
    server.push(Gradient(torch.cat([torch.ones(N, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]), 5))
    assert torch.allclose(server.pull(), START - 0.1)


@pytest.mark.parametrize(("lo", "hi"), [(0, N), (0, 3), (4, 8), (5, 6), (8, N), (3, 3), (N, N)])
def test_ranges_across_shards(house, lo, hi):
    server = house(3, 1, 0).join(0)
    assert torch.equal(server.pull(lo, hi), START[lo:hi])
    server.push(torch.ones(hi - lo, dtype=torch.float64), lo=lo)
    law = START.clone()
    law[lo:hi] -= 0.1
    assert torch.allclose(server.pull(), law, atol=1e-15)
    assert server.step == 1


@pytest.mark.parametrize(("lo", "hi"), [(-1, 3), (0, N + 1), (5, 4), (N + 1, N + 2)])
def test_ranges_that_are_none(house, lo, hi):
    server = house(2, 1, 0).join(0)
    with pytest.raises(ConfigError, match=f"the {N} (parameters|elements)"):
        server.pull(lo, hi)
    with pytest.raises(ConfigError, match=f"the {N} (parameters|elements)"):
        server.push(torch.ones(abs(hi - lo) or 1) if hi > lo else torch.ones(N), lo=lo)
    assert server.step == 0
    assert torch.equal(server.pull(), START)


def test_a_rank_that_joins_again_fences_the_former_holder(house):
    one = house(2, 2, None)
    old = one.join(0)
    old.push(torch.ones(N))
    new = one.join(0)
    assert new.step == 1
    for call in (lambda: (old.push(torch.ones(N)), old.settle()), old.pull):
        with pytest.raises(StaleGeneration, match="a newer worker has joined"):
            call()
    new.push(torch.ones(N))
    assert torch.allclose(new.pull(), START - 2 * 0.1 / 2, atol=1e-12)


def test_a_push_that_was_cut_off_between_shards_is_completed(house):
    one = house(2, 1, None)
    old = one.join(0)
    old.push(torch.ones(N))
    old.settle()
    # what the first shard has heard and the second has not
    one.loops[0].do(lambda shard: shard.push(0, 1, torch.ones(one.ranges[0][1], dtype=torch.float64), 1.0))
    new = one.join(0)
    assert new.step == 1
    new.push(torch.ones(N))
    assert torch.allclose(new.pull(), START - 0.2, atol=1e-12)


def test_a_pull_past_its_deadline_names_the_slow_rank(house):
    one = house(2, 3, 0)
    fast, slow, _ = one.join(0, timeout=0.4), one.join(1), one.join(2)
    one.servers[2].push(torch.ones(N))
    fast.push(torch.ones(N))
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        fast.pull()
    assert time.monotonic() - began > 0.3
    assert caught.value.data["peer"] == "worker-1"
    assert all(word in str(caught.value) for word in ("rank 1", "step 0", "0.4 s", "timeout"))
    slow.push(torch.ones(N))
    assert torch.allclose(fast.pull(), START - 0.1)  # the same server goes on


def test_a_vanished_worker_leaves_the_others_served(house):
    one = house(2, 3, 1)
    gone, stays = one.join(0), one.join(1)
    third = one.join(2)
    waits = threading.Thread(target=lambda: found.append(errors_of(third)))
    found = []
    for server in (gone, stays, third):
        server.push(torch.ones(N))
    third.push(torch.ones(N))
    third.push(torch.ones(N))
    waits.start()  # parked: it leads by two
    time.sleep(0.1)
    gone.close()
    third.close()  # vanishes while it is parked
    stays.push(torch.ones(N))
    assert stays.pull().shape == (N,)
    again = one.join(0)
    again.push(torch.ones(N))
    assert again.step == 2
    waits.join(60)
    assert isinstance(found[0], (LinkError, OSError, ValueError))


def errors_of(server):
    try:
        server.pull()
    except Exception as error:
        return error


def test_a_dead_shard_is_a_lost_peer(house):
    one = house(2, 1, 0)
    server = one.join(0)
    one.loops[1].close()
    with pytest.raises(PeerLost):  # not PeerTimeout: it is known at once
        for _ in range(3):
            server.push(torch.ones(N))
            server.pull()


@pytest.mark.parametrize("staleness", [2, None])
def test_out_of_step_a_restored_shard_is_found_again(house, staleness):
    one = house(2, 1, staleness)
    server = one.join(0, relink=True)
    for _ in range(5):
        server.push(torch.ones(N))
    server.settle()  # what is not acknowledged would be pushed again
    one.restart(1)
    for _ in range(3):
        server.push(torch.ones(N))
    cut = one.ranges[1][0]
    final = server.pull()
    assert torch.allclose(final[:cut], START[:cut] - 0.8, atol=1e-12)
    assert torch.allclose(final[cut:], START[cut:] - 0.3, atol=1e-12)
    assert one.loops[1].facts().version == 3


class Fails(SGD):
    def step(self, closure=None):
        raise ArithmeticError("no such step")


def test_the_users_optimizer_fails_on_the_shard_and_the_pusher_hears_of_it(house):
    one = house(2, 1, 0, factory=lambda p: Fails(p, lr=0.1))
    server = one.join(0)
    with pytest.raises(WorkloadError, match="no such step") as caught:
        server.push(torch.ones(N))
        server.settle()
    assert "test_server.py:" in str(caught.value)
    assert torch.equal(one.join(0).read(), START)  # it still serves


def test_a_fault_of_ours_does_not_silence_the_shard(house, monkeypatch):
    one = house(1, 1, 0)
    server = one.join(0)
    monkeypatch.setattr(one.loops[0].shard, "push", lambda *_: 1 / 0)
    with pytest.raises(Exception, match=r"shard-0 failed: ZeroDivisionError"):
        server.push(torch.ones(N))
        server.settle()
    assert torch.equal(server.read(), START)


def test_an_unknown_rank_and_a_skipped_step_are_errors_not_silence(house):
    one = house(1, 2, None)
    with pytest.raises(LinkError, match="5"):
        one.join(5)
    server = one.join(1)
    server.step = WINDOW
    with pytest.raises(LinkError, match=f"step {WINDOW} before step 0"):
        server.push(torch.ones(N))
        server.settle()


def test_many_workers_come_at_once(house):
    one = house(1, 60, 0)

    def work(rank):
        server = one.join(rank, timeout=60)
        server.push(torch.ones(N))
        return server.pull()

    assert all(torch.allclose(found, START - 0.1) for found in every(work, 60))


def test_bytes_are_counted(house):
    server = house(2, 1, 0).join(0)
    server.pull()
    server.push(torch.ones(N))
    server.pull(0, 3)
    assert server.bytes_moved == 8 * (N + N + 3)


def test_closing_ends_the_thread(house):
    before = set(threading.enumerate())
    one = house(2, 1, 0)
    one.join(0)
    assert len(set(threading.enumerate()) - before) == 2
    one.close()
    assert until(lambda: not set(threading.enumerate()) - before, 60)
