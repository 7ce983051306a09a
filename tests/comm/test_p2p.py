"""Tensors of any shape between two ranks: `rayps.comm.ring.p2p`."""

import threading
import time

import pytest
import torch
from rayps_client.errors import ConfigError, PeerLost, PeerTimeout
from test_ring import errors, every, form

from rayps.comm.ring import p2p as ring_parcels

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
    torch.complex64,
]
SHAPES = [(), (0,), (1,), (3, 4), (2, 0, 5), (1, 2, 3, 4, 5), (700,), (300_001,)]


def values(shape, dtype):
    count = torch.arange(int(torch.tensor(shape).prod()) if shape else 1, dtype=torch.float64)
    return (count % 2 > 0 if dtype == torch.bool else count % 250).to(dtype).reshape(shape)


@pytest.fixture(params=["shm", "tcp"])
def pair(request):
    rings = form(2, prefer=request.param)
    yield rings
    for ring in rings:
        ring.close()


def test_any_dtype_and_shape_arrives_as_it_was(pair):
    some = [values(shape, dtype) for dtype in DTYPES for shape in SHAPES]

    def work(ring):
        other, got = 1 - ring.rank, []
        for _ in range(2):  # the second time without descriptions
            for t in some:
                ring.parcels.give(other, 7, [t], "alone")
            ring.parcels.give(other, 8, some, "all")
            ring.parcels.give(other, 8, [], "none")
            got.append(
                ([ring.parcels.take(other, 7) for _ in some], ring.parcels.take(other, 8), ring.parcels.take(other, 8))
            )
        ring.parcels.settle()
        return got

    for got in every(pair, work):
        for alone, together, none in got:
            assert [parcel.form for parcel in alone] == ["alone"] * len(some)
            for t, u, v in zip(some, [parcel.tensors[0] for parcel in alone], together.tensors, strict=True):
                assert t.dtype == u.dtype == v.dtype and t.shape == u.shape == v.shape
                assert torch.equal(t, u) and torch.equal(t, v)
            assert none.tensors == [] and none.form == "none"


def test_what_wants_a_gradient_and_what_is_not_contiguous(pair):
    def work(ring):
        if ring.rank == 0:
            x = torch.arange(6.0).reshape(2, 3).requires_grad_()
            ring.parcels.give(1, 0, [x.t(), torch.arange(4)[::2], x.detach()[:, 1]])
            ring.parcels.settle()
            return None
        return ring.parcels.take(0, 0)

    got = every(pair, work)[1]
    assert got.wants == [True, False, False]
    assert [t.tolist() for t in got.tensors] == [[[0, 3], [1, 4], [2, 5]], [0, 2], [1, 4]]
    assert not any(t.requires_grad for t in got.tensors)


def test_tags_are_apart_and_in_the_order_of_giving(pair):
    def work(ring):
        if ring.rank == 0:
            for i in range(4):
                ring.parcels.give(1, i % 2, [torch.full((i + 1,), i)])
            ring.send(torch.tensor([9.0]), 1, tag=0)  # a message of the same tag is not a parcel
            return None
        late = [ring.parcels.take(0, 1).tensors[0].tolist() for _ in range(2)]
        word = ring.recv(torch.empty(1), 0, tag=0).item()
        return late, word, [ring.parcels.take(0, 0).tensors[0].tolist() for _ in range(2)]

    assert every(pair, work)[1] == ([[1, 1], [3, 3, 3, 3]], 9.0, [[0], [2, 2, 2]])


def test_a_description_may_be_in_a_parcel_that_is_taken_later(pair):
    def work(ring):
        if ring.rank == 0:
            for tag in (5, 6):
                ring.parcels.give(1, tag, [torch.ones(2, 3)])
            ring.parcels.settle()
            return None
        return [ring.parcels.take(0, tag).tensors[0].shape for tag in (6, 5)]

    assert every(pair, work)[1] == [(2, 3), (2, 3)]


