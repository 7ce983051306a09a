"""Exactly once: the ledger and what a worker keeps, alone."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_client.errors import CheckpointError
from torch.optim import SGD

from rayps.core.failpoint import VARIABLE, parse
from rayps.core.job.repeated_pushes import WINDOW, Ledger, merge_ledgers
from rayps.ps.client.replay_buffer import ReplayBuffer
from rayps.ps.protocol.pieces import Extent
from rayps.ps.server.dense_segment import Shard
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout

PUSHES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=60)


def filed(pushes, start=(0, 0, 0)):
    ledger = Ledger(start)
    for rank, step in pushes:
        ledger.add(rank, step)
    return ledger


@given(PUSHES)
def test_each_push_is_new_once_in_any_order(pushes):
    ledger, law = Ledger([0, 0, 0]), set()
    for push in pushes:
        assert ledger.seen(*push) is (push in law)
        assert ledger.add(*push) is (push not in law)
        law.add(push)
    for rank in range(3):
        steps = {step for r, step in law if r == rank}
        assert ledger.marks[rank] == next(n for n in range(99) if n not in steps)
        assert ledger.reach(rank) == max(steps, default=-1) + 1


@given(PUSHES)
def test_it_is_saved_and_loaded_as_plain_data(pushes):
    ledger = filed(pushes)
    data = ledger.to_json()
    assert Ledger.from_json(data) == ledger == ledger.copy()
    assert sum(len(steps) for steps in data["above"].values()) == len(
        {(r, s) for r, s in pushes if s >= ledger.marks[r]}
    )  # nothing is kept twice
    ledger.add(0, 500)
    assert Ledger.from_json(data) != ledger


def test_skipped_steps_are_counted_where_they_are_counted():
    ledger = Ledger([4, 2], {1: [5]}, {0: 3, 1: 1})
    assert Ledger.from_json(ledger.to_json()) == ledger == ledger.copy() != Ledger([4, 2], {1: [5]})
    assert "skipped" not in Ledger([4, 2]).to_json()  # as in the states of earlier versions
    assert Ledger.from_json({"marks": [4, 2], "above": {}}).skipped is None
    ledger.copy().skipped[0] = 9
    assert ledger.skipped == {0: 3, 1: 1}
    assert merge_ledgers([ledger, Ledger([5, 2]), Ledger([3, 3], skipped={0: 2, 1: 2})]).skipped == {0: 3, 1: 2}
    assert merge_ledgers([Ledger([4, 2]), Ledger([5, 2])]).skipped is None


@given(PUSHES, st.integers(0, 2), st.integers(0, 15))
def test_what_nobody_has_any_more_is_skipped_and_counted(pushes, rank, step):
    ledger = filed(pushes)
    held = {s for r, s in pushes if r == rank}
    assert ledger.skip(rank, step) == len(set(range(step)) - held)
    assert all(ledger.seen(rank, s) for s in range(step))
    assert all(ledger.seen(rank, s) is (s in held) for s in range(step, 20))
    assert ledger.marks[rank] == next(n for n in range(99) if n >= step and n not in held)
    assert ledger.skip(rank, step) == 0


@pytest.mark.parametrize(
    ("rank", "step", "words"),
    [(3, 0, "rank 3 is not one"), (-1, 0, "rank -1"), (1, 5 + WINDOW, f"step {5 + WINDOW} before step 5")],
)
def test_what_cannot_be_is_refused_and_changes_nothing(rank, step, words):
    ledger = Ledger([5, 5, 5])
    with pytest.raises(ValueError, match=words):
        ledger.add(rank, step)
    assert ledger == Ledger([5, 5, 5])


@given(st.lists(PUSHES, min_size=1, max_size=3))
def test_anywhere_is_what_one_of_them_has(several):
    common = merge_ledgers([filed(pushes) for pushes in several])
    found = [max(filed(pushes).marks[rank] for pushes in several) for rank in range(3)]
    for rank in range(3):
        for step in range(14):
            assert common.seen(rank, step) is (step < found[rank] or any((rank, step) in p for p in several))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"marks": [1]},
        {"marks": ["x"], "above": {}},
        [],
        None,
        {"marks": [1], "above": {"7": [2]}},
        {"marks": [1], "above": [3]},
        {"marks": [1], "above": {}, "skipped": [1, 2]},
        {"marks": [1], "above": {}, "skipped": ["x"]},
    ],
)
def test_what_is_no_ledger_is_refused(data):
    with pytest.raises(CheckpointError, match="ledger"):
        Ledger.from_json(data)


PIECE = memoryview(bytes(10))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=30), st.integers(0, 120))
def test_what_is_kept_is_bounded_and_has_no_holes(durable, limit):
    kept, marks = ReplayBuffer(limit), [0, 0]
    for step in range(10):
        kept.retain(step, 1.0, {0: PIECE, 1: PIECE})
        for shard, mark in durable[3 * step : 3 * step + 3]:
            marks[shard] = max(marks[shard], min(mark, step + 1))
            kept.durable([shard], mark if mark <= step else step + 1)
        assert kept.bytes <= limit
        for shard in (0, 1):
            held = kept.first(shard)
            first = step + 1 if held is None else held
            assert first >= marks[shard]
            assert [push.step for push in kept.of([shard])] == list(range(first, step + 1))
            assert [push.step for push in kept.of([shard], {shard: first + 1})] == list(range(first + 1, step + 1))
    if limit >= 200:
        assert kept.dropped == 0


def test_a_failpoint_is_read_from_one_variable():
    assert parse("") == {}
    assert parse("a, b=3; c=1;") == {"a, b": 3, "c": 1}
    for wrong in ("a", "a=", "a=0", "=3", "a=-1"):
        with pytest.raises(ValueError, match="PLACE=VISIT"):
            parse(wrong)


def test_a_failpoint_kills_at_its_visit_and_not_before():
    code = (
        "from rayps.core.failpoint import passing\nfor i in range(9): print(i, flush=True); passing('x'); passing('y')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {VARIABLE: "x=3"}, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == [b"0", b"1", b"2"]


# ---------------------------------------------------------------- a world of shards and workers, without sockets


RANKS, STEPS = 2, 5
SLOTS = RANKS * STEPS  # on each shard: the slot of (rank, step)
SLOT_LAYOUT = Layout.of([("slots", torch.empty(2 * SLOTS, dtype=torch.float64))])


def pushed(rank, step):
    value = torch.zeros(SLOTS, dtype=torch.float64)
    value[rank * STEPS + step] = -RANKS  # a push is scaled by 1/N and subtracted
    return value


class World:
    """Two real shards, two workers that keep their pushes, and a network that loses, repeats and reorders."""

    def __init__(self):
        self.saved = [(torch.zeros(SLOTS, dtype=torch.float64), Ledger([0] * RANKS)) for _ in range(2)]
        self.shards = [self.restored(i) for i in range(2)]
        self.kept = [ReplayBuffer(10**9) for _ in range(RANKS)]
        self.step = [0] * RANKS
        self.flying = []  # (shard, its life, rank, step)
        self.lives = [0, 0]
        self.lost = [0, 0]  # what earlier lives of each shard have counted as lost
        self.acked = set()  # (shard, rank, step)

    def restored(self, i):
        params, ledger = self.saved[i]
        return Shard(
            Extent(SLOT_LAYOUT, i * SLOTS, (i + 1) * SLOTS),
            ParameterServer(staleness=None),
            lambda p: SGD(p, lr=1.0),
            params,
            ledger,
        )

    def push(self, rank):
        step = self.step[rank]
        if step < STEPS:
            self.step[rank] += 1
            for i in range(2):
                self.kept[rank].retain(step, 1.0, {i: PIECE})
                self.flying.append((i, self.lives[i], rank, step))

    def deliver(self, n, keep):
        if self.flying:
            message = self.flying[n % len(self.flying)]
            if not keep:
                self.flying.remove(message)
            i, life, rank, step = message
            if life == self.lives[i]:  # a link to a shard that is gone leads nowhere
                self.shards[i].push(rank, step, pushed(rank, step), 1.0)
                self.acked.add((i, rank, step))

    def lose(self, n):
        if self.flying:
            self.flying.pop(n % len(self.flying))

    def again(self, rank, i):
        mark = self.shards[i].ledger.marks[rank]
        self.flying += [(i, self.lives[i], rank, push.step) for push in self.kept[rank].of([i], {i: mark})]

    def save(self, i):
        self.saved[i] = self.shards[i].params.clone(), self.shards[i].ledger.copy()
        for rank in range(RANKS):
            self.kept[rank].durable([i], self.saved[i][1].marks[rank])

    def kill_shard(self, i):
        self.lives[i] += 1
        self.lost[i] += self.shards[i].facts(i).lost
        self.shards[i] = self.restored(i)
        for rank in range(RANKS):
            held = self.kept[rank].first(i)
            self.shards[i].skip(rank, self.step[rank] if held is None else held)
            self.again(rank, i)

    def kill_worker(self, rank):
        self.flying = [message for message in self.flying if message[2] != rank]  # its links are fenced
        self.step[rank] = min(shard.ledger.marks[rank] for shard in self.shards)
        self.kept[rank] = ReplayBuffer(10**9)

    def check(self):
        for i, shard in enumerate(self.shards):
            assert shard.params.max() <= 1, shard.params
            for rank in range(RANKS):
                for step in range(STEPS):
                    held = shard.params[rank * STEPS + step]
                    assert held in (0, 1)
                    if self.saved[i][1].seen(rank, step):  # durable
                        assert held == self.saved[i][0][rank * STEPS + step]
                    if (i, rank, step) in self.acked and not self.lives[i]:
                        assert held == 1

    def finish(self):
        for rank in range(RANKS):
            while self.step[rank] < STEPS:
                self.push(rank)
            for i in range(2):
                self.again(rank, i)
        while self.flying:
            self.deliver(0, False)


MOVES = st.one_of(
    st.tuples(st.just("push"), st.integers(0, RANKS - 1)),
    st.tuples(st.just("deliver"), st.integers(0, 30), st.booleans()),
    st.tuples(st.just("lose"), st.integers(0, 30)),
    st.tuples(st.just("again"), st.integers(0, RANKS - 1), st.integers(0, 1)),
    st.tuples(st.just("save"), st.integers(0, 1)),
    st.tuples(st.just("kill_shard"), st.integers(0, 1)),
    st.tuples(st.just("kill_worker"), st.integers(0, RANKS - 1)),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(MOVES, max_size=60))
def test_whatever_is_lost_repeated_reordered_or_killed_each_push_counts_once(moves):
    world, worker_died = World(), False
    for name, *arguments in moves:
        getattr(world, name)(*arguments)
        worker_died = worker_died or name == "kill_worker"
        world.check()
    world.finish()
    world.check()
    for shard, before in zip(world.shards, world.lost, strict=True):
        missing, lost = int((shard.params == 0).sum()), before + shard.facts(0).lost
        assert missing <= lost
        if not worker_died:
            assert lost == 0  # nobody has forgotten anything
