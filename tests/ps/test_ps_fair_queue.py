"""Turns of spaces: nobody who asks more gets more; quotas wait and lose nothing. With a clock of its own."""

import random

import pytest

from rayps.ps.server.fair_queue import BURST_SECONDS, Bucket, FairQueue


def serve(fair, seconds, cost, now=0.0, refill=None):
    """Serve for so long; what each space got. `cost[space]` = seconds per request."""
    got = dict.fromkeys(cost, 0.0)
    end = now + seconds
    while now < end:
        if refill:
            refill(fair, now)
        found = fair.next(now)
        if found is None:
            wake = fair.wake_at(now)
            if wake is None:
                break
            now = max(wake, now + 1e-9)
            continue
        space, _ = found
        fair.spent(space, cost[space])
        got[space] += cost[space]
        now += cost[space]
    return got


def full(*spaces, depth=50):
    def refill(fair, now):
        for space in spaces:
            while fair.queued(space) < depth:
                fair.put(space, "request", 1)

    return refill


def test_a_flood_gets_no_more_than_half():
    """One space has a thousand requests waiting, and dear ones; the other always one cheap one."""

    def refill(fair, now):
        full(1, depth=1000)(fair, now)
        full(2, depth=1)(fair, now)

    got = serve(FairQueue(), 10.0, {1: 0.01, 2: 0.001}, refill=refill)
    assert got[2] == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_equal_whatever_requests_cost(seed):
    rng = random.Random(seed)
    spaces = list(range(rng.randint(2, 6)))
    cost = {space: rng.uniform(0.0005, 0.02) for space in spaces}
    got = serve(FairQueue(), 20.0, cost, refill=full(*spaces))
    for share in got.values():
        assert share == pytest.approx(20.0 / len(spaces), rel=0.03)


def test_who_was_idle_saves_up_nothing_and_is_not_punished():
    fair = FairQueue()
    serve(fair, 1.0, {1: 0.01, 2: 0.01}, refill=full(1, 2))
    while fair.next(0.0):
        pass
    serve(fair, 100.0, {1: 0.01}, refill=full(1))  # the other is idle all the while
    got = serve(fair, 10.0, {1: 0.01, 2: 0.01}, refill=full(1, 2))
    assert got[1] == pytest.approx(5.0, rel=0.05)
    assert got[2] == pytest.approx(5.0, rel=0.05)


def test_a_line_that_is_empty_now_and_then_is_not_overtaken_by_a_new_one():
    """Workers in step leave their line empty between rounds; whoever comes then must not begin at zero."""
    fair = FairQueue()
    for _ in range(1000):
        fair.put(1, "request", 1)
        assert fair.next(0.0) is not None
        fair.spent(1, 0.1)
    assert fair.next(0.0) is None
    fair.put(2, "new", 1)
    fair.put(1, "old", 1)
    got = serve(fair, 4.0, {1: 0.1, 2: 0.1}, refill=full(1, 2))
    assert got[1] == pytest.approx(2.0, rel=0.15)


def test_requests_of_a_space_keep_their_order_and_servers_go_first():
    fair = FairQueue()
    for i in range(5):
        fair.put(1, f"worker {i}", 1)
    fair.put(1, "server 0", 1, urgent=True)
    fair.put(1, "server 1", 1, urgent=True)
    assert [fair.next(0.0)[1] for _ in range(7)] == ["server 0", "server 1", *[f"worker {i}" for i in range(5)]]
    assert len(fair) == 0
    assert fair.next(0.0) is None


def test_room_is_bounded_by_space():
    fair = FairQueue(limit=100)
    fair.put(1, "large", 99)
    assert fair.has_room(1)
    fair.put(1, "small", 1)
    assert not fair.has_room(1)
    assert fair.has_room(2)
    assert fair.queued(1) == 100
    fair.next(0.0)
    assert fair.has_room(1)


def test_a_quota_waits_and_loses_nothing():
    fair = FairQueue()
    fair.limit_rate(1, 10.0, 0.0)
    for i in range(30):
        fair.put(1, i, 1)
    now, served = 0.0, []
    while len(fair):
        found = fair.next(now)
        if found is None:
            now = fair.wake_at(now)
        else:
            served.append((found[1], now))
    assert [item for item, _ in served] == list(range(30))
    assert now == pytest.approx((30 - max(1, 10 * BURST_SECONDS)) / 10, abs=0.11)
    assert fair.throttled(1) == 28
    for start in range(20):  # no second sees more than its ten and the burst
        begin = served[start][1]
        assert sum(begin <= at < begin + 1.0 for _, at in served) <= 10 + 10 * BURST_SECONDS + 1


def test_a_quota_binds_operations_of_workers_only_and_nobody_else():
    fair = FairQueue()
    fair.limit_rate(1, 1.0, 0.0)
    fair.put(1, "first", 1)
    fair.put(1, "second", 1)
    fair.put(2, "other", 1)
    assert fair.next(0.0) == (1, "first")
    assert fair.next(0.0) == (2, "other")
    assert fair.next(0.0) is None
    assert fair.wake_at(0.0) == pytest.approx(1.0)
    fair.put(1, "server", 1, urgent=True)
    assert fair.next(0.0) == (1, "server")
    fair.limit_rate(1, None, 0.0)
    assert fair.next(0.0) == (1, "second")
    fair.limit_rate(1, 1.0, 0.0)
    fair.put(1, "operation", 1)
    fair.put(1, "join", 1, counts=False)
    assert fair.next(0.0) == (1, "operation")
    assert fair.next(0.0) == (1, "join")


def test_a_space_that_is_not_known_waits_and_can_be_dropped():
    fair = FairQueue()
    fair.block(1, True)
    fair.put(1, "early", 7)
    assert fair.next(0.0) is None
    fair.block(1, False)
    assert fair.next(0.0) == (1, "early")
    fair.put(1, "a", 1)
    fair.put(1, "b", 1, urgent=True)
    assert fair.drop(1) == ["b", "a"]
    assert fair.next(0.0) is None
    assert fair.drop(9) == []


def test_a_bucket():
    bucket = Bucket(100.0, 0.0)
    assert sum(bucket.use_operation(0.0) for _ in range(100)) == 100 * BURST_SECONDS
    assert not bucket.use_operation(0.005)
    assert bucket.use_operation(0.011)
    bucket.set(1.0, 10.0)  # what was saved up at the higher rate is not kept
    assert bucket.use_operation(10.0)
    assert not bucket.use_operation(10.5)
    assert bucket.ready_at() == pytest.approx(11.0)
