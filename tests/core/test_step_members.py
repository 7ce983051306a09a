"""Backup workers, pure: which ranks are members of a step, which rows each has, who is reported as late."""

import itertools
import random

import pytest

from rayps.core.rows.backup_portions import NOTHING, Portions
from rayps.core.rows.dropped_steps import DroppedSteps
from rayps.core.rows.step_members import StepMembers
from rayps.ps.protocol.messages import ArrivalKind, pack_members, pack_numbers, unpack_members
from rayps.ps.server.backup_rounds import Arrivals


@pytest.mark.parametrize("needed", [1, 2, 3, 4])
def test_the_first_that_arrive_are_members_in_every_order(needed):
    for order in itertools.permutations(range(4)):
        members = StepMembers(4)
        decided = [members.arrive(rank, 0, needed) for rank in order]
        assert decided == [i == needed - 1 for i in range(4)]
        assert members.since(0, 0) == [tuple(sorted(order[:needed]))]
        assert members.step == 1 and members.missing() == (0, 1, 2, 3)


def test_a_repeated_arrival_counts_once():
    members = StepMembers(3)
    assert [members.arrive(1, 0, 2), members.arrive(1, 0, 2), members.arrive(2, 0, 2)] == [False, False, True]
    assert members.arrive(1, 0, 2) is False  # repeated after the decision
    assert members.since(1, 0) == [(1, 2)] and members.arrived == ()


def test_a_late_rank_learns_all_steps_that_it_has_missed():
    members = StepMembers(3)
    for step in range(5):
        members.arrive(0, step, 2), members.arrive(1 + step % 2, step, 2)
        members.since(0, step + 1)
    assert members.since(2, 1) == [(0, 2), (0, 1), (0, 2), (0, 1)]
    members.since(1, 5)
    assert members.since(2, 5) == []
    with pytest.raises(ValueError, match="has learned them before"):
        members.since(2, 4)


def test_decisions_are_dropped_when_every_rank_has_learned_them():
    members = StepMembers(2)
    for step in range(1000):
        members.arrive(0, step, 1)
        members.since(0, step + 1), members.since(1, step)
    assert len(members._decided) == 1


@pytest.mark.parametrize(
    ("arrival", "words"),
    [
        ((3, 0, 2), "rank 3 does not exist"),
        ((-1, 0, 2), "rank -1 does not exist"),
        ((0, 1, 2), "the members of step 0 are not known"),
        ((0, 0, 4), "expected 1 to 3"),
        ((0, 0, 0), "expected 1 to 3"),
    ],
)
def test_an_arrival_that_cannot_be_is_refused(arrival, words):
    with pytest.raises(ValueError, match=words):
        StepMembers(3).arrive(*arrival)


def test_ranks_that_count_differently_are_refused():
    members = StepMembers(3)
    members.arrive(0, 0, 2)
    with pytest.raises(ValueError, match="of 3 members; expected 2"):
        members.arrive(1, 0, 3)


# ---- on a server


def ask(arrivals, rank, kind, step, needed):
    """What a server does with ARRIVE: record it, then answer, or None."""
    piece = pack_numbers([kind])
    wakes = arrivals.record(rank, step, needed, piece)
    found = arrivals.answer(rank, step, needed, piece)
    return wakes, None if found is None else unpack_members(found)


def test_a_server_answers_when_the_members_are_decided():
    arrivals, kind = Arrivals(3, first=5), ArrivalKind
    assert ask(arrivals, 2, kind.READY, 5, 2) == (False, None)
    assert ask(arrivals, 0, kind.LOOK, 5, 0) == (False, [])
    assert ask(arrivals, 1, kind.READY, 5, 2) == (True, [(1, 2)])
    assert ask(arrivals, 1, kind.READY, 5, 2) == (False, [(1, 2)])  # a repeated request
    assert ask(arrivals, 2, kind.WAIT, 5, 2) == (False, [(1, 2)])
    assert ask(arrivals, 1, kind.READY, 6, 2) == (False, None)
    assert ask(arrivals, 2, kind.READY, 6, 2) == (True, [(1, 2)])
    assert ask(arrivals, 0, kind.READY, 5, 2) == (False, [(1, 2), (1, 2)])  # late, and told of both rounds
    assert ask(arrivals, 0, kind.WAIT, 7, 2) == (False, None)


def test_all_workers_meet_before_a_round():
    arrivals = Arrivals(3, first=0)
    assert [ask(arrivals, rank, ArrivalKind.MEET, 4, 3)[1] for rank in (2, 0, 2)] == [None] * 3
    assert ask(arrivals, 1, ArrivalKind.MEET, 4, 3) == (True, [])
    assert ask(arrivals, 0, ArrivalKind.MEET, 4, 3) == (True, [])  # asked again
    assert ask(arrivals, 0, ArrivalKind.MEET, 8, 3)[1] is None


def test_a_wait_that_is_too_long_names_who_has_not_come():
    arrivals = Arrivals(3, first=0)
    for kind in (ArrivalKind.READY, ArrivalKind.MEET):
        ask(arrivals, 1, kind, 0, 3)
    late = arrivals.too_late(2.0, "worker-1", 0, 3, pack_numbers([ArrivalKind.READY]))
    assert (late.data["ranks"], late.data["peer"]) == ([0, 2], "worker-0")
    assert "for worker-0, worker-2 to complete a gradient (3 are needed): raise `timeout`" in str(late)
    assert "to evaluate" in str(arrivals.too_late(2.0, "worker-1", 0, 3, pack_numbers([ArrivalKind.MEET])))


