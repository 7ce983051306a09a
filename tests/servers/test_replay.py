"""What workers keep is said again to a restored shard; what is retried counts once and is still answered."""

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from rayps_client.errors import RaypsError
from test_consistent import joined
from test_server import START, N, every, house  # noqa: F401  (a fixture)

from rayps.cluster.local import until
from rayps.ps.protocol.mailbox import WAITS
from rayps.ps.protocol.messages import GroupMessage
from rayps.tensors.flat import Layout
from rayps.tensors.packing import view_bytes

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
    assert server.session.replay_buffer.bytes == 4 * N * 8
    for loop in one.loops:
        loop.do(lambda shard: shard.retained.requested.add(5))
    server.push(ONES)
    server.settle()
    for loop in one.loops:
        loop.actor.saved(5)
    server.push(ONES)  # its acknowledgement says so
    server.settle()
    assert server.session.replay_buffer.bytes == N * 8


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
    server.session.catch_up()  # as `rewire` lets another thread do
    assert one.loops[1].shard.ledger.marks[0] == 3
    assert torch.allclose(server.read(), START - 3 * 0.1, atol=1e-12)


def test_a_new_worker_that_kept_nothing_says_what_a_restored_shard_has_lost(house):  # noqa: F811
    """Pushes of a dead worker to a dead shard: consistent pulls would wait for them if nobody declared them lost."""
    one = house(2, 2, None)
    first = keeps(one, 0)
    for _ in range(3):
        first.push(ONES)
    first.close()
    other, second = keeps(one, 1, consistent=True, timeout=5.0), keeps(one, 0)
    assert second.step == 3
    one.restart(1)
    second.session.catch_up()
    assert one.loops[1].facts().lost == 3
    cut, found = one.ranges[1][0], other.pull()
    assert torch.allclose(found[:cut], START[:cut] - 3 * 0.1 / 2, atol=1e-12)
    assert torch.equal(found[cut:], START[cut:])


def test_a_new_worker_that_waits_at_one_shard_joins_the_restored_one(house):  # noqa: F811
    """Rank 0 leads and waits at the first shard for rank 1, who waits for what the second one lacks of rank 0."""
    one = house(2, 2, 1)
    first = keeps(one, 0)
    for _ in range(2):
        first.push(ONES)
    first.close()
    second, other = keeps(one, 0, consistent=True), keeps(one, 1, consistent=True, timeout=20.0)
    assert second.step == 2
    waits = threading.Thread(target=second.pull, daemon=True)
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()  # two rounds ahead
    one.restart(1)
    other.pull()
    other.push(ONES)
    waits.join(60)
    assert not waits.is_alive()
    assert one.loops[1].facts().lost == 2


def test_a_reader_declares_nothing_lost_that_its_worker_kept(house):  # noqa: F811
    one = house(2, 1, None)
    server = keeps(one, 0)
    for _ in range(3):
        server.push(ONES)
    reader, pieces = server.session.reader(), dict.fromkeys(range(2), b"")
    reader.exchange(GroupMessage.READ, pieces)
    one.restart(1)
    reader.exchange(GroupMessage.READ, pieces)
    reader.close()
    assert one.loops[1].facts().lost == 0
    server.session.catch_up()
    assert torch.allclose(server.read(), START - 3 * 0.1, atol=1e-12)


def test_a_map_in_which_nothing_of_a_lost_server_changed_is_no_reason_to_call_it_again(house):  # noqa: F811
    """A call to a dead server holds the worker up for 0.1 s, in which it does not read the map that names the next."""
    one = house(2, 1, None)
    server = keeps(one, 0)
    server.push(ONES)
    server.settle()
    connections = server.session._connections
    for name in ("shard-0", "shard-1"):
        connections.refused(name)
    one.maps[-1].publish(replace(connections.map, version=connections.map.version + 1))  # as with another backup
    assert connections.newer() == set()
    assert sorted(connections.backoffs) == ["shard-0", "shard-1"]
    one.now = one.maps[-1].map
    one.maps[-1].publish(one.maps[-1].moved(1, one.loops[1].address))
    assert connections.newer() == {1}
    assert sorted(connections.backoffs) == ["shard-0"]


def test_a_worker_that_is_lost_between_its_answer_and_its_wakeup_ends_no_server(house):  # noqa: F811
    one = house(1, 2, None)
    first, second = keeps(one, 0), keeps(one, 1)
    for server in (first, second):
        server.push(ONES)
        server.settle()

    def answer_and_lose():
        boxes = one.loops[0].loop._mailboxes
        guest = next(guest for guest in one.loops[0].boxes() if guest.rank == 0)
        guest.mailbox.words[WAITS] = 1
        boxes.answered.append(guest.mailbox)
        boxes.close(guest)
        boxes.wake()

    one.loops[0].do(lambda _: answer_and_lose())
    second.push(ONES)
    assert torch.allclose(second.pull(), START - 3 * 0.1 / 2, atol=1e-12)


def test_a_session_that_is_closed_ends_the_thread_that_catches_up(house):  # noqa: F811
    one = house(2, 1, None)
    server, free = keeps(one, 0), threading.Event()
    server.push(ONES)
    server.settle()

    def catch_up():
        with contextlib.suppress(RaypsError):
            server.session.catch_up()

    busy = threading.Thread(target=lambda: one.loops[1].do(lambda _: free.wait(60)), daemon=True)
    waits = threading.Thread(target=catch_up, daemon=True)
    busy.start()
    try:
        one.maps[-1].publish(one.maps[-1].moved(1, one.loops[1].address))
        waits.start()
        waits.join(0.5)
        assert waits.is_alive()  # the server does not answer its JOIN
        server.close()
        waits.join(30)
        assert not waits.is_alive()
    finally:
        free.set()
        busy.join(60)


@pytest.mark.parametrize("resident", [True, False])
def test_a_retried_push_pull_counts_once_and_still_pulls(house, resident):  # noqa: F811
    one = house(1, 1, None)
    server = joined(one, 0, resident=resident)
    piece, found = np.ones(N), torch.empty(N, dtype=torch.float64)
    for _ in range(3):
        found.zero_()
        places = {0: view_bytes(found)}
        server.session.exchange(GroupMessage.PUSH_PULL, {0: piece.data.cast("B")}, step=0, weight=1.0, outputs=places)
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
