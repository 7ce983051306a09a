"""How many servers a group has: the decision from the load, and what follows from it under every constant load."""

import itertools

import pytest
from rayps_client.errors import ConfigError

from rayps.ps.manager.decide_scale import (
    Measured,
    ScaleFacts,
    ScaleRule,
    ServerScaler,
    ServerUse,
    SetServers,
    changed,
    decide_scale,
    is_high,
    is_low,
    paid,
)
from rayps.ps.manager.host_starter import choose_node

RULE = ScaleRule(2, 8)
LONG = {"high_for": 1e6, "low_for": 1e6}


def uses(count, total, memory=0.3, touches=1000.0):
    """`count` servers that share a load of `total` server-seconds a second."""
    return tuple(ServerUse(min(1.0, total / count), touches / count, 10**6, memory, 10**9) for _ in range(count))


def facts(count, total, **more):
    options = {"replicas": 1, "room": 100, **LONG} | more
    return ScaleFacts(uses(count, total), count, **options)


def test_the_rule_refuses_what_contradicts_itself():
    for least, most in ((0, 4), (5, 4), (-1, 2)):
        with pytest.raises(ConfigError, match=r"give the least number and then the most, such as 2\.\.8"):
            ScaleRule(least, most)
    for shares in ({"low": 0.6}, {"goal": 0.8}, {"high": 1.2}, {"low": 0.0}):
        with pytest.raises(ConfigError, match="0 < low < goal < high <= 1"):
            ScaleRule(2, 8, **shares)


@pytest.mark.parametrize("count", range(1, 11))
def test_every_decision_keeps_its_bounds(count):
    """All combinations of what bounds a decision; and none is made while one of the conditions is missing."""
    for total, room, replicas, high, low, since, settled, gain, memory in itertools.product(
        (0.0, 0.3, 0.9, 1.9, 3.5, 9.9),
        (0, 1, 3, 100),
        (0, 1, 3),
        (0.0, 5.0, 100.0),
        (0.0, 60.0, 1000.0),
        (0.0, 29.9, 30.0),
        (True, False),
        (True, False),
        (0.3, 0.95),
    ):
        use = uses(count, total, memory)
        found = decide_scale(RULE, ScaleFacts(use, count, replicas, room, settled, high, low, since, gain))
        least = max(RULE.least, replicas + 1)
        if not settled:
            assert found is None
        elif count < least or count > RULE.most:
            assert found == SetServers(least if count < least else RULE.most, f"the group has {least} to 8 servers")
        elif found is None:
            continue
        else:
            assert since >= RULE.cooldown and least <= found.servers <= RULE.most and found.servers != count
            assert found.reason
            if found.servers > count:
                assert high >= RULE.patience and is_high(RULE, use)
                assert found.servers <= min(2 * count, count + room)
                assert gain or memory > RULE.memory
            else:
                assert low >= RULE.calm and is_low(RULE, use) and found.servers == count - 1


def test_a_constant_load_moves_the_number_in_one_direction_and_then_never():
    """Loads in hundredths from every number of servers: no number comes back, whatever the order of changes."""
    for start, hundredths in itertools.product(range(1, 9), range(0, 801, 5)):
        count, path = start, [start]
        for _ in range(20):
            found = decide_scale(RULE, facts(count, hundredths / 100, replicas=0))
            if found is None:
                break
            count = found.servers
            path.append(count)
        assert decide_scale(RULE, facts(count, hundredths / 100, replicas=0)) is None
        ways = {b > a for a, b in itertools.pairwise(path) if a >= RULE.least}
        assert len(ways) <= 1, path


def test_the_number_is_that_at_which_the_servers_would_be_busy_as_the_goal_says():
    assert decide_scale(RULE, facts(2, 1.9)).servers == 4
    assert decide_scale(RULE, facts(3, 2.4)).servers == 5
    assert "95%" in decide_scale(RULE, facts(2, 1.9)).reason
    assert decide_scale(RULE, facts(4, 4.0)).servers == 8
    assert decide_scale(RULE, facts(4, 4.0, room=1)).servers == 5
    assert decide_scale(RULE, facts(4, 4.0, room=0)) is None
    assert decide_scale(RULE, facts(4, 0.5)).servers == 3
    assert "one less suffices" in decide_scale(RULE, facts(4, 0.5)).reason
    assert decide_scale(RULE, facts(4, 1.2)) is None  # three would be busy for 40%


