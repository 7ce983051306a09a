"""One version out of several shards: the pure half, under every order of arrival."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayps.core.job.repeated_pushes import Ledger
from rayps.ps.server.consistent_readers import ConsistentCut


class Shard:
    """A ledger behind a cut, and the pushes that are on their way to it, in order for each rank."""

    def __init__(self, ranks):
        self.ledger = Ledger([0] * ranks)
        self.cut = None  # while a reader holds it
        self.coming = [[] for _ in range(ranks)]
        self.held = []

    def arrive(self, rank):
        if self.coming[rank]:
            self.take(rank, self.coming[rank].pop(0))

    def take(self, rank, step):
        if self.cut is None or self.cut.admits(rank, step):
            self.ledger.add(rank, step)
        else:
            self.held.append((rank, step))

    def again(self):
        waiting, self.held = self.held, []
        for push in waiting:
            self.take(*push)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_whatever_arrives_when_all_shards_are_read_with_the_same_pushes(shards, ranks, data):
    several, steps = [Shard(ranks) for _ in range(shards)], [0] * ranks

    def stir():
        for _ in range(data.draw(st.integers(0, 8))):
            rank = data.draw(st.integers(0, ranks - 1))
            if data.draw(st.booleans()):
                for shard in several:  # a push leaves for all shards at once
                    shard.coming[rank].append(steps[rank])
                steps[rank] += 1
            else:
                several[data.draw(st.integers(0, shards - 1))].arrive(rank)

    stir()
    reached = []
    for shard in several:
        shard.cut = ConsistentCut(shard.ledger)
        reached.append(shard.cut.reached())
        stir()
    target = [max(steps) for steps in zip(*reached, strict=True)]
    for shard in several:
        shard.cut.aim(target)
        shard.again()
        stir()
    for shard in several:  # what another shard has applied is under way to this one
        while late := shard.cut.missing():
            shard.arrive(late[0])
    assert all(list(shard.ledger.marks.values()) == target for shard in several)
    stir()
    assert all(list(shard.ledger.marks.values()) == target for shard in several)  # nothing moves while it is read
    for shard in several:
        shard.cut = None
        shard.again()
        for rank in range(ranks):
            while shard.coming[rank]:
                shard.arrive(rank)
        assert list(shard.ledger.marks.values()) == steps  # and nothing was lost by waiting


def test_a_repeated_push_is_admitted_while_the_shard_is_held():
    ledger = Ledger([2, 0])
    cut = ConsistentCut(ledger)
    assert cut.reached() == [2, 0]
    assert cut.admits(0, 1)
    assert not cut.admits(0, 2)
    assert cut.missing() == []
    with pytest.raises(ValueError, match="3 ranks, but the space has 2"):
        cut.aim([1, 2, 3])
    cut.aim([2, 1])
    assert cut.missing() == [1]
    assert cut.admits(1, 0) and not cut.admits(1, 1) and not cut.admits(0, 2)
