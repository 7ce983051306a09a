import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayps.core.job.repeated_pushes import Ledger
from rayps.core.strategy.staleness_bound import ActiveRanks, Clock, MovedBound


def test_a_barrier_lets_nobody_lead():
    clock = Clock(dict.fromkeys(range(3), 0), 0)
    assert [clock.may_pull(r) for r in range(3)] == [True] * 3
    clock.done[1] += 1
    assert [clock.may_pull(r) for r in range(3)] == [True, False, True]
    assert (clock.lead(1), clock.slowest, clock.laggards()) == (1, 0, [0, 2])
    clock.done[0] += 1
    clock.done[2] += 1
    assert clock.may_pull(1)
    assert clock.laggards() == [0, 1, 2]


@pytest.mark.parametrize("staleness", [0, 1, 3, 7])
def test_the_bound_is_the_largest_lead_at_which_a_pull_is_served(staleness):
    clock = Clock(dict.fromkeys(range(2), 0), staleness)
    for _ in range(staleness):
        clock.done[0] += 1
        assert clock.may_pull(0)
    clock.done[0] += 1
    assert not clock.may_pull(0)
    clock.done[1] += 1
    assert clock.may_pull(0)


def test_a_worker_that_repeats_a_push_pulls_by_its_own_count():
    clock = Clock({0: 3, 1: 1}, 1)
    assert not clock.may_pull(0) and clock.may_pull(0, 2)
    assert not clock.may_pull(0, 3) and not clock.may_pull(0, 4)


def test_without_a_bound_anyone_may_always_pull():
    clock = Clock(dict.fromkeys(range(2), 0), None)
    for step in range(1000):
        clock.done[0] = step + 1
        assert clock.may_pull(0)


def test_an_empty_group_has_a_slowest():
    assert Clock({}, 0).slowest == 0


@given(st.integers(1, 5), st.integers(0, 4), st.lists(st.integers(0, 4), max_size=200))
def test_whoever_obeys_the_clock_keeps_the_bound(size, staleness, moves):
    clock = Clock(dict.fromkeys(range(size), 0), staleness)
    for move in moves:
        rank = move % size
        if clock.may_pull(rank):
            clock.done[rank] += 1
        spread = max(clock.done.values()) - min(clock.done.values())
        assert spread <= staleness + 1
        assert any(clock.may_pull(r) for r in range(size))  # somebody may always go on


def test_only_the_clocks_of_active_ranks_count():
    active = ActiveRanks({0, 1})
    clock = Clock({0: 5, 1: 3, 2: 0}, 1, active)
    assert (clock.slowest, clock.laggards(), clock.lead(0)) == (3, [1], 2)
    assert not clock.may_pull(0)
    active.ranks.discard(1)  # the slowest leaves: the pull that waited for it is served
    assert clock.may_pull(0) and clock.slowest == 5
    active.ranks.clear()
    active.floor = 5
    assert (clock.slowest, clock.laggards()) == (5, [])


@given(st.integers(0, 3), st.lists(st.tuples(st.sampled_from("ajrp"), st.integers(0, 3)), max_size=100))
def test_ranks_that_join_and_leave_keep_the_bound_and_block_nobody(staleness, moves):
    ledger = Ledger([0] * 4, active=ActiveRanks())
    clock = Clock(ledger.marks, staleness, ledger.active)
    slowest, pushed = 0, set()
    for move, rank in moves:
        if move == "j" and rank not in ledger.active.ranks:
            first = ledger.admit(rank, 0)
            assert first >= slowest and not any(r == rank and step >= first for r, step in pushed)
        elif move == "r":
            ledger.remove(rank)
        elif rank in ledger.active.ranks and clock.may_pull(rank):
            pushed.add((rank, ledger.marks[rank]))
            ledger.add(rank, ledger.marks[rank])
        assert clock.slowest >= slowest  # also when the slowest rank leaves or all do
        slowest = clock.slowest
        assert not ledger.active.ranks or any(clock.may_pull(r) for r in ledger.active.ranks)
        assert Ledger.from_json(ledger.to_json()) == ledger == ledger.copy()
    assert all(ledger.applied(*push) for push in pushed)
    steps = {rank: {step for r, step in pushed if r == rank} for rank in range(4)}
    assert all(ledger.applied(r, s) == (s in steps[r]) for r in range(4) for s in range(ledger.marks[r]))


def test_a_moved_bound_counts_leads_from_the_clocks_that_it_was_given():
    clock = Clock({0: 50, 1: 10}, None)
    assert clock.may_pull(0)
    clock.move(MovedBound(2, (50, 10)))
    assert clock.may_pull(0) and clock.lead(0) == 40  # the lead itself is reported as it is
    clock.done[0] = 52
    assert clock.may_pull(0)
    clock.done[0] = 53
    assert not clock.may_pull(0) and clock.may_pull(0, 52)
    clock.done[1] = 11
    assert clock.may_pull(0)
    clock.move(MovedBound(None, (53, 11)))
    assert clock.may_pull(0)
    clock.move(None)
    assert clock.staleness is None


def test_a_rank_without_a_clock_in_the_bound_counts_from_zero():
    clock = Clock({0: 5, 1: 4, 2: 0}, 0)
    clock.move(MovedBound(1, (4, 4)))
    assert [clock.may_pull(rank) for rank in range(3)] == [True, True, True]
    clock.done[0] = 6
    assert not clock.may_pull(0)


def test_a_rank_that_is_behind_does_not_wait_for_one_that_has_ended():
    clock = Clock({0: 60, 1: 75}, None)
    clock.move(MovedBound(2, (60, 75)))
    clock.done[1] = 80  # its last round
    for clock.done[0] in range(60, 81):
        assert clock.may_pull(0)


@given(st.integers(1, 4), st.data())
def test_all_ranks_reach_their_last_round(size, data):
    """Whatever bounds follow each other, and whoever is faster: no rank waits for good."""
    clock = Clock(dict.fromkeys(range(size), 0), 1)
    last = data.draw(st.integers(1, 12))
    while any(done < last for done in clock.done.values()):
        if data.draw(st.integers(0, 3)) == 0:
            bound = data.draw(st.sampled_from([0, 1, 4, None]))
            clock.move(MovedBound(bound, tuple(clock.done.values())))
        able = [rank for rank, done in clock.done.items() if done < last and clock.may_pull(rank)]
        assert able
        clock.done[data.draw(st.sampled_from(able))] += 1


@given(st.integers(1, 4), st.data())
def test_whoever_obeys_moved_bounds_never_stops_for_good(size, data):
    clock = Clock(dict.fromkeys(range(size), 0), 1)
    for _ in range(data.draw(st.integers(0, 60))):
        if data.draw(st.integers(0, 9)) == 0:
            bound = data.draw(st.sampled_from([0, 1, 4, None]))
            clock.move(MovedBound(bound, tuple(clock.done.values())))
        rank = data.draw(st.integers(0, size - 1))
        if clock.may_pull(rank):
            clock.done[rank] += 1
        assert any(clock.may_pull(each) for each in range(size))


@given(st.integers(1, 4), st.integers(0, 3), st.data())
def test_a_bound_from_zero_is_the_same_bound(size, staleness, data):
    done = {rank: data.draw(st.integers(0, 6)) for rank in range(size)}
    moved = Clock(done, None)
    moved.move(MovedBound(staleness, (0,) * size))
    plain = Clock(done, staleness)
    for rank in range(size):
        step = data.draw(st.one_of(st.none(), st.integers(0, 6)))
        assert moved.may_pull(rank, step) == plain.may_pull(rank, step)
