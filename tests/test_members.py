"""Ranks that join and leave the segments of servers: clocks, scales, backups, and exactly once."""

import random

import numpy as np
import pytest
import torch
from torch.optim import SGD

from rayps.core.errors import ConfigError, StaleGeneration
from rayps.ps.client.client import compress
from rayps.ps.protocol.members import MemberChange, MemberChangeKind
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, read_numbers, unpack
from rayps.ps.protocol.space import SparseTable
from rayps.ps.server.dense_segment import DenseSegment, state_of
from rayps.ps.tables.table_segment import TableSegment
from rayps.ps.tables.wire_format import encode_push
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout
from tests.ps_site import Site, error, space
from tests.static_servers import House

SIZE, SLOTS = 12, 4
KINDS = MemberChangeKind


def begin(floor=0):
    return MemberChange(KINDS.BEGIN, step=floor)


def admit(rank, step=0):
    return MemberChange(KINDS.ADMIT, rank, step)


def remove(rank):
    return MemberChange(KINDS.REMOVE, rank)


def repeat(rank, step, *earlier):
    return MemberChange(KINDS.REPEAT, rank, step, earlier)


def end(step):
    return MemberChange(KINDS.END, step=step)


def dense(staleness=1, factory=lambda p: SGD(p, lr=0.1)):
    one = space(SIZE, 2, SLOTS, strategy=ParameterServer(staleness=staleness), factory=factory)
    segment = DenseSegment(one, 1, factory)
    lo, hi = segment.extent.lo, segment.extent.hi
    segment.load(state_of(torch.arange(float(hi - lo)), segment.extent.layout, lo, marks=[0] * SLOTS))
    return segment


