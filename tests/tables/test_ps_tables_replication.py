"""Backups of tables' segments."""

import dataclasses

import numpy as np
import pytest
import test_ps_replication
from ps_site import space
from test_ps_replication import SIZE, START, pieces

from rayps.ps.protocol.messages import GroupMessage, SegmentPayload
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.wire_format import bucket, encode_pull, encode_push

site = test_ps_replication.site


@pytest.mark.parametrize("staleness", [0, None])
def test_tables_are_copied_with_the_dense_part_and_promoted(site, staleness):
    """Rows that pulls make and count, too; a step names every segment, whether it has ids there or not."""
    table = SparseTable("users", dim=4, segments=3, optimizer={"name": "adam", "lr": 0.1})
    one = dataclasses.replace(space(SIZE, 3, staleness=staleness), tables=(table,))
    site.open(one, ["s0"] * 6, copies=[["s1"]] * 6)
    site.load(one, ["s0"] * 3, START)
    guests = [site.guest("s0", rank=rank) for rank in range(2)]
    rng = np.random.default_rng(5)

    def step_of(rank, step, generation):
        ids = np.unique(rng.integers(0, 50, 20))
        where = bucket(ids, 3)
        rows = rng.standard_normal((len(ids), 4)).astype(np.float32)
        tables = [
            SegmentPayload(3 + i, generation, encode_push(ids[where == i], rows[where == i]))
            if (where == i).any() and i != step % 3
            else SegmentPayload(3 + i, generation, b"")
            for i in range(3)
        ]
        pulls = [
            SegmentPayload(3 + i, generation, encode_pull(ids[where == i], np.ones(int((where == i).sum()))))
            for i in range(3)
        ]
        return pieces(rank, step, generation) + tables, pulls

    def turn(step, generation):
        for rank, guest in enumerate(guests):
            push, pulls = step_of(rank, step, generation)
            if staleness is None:
                assert guest.ask(GroupMessage.PULL, pulls, a=step).kind == GroupMessage.VALUE
            assert guest.ask(GroupMessage.PUSH, push, a=step, weight=1.0).kind == GroupMessage.ACK

    for step in range(6):
        turn(step, 1)
    for i in range(6):
        assert site.segment("s0", i).dump() == site.segment("s1", i).dump()
        assert site.segment("s1", i).marks() == {0: 6, 1: 6}
    assert sum(site.segment("s1", i).rows for i in range(3, 6)) > 20
    site.kill("s0")
    site.manager.orders("s1", 1, [[i, "primary", 2, site.copies("s2")] for i in range(6)])
    site.manager.orders("s2", 1, [[i, "copy", 2, {}] for i in range(6)])
    for i in range(6):
        site.manager.heard("s1", "synced", 1, i, 2, "s2")
    guests = [site.guest("s1", rank=rank) for rank in range(2)]
    for step in range(6, 9):
        turn(step, 2)
    for i in range(6):
        assert site.segment("s1", i).dump() == site.segment("s2", i).dump()


def test_a_lost_table_is_not_served_before_it_is_loaded(site):
    one = dataclasses.replace(space(SIZE, 3), tables=(SparseTable("users", dim=4, segments=1),))
    site.open(one, ["s0"] * 4)
    site.manager.orders("s1", 1, [[3, "primary", 2, {}, True]])
    site.manager.heard("s1", "ready", 1, 3, 2, "")
    worker = site.guest("s1")
    assert worker.ask(GroupMessage.PULL, [SegmentPayload(3, 2, encode_pull(np.arange(3)))]).kind == GroupMessage.STALE
    opener = site.guest("s1", rank=-1)
    assert opener.ask(GroupMessage.LOAD, [SegmentPayload(3, 2, site.segment("s0", 3).dump())]).kind == GroupMessage.ACK
    assert worker.ask(GroupMessage.PULL, [SegmentPayload(3, 2, encode_pull(np.arange(3)))]).kind == GroupMessage.VALUE
