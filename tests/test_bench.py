import pytest

from rayps.bench.ring import bench_ring
from rayps.cluster import LocalCluster
from rayps.errors import ConfigError


def test_rows_name_size_contender_and_transport():
    cluster = LocalCluster()
    try:
        rows = bench_ring(cluster, 2, [1000, 300_000], ["auto", "ring", "resident", "gloo"], repeats=2, timeout=30)
    finally:
        cluster.close()
    assert [(r.bytes, r.algorithm) for r in rows] == [
        (size, name) for size in (1000, 300_000) for name in ("auto", "ring", "resident", "gloo")
    ]
    assert {r.transport for r in rows} == {"shm", "gloo"}
    for row in rows:
        assert row.seconds > 0 and row.bandwidth == row.bytes / row.seconds and row.ratio > 0
        assert row.times_gloo is not None and row.workers == row.repeats == 2


def test_unknown_contenders_are_refused():
    with pytest.raises(ConfigError, match="no contender 'mpi'; use some of auto"):
        bench_ring(LocalCluster(), 2, [1000], ["mpi"])
    with pytest.raises(ConfigError, match="0 workers"):
        bench_ring(LocalCluster(), 0, [1000], ["auto"])
