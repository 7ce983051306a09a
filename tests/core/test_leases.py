"""Leases of blocks: each block of each epoch is applied once, whatever workers join, leave and die."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_client.errors import CheckpointError

from rayps.core.job.repeated_pushes import Ledger
from rayps.core.rows.leases import (
    LEASE_SECONDS,
    LEAST_SECONDS,
    MOST_BLOCKS,
    BlockRange,
    Leases,
    Marks,
    PushId,
    choose_lease_size,
    join_ranges,
)
from rayps.core.strategy.staleness_bound import ActiveRanks, Clock, PushCount
from rayps.ps.protocol.members import MemberChange, MemberChangeKind, with_members
from rayps.runtime.size.leased_run import Visits


class Servers:
    """The slow twin of servers: for each segment a ledger, and how often each block was applied."""

    def __init__(self, segments: int, slots: int) -> None:
        self.ledgers = [Ledger([0] * slots, active=ActiveRanks()) for _ in range(segments)]
        self.applied = [Counter() for _ in range(segments)]

    def push(self, segment: int, rank: int, step: int, block: tuple[int, int]) -> None:
        if self.ledgers[segment].takes_part(rank) and self.ledgers[segment].add(rank, step):
            self.applied[segment][block] += 1
            self.ledgers[segment].count_push()

    def admit(self, rank: int, first: int) -> int:
        first = max(ledger.admit(rank, first) for ledger in self.ledgers)
        assert {ledger.admit(rank, first) for ledger in self.ledgers} == {first}
        return first

    def remove(self, rank: int) -> Marks:
        for ledger in self.ledgers:
            ledger.remove(rank)
        return self.marks(rank)

    def marks(self, rank: int) -> Marks:
        marks = [ledger.marks[rank] for ledger in self.ledgers]
        return Marks(min(marks), max(marks))

    def state(self):
        return [ledger.to_json() for ledger in self.ledgers], [Counter(each) for each in self.applied]


class Run:
    """A run of workers that push block by block: the next step is pushed when all segments have the last one."""

    def __init__(self, leases: Leases, servers: Servers) -> None:
        self.leases, self.servers = leases, servers
        self.steps: dict[int, int] = {}  # rank -> its next step
        self.sent: dict[int, set[int]] = {}  # rank -> the segments that have its present step
        self.left: dict[int, list] = {}  # rank -> the leases that it has been given
        self.pushed: Counter[int] = Counter()  # rank -> the step after its highest one that any segment was sent

    def join(self, rank: int) -> None:
        """Let a rank join. Its clock begins with the slowest one, or after what its worker before had pushed."""
        if rank not in self.steps:
            slowest = max(Clock(ledger.marks, None, ledger.active).slowest for ledger in self.servers.ledgers)
            first = self.servers.admit(rank, self.leases.least_first(rank))
            assert first <= max(slowest, self.pushed[rank])
            self.leases.join(rank, first)
            self.steps[rank], self.sent[rank], self.left[rank] = first, set(), []

    def lease(self, rank: int, count: int) -> None:
        if rank in self.steps:
            for lease in self.leases.lease(rank, count):
                for i in range(lease.first, lease.end):
                    for ledger in self.servers.ledgers:
                        ledger.expect_repeat(rank, i, lease.blocks.earlier)
                self.left[rank].append(lease)

    def push(self, rank: int, segment: int) -> None:
        if rank not in self.steps:
            return
        step = self.steps[rank]
        lease = next((each for each in self.left[rank] if each.first <= step < each.end), None)
        if lease is None:
            return
        self.servers.push(segment, rank, step, lease.block_of(step))
        self.pushed[rank] = max(self.pushed[rank], step + 1)
        self.sent[rank].add(segment)
        if len(self.sent[rank]) == len(self.servers.ledgers):
            self.steps[rank], self.sent[rank] = step + 1, set()

    def die(self, rank: int) -> None:
        if rank in self.steps:
            self.leases.leave(rank, self.servers.remove(rank))
            del self.steps[rank], self.sent[rank], self.left[rank]

    def complete(self, rank: int) -> None:
        """Let one rank train to the end."""
        self.join(rank)
        for other in [other for other in self.steps if other != rank]:
            self.die(other)
        while True:
            for segment in range(len(self.servers.ledgers)):
                self.push(rank, segment)
            self.leases.advance(rank, self.steps[rank])
            if self.leases.finished:
                return
            self.lease(rank, 1)

    def check(self, epochs: int) -> None:
        law = Counter(itertools.product(range(epochs), range(self.leases.blocks)))
        assert all(applied == law for applied in self.servers.applied)
        counted = {ledger.active.pushes.done for ledger in self.servers.ledgers}
        assert counted == {epochs * self.leases.blocks}  # what the schedule of the learning rate counts


class Restored(Run):
    """A run whose segments die, and are restored from the newest snapshot of the whole state.

    Workers retain all their pushes. A worker pushes again what a restored segment lacks before its next push to it, or
    later, or dies first. A worker that waits for rows stays, with its pushes, and may be admitted again.
    """

    def __init__(self, leases: Leases, servers: Servers) -> None:
        super().__init__(leases, servers)
        slots = len(servers.ledgers[0].marks)
        self.firsts: dict[int, int] = {}  # rank -> the first step of the worker that takes part
        self.retained: dict[int, list] = {rank: [] for rank in range(slots)}  # rank -> pushes (segment, step, block)
        self.repeats: list = []  # (rank, step, earlier)
        self.snapshot: list = []
        self.save()

    def join(self, rank: int) -> None:
        joins = rank not in self.steps
        super().join(rank)
        if joins:
            self.firsts[rank] = self.steps[rank]
            # the pushes that moved the clocks to this step may be lost in a restored segment
            self.pushed[rank] = max(self.pushed[rank], self.steps[rank])
            self.repeats = [each for each in self.repeats if each[0] != rank]

    def lease(self, rank: int, count: int) -> None:
        before = len(self.left.get(rank, []))
        super().lease(rank, count)
        for lease in self.left.get(rank, [])[before:]:
            if lease.blocks.earlier:
                self.repeats.append((rank, lease.first, lease.blocks.earlier))

    def push(self, rank: int, segment: int) -> None:
        segment %= len(self.servers.ledgers)
        if rank in self.steps:
            self.catch_up(rank, segment)
            step = self.steps[rank]
            lease = next((each for each in self.left[rank] if each.first <= step < each.end), None)
            if lease is not None:
                self.retained[rank].append((segment, step, lease.block_of(step)))
        super().push(rank, segment)

    def train(self, rank: int, count: int) -> None:
        """Let a worker join and complete some blocks, or all that there are."""
        self.join(rank)
        for _ in range(count):
            if not self.leases.held(rank, self.steps[rank]):
                self.lease(rank, 1)
            for segment in range(len(self.servers.ledgers)):
                self.push(rank, segment)

    def catch_up(self, rank: int, segment: int) -> None:
        """Push all retained pushes of a rank to a segment again."""
        segment %= len(self.servers.ledgers)
        for at, step, block in self.retained[rank]:
            if at == segment:
                self.servers.push(segment, rank, step, block)

    def wait(self, rank: int) -> None:
        """Let a worker that has pushed all its blocks wait: the servers remove it."""
        if rank in self.steps and not self.sent[rank] and not self.leases.held(rank, self.steps[rank]):
            self.leases.advance(rank, self.steps[rank])  # it waits at this step: all its pushes were applied once
            super().die(rank)

    def die(self, rank: int) -> None:
        super().die(rank)
        self.retained[rank] = []

    def save(self) -> None:
        """Save a snapshot."""
        self.snapshot = [
            (ledger.copy(), Counter(applied))
            for ledger, applied in zip(self.servers.ledgers, self.servers.applied, strict=True)
        ]
        self.leases.saved(self.marks())

    def marks(self) -> dict[int, Marks]:
        """The marks in the snapshot."""
        marks = {rank: [ledger.marks[rank] for ledger, _ in self.snapshot] for rank in self.retained}
        return {rank: Marks(min(each), max(each)) for rank, each in marks.items()}

    def restore(self, *segments: int) -> None:
        """Restore segments, which have died at once, from the snapshot."""
        for segment in {each % len(self.snapshot) for each in segments}:
            ledger, applied = self.snapshot[segment]
            changes = [MemberChange.begin(0, PushCount())]
            changes += [MemberChange(MemberChangeKind.RESUME, rank, self.firsts[rank]) for rank in self.steps]
            changes += [MemberChange(MemberChangeKind.REPEAT, *each) for each in self.repeats]
            self.servers.ledgers[segment] = with_members(ledger, changes)
            self.servers.applied[segment] = Counter(applied)
        self.leases.restore(self.marks())


OPERATIONS = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 2)),
    st.tuples(st.just("die"), st.integers(0, 2)),
    st.tuples(st.just("lease"), st.integers(0, 2), st.integers(1, 4)),
    *[st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, 1))] * 3,
)


def carried_out(run: Run, operations) -> None:
    for name, *given_ in operations:
        getattr(run, name)(*given_)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 5), st.integers(1, 2), st.lists(OPERATIONS, max_size=60), st.integers(0, 2))
def test_each_block_is_applied_once_on_each_segment(blocks, epochs, operations, last):
    run = Run(Leases(blocks, (epochs, 0)), Servers(2, 3))
    carried_out(run, operations)
    run.complete(last)
    run.check(epochs)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 5), st.lists(OPERATIONS, max_size=40), st.lists(OPERATIONS, max_size=30), st.integers(0, 2))
def test_a_run_resumes_from_states_that_segments_took_at_different_moments(blocks, before, after, last):
    """Segment 0 takes its state between `before` and `after`, segment 1 after both; the leases are read at the end."""
    run, servers = Run(Leases(blocks, (2, 0)), Servers(2, 3)), None
    carried_out(run, before)
    servers = run.servers
    early = servers.ledgers[0].copy(), Counter(servers.applied[0])
    carried_out(run, after)
    late = servers.ledgers[1].copy(), Counter(servers.applied[1])
    resumed = Servers(2, 3)
    resumed.ledgers, resumed.applied = [early[0], late[0]], [early[1], late[1]]
    marks = {rank: resumed.marks(rank) for rank in range(3)}
    leases = Leases.from_json(run.leases.to_json(marks), (2, 0))
    for ledger in resumed.ledgers:
        ledger.active = replace(ledger.active, ranks=set())
    again = Run(leases, resumed)
    again.pushed |= Counter({rank: max(ledger.reach(rank) for ledger in resumed.ledgers) for rank in range(3)})
    again.complete(last)
    again.check(2)


RANKS = st.integers(0, 1)
RESTORES = st.one_of(
    st.tuples(st.just("train"), RANKS, st.integers(1, 3)),
    st.tuples(st.just("train"), RANKS, st.integers(1, 3)),
    st.tuples(st.just("lease"), RANKS, st.integers(1, 3)),
    st.tuples(st.just("push"), RANKS, st.integers(0, 1)),
    st.tuples(st.just("die"), RANKS),
    st.tuples(st.just("wait"), RANKS),
    st.tuples(st.just("catch_up"), RANKS, st.integers(0, 1)),
    st.tuples(st.just("save")),
    st.tuples(st.just("restore"), st.integers(0, 1)),
    st.tuples(st.just("restore"), st.just(0), st.just(1)),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 6), st.integers(1, 2), st.lists(RESTORES, min_size=4, max_size=25), st.integers(0, 1))
def test_each_block_is_applied_once_on_segments_that_are_restored(blocks, segments, operations, last):
    run = Restored(Leases(blocks, (2, 0)), Servers(segments, 2))
    carried_out(run, operations)
    run.complete(last)
    run.check(2)


HISTORIES = {
    "the worker waits": (2, "train 0 3, join 1, lease 1 3, wait 0, restore 1", 1),
    "all segments are restored, and the rank is used again": (
        1, "train 0 2, die 0, restore 0, join 1, lease 1 1, join 0, lease 0 1, push 0 0, die 1", 0
    ),
    "the worker waits while all segments are restored, and joins again": (
        1, "train 0 2, restore 0, wait 0, train 0 1", 1
    ),
    "the repetition was announced before": (
        2, "join 0, lease 0 1, push 0 1, die 0, save, join 1, lease 1 1, restore 1", 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_with_restored_segments(name):
    segments, text, last = HISTORIES[name]
    run = Restored(Leases(5, (1, 0)), Servers(segments, 2))
    carried_out(run, [(each.split()[0], *map(int, each.split()[1:])) for each in text.split(", ")])
    run.complete(last)
    run.check(1)


def test_every_order_of_two_deaths_of_a_step_that_one_segment_has():
    """Rank 0 dies between two segments; rank 1 gets its block and dies likewise, at each place; rank 2 completes it."""
    for first, second in itertools.product((0, 1), (None, 0, 1)):
        run = Run(Leases(2, (1, 0)), Servers(2, 3))
        run.join(0)
        run.lease(0, 2)
        run.push(0, first)
        run.die(0)
        run.join(0)  # the slot is used again before the block is leased again
        run.join(1)
        run.lease(1, 1)
        assert run.left[1][0].blocks == BlockRange(0, 0, 1, (PushId(0, 0),))
        if second is not None:
            run.push(1, second)
        run.die(1)
        run.complete(2)
        run.check(1)


def test_a_leaver_gives_back_the_blocks_that_it_has_not_pushed():
    leases = Leases(10, (1, 0))
    leases.join(0, 5)
    assert [(each.first, each.end, each.blocks) for each in leases.lease(0, 4)] == [(5, 9, BlockRange(0, 0, 4))]
    assert leases.held(0, 6) == 3
    assert leases.leave(0, Marks(6, 6)) == [BlockRange(0, 1, 4)]
    assert leases.unleased == 9
    leases.join(1, 6)
    assert [each.blocks for each in leases.lease(1, 5)] == [BlockRange(0, 1, 4), BlockRange(0, 4, 6)]
    assert leases.ranks == [1]


def test_the_epoch_is_that_of_the_oldest_block_that_is_not_done():
    leases = Leases(2, (3, 0))
    for rank in (0, 1):
        leases.join(rank, 0)
    leases.lease(0, 1)
    leases.lease(1, 3)
    assert leases.epoch == 0
    leases.advance(0, 1)
    leases.advance(1, 1)
    assert leases.epoch == 1 and not leases.finished
    leases.lease(0, 9)
    leases.advance(0, 9)
    leases.advance(1, 9)
    assert leases.finished and leases.epoch == 3


def test_the_last_epoch_may_be_incomplete():
    leases = Leases(4, (1, 2))
    leases.join(0, 0)
    assert leases.unleased == 6
    assert [each.blocks for each in leases.lease(0, 9)] == [BlockRange(0, 0, 4), BlockRange(1, 0, 2)]
    leases.advance(0, 6)
    assert leases.finished and leases.epoch == 1


def test_history_that_a_snapshot_has_is_dropped():
    leases = Leases(6, (1, 0))
    leases.join(0, 0)
    for _ in range(3):
        leases.lease(0, 2)
    leases.saved({0: Marks(4, 4)})
    assert leases.undone({0: Marks(4, 5)}) == [BlockRange(0, 4, 5, (PushId(0, 4),)), BlockRange(0, 5, 6)]


def test_ranges_that_follow_each_other_are_joined():
    one = BlockRange(0, 2, 3, (PushId(0, 1),))
    assert join_ranges([BlockRange(0, 0, 1), BlockRange(0, 1, 2), one, BlockRange(0, 3, 4), BlockRange(1, 4, 5)]) == [
        BlockRange(0, 0, 2), one, BlockRange(0, 3, 4), BlockRange(1, 4, 5)
    ]  # fmt: skip


def test_the_longest_time_between_two_visits():
    visits = Visits()
    for now in (10.0, 10.5, 13.5, 14.0):
        visits.record(now)
    visits.interrupt()  # all workers start again
    visits.record(99.0)
    visits.record(99.5)
    assert visits.longest == 3.0


@pytest.mark.parametrize(
    "data", [{}, {"blocks": 2, "next": [0], "undone": []}, {"blocks": 2, "next": [0, 0], "undone": [1]}]
)
def test_damaged_data_is_refused(data):
    with pytest.raises(CheckpointError, match="leases are damaged"):
        Leases.from_json(data, (1, 0))


def test_the_size_of_a_lease():
    assert choose_lease_size(None, 1000, 2) == 1  # the pace is not known
    assert choose_lease_size(0.01, 1000, 2) == round(LEASE_SECONDS / 0.01)
    assert choose_lease_size(1e-9, 10_000, 1) == MOST_BLOCKS
    assert choose_lease_size(30.0, 1000, 2) == 1
    assert choose_lease_size(0.01, 100, 2) == 25  # half an equal share of what is left
    assert choose_lease_size(0.01, 4, 2) == round(LEAST_SECONDS / 0.01)
    assert choose_lease_size(0.1, 1000, 2, gap=3.0) == 60  # twice the longest time between two visits
    assert choose_lease_size(0.1, 1000, 2, gap=LEASE_SECONDS / 4) == choose_lease_size(0.1, 1000, 2)
    assert choose_lease_size(0.1, 40, 2, gap=3.0) == 10  # all workers still end at about the same time
    assert choose_lease_size(0.001, 10_000, 2, gap=60.0) == MOST_BLOCKS