def gradient(rank, step):
    values = torch.randn(SIZE // 2, generator=torch.Generator().manual_seed(1000 * step + rank)).numpy()
    return memoryview(bytearray(values.tobytes()))


TABLE = SparseTable("t", 3, segments=1, optimizer={"name": "adagrad", "lr": 0.1})


def table(staleness=1):
    return TableSegment(TABLE, 0, ParameterServer(staleness=staleness), SLOTS)


def rows(rank, step):
    ids = np.array([rank, 10 + step % 3], np.int64)
    return encode_push(ids, torch.ones(2, 3), np.ones(2, np.int64)).data


SEGMENTS = {"dense": (dense, gradient), "table": (table, rows)}


@pytest.mark.parametrize("kind", SEGMENTS)
def test_only_ranks_that_take_part_count(kind):
    make, push = SEGMENTS[kind]
    segment = make(staleness=1)
    for change in (begin(), admit(0), admit(1)):
        segment.change_members(change)
    assert segment.size if kind == "table" else segment.shard.size == 2
    for step in range(3):
        segment.push(0, step, 1.0, push(0, step))
    assert (segment.closed, segment.may_pull(0), segment.laggards()) == (0, False, [1])
    segment.change_members(remove(1))  # the slowest leaves: the pull of rank 0 is served
    assert (segment.closed, segment.may_pull(0)) == (3, True)
    segment.change_members(admit(2))  # a newcomer begins at the slowest clock
    assert (segment.marks()[2], segment.closed, segment.may_pull(2)) == (3, 3, True)
    with pytest.raises(StaleGeneration, match="worker-1 has left"):
        segment.push(1, 0, 1.0, push(1, 0))
    segment.change_members(admit(1))
    assert segment.marks()[1] == 3


def test_a_push_is_scaled_by_the_workers_that_take_part():
    segment = dense(None)
    segment.change_members(begin())
    law = torch.arange(float(SIZE // 2))
    for step, change in enumerate([admit(0), admit(1), admit(3), remove(1), remove(3)]):
        segment.change_members(change)
        segment.push(0, step, 1.0, gradient(0, step))
        law -= 0.1 / [1, 2, 3, 2, 1][step] * torch.frombuffer(gradient(0, step), dtype=torch.float32)
    assert torch.allclose(torch.frombuffer(bytearray(bytes(segment.read())), dtype=torch.float32), law)


def test_a_push_that_is_repeated_by_another_worker_counts_once():
    segment = dense(None)
    for change in (begin(), admit(0), admit(1)):
        segment.change_members(change)
    segment.push(0, 0, 1.0, gradient(0, 0))
    segment.change_members(remove(0))
    segment.change_members(admit(0, 5))  # the slot is used again
    for push in ((0, 0), (0, 3)):
        segment.change_members(repeat(1, push[1], push))
    before, closed = bytes(segment.read()), segment.closed
    backup = dense(None)
    backup.load(segment.dump())
    [change] = segment.push(1, 0, 1.0, gradient(1, 0))  # recorded, without an effect on the parameters
    assert bytes(segment.read()) == before and segment.marks()[1] == 1 and segment.closed == closed + 1
    backup.replay(memoryview(change))
    assert backup.dump() == segment.dump()
    for step in (1, 2, 3):  # the push (0, 3) was passed over, and never applied
        segment.push(1, step, 1.0, gradient(1, step))
        assert bytes(segment.read()) != before
        before = bytes(segment.read())


@pytest.mark.parametrize("kind", SEGMENTS)
def test_the_end_retains_the_last_state(kind):
    make, push = SEGMENTS[kind]
    segment = make(staleness=None)
    for change in (begin(), admit(0), admit(1)):
        segment.change_members(change)
    for step in range(4):
        segment.push(0, step, 1.0, push(0, step))
    segment.change_members(remove(0))
    segment.change_members(remove(1))
    assert segment.part(7) is None
    segment.change_members(end(7))
    assert (segment.closed, set(segment.marks().values())) == (7, {7})
    again = make(staleness=None)
    again.load(segment.part(7))
    assert again.closed == 7
    if kind == "dense":
        assert bytes(again.read()) == bytes(segment.read())


@pytest.mark.parametrize("kind", SEGMENTS)
@pytest.mark.parametrize("seed", range(5))
def test_a_backup_from_any_moment_is_equal_bit_for_bit(kind, seed):
    make, push = SEGMENTS[kind]
    rng = random.Random(seed)
    primary, backups, joined = make(staleness=None), [], set()
    primary.change_members(begin())
    for _ in range(60):
        if rng.random() < 0.1:
            backups.append(make(staleness=None))
            backups[-1].load(primary.dump())
        rank = rng.randrange(SLOTS)
        step = primary.marks()[rank]
        if rng.random() < 0.3:
            change = remove(rank) if rank in joined else admit(rank, step + rng.randrange(2))
            (joined.discard if rank in joined else joined.add)(rank)
            changes = primary.change_members(change)
        elif rank in joined:
            changes = primary.push(rank, step, 1.0, push(rank, step))
        else:
            continue
        for backup in backups:
            for each in changes:
                backup.replay(memoryview(each))
    assert backups
    for backup in backups:
        assert backup.dump() == primary.dump()
        assert (backup.laggards(), backup.seq) == (primary.laggards(), primary.seq)


def test_workers_in_step_neither_join_nor_leave():
    with pytest.raises(ConfigError, match="applies whole rounds"):
        dense(0).change_members(begin())
    with pytest.raises(ConfigError, match="applies whole rounds"):
        table(0).change_members(begin())


def test_a_rank_joins_only_where_ranks_change():
    with pytest.raises(ValueError, match="do not change"):
        dense().change_members(admit(0))


def asked(opener, change, segments, generation=1, incarnation=0):
    """Send a change to segments of a server; return each segment's marks."""
    pieces = [SegmentPayload(i, generation, change.encode()) for i in segments]
    answer = opener.ask(GroupMessage.MEMBERS, pieces, weight=incarnation)
    assert answer.kind == GroupMessage.VALUE, bytes(answer.payload)
    return [read_numbers(piece.data) for piece in unpack(answer.payload)]


def pushed(rank, step, generation=1):
    return [SegmentPayload(i, generation, gradient(rank + i, step)[: SIZE // 3 * 4]) for i in range(3)]


def nothing(generation=1):
    return [SegmentPayload(i, generation, b"") for i in range(3)]


def test_members_survive_the_death_of_a_server():
    """The changes are on the backup before they are answered; the pull that waits is served by a removal."""
    with Site("s0", "s1") as site:
        one = space(SIZE, 3, SLOTS, staleness=1)
        site.open(one, ["s0"] * 3, copies=[["s1"]] * 3)
        site.load(one, ["s0"] * 3, torch.arange(float(SIZE)))
        opener = site.guest("s0", rank=-1)
        for change in (begin(), admit(0), admit(1)):
            asked(opener, change, range(3))
        fast = site.guest("s0", rank=0)
        for step in range(2):
            assert fast.ask(GroupMessage.PUSH, pushed(0, step), a=step, weight=1.0).kind == GroupMessage.ACK
        waiting = fast.say(GroupMessage.PULL, nothing(), a=2)
        assert fast.silent()
        assert asked(opener, remove(1), range(3)) == [[2, 0, 0, 0]] * 3
        assert fast.hear(waiting).kind == GroupMessage.VALUE
        assert asked(opener, admit(2), range(3)) == [[2, 0, 2, 0]] * 3
        site.kill("s0")
        site.manager.orders("s1", one.number, [[i, "primary", 2, {}] for i in range(3)])
        site.manager.heard("s1", "ready", one.number, 2, 2, "")
        opener = site.guest("s1", rank=-1)
        assert asked(opener, admit(2, 2), range(3), 2) == [[2, 0, 2, 0]] * 3  # a repeated change has no effect
        left = site.guest("s1", rank=1)
        assert error(left.ask(GroupMessage.PUSH, pushed(1, 0, 2), weight=1.0))["kind"] == "StaleGeneration"
        newcomer = site.guest("s1", rank=2)
        assert newcomer.marks == dict.fromkeys(range(3), 2)


def test_an_admission_refuses_the_rank_s_earlier_worker():
    with Site("s0") as site:
        one = space(SIZE, 3, SLOTS, staleness=None)
        site.open(one, ["s0"] * 3)
        site.load(one, ["s0"] * 3, torch.arange(float(SIZE)))
        opener = site.guest("s0", rank=-1)
        asked(opener, begin(), range(3))
        asked(opener, admit(0), range(3), incarnation=1)
        old = site.guest("s0", rank=0, incarnation=1)
        asked(opener, remove(0), range(3))
        asked(opener, admit(0), range(3), incarnation=2)
        assert error(old.ask(GroupMessage.PUSH, pushed(0, 0), weight=1.0))["kind"] == "StaleGeneration"
        worker = site.guest("s0", rank=1)
        refused = worker.ask(GroupMessage.MEMBERS, [SegmentPayload(0, 1, remove(0).encode())])
        assert "only a reader" in error(refused)["message"]


def test_a_leaver_pushes_what_its_compression_has_left_out():
    """After it, the servers have the sum of all gradients; the step of this push leaves a gap above the mark."""
    layout = Layout.of([("a", torch.zeros(64))])
    house = House(layout, torch.zeros(64), 2, 1, ParameterServer(staleness=None), lambda p: SGD(p, lr=1.0))
    try:
        server, law = house.join(0), torch.zeros(64)
        compress(server, "top_k:0.05")
        for step in range(5):
            grad = torch.randn(64, generator=torch.Generator().manual_seed(step))
            law -= grad
            server.push(grad)
        server.settle()
        assert not torch.allclose(server.read(), law, atol=1e-5)
        assert server.push_rest(300)
        assert torch.allclose(server.read(), law, atol=1e-5)
        assert {each.shard.ledger.marks[0] for each in house.loops} == {5}
        assert {each.shard.ledger.reach(0) for each in house.loops} == {301}
        assert not server.push_rest(301)  # nothing is compressed any more
    finally:
        house.close()


def test_a_consistent_pull_that_waits_for_a_rank_is_served_when_the_rank_leaves():
    with Site("s0") as site:
        one = space(SIZE, 3, SLOTS, staleness=1)
        site.open(one, ["s0"] * 3)
        site.load(one, ["s0"] * 3, torch.arange(float(SIZE)))
        opener = site.guest("s0", rank=-1)
        for change in (begin(), admit(0), admit(1)):
            asked(opener, change, range(3))
        fast = site.guest("s0", rank=0)
        for step in range(2):
            fast.ask(GroupMessage.PUSH, pushed(0, step), a=step, weight=1.0)
        waiting = fast.say(GroupMessage.HOLD, nothing(), a=3)
        assert fast.silent()
        asked(opener, remove(1), range(3))
        assert fast.hear(waiting).kind == GroupMessage.VALUE
