import pytest
from rayps_client.errors import ConfigError

from benchmarks.servers.balance import bench_balance
from rayps.cluster.local import LocalCluster


def test_a_row_for_equal_and_balanced_shares():
    cluster = LocalCluster()
    try:
        equal, balanced = bench_balance(cluster, 2, row_seconds=0.0005, slower=3.0, rounds=24)
    finally:
        cluster.close()
    assert (equal.shares, equal.rows, equal.times_equal) == ("equal", "32, 32", 1.0)
    assert balanced.shares == "balanced" and balanced.times_equal == equal.seconds / balanced.seconds
    slow, fast = map(int, balanced.rows.split(", "))
    assert slow + fast == 64 and slow <= fast
    assert equal.bound_seconds == pytest.approx(64 * 0.0005 / (1 + 1 / 3))
    assert balanced.of_bound == balanced.bound_seconds / balanced.seconds


def test_one_worker_is_refused():
    with pytest.raises(ConfigError, match="give at least 2"):
        bench_balance(LocalCluster(), 1)
