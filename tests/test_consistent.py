"""A pull of the whole vector reads one moment of all shards: by construction in step, by holding them out of step."""

import random
import time

import pytest
import torch
from test_server import START, N, every, house  # noqa: F401  (a fixture)
from torch.optim import SGD

from rayps.core.errors import PeerLost, PeerTimeout
from rayps.ps.fixed import Server
from rayps.ps.fixed.messages import ShardMessage

ONES = torch.ones(N, dtype=torch.float64)


def plain(params):
    return SGD(params, lr=1.0)


def joined(one, rank, **options):
    """A worker whose shards step independently of each other."""
    server = one.join(rank)
    server.close()
    links = [one.link(i, rank) for i in range(len(one.ranges))]
    server = Server(
        rank, torch.float64, one.ranges, links, timeout=options.pop("timeout", 5.0), independent=True, **options
    )
    one.servers.append(server)
    return server


def moved(pulled):
    """By how much each element has moved: all alike when every push is in all of them or in none."""
    return (START - pulled).round(decimals=9)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("staleness", [2, None])
def test_out_of_step_a_consistent_pull_is_never_torn(house, staleness, shards, resident):  # noqa: F811
    one = house(shards, 3, staleness, plain)

    def work(rank):
        server = joined(one, rank, resident=resident)
        for _ in range(25):
            time.sleep(random.random() * 0.002)
            found = moved(server.pull())
            assert (found == found[0]).all(), found
            assert staleness is None or server.lead <= staleness
            server.push(ONES)
        server.settle()

    every(work, 3)
    assert torch.allclose(one.join(0).read(), START - 25, atol=1e-9)


def test_in_step_a_pull_is_never_torn_and_shards_are_not_held(house, monkeypatch):  # noqa: F811
    one = house(3, 3, 0, plain)
    kinds = []
    for loop in one.loops:
        own = loop._hold
        monkeypatch.setitem(
            loop._answers, ShardMessage.HOLD, lambda request, own=own: (kinds.append(request), own(request))
        )

    servers = [one.join(rank) for rank in range(3)]

    def work(rank):
        server = servers[rank]
        for step in range(25):
            time.sleep(random.random() * 0.002)
            assert (moved(server.pull()) == step).all()
            server.push(ONES)

    every(work, 3)
    assert not kinds


def test_a_reader_that_vanishes_or_stays_too_long_lets_the_shards_go(house):  # noqa: F811
    one = house(2, 2, None, plain)
    reader, pusher = joined(one, 0, timeout=0.5), joined(one, 1)
    began = time.monotonic()
    with reader._turns._held():
        pusher.push(ONES)
        assert time.monotonic() - began >= 0.3  # held back until the reader's time was over
    again = joined(one, 0, timeout=600)
    with pytest.raises(PeerLost), again._turns._held():
        again.close()  # dies while it holds them
        pusher.push(ONES)
        raise PeerLost("as its process would", peer="worker-0")
    assert torch.allclose(one.join(0).read(), START - 1.0, atol=1e-9)


def test_a_push_cut_off_between_shards_is_named_by_who_waits_for_it(house):  # noqa: F811
    one = house(2, 2, None, plain)
    reader = joined(one, 0, timeout=0.7)
    joined(one, 1)
    with one.loops[0]._lock:  # what the first shard has heard of rank 1, and the second has not
        one.loops[0].shard.push(1, 0, torch.ones(one.ranges[0][1], dtype=torch.float64), 1.0)
    with pytest.raises(PeerTimeout, match="push of rank 1 that another shard has and shard-1 has not"):
        reader.pull()
    found = moved(reader.pull(consistent=False))
    assert found.tolist() == [0.5] * one.ranges[0][1] + [0.0] * (N - one.ranges[0][1])
    new = joined(one, 1)
    assert new.step == 0
    new.push(ONES)  # completed
    found = moved(reader.pull())
    assert (found == 0.5).all()


def test_a_shard_that_was_replaced_while_it_was_held_is_held_again(house, monkeypatch):  # noqa: F811
    one = house(2, 2, None, plain)
    reader = joined(one, 0)
    joined(one, 1)
    first, second = one.loops
    aim, tries = second._answers[ShardMessage.AIM], []

    def forgetful(request):
        if not tries:
            second._readers._let_go()  # a replacement knows of no reader
        tries.append(request)
        second.shard.push(1, 0, torch.ones(N - one.ranges[0][1], dtype=torch.float64), 1.0)  # and is told what it lacks
        aim(request)

    monkeypatch.setitem(second._answers, ShardMessage.AIM, forgetful)
    with first._lock:
        first.shard.push(1, 0, torch.ones(one.ranges[0][1], dtype=torch.float64), 1.0)
    assert (moved(reader.pull()) == 0.5).all()
    assert len(tries) == 1  # by the second try both had come as far
