"""Shares of rows by speed, and ranks that are slow for long."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayps.core.rows.balanced_shares import RowSpeeds, balance_shares, estimate_round_seconds
from rayps.core.rows.row_shares import cut_evenly
from rayps.core.time.slow_ranks import INTERVALS, WINDOW, SlowRanks

seconds_of_a_row = st.floats(0.001, 0.1)


def all_shares(rows, ranks, largest):
    for given_ in itertools.product(range(1, largest + 1), repeat=ranks - 1):
        last = rows - sum(given_)
        if 1 <= last <= largest:
            yield (*given_, last)


@given(st.integers(1, 12), st.lists(seconds_of_a_row, min_size=1, max_size=3))
def test_no_other_shares_have_a_shorter_round(rows, seconds):
    ranks = len(seconds)
    rows = max(rows, ranks)
    now = cut_evenly(rows, ranks)
    largest = max(-(-rows // ranks), int(4 * rows / ranks))
    best = min(estimate_round_seconds(shares, seconds) for shares in all_shares(rows, ranks, largest))
    found = balance_shares(now, seconds, gain=0.0)
    assert (
        estimate_round_seconds(found or now, seconds) <= best + 0.001 + 1e-12
    )  # gains of less than a millisecond do not count
    if found is not None:
        assert estimate_round_seconds(found, seconds) == pytest.approx(best)


@given(st.integers(1, 500), st.lists(seconds_of_a_row, min_size=1, max_size=8))
def test_the_rows_are_kept_and_each_rank_has_some(rows, seconds):
    ranks = len(seconds)
    now = cut_evenly(max(rows, ranks), ranks)
    found = balance_shares(now, seconds)
    if found is not None:
        assert sum(found) == sum(now) and min(found) >= 1
        assert max(found) <= max(4 * sum(now) / ranks, max(now))
        assert estimate_round_seconds(found, seconds) <= 0.9 * estimate_round_seconds(now, seconds)
        assert balance_shares(found, seconds) is None  # the result is stable


@given(st.integers(8, 500), st.integers(1, 8), seconds_of_a_row)
def test_equal_speeds_change_nothing(rows, ranks, seconds):
    assert balance_shares(cut_evenly(rows, ranks), [seconds] * ranks) is None


def test_a_rank_of_half_the_speed_has_half_the_rows():
    assert balance_shares((30, 30, 30), (0.002, 0.001, 0.001)) == (18, 36, 36)


def test_ranks_that_are_equal_again_have_equal_shares_again():
    assert balance_shares((18, 36, 36), (0.001, 0.001, 0.001)) == (30, 30, 30)


@pytest.mark.parametrize("slower, changes", [(1.05, False), (1.3, True)])
def test_a_small_gain_changes_nothing(slower, changes):
    assert (balance_shares((100, 100), (0.001 * slower, 0.001)) is not None) == changes


def test_no_rank_takes_more_than_four_times_an_even_share():
    assert balance_shares((10, 10, 10, 10, 10), (1.0, 1.0, 1.0, 1.0, 0.001)) == (3, 3, 2, 2, 40)


def test_speeds_are_medians_of_the_last_rounds():
    speeds = RowSpeeds(2, window=3)
    for seconds in (9.0, 1.0, 2.0, 30.0):  # the first one is no longer in the window
        assert speeds.seconds is None
        speeds.add(0, seconds, 10)
    for rows in (5, 0, 5, 5):  # a round without rows has no speed
        assert speeds.seconds is None
        speeds.add(1, 1.0, rows)
    assert speeds.seconds == [0.2, 0.2]


# ---- slow ranks


def rounds(watch, seconds, count):
    """Add `count` rounds of ranks that take `seconds`; return what was reported."""
    return [slow for _ in range(count) for rank, each in enumerate(seconds) for slow in watch.add(rank, each, 32)]


def test_a_rank_that_is_slow_for_long_is_reported_once():
    watch = SlowRanks(3)
    assert rounds(watch, (1.0, 2.5, 1.0), INTERVALS * WINDOW - 1) == []
    [slow] = rounds(watch, (1.0, 2.5, 1.0), 1)
    assert (slow.rank, slow.rounds, slow.seconds, slow.rows, slow.others) == (1, 60, 2.5, 32, 1.0)
    assert rounds(watch, (1.0, 2.5, 1.0), 5 * WINDOW) == []


def test_a_rank_that_was_fast_again_is_reported_again():
    watch = SlowRanks(2)
    assert len(rounds(watch, (1.0, 3.0), INTERVALS * WINDOW)) == 1
    assert rounds(watch, (1.0, 1.0), WINDOW) == []
    assert len(rounds(watch, (1.0, 3.0), INTERVALS * WINDOW)) == 1


@pytest.mark.parametrize(
    "seconds, count", [((1.0, 1.9), 200), ((1.0, 5.0), INTERVALS * WINDOW - 1), ((0.001, 0.01), 200), ((7.0,), 200)]
)
def test_a_rank_that_is_little_slower_or_for_a_short_time_is_not_reported(seconds, count):
    assert rounds(SlowRanks(len(seconds)), seconds, count) == []


def test_an_interval_that_was_not_slow_starts_the_count_anew():
    watch = SlowRanks(2)
    for _ in range(5):
        assert rounds(watch, (1.0, 3.0), (INTERVALS - 1) * WINDOW) == []
        assert rounds(watch, (1.0, 1.0), WINDOW) == []
