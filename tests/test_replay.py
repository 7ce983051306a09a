"""What workers keep is said again to a restored shard; what is retried counts once and is still answered."""

import threading

import numpy as np
import pytest
import torch
from test_consistent import joined
from test_server import START, N, every, house  # noqa: F401  (a fixture)

from rayps.cluster.local import until
from rayps.ps.protocol.messages import GroupMessage
from rayps.tensors.flat import Layout
from rayps.tensors.packing import flat_bytes

ONES = torch.ones(N, dtype=torch.float64)
TABLE = Layout.of([("w", torch.empty(N, 1, dtype=torch.float64))])


def keeps(one, rank, keep=10**6, **options):
    return joined(one, rank, keep=keep, relink=True, **{"consistent": False, "timeout": 60.0} | options)


def restart(one, i):
    """A shard dies, and begins anew from the beginning."""
    for server in one.servers:
        server.settle()
    one.restart(i)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("staleness", [2, None])
def test_out_of_step_a_restored_shard_loses_nothing(house, staleness, resident):  # noqa: F811
    one = house(2, 1, staleness)
    server = keeps(one, 0, resident=resident)
    for _ in range(5):
        server.push(ONES)
    restart(one, 1)
    for _ in range(3):
        server.push(ONES)
    assert torch.allclose(server.pull(), START - 0.8, atol=1e-12)
    assert [loop.facts().version for loop in one.loops] == [8, 8]
    assert one.loops[1].facts().lost == 0


def test_what_is_durable_is_not_kept(house):  # noqa: F811
    one = house(2, 1, None)
    server = keeps(one, 0)
    for _ in range(4):
        server.push(ONES)
    server.settle()
    assert server.talk.kept.bytes == 4 * N * 8
    for loop in one.loops:
        loop.do(lambda shard: shard.retained.requested.add(5))
    server.push(ONES)
    server.settle()
    for loop in one.loops:
        loop.actor.saved(5)
    server.push(ONES)  # its acknowledgement says so
    server.settle()
    assert server.talk.kept.bytes == N * 8


def test_what_was_not_kept_is_lost_and_counted(house):  # noqa: F811
    one = house(2, 1, None)
    server = keeps(one, 0, keep=2 * N * 8)  # two pushes
    for _ in range(5):
        server.push(ONES)
    restart(one, 1)
    assert one.loops[1].facts().lost == 0
    server.push(ONES)
    cut, final = one.ranges[1][0], server.pull()
    assert torch.allclose(final[:cut], START[:cut] - 0.6, atol=1e-12)
    lost = one.loops[1].facts().lost
    assert lost in (3, 4)  # the sixth push itself takes room
    assert torch.allclose(final[cut:], START[cut:] - 0.1 * (6 - lost), atol=1e-12)


def test_rows_are_said_again_with_their_ids(house, monkeypatch):  # noqa: F811
    monkeypatch.setattr("test_server.LAYOUT", TABLE)
    one = house(2, 1, None)
    server = keeps(one, 0)
    for ids in ([0, 9], [3, 1, 3], [0, 9], [10]):
        server.push_rows(torch.tensor(ids), torch.ones(len(ids), 1, dtype=torch.float64))
    before = server.pull()
    restart(one, 0)
    restart(one, 1)
    server.push_rows(torch.tensor([0, 9]), torch.ones(2, 1, dtype=torch.float64))
    law = before.clone()
    law[[0, 9]] -= 0.1
    assert torch.allclose(server.pull(), law, atol=1e-12)


def test_a_shard_is_told_by_another_thread_while_the_worker_waits_elsewhere(house):  # noqa: F811
    """Rank 0 waits at the first shard for rank 1, who waits at the restored one for what rank 0 pushed there."""
    one = house(2, 2, 0 + 1)
    first, second = keeps(one, 0), keeps(one, 1)
    for server in (first, second):
        server.push(ONES)
    first.push(ONES)
    restart(one, 1)
    waits = threading.Thread(target=first.pull, daemon=True)
    first.push(ONES)  # finds the shard again, and leads by two
    restart(one, 1)
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    assert until(lambda: one.loops[1].shard.ledger.marks[0] == 3, 60)  # of rank 0 all is there
    assert one.loops[1].facts().reached == 0  # rank 1 has not asked yet
    second.push(ONES)
    waits.join(60)
    assert not waits.is_alive()
    assert torch.allclose(second.read(), START - 5 * 0.1 / 2, atol=1e-12)


def test_a_finished_worker_tells_a_restored_shard_what_it_lacks(house):  # noqa: F811
    one = house(2, 1, None)
    server = keeps(one, 0)
    for _ in range(3):
        server.push(ONES)
    restart(one, 1)
    assert one.loops[1].shard.ledger.marks[0] == 0
    server.talk.catch_up()  # as `rewire` lets another thread do
    assert one.loops[1].shard.ledger.marks[0] == 3
    assert torch.allclose(server.read(), START - 3 * 0.1, atol=1e-12)


@pytest.mark.parametrize("resident", [True, False])
def test_a_retried_push_pull_counts_once_and_still_pulls(house, resident):  # noqa: F811
    one = house(1, 1, None)
    server = joined(one, 0, resident=resident)
    piece, found = np.ones(N), torch.empty(N, dtype=torch.float64)
    for _ in range(3):
        found.zero_()
        places = {0: flat_bytes(found)}
        server.talk.exchange(GroupMessage.PUSH_PULL, {0: piece.data.cast("B")}, step=0, weight=1.0, landing=places)
        assert np.array_equal(found.numpy(), (START - 0.1).numpy())


def test_a_worker_that_does_nothing_blocks_nobody(house):  # noqa: F811
    one = house(2, 3, None)
    idle = one.join(2)
    idle.pull()

    def work(rank):
        server = one.join(rank)
        for _ in range(50):
            server.push(ONES)
            server.pull()
        return server.step

    assert every(work, 2) == [50, 50]
    idle.push(ONES)
    ages = one.loops[0].facts().ages  # its gradient was a hundred versions old
    assert ages[100] == 1 and sum(ages.values()) >= 99