def test_memory_adds_one_server_and_keeps_it():
    full = tuple(ServerUse(0.1, 1.0, 2 * 10**8, 0.9, 10**9) for _ in range(2))
    found = decide_scale(RULE, ScaleFacts(full, 2, 1, 5, **LONG))
    assert found.servers == 3 and "90% of a host's memory" in found.reason
    after = tuple(ServerUse(0.1, 1.0, 4 * 10**8 // 3, 0.9 - 2 / 30, 10**9) for _ in range(3))
    assert not is_high(RULE, after) and not is_low(RULE, after)  # with two, the memory would be too full again


def test_what_a_growth_has_gained():
    before = Measured(2, 0.9, 1000.0)
    assert paid(before, Measured(4, 0.9, 1200.0)) and paid(before, Measured(4, 0.5, 1000.0))
    assert not paid(before, Measured(4, 0.88, 1050.0))
    assert changed(before, Measured(2, 0.5, 700.0)) and changed(before, Measured(2, 0.5, 1300.0))
    assert not changed(before, Measured(2, 0.1, 1100.0))


def run(load, seconds, rule=RULE, count=2, touches=lambda n, t: 1000.0):
    """The numbers of servers over time: a change takes three seconds to settle."""
    scaler, found, until = ServerScaler(), [], 0.0
    for now in range(seconds):
        if not scaler.due(rule, float(now)):
            continue
        use = uses(count, load(count, now), touches=touches(count, now))
        decision = scaler.decide(rule, ScaleFacts(use, count, 1, 100, settled=now >= until), float(now))
        if decision is not None:
            found.append((now, decision.servers))
            count, until = decision.servers, now + 3
    return found


def test_growth_waits_for_patience_and_shrinking_for_calm():
    assert run(lambda n, t: 1.9, 300) == [(5, 4)]
    assert run(lambda n, t: 0.2, 300, count=4) == [(60, 3), (123, 2)]
    assert run(lambda n, t: 1.9 if t % 4 else 0.5, 300) == []  # never high for five seconds


def test_a_load_that_swings_changes_the_number_once_in_a_cooldown_at_most():
    found = run(lambda n, t: 1.9 if t // 20 % 2 else 0.1, 2000)
    assert found == [(25, 4)]  # never low for a minute: the servers stay
    changes = run(lambda n, t: 3.9 if t // 100 % 2 else 0.1, 4000, count=2)
    assert all(b - a >= RULE.cooldown for (a, _), (b, _) in itertools.pairwise(changes))


def test_a_growth_that_did_not_pay_is_not_continued_until_the_load_changes():
    """The cores are all used: twice the servers are as busy, and serve as much."""
    found = run(lambda n, t: 0.9 * n, 1000, touches=lambda n, t: 1000.0)
    assert [servers for _, servers in found] == [4]
    found = run(lambda n, t: 0.9 * n, 1000, touches=lambda n, t: 1000.0 if t < 500 else 2000.0)
    assert [servers for _, servers in found] == [4, 8] and found[1][0] >= 500
    found = run(lambda n, t: 0.9 * n, 1000, touches=lambda n, t: 500.0 * n)  # it pays: the rate grows
    assert [servers for _, servers in found] == [4, 8]


def test_a_call_begins_a_cooldown():
    scaler = ServerScaler()
    scaler.resized(0.0)
    decided = [
        now for now in range(60) if scaler.decide(RULE, ScaleFacts(uses(2, 1.9), 2, 1, 100), float(now)) is not None
    ]
    assert decided[0] == 30


HOSTS = {"a": {"cpu": 4.0}, "b": {"cpu": 2.0}, "c": {"cpu": 0.0}}


@pytest.mark.parametrize(
    ("free", "placed", "avoid", "cpus", "expected"),
    [
        ({"a": 4.0, "b": 2.0, "c": 0.0}, [], (), 1.0, "a"),
        ({"a": 3.0, "b": 2.0, "c": 0.0}, ["a"], (), 1.0, "b"),
        ({"a": 3.0, "b": 0.5, "c": 0.0}, ["a"], (), 1.0, "a"),
        ({"a": 3.0, "b": 2.0, "c": 0.0}, ["b"], ("a",), 1.0, "b"),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, [], (), 1.0, None),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, ["a"], (), 0.0, "b"),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, [], ("a", "b"), 0.0, "c"),
        ({}, [], ("a", "b", "c"), 0.0, None),
    ],
    ids=["most free", "fewest", "only room", "ends", "full", "reserves none", "no CPUs", "all end"],
)
def test_a_server_starts_where_it_fits(free, placed, avoid, cpus, expected):
    left = {node: {"cpu": amount} for node, amount in free.items()}
    assert choose_node(left, HOSTS, placed, frozenset(avoid), cpus) == expected
