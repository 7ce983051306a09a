import pytest
from conftest import missing
from rayps_client.errors import ClusterError, ConfigError

from benchmarks.network.shards import bench_shards


def test_a_row_for_each_number_of_shards():
    try:
        rows = bench_shards((1, 2), rate="1gbit", size=4_000_000, repeats=2, workers=2)
    except ClusterError as error:
        missing(f"network namespaces: {error}")
    assert [(row.bytes, row.shards, row.workers) for row in rows] == [(4_000_000, 1, 2), (4_000_000, 2, 2)]
    for row in rows:
        assert row.limit == pytest.approx(2 * 2 * 4_000_000 / row.shards / 125e6)
        assert row.seconds > 0
        assert row.of_limit == row.limit / row.seconds
        assert row.times_first == rows[0].seconds / row.seconds
        assert row.memory > 4_000_000 / row.shards  # its parameters at least


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        bench_shards((1, 0))
    with pytest.raises(ConfigError, match="rate"):
        bench_shards((1,), rate="fast")
