"""Exactly once: the ledger and what a worker keeps, alone."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayps.errors import CheckpointError
from rayps.failpoint import VARIABLE, parse
from rayps.server.kept import Kept
from rayps.server.ledger import WINDOW, Ledger, anywhere
from rayps.server.messages import Kind
from rayps.server.ways import Ask

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
        {(r, s) for r, s in pushes if s >= ledger.marks[r]})  # nothing is kept twice
    ledger.add(0, 500)
    assert Ledger.from_json(data) != ledger


@given(PUSHES, st.integers(0, 2), st.integers(0, 15))
def test_what_nobody_has_any_more_is_skipped_and_counted(pushes, rank, step):
    ledger = filed(pushes)
    held = {s for r, s in pushes if r == rank}
    assert ledger.skip(rank, step) == len(set(range(step)) - held)
    assert all(ledger.seen(rank, s) for s in range(step))
    assert all(ledger.seen(rank, s) is (s in held) for s in range(step, 20))
    assert ledger.marks[rank] == next(n for n in range(99) if n >= step and n not in held)
    assert ledger.skip(rank, step) == 0


@pytest.mark.parametrize(("rank", "step", "words"), [
    (3, 0, "rank 3 is not one"), (-1, 0, "rank -1"), (1, 5 + WINDOW, f"step {5 + WINDOW} before step 5"),
])
def test_what_cannot_be_is_refused_and_changes_nothing(rank, step, words):
    ledger = Ledger([5, 5, 5])
    with pytest.raises(ValueError, match=words):
        ledger.add(rank, step)
    assert ledger == Ledger([5, 5, 5])


@given(st.lists(PUSHES, min_size=1, max_size=3))
def test_anywhere_is_what_one_of_them_has(several):
    common = anywhere([filed(pushes) for pushes in several])
    found = [max(filed(pushes).marks[rank] for pushes in several) for rank in range(3)]
    for rank in range(3):
        for step in range(14):
            assert common.seen(rank, step) is (step < found[rank] or any((rank, step) in p for p in several))


@pytest.mark.parametrize("data", [{}, {"marks": [1]}, {"marks": ["x"], "above": {}}, [], None,
                                  {"marks": [1], "above": {"7": [2]}}, {"marks": [1], "above": [3]}])
def test_what_is_no_ledger_is_refused(data):
    with pytest.raises(CheckpointError, match="ledger"):
        Ledger.from_json(data)


def said(step):
    return [Ask(0, Kind.PUSH, step, 0)]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=30), st.integers(0, 120))
def test_what_is_kept_is_bounded_and_has_no_holes(durable, limit):
    kept, marks = Kept(2, limit), [0, 0]
    for step in range(10):
        for shard in (0, 1):
            kept.keep(shard, step, said(step), 10)
        for shard, mark in durable[3 * step : 3 * step + 3]:
            marks[shard] = max(marks[shard], min(mark, step + 1))
            kept.durable(shard, mark if mark <= step else step + 1)
        assert kept.bytes <= limit
        for shard in (0, 1):
            first = kept.first(shard, step + 1)
            assert first >= marks[shard]
            assert [s for s, _ in kept.since(shard, 0)] == list(range(first, step + 1))
            assert [s for s, _ in kept.since(shard, first + 1)] == list(range(first + 1, step + 1))
    if limit >= 200:
        assert kept.dropped == 0


def test_a_failpoint_is_read_from_one_variable():
    assert parse("") == {}
    assert parse("a, b=3; c=1;") == {"a, b": 3, "c": 1}
    for wrong in ("a", "a=", "a=0", "=3", "a=-1"):
        with pytest.raises(ValueError, match="PLACE=VISIT"):
            parse(wrong)


def test_a_failpoint_kills_at_its_visit_and_not_before():
    code = "from rayps.failpoint import passing\nfor i in range(9): print(i, flush=True); passing('x'); passing('y')"
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {VARIABLE: "x=3"}, capture_output=True,
                           timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == [b"0", b"1", b"2"]
