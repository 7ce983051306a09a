"""Who sheds segments by load, on loads that are made up."""

import random

import numpy as np
import pytest
from rayps_client.errors import ConfigError

from rayps.core.partition import place
from rayps.ps.manager.assign_segments import Balance, Rebalancer, measure_skew

SERVERS = [f"server-{i}" for i in range(4)]


def zipf(segments, ids=100_000, exponent=1.2, number=0):
    """Operations a second by segment, of ids that follow Zipf's law and stand in segments at random."""
    weights = np.arange(1, ids + 1, dtype=float) ** -exponent
    where = np.random.default_rng(number).integers(0, segments, ids)
    return 10_000 * np.bincount(where, weights, segments) / weights.sum()


def world(segments=64, number=0):
    loads = {(1, i): float(load) for i, load in enumerate(zipf(segments, number=number))}
    places = place([f"job/{i}" for i in range(segments)], SERVERS, bound=1.25)
    return loads, {(1, i): SERVERS[at] for i, at in enumerate(places)}


def by_server(loads, at):
    return [sum(load for seat, load in loads.items() if at[seat] == name) for name in SERVERS]


def run(balance, loads, at, looks=60, noise=0.0):
    """Look again and again; how many segments moved, and when the last one did."""
    rebalancer, moved, last, rng = Rebalancer(balance), 0, 0, random.Random(1)
    for look in range(looks):
        seen = {seat: load * (1 + noise * rng.uniform(-1, 1)) for seat, load in loads.items()}
        found = rebalancer.choose_moves(seen, at, SERVERS, look * balance.every)
        at.update(found)
        if found:
            moved, last = moved + len(found), look
    return moved, last


def test_a_hot_table_is_spread():
    before, after = [], []
    for number in range(20):
        loads, at = world(number=number)
        before.append(measure_skew(by_server(loads, at)))
        moved, last = run(Balance(hot=1.2, cool=1.1), loads, at, noise=0.05)
        after.append(measure_skew(by_server(loads, at)))
        heaviest = max(loads.values()) * 4 / sum(loads.values())
        assert after[-1] <= max(1.3, 1.1 * heaviest), (number, before[-1], after[-1], heaviest)
        assert moved < 40 and last < 55  # it comes to rest
    print(f"skew over 20 tables, Zipf 1.2 on 4 servers: {np.mean(before):.2f} before, {np.mean(after):.2f} after")
    assert np.mean(after) < 1.3 < np.mean(before)


def test_a_segment_that_alone_is_too_hot_is_left_alone():
    loads = {(1, i): 10.0 for i in range(16)} | {(1, 0): 1000.0}
    at = {seat: SERVERS[seat[1] % 4] for seat in loads}
    run(Balance(), loads, at)
    assert [seat for seat, name in at.items() if name == at[1, 0]] == [(1, 0)]


def test_idle_and_even_groups_do_not_move():
    loads, at = world()
    assert run(Balance(), {seat: load / 10_000 for seat, load in loads.items()}, dict(at)) == (0, 0)
    even = dict.fromkeys(loads, 100.0)
    assert run(Balance(), even, {seat: SERVERS[seat[1] % 4] for seat in even}, noise=0.3) == (0, 0)
    assert Rebalancer(Balance()).choose_moves({}, {}, [], 0.0) == {}
    assert run(Balance(), {(1, 0): 500.0}, {(1, 0): "server-0"}) == (0, 0)  # it would be as hot elsewhere


def test_a_moment_is_not_enough_and_what_moved_rests():
    _, at = world()
    loads = {seat: 500.0 if name == "server-1" else 100.0 for seat, name in at.items()}
    rebalancer = Rebalancer(Balance(patience=3, at_once=2, rest=10.0))

    def shed(loads, now):
        return rebalancer.choose_moves(loads, at, SERVERS, now)

    assert [len(shed(loads, float(t))) for t in range(2)] == [0, 0]
    first = shed(loads, 2.0)
    assert len(first) == 2
    cold = dict.fromkeys(loads, 100.0)
    assert shed(cold, 3.0) == {}
    later = [shed(loads, float(t)) for t in range(4, 10)]
    assert [len(found) for found in later] == [0, 0, 2, 2, 2, 2]  # the streak began again
    assert not set(first) & {seat for found in later for seat in found}
    shed(cold, 30.0)
    assert set(first) & {seat for t in range(31, 40) for seat in shed(loads, float(t))}  # they have rested


def test_numbers_that_cannot_be():
    for hot, cool in ((1.0, 1.2), (0.5, 0.4), (1.5, 0.9)):
        with pytest.raises(ConfigError, match="1 <= cool <= hot"):
            Balance(hot=hot, cool=cool)
