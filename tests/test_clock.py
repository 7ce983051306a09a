import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayps.clock import Clock


def test_a_barrier_lets_nobody_lead():
    clock = Clock(range(3), 0)
    assert [clock.may_pull(r) for r in range(3)] == [True] * 3
    clock.tick(1, 0)
    assert [clock.may_pull(r) for r in range(3)] == [True, False, True]
    assert (clock.lead(1), clock.slowest, clock.laggards()) == (1, 0, [0, 2])
    clock.tick(0, 0)
    clock.tick(2, 0)
    assert clock.may_pull(1)
    assert clock.laggards() == [0, 1, 2]


@pytest.mark.parametrize("staleness", [0, 1, 3, 7])
def test_the_bound_is_the_largest_lead_at_which_a_pull_is_served(staleness):
    clock = Clock(range(2), staleness)
    for step in range(staleness):
        clock.tick(0, step)
        assert clock.may_pull(0)
    clock.tick(0, staleness)
    assert not clock.may_pull(0)
    clock.tick(1, 0)
    assert clock.may_pull(0)


def test_without_a_bound_anyone_may_always_pull():
    clock = Clock(range(2), None)
    for step in range(1000):
        assert clock.tick(0, step)
        assert clock.may_pull(0)


def test_a_push_counts_once():
    clock = Clock([0, 1], 1, start=5)
    assert clock.tick(0, 5) is True
    assert clock.tick(0, 5) is False
    assert clock.tick(0, 2) is False
    assert clock.done == {0: 6, 1: 5}


@pytest.mark.parametrize(
    ("rank", "step", "words"), [(0, 7, "step 7 before step 5"), (2, 5, "rank 2"), (-1, 5, "rank -1")])
def test_what_cannot_be_is_refused_and_changes_nothing(rank, step, words):
    clock = Clock([0, 1], 1, start=5)
    with pytest.raises(ValueError, match=words):
        clock.tick(rank, step)
    assert clock.done == {0: 5, 1: 5}


def test_advance_never_goes_back():
    clock = Clock([0], None)
    clock.advance(0, 4)
    clock.advance(0, 2)
    assert clock.done == {0: 4}


def test_an_empty_group_has_a_slowest():
    assert Clock([], 0).slowest == 0


@given(st.integers(1, 5), st.integers(0, 4), st.lists(st.integers(0, 4), max_size=200))
def test_whoever_obeys_the_clock_keeps_the_bound(size, staleness, moves):
    clock = Clock(range(size), staleness)
    for move in moves:
        rank = move % size
        if clock.may_pull(rank):
            clock.tick(rank, clock.done[rank])
        spread = max(clock.done.values()) - min(clock.done.values())
        assert spread <= staleness + 1
        assert any(clock.may_pull(r) for r in range(size))  # somebody may always go on
