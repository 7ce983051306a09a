"""A pull of the whole vector reads one moment of all shards: by construction in step, by holding them out of step."""

import random
import time

import pytest
import torch
from rayps_client.errors import PeerTimeout
from test_server import START, N, every, house  # noqa: F401  (a fixture)
from torch.optim import SGD

from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.server.consistent_readers import ConsistentReaders
from rayps.ps.server.requests import RequestHandler

ONES = torch.ones(N, dtype=torch.float64)


def plain(params):
    return SGD(params, lr=1.0)


def joined(one, rank, **options):
    """A worker whose pulls are of one moment of all shards."""
    return one.join(rank, **{"timeout": 5.0, "consistent": True} | options)


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
    kinds, own = [], RequestHandler.answer
    monkeypatch.setattr(
        RequestHandler, "answer", lambda self, held, request: (kinds.append(request.kind), own(self, held, request))
    )

    servers = [one.join(rank) for rank in range(3)]

    def work(rank):
        server = servers[rank]
        for step in range(25):
            time.sleep(random.random() * 0.002)
            assert (moved(server.pull()) == step).all()
            server.push(ONES)

    every(work, 3)
    assert kinds and GroupMessage.HOLD not in kinds


def test_the_request_that_admits_a_reader_is_of_one_segment(house, monkeypatch):  # noqa: F811
    """Of several, each on another server after a move, two readers could hold one each and wait for the other."""
    one = house(3, 2, None, plain)
    admitted, own = [], ConsistentReaders.add_request

    def hold(self, request):
        if request.a:
            admitted.append([piece.segment for piece in request.pieces])
        own(self, request)

    monkeypatch.setattr(ConsistentReaders, "add_request", hold)
    joined(one, 0).pull()
    assert admitted == [[0]]


def test_a_reader_that_vanishes_or_stays_too_long_lets_the_shards_go(house):  # noqa: F811
    one = house(2, 2, None, plain)
    reader, pusher = joined(one, 0, timeout=0.5), joined(one, 1)
    began = time.monotonic()
    pusher.settle()
    reader.session._stop_segments(0)
    pusher.push(ONES)
    pusher.settle()
    assert time.monotonic() - began >= 0.3  # held back until the reader's time was over
    again = joined(one, 0, timeout=600)
    again.session._stop_segments(0)
    again.close()  # dies while it holds them
    pusher.push(ONES)
    pusher.settle()
    assert torch.allclose(one.join(0).read(), START - 1.0, atol=1e-9)


def test_a_push_cut_off_between_shards_is_named_by_who_waits_for_it(house):  # noqa: F811
    one = house(2, 2, None, plain)
    reader = joined(one, 0, timeout=0.7)
    joined(one, 1)
    # what the first shard has heard of rank 1, and the second has not
    one.loops[0].do(lambda shard: shard.push(1, 0, torch.ones(one.ranges[0][1], dtype=torch.float64), 1.0))
    with pytest.raises(PeerTimeout, match="push of rank 1 that another server has"):
        reader.pull()
    found = moved(reader.pull(consistent=False))
    assert found.tolist() == [0.5] * one.ranges[0][1] + [0.0] * (N - one.ranges[0][1])
    new = joined(one, 1)
    assert new.step == 0
    new.push(ONES)  # completed
    found = moved(reader.pull())
    assert (found == 0.5).all()


def test_a_replacement_repeats_a_push_although_the_bound_lets_nobody_so_far_ahead_pull(house):  # noqa: F811
    """It died in its push: one shard counts it two ahead of rank 1, which waits for the other shard to have the push.

    The replacement could not pull before rank 1 pushed, and rank 1 not before the replacement did.
    """
    one = house(2, 2, 1, plain)
    first, slow = joined(one, 0), joined(one, 1, timeout=20.0)
    slow.push(ONES)
    slow.settle()
    for _ in range(2):
        first.push(ONES)
    first.settle()
    first.close()
    one.loops[0].do(lambda shard: shard.push(0, 2, torch.ones(one.ranges[0][1], dtype=torch.float64), 1.0))
    again = joined(one, 0, timeout=20.0)
    assert again.step == 2

    def work(rank):
        if rank == 1:
            return moved(slow.pull())
        again.pull()
        again.push(ONES)
        return None

    found = every(work, 2)[1]
    assert (found == 2.0).all()  # three pushes of rank 0 and one of its own, each a half


def test_a_shard_that_was_replaced_while_it_was_held_is_held_again(house, monkeypatch):  # noqa: F811
    one = house(2, 2, None, plain)
    reader = joined(one, 0, relink=True, timeout=20.0)
    late = joined(one, 1, relink=True, keep=10**6)
    late.push(ONES)
    late.settle()
    own, tries = reader.session.exchange, []

    def exchange(kind, *arguments, **more):
        if kind == GroupMessage.PULL:
            tries.append(kind)
            if len(tries) == 1:
                one.restart(1)  # the replacement knows of no reader, and lacks what was pushed
                late.session.catch_up()
        return own(kind, *arguments, **more)

    monkeypatch.setattr(reader.session, "exchange", exchange)
    assert (moved(reader.pull()) == 0.5).all()
    assert len(tries) == 2  # by the second try both had come as far