def test_both_give_more_than_the_line_holds_at_once(pair):
    big = torch.arange(4_000_000, dtype=torch.float64)  # 32 MB, several of them

    def work(ring):
        for i in range(6):
            ring.parcels.give(1 - ring.rank, i, [big + i])
        return all(torch.equal(ring.parcels.take(1 - ring.rank, i).tensors[0], big + i) for i in range(6))

    assert every(pair, work) == [True, True]


def test_what_waits_leaves_while_the_giver_is_elsewhere(pair):
    """Neither rank comes back to the ring before the other has all of it."""
    big = torch.ones(6_000_000)
    arrived = threading.Event()

    def work(ring):
        if ring.rank == 0:
            ring.parcels.give(1, 0, [big])
            return arrived.wait(30)
        got = ring.parcels.take(0, 0).tensors[0]
        arrived.set()
        return torch.equal(got, big)

    assert every(pair, work) == [True, True]


def test_a_collective_after_parcels_that_have_not_left(pair):
    big = torch.ones(3_000_000)

    def work(ring):
        ring.parcels.give(1 - ring.rank, 3, [big])
        total = ring.sum(torch.ones(10))
        return total[0].item(), ring.parcels.take(1 - ring.rank, 3).tensors[0].sum().item()

    assert every(pair, work) == [(2.0, 3e6)] * 2


def test_descriptions_are_said_once_and_beyond_a_bound_each_time(pair, monkeypatch):
    monkeypatch.setattr(ring_parcels, "KNOWN", 5)

    def work(ring):
        got = []
        for _ in range(2):
            for n in range(9):
                ring.parcels.give(1 - ring.rank, 0, [torch.arange(n)])
            got += [ring.parcels.take(1 - ring.rank, 0).tensors[0].tolist() for _ in range(9)]
        return got == 2 * [list(range(n)) for n in range(9)], len(ring.parcels._sent[1 - ring.rank])

    assert every(pair, work) == [(True, 5)] * 2


def test_it_counts_what_it_gives(pair):
    def work(ring):
        ring.parcels.give(1 - ring.rank, 0, [torch.ones(5), torch.ones(3, dtype=torch.int64)])
        ring.parcels.give(1 - ring.rank, 0, [torch.ones(2)])
        ring.parcels.take(1 - ring.rank, 0)
        ring.parcels.take(1 - ring.rank, 0)
        return ring.parcels.messages, ring.parcels.bytes

    assert every(pair, work) == [(2, 5 * 4 + 3 * 8 + 2 * 4)] * 2


def test_a_rank_that_dies_is_named_to_whoever_waits(pair):
    def work(ring):
        if ring.rank == 1:
            time.sleep(0.1)
            ring.abort()
        else:
            ring.parcels.take(1, 0)

    error = errors(pair, work)[0]
    assert isinstance(error, PeerLost) and error.data["peer"] == "rank 1"


def test_a_silent_rank_is_named_and_the_wait_ends():
    rings = form(2, timeout=0.6)
    error = errors(rings, lambda ring: ring.parcels.take(1, 0) if ring.rank == 0 else time.sleep(1.5))[0]
    assert isinstance(error, PeerTimeout) and error.data["peer"] == "rank 1"
    for ring in rings:
        ring.close()


def test_a_dtype_that_cannot_travel(pair):
    with pytest.raises(ConfigError, match="float8"):
        pair[0].parcels.give(1, 0, [torch.zeros(2, dtype=torch.float8_e4m3fn)])


def test_no_thread_outlives_the_ring(pair):
    pair[0].parcels.give(1, 0, [torch.ones(6_000_000)])  # more than any line holds while nobody reads
    thread = pair[0].parcels._thread
    assert thread is not None and thread.is_alive()
    for ring in pair:
        ring.close()
    thread.join(60)
    assert not thread.is_alive()
