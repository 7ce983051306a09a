"""The adaptive staleness bound: what it costs, where it moves, and that servers follow at once."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayps.core.grid import Grid
from rayps.core.strategy.adaptive_staleness import (
    FIRST,
    GAIN,
    LADDER,
    ROUNDS,
    TRUST,
    BoundControl,
    BoundCost,
    PushFacts,
    cost_of,
    estimate_lost_share,
    find_mean_and_error,
    is_complete,
)
from rayps.runtime.driver.bound_mover import BoundMover
from rayps.runtime.records.journal import Journal
from rayps.strategies.catalogue import parse

NONE = LADDER[-1]


def cost(waiting=0.0, lost=0.0, loss=1.0, error=0.01):
    return BoundCost(24, 10.0, 10.0 * waiting, lost, loss, error)


# ---- what a bound costs


def facts(count, exchange=0.0, between=4, agreement=0.5, loss=1.0, seconds=1.0):
    """Return rounds of 4 ranks; agreements and losses vary by a tenth around their means."""
    return [
        PushFacts(i % 4, seconds, exchange, between, agreement and agreement + 0.1 * (-1) ** i, loss + 0.1 * (-1) ** i)
        for i in range(count)
    ]


def test_waiting_is_what_exceeds_the_shortest_exchange():
    found = cost_of([*facts(12, exchange=0.1), *facts(12, exchange=0.6)], 4)
    assert (found.rounds, found.seconds) == (24, 24.0)
    assert found.waited == pytest.approx(12 * 0.5) and found.waiting == pytest.approx(0.25)
    assert found.value == pytest.approx(0.75)


def test_an_interval_without_rounds_costs_nothing():
    found = cost_of([], 4)
    assert (found.rounds, found.waiting, found.lost, found.value) == (0, 0.0, 0.0, 1.0)
    assert math.isnan(found.loss)


def test_old_pushes_that_make_no_progress_are_lost():
    rounds = [*facts(60), *facts(20, between=20, agreement=1e-9)]
    assert estimate_lost_share(rounds, 4) == pytest.approx(0.25, abs=0.05)
    assert (
        estimate_lost_share(rounds, 20) == 0.0
    )  # with 20 workers, 20 pushes in between are those of a synchronous round


def test_old_pushes_that_go_backwards_cost_more_than_their_share():
    assert estimate_lost_share([*facts(60), *facts(20, between=20, agreement=-0.5)], 4) > 0.4


def test_a_difference_within_noise_costs_nothing():
    noisy = [PushFacts(0, 1.0, 0.0, b, a) for b in (4, 20) for a in (-1.0, 1.0, 0.9, -0.8, 0.2)]
    assert estimate_lost_share(noisy, 4) == 0.0
    assert estimate_lost_share(facts(24, agreement=None), 4) == 0.0
    assert estimate_lost_share([*facts(24), *facts(1, between=20, agreement=-1.0)], 4) == 0.0  # one push has no error


def test_means_and_their_errors():
    assert find_mean_and_error([]) == (pytest.approx(math.nan, nan_ok=True), math.inf)
    assert find_mean_and_error([2.0]) == (2.0, math.inf)
    assert find_mean_and_error([1.0, 3.0]) == (2.0, 1.0)


def test_an_interval_is_complete_after_some_rounds_or_clear_waiting():
    assert not is_complete(facts(ROUNDS * 4 - 1), 4)
    assert is_complete(facts(ROUNDS * 4), 4)
    clear = [*facts(4), *facts(4, exchange=0.9)]
    assert is_complete(clear, 4) and not is_complete(clear[:-1], 4)


# ---- where the bound moves


def test_waiting_raises_the_bound_faster_and_faster():
    control = BoundControl()
    moves = [control.after(cost(waiting=0.4)) for _ in range(3)]
    assert [move and (move.old, move.new) for move in moves] == [(8, 16), (16, None), None]


def test_lost_progress_lowers_the_bound():
    control = BoundControl(8)
    move = control.after(cost(lost=0.3))
    assert (move.old, move.new, move.rises) == (8, 4, False)


def test_without_costs_the_bound_stays():
    for bound in LADDER:
        control = BoundControl(bound)
        assert all(control.after(cost(waiting=GAIN / 2, lost=GAIN / 3)) is None for _ in range(50))


@pytest.mark.parametrize("bound, waiting, lost", [(None, 0.9, 0.0), (0, 0.0, 0.9)])
def test_the_ends_of_the_ladder_are_ends(bound, waiting, lost):
    assert BoundControl(bound).after(cost(waiting, lost)) is None


def test_a_rising_loss_halves_the_way_to_the_lowest_bound_and_is_remembered():
    control = BoundControl(16)
    assert control.after(cost(loss=1.0)) is None
    move = control.after(cost(loss=2.0))
    assert (move.old, move.new, move.rises) == (16, 2, True)
    quiet = [control.after(cost(waiting=0.5, loss=1.0)) for _ in range(TRUST)]
    assert quiet == [None] * TRUST  # the bounds above are refused for so long
    assert control.after(cost(waiting=0.5, loss=1.0)).new == 4
    assert control.after(cost(loss=2.0)).new == 1
    quiet = [control.after(cost(waiting=0.5, loss=1.0)) for _ in range(TRUST)]
    assert [move and move.new for move in quiet].count(2) <= 1  # 2 was refused once, and greater bounds twice
    assert control.bound in (1, 2)


def test_a_loss_that_rises_within_noise_moves_nothing():
    control = BoundControl(16)
    for i in range(50):
        assert control.after(cost(loss=1.0 + 0.02 * (i % 2), error=0.01)) is None


def test_a_rising_loss_at_the_lowest_bound_has_no_lower_one():
    control = BoundControl(0)
    assert [control.after(cost(loss=loss)) for loss in (1.0, 5.0)] == [None, None]


class Machine:
    """A job whose bounds have known values: waiting falls and lost progress grows with the bound."""

    def __init__(self, waiting, lost):
        self.waiting, self.lost = dict(zip(LADDER, waiting, strict=True)), dict(zip(LADDER, lost, strict=True))

    def cost(self, bound):
        return cost(self.waiting[bound], self.lost[bound])

    def run(self, intervals):
        """Return the bounds of the intervals."""
        control, bounds = BoundControl(), []
        for _ in range(intervals):
            bounds.append(control.bound)
            control.after(self.cost(control.bound))
        return bounds


CURVES = [(0.0,) * 7, (0.5,) * 6 + (0.0,), (0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0), (0.6, 0.1, 0.02, 0.0, 0.0, 0.0, 0.0)]


@pytest.mark.parametrize("waiting, lost", list(itertools.product(CURVES, [curve[::-1] for curve in CURVES])))
def test_the_bound_finds_a_value_from_which_no_neighbour_is_better_and_does_not_flap(waiting, lost):
    machine = Machine(waiting, lost)
    bounds = machine.run(2000)
    values = [machine.cost(bound).value for bound in bounds]
    late = bounds[-1000:]
    moves = sum(a != b for a, b in itertools.pairwise(late))
    assert moves <= 40  # a trial is two moves; the trust in what is known doubles with each trial that was no gain
    home = max(set(late), key=late.count)
    at = LADDER.index(home)
    near = [LADDER[i] for i in (at - 1, at + 1) if 0 <= i < len(LADDER)]
    assert machine.cost(home).value >= max(machine.cost(each).value for each in near) - GAIN - 1e-9
    assert sum(values[-1000:]) / 1000 >= machine.cost(home).value - 0.05  # trials cost little


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 10), st.floats(0, 1)), max_size=60))
def test_whatever_is_measured_the_bound_is_one_of_the_ladder(measured):
    control = BoundControl()
    for waiting, lost, loss, error in measured:
        before = control.bound
        move = control.after(cost(waiting, lost, loss, error))
        assert control.bound in LADDER
        assert (move is None) == (control.bound == before)
        if move is not None:
            assert (move.old, move.new) == (before, control.bound)


# ---- the driver's part


class FakeGroup:
    def __init__(self, workers=4):
        self.grid, self.moved = Grid(workers), []

    def move_bound(self, staleness):
        self.moved.append(staleness)


def points(round, waits, loss=1.0):
    return [
        {
            "kind": "round",
            "rank": rank,
            "round": round,
            "seconds": 1.0,
            "wait": wait,
            "between": 4,
            "agreement": None,
            "loss": loss,
        }
        for rank, wait in enumerate(waits)
    ]


def mover_of(strategy):
    journal = Journal()
    mover = BoundMover(journal)
    mover.begin(parse(strategy)[0].strategy)
    return mover, journal


def test_the_mover_tells_servers_the_bound_and_the_journal_why():
    (mover, journal), group = mover_of("parameter_server:staleness=auto"), FakeGroup()
    for round in range(3):  # the first round of a generation is not measured
        mover.follow(group, points(round, (0.0, 0.5, 0.5, 0.5)))
    assert group.moved == [16] and mover.bound == 16
    [event] = journal.events
    assert event["kind"] == "staleness" and (event["old"], event["new"]) == (8, 16)
    assert (event["rounds"], event["seconds"], event["waited"], event["lost"]) == (8, 8.0, 3.0, 0.0)
    assert event["message"] == (
        "the staleness bound moves from 8 to 16: in 8 rounds the workers waited 3.00 of 8.00 s (38%), and old pushes "
        "lost 0% of the progress"
    )
    mover.follow(group, points(3, (0.0, 0.9, 0.9, 0.9)))  # this round was in progress when the bound moved
    for round in range(4, 10):
        mover.follow(group, points(round, (0.0,) * 4))
    assert group.moved == [16]


def test_the_mover_reports_a_rising_loss():
    (mover, journal), group = mover_of("parameter_server:staleness=auto"), FakeGroup()
    for round in range(7):
        mover.follow(group, points(round, (0.0,) * 4, loss=1.0))
    for round in range(7, 13):
        mover.follow(group, points(round, (0.0,) * 4, loss=3.0))
    assert group.moved == [2]
    assert journal.events[0]["message"] == (
        "the staleness bound moves from 8 to 2: the loss has risen to 3 in 24 rounds"
    )


def test_a_new_generation_gets_the_bound_that_was_found():
    (mover, _), group = mover_of("parameter_server:staleness=auto"), FakeGroup()
    for round in range(3):
        mover.follow(group, points(round, (0.0, 0.5, 0.5, 0.5)))
    mover.begin(parse("parameter_server:staleness=auto")[0].strategy)
    mover.follow(group, [])
    mover.follow(group, [])
    assert group.moved == [16, 16]


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:staleness=3", "downpour"])
def test_another_strategy_moves_no_bound(strategy):
    (mover, journal), group = mover_of(strategy), FakeGroup()
    for round in range(30):
        mover.follow(group, [{"kind": "round", "rank": 0, "round": round}])
    assert group.moved == journal.events == [] and mover.bound == FIRST
