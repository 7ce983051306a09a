"""The number of workers of an elastic job: each rule, and what holds for all facts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rayps.runtime.size.decide_size import SizeDecision, SizeFacts, assign_ranks, decide_size, gain_of

FACTS = SizeFacts(size=4, least=2, most=8, allowed=8)


def test_nothing_is_done_without_room() -> None:
    assert decide_size(FACTS) == SizeDecision()


def test_it_grows_into_room_after_the_cooldown() -> None:
    assert decide_size(replace(FACTS, room=3)).start == 3
    assert decide_size(replace(FACTS, room=30)).start == 4
    assert decide_size(replace(FACTS, room=3, since_change=29)) == SizeDecision()
    assert decide_size(replace(FACTS, room=3, allowed=5)).start == 1


def test_growth_that_has_not_paid_is_not_repeated() -> None:
    assert decide_size(replace(FACTS, room=3, ceiling=4)) == SizeDecision()
    assert decide_size(replace(FACTS, room=3, ceiling=5)).start == 1


def test_newcomers_join_together_when_all_are_ready() -> None:
    assert decide_size(replace(FACTS, ready=1, starting=1)) == SizeDecision()
    found = decide_size(replace(FACTS, ready=2))
    assert (found.regroup, found.joiners, found.leavers) == (True, 2, ())


def test_the_highest_ranks_leave_if_fewer_are_allowed() -> None:
    found = decide_size(replace(FACTS, allowed=2, why="job b needs 2", since_change=0, ready=1))
    assert (found.regroup, found.leavers, found.drop, found.reason) == (True, (2, 3), 1, "job b needs 2")
    assert decide_size(replace(FACTS, allowed=0)).leavers == (2, 3)  # never below the least


def test_newcomers_beyond_what_is_allowed_are_dropped() -> None:
    assert decide_size(replace(FACTS, allowed=5, starting=2, ready=1)).drop == 2


def test_a_worker_under_notice_leaves() -> None:
    found = decide_size(replace(FACTS, noticed={1: 30.0}, since_change=0))
    assert (found.regroup, found.leavers, found.joiners) == (True, (1,), 0)
    found = decide_size(replace(FACTS, noticed={1: 30.0}, ready=1))
    assert (found.leavers, found.joiners) == ((1,), 1)


def test_replacements_start_first_if_too_few_would_remain() -> None:
    facts = replace(FACTS, size=2, noticed={0: 30.0})
    assert decide_size(facts) == SizeDecision(start=1, reason="notice for worker-0")
    assert decide_size(replace(facts, starting=1)) == SizeDecision()
    found = decide_size(replace(facts, ready=1))
    assert (found.regroup, found.leavers, found.joiners) == (True, (0,), 1)
    late = decide_size(replace(facts, starting=1, noticed={0: 4.0}))
    assert (late.regroup, late.leavers, late.joiners) == (True, (0,), 0)
    assert decide_size(replace(facts, starting=1, noticed={0: None})) == SizeDecision()


def test_if_all_are_under_notice_replacements_join_before_they_leave() -> None:
    facts = replace(FACTS, size=2, noticed={0: 30.0, 1: 20.0})
    assert decide_size(facts).start == 2
    found = decide_size(replace(facts, ready=2))
    assert (found.regroup, found.leavers, found.joiners) == (True, (), 2)
    found = decide_size(replace(facts, size=4))
    assert (found.regroup, found.leavers, found.joiners) == (True, (0, 1), 0)


def test_after_deaths_replacements_do_not_wait() -> None:
    assert decide_size(replace(FACTS, size=1, since_change=0)).start == 1


def test_what_holds_for_all_facts() -> None:
    for size, allowed, room, starting, ready, ceiling, since in itertools.product(
        range(1, 6), range(7), (0, 2), (0, 1), (0, 2), (None, 3), (0.0, 60.0)
    ):
        for noticed in ({}, {0: 20.0}, {0: 1.0}, {0: None, 2: 9.0}):
            facts = SizeFacts(size, 2, 5, allowed, "", room, starting, ready, noticed, since, 30.0, ceiling)
            found = decide_size(facts)
            known = [rank for rank in noticed if rank < size]
            after = size - len(found.leavers) + found.joiners
            assert found.joiners <= ready
            assert found.drop <= starting + ready
            assert set(found.leavers) <= set(range(size))
            if found.regroup:
                assert after <= max(5, size + ready if len(known) == size else size)
                assert after >= min(2, size) or min((s for s in noticed.values() if s), default=99) <= 5
                assert after > 0
                assert set(known) <= set(found.leavers) or len(known) == size
            if found.start:
                assert not found.regroup
                assert known or size + found.start <= max(2, min(5, allowed))


def test_new_ranks() -> None:
    assert assign_ranks(2, (), 2) == [0, 1, None, None]
    assert assign_ranks(4, (2, 3), 0) == [0, 1]
    assert assign_ranks(4, (1,), 0) == [0, 3, 2]
    assert assign_ranks(4, (1,), 1) == [0, None, 2, 3]
    assert assign_ranks(4, (0, 1), 1) == [None, 3, 2] or assign_ranks(4, (0, 1), 1) == [3, None, 2]
    for size in range(1, 6):
        for leaving in itertools.chain.from_iterable(itertools.combinations(range(size), n) for n in range(size)):
            for joiners in range(3):
                found = assign_ranks(size, leaving, joiners)
                staying = set(range(size)) - set(leaving)
                assert sorted(rank for rank in found if rank is not None) == sorted(staying)
                assert found.count(None) == joiners
                assert all(found[rank] == rank for rank in staying if rank < len(found))


@pytest.mark.parametrize(
    ("before", "after", "gain"), [((2, 100), (4, 200), 1.0), ((2, 100), (4, 150), 0.5), ((2, 100), (3, 100), 0.0)]
)
def test_the_gain_of_a_growth(before: tuple[int, float], after: tuple[int, float], gain: float) -> None:
    assert gain_of(before, after) == pytest.approx(gain)
