import pytest
from conftest import missing
from rayps_client.errors import ClusterError, ConfigError

from benchmarks.network.compression import bench_compression


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_row_for_each_way(hosts):
    try:
        rows = bench_compression(hosts, 2 // hosts, "1gbit", 200_000, ["fp16", "auto"], repeats=2)
    except ClusterError as error:
        missing(f"network namespaces: {error}")
    assert [row.compression for row in rows] == ["off", "fp16", "auto"]
    assert [row.picked for row in rows[:2]] == ["off", "fp16"]
    assert rows[2].picked in rows[2].why or rows[2].picked == "off"
    assert rows[1].sent < 0.6 * rows[0].sent
    for row in rows:
        assert row.seconds > 0 and row.times_off == rows[0].seconds / row.seconds


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="zip"):
        bench_compression(names=["zip"])
    with pytest.raises(ConfigError, match="at least 2 ranks"):
        bench_compression(hosts=1, ranks=1)
