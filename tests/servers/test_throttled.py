"""When a job is told that its quota holds it back: from what its space's counts say."""

from rayps.ps.job_space import FOR_SECONDS, Throttled


def space(throttled, limit=4.0):
    return {"throttled": throttled, "quota": {"operations": limit, "bytes": None}}


def test_a_job_that_waits_for_its_quota_is_told_once():
    held = Throttled()
    assert held.observe(space(0), 0.0) is None
    assert held.observe(space(1), 1.0) is None  # a burst
    assert held.now(1.0) is None
    assert held.observe(space(5), 2.0) == "throttled by its quota of 4 operations a second"
    assert held.observe(space(9), 3.0) is None
    assert held.now(3.0) == "throttled by its quota of 4 operations a second"
    assert held.now(3.0 + FOR_SECONDS) is None


def test_another_quota_is_told_again_and_none_says_nothing():
    held = Throttled()
    told = [held.observe(space(n, limit), float(n)) for n, limit in enumerate([4, 4, 4, 8, 8, 8, None, None, None])]
    assert [bool(each) for each in told] == [False, False, True, False, False, True, False, False, False]
    assert held.now(9.0) is None


def test_two_requests_that_waited_long_apart_are_two_bursts():
    held = Throttled()
    for number in range(5):
        assert held.observe(space(number), number * (FOR_SECONDS + 1)) is None