@pytest.mark.parametrize("piece", [b"", pack_numbers([1, 2]), pack_numbers([9])])
def test_a_piece_that_says_nothing_is_refused(piece):
    with pytest.raises(ValueError, match=r"expected 1, an ArrivalKind|9 is not a valid"):
        Arrivals(2, 0).record(0, 0, 1, piece)


@pytest.mark.parametrize("rounds", [[], [()], [(0,), (), (3, 1, 2)]], ids=str)
def test_members_are_read_as_they_were_written(rounds):
    assert unpack_members(pack_members(rounds)) == rounds


# ---- rows


def epochs(shares, workers, steps, seed, *, always_late=None):
    """Run epochs with random members; return for each epoch its applied portions and the members of each step."""
    draw, found = random.Random(seed), []
    for _ in range(2):
        portions, applied, members = Portions.at(0, shares=shares, workers=workers, steps=steps), [], []
        for _ in range(steps):
            ranks = [rank for rank in portions.holders if rank != always_late or len(portions.holders) == shares]
            chosen = sorted(draw.sample(ranks, portions.needed))
            applied += [portions.held[rank] for rank in chosen]
            members.append(chosen)
            portions = portions.after(chosen)
        assert portions.holders == ()
        found.append((applied, members))
    return found


@pytest.mark.parametrize("shares", [2, 3, 4])
@pytest.mark.parametrize("backup", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_each_portion_is_applied_once_in_an_epoch_whoever_is_late(shares, backup, steps):
    if backup >= shares:
        return
    for seed in range(20):
        for applied, members in epochs(shares, shares + backup, steps, seed):
            assert sorted(applied) == list(range(shares * steps))
            assert all(len(each) == shares for each in members)


def test_a_rank_that_is_always_late_is_a_member_in_the_last_step_only():
    for applied, members in epochs(3, 4, 9, 5, always_late=2):
        assert [2 in each for each in members] == [False] * 8 + [True]
        assert applied[-3:][members[-1].index(2)] == 2  # the portion that it has had since the epoch began


def test_every_choice_of_members_of_a_short_epoch():
    """All of the 4 * 4 * 4 * 1 ways in which one of four workers can be dropped in each step but the last."""
    todo, seen = [(Portions.at(0, shares=3, workers=4, steps=4), ())], set()
    while todo:
        portions, applied = todo.pop()
        for members in itertools.combinations(portions.holders, portions.needed):
            done = (*applied, *(portions.held[rank] for rank in members))
            left = portions.after(members)
            assert left.dropped([]) == left.holders
            if left.holders:
                todo.append((left, done))
            else:
                assert sorted(done) == list(range(12))
                seen.add(done)
    assert len(seen) == 4 * 4 * 4


def test_without_drops_step_k_has_the_portions_of_n_workers():
    portions = Portions.at(0, shares=2, workers=3, steps=4)
    for index in range(4):
        members = sorted(sorted(portions.holders, key=lambda rank: portions.held[rank])[:2])
        assert {portions.held[rank] for rank in members} == {2 * index, 2 * index + 1}
        assert [portions.place(portions.held[rank])[1] for rank in members] == [index, index]
        portions = portions.after(members)


def test_members_that_cannot_be_are_refused():
    portions = Portions.at(3, shares=2, workers=3, steps=4)  # the last step: two of three have a portion
    assert portions.held == (6, 7, NOTHING) and portions.needed == 2
    for members in ([0], [0, 2], [0, 1, 2]):
        with pytest.raises(ValueError, match="cannot be the members"):
            portions.after(members)


def test_the_state_of_a_snapshot_is_restored_or_refused():
    begin = Portions.at(0, shares=3, workers=4, steps=5)
    now = begin.after((0, 1, 3)).after((1, 2, 3))
    fresh = Portions.at(2, shares=3, workers=4, steps=5)
    assert fresh != now and fresh.restored(now.to_list()) == now
    for state in (now.to_list()[:-1], begin.to_list(), [99, *now.held], [now.following, 0, 0, 1, 2]):
        with pytest.raises(ValueError, match="are not those of 4 workers"):
            fresh.restored(state)


# ---- reports


def test_a_rank_is_reported_after_so_many_steps_in_a_row_and_then_after_twice_as_many():
    counted = DroppedSteps(3, limit=2)
    reports = [counted.add([2]) for _ in range(9)]
    assert reports == [[], [2], [], [2], [], [], [], [2], []]
    assert counted.add([1]) == [] and counted.in_a_row == [0, 1, 0]
    assert [counted.add([2]), counted.add([2])] == [[], [2]]
    assert counted.summary() == "worker-2 in 11, worker-1 in 1 of 12 steps"


def test_a_step_without_rows_does_not_end_a_row():
    counted = DroppedSteps(2, limit=2)
    assert [counted.add([1]), counted.add([], idle=[1]), counted.add([1])] == [[], [], [1]]
    assert DroppedSteps(2).summary() == ""
