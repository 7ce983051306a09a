import pytest

from rayps.bench.staleness import bench_staleness
from rayps.cluster.local import LocalCluster
from rayps.core.errors import ConfigError


def test_a_row_for_each_staleness():
    cluster, scene = LocalCluster(), "momentum"
    try:
        rows = bench_staleness(cluster, 2, [scene], pace=0.002, seeds=[0], target=1.5)
    finally:
        cluster.close()
    assert [(row.scene, row.staleness) for row in rows] == [(scene, name) for name in ("0", "2", "8", "none", "auto")]
    best = min(row.seconds for row in rows[:-1])
    for row in rows:
        assert row.seconds > 0 and row.rounds > 1 and row.times_best == row.seconds / best
        assert row.staleness == "auto" or (row.moves == 0 and row.last == row.staleness)


def test_what_cannot_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no scene 'rush'; use some of come_and_go, one_slow, momentum"):
        bench_staleness(LocalCluster(), 2, ["rush"])
    with pytest.raises(ConfigError, match=r"no digits\.parquet .* --data"):
        bench_staleness(LocalCluster(), 2, folder=tmp_path)
