"""The round after which everyone keeps its share until the driver has it: members as they are, rounds of any speed."""

import random

import pytest

from rayps.core.rows.phase_rounds import Boundary
from rayps.runtime.results.snapshots import SnapshotSchedule
from rayps.tensors.snapshot import RetainedParts


def test_a_boundary_and_the_one_that_follows():
    boundary = Boundary(10, 35)
    assert [boundary.following(n) for n in (0, 1, 10, 11, 30, 31, 35, 99)] == [0, 10, 10, 20, 30, 35, 35, 35]
    assert Boundary(0, 35).following(3) == 35
    assert all(boundary.following(n) in boundary or boundary.following(n) == 0 for n in range(40))


def test_parts_keep_the_newest_two_and_the_wanted_one():
    parts = RetainedParts()
    parts.wanted = 2
    for rounds in range(1, 7):
        parts.retain(rounds, f"after {rounds}")
    assert dict(parts) == {2: "after 2", 5: "after 5", 6: "after 6"}
    parts.wanted = 9
    parts.retain(7, "after 7")
    assert sorted(parts) == [6, 7]


@pytest.mark.parametrize("every", [1, 3, 1000])
@pytest.mark.parametrize("speeds", [(1, 1, 1), (300, 300, 300), (200, 310, 90)])
def test_all_meet_again_and_again_however_fast_the_rounds_are(every, speeds):
    """Members go on by `speeds` rounds between two looks, and each is heard and told at another moment."""
    chance, boundary = random.Random(5), Boundary(every, 10**9)
    schedule, members, collected, met = SnapshotSchedule(boundary), [RetainedParts() for _ in speeds], 0, []
    reached, told = [0] * len(speeds), [0] * len(speeds)
    for _ in range(3000 if every == 1000 else 300):
        facts = []
        for rank, parts in enumerate(members):
            parts.wanted = told[rank]
            ahead = chance.randint(max(1, speeds[rank] // 2), speeds[rank])
            for rounds in range(reached[rank] + 1, reached[rank] + ahead + 1):
                reached[rank] = rounds
                if rounds in boundary or rounds == parts.wanted:
                    parts.retain(rounds, rounds)
            facts.append((reached[rank], sorted(parts)))
        common = set.intersection(*[set(held) for _, held in facts])
        if common and max(common) > collected:
            collected = max(common)
            met.append(collected)
        told = [schedule.choose_round(facts, collected)] * len(speeds)
    assert len(met) >= 2
    assert all(rounds in boundary for rounds in met)


def test_in_a_hurry_any_round_will_do_but_none_beyond_the_end():
    schedule = SnapshotSchedule(Boundary(100, 250))
    assert schedule.choose_round([(3, []), (5, [])], 0) == 100
    schedule.snapshot_soon()
    assert schedule.choose_round([(7, []), (5, [])], 0) == 8
    assert schedule.choose_round([(8, [8]), (6, [])], 0) == 8  # it is waited for
    assert schedule.choose_round([(20, []), (6, [])], 0) == 22  # one was past it: twice as far ahead
    assert schedule.choose_round([(22, [22]), (22, [22])], 22) == 24
    assert schedule.choose_round([(249, []), (249, [])], 24) == 250
