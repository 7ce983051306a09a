import pytest

from rayps.bench.stragglers import SCENES, bench_stragglers, factors
from rayps.cluster.local import LocalCluster
from rayps.core.errors import ConfigError


def test_a_random_tenth_of_the_rounds_is_slow():
    dealt = [factors("come_and_go", rank, 80, seed, epoch) for rank in range(4) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(found) == [1.0] * 72 + [5.0] * 8 for found in dealt)
    assert len({tuple(found) for found in dealt}) == len(dealt)
    assert factors("come_and_go", 2, 80, 1, 0) == factors("come_and_go", 2, 80, 1, 0)


def test_one_worker_is_slow_throughout():
    assert [set(factors("one_slow", rank, 5, 0, 0)) for rank in range(3)] == [{3.0}, {1.0}, {1.0}]


@pytest.mark.parametrize("scene", SCENES)
def test_a_row_for_each_staleness(scene):
    cluster = LocalCluster()
    try:
        rows = bench_stragglers(cluster, 2, [scene], pace=0.002, repeats=1, target=0.7)
    finally:
        cluster.close()
    assert [(row.scene, row.staleness) for row in rows] == [(scene, "0"), (scene, "8"), (scene, "none")]
    for row in rows:
        assert row.seconds > 0 and row.rounds > 1 and 0 <= row.idle < 1
        assert row.times_synchronous == rows[0].seconds / row.seconds


def test_what_cannot_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no scene 'rush'; use some of come_and_go, one_slow"):
        bench_stragglers(LocalCluster(), 2, ["rush"])
    with pytest.raises(ConfigError, match=r"no digits\.parquet .* --data"):
        bench_stragglers(LocalCluster(), 2, folder=tmp_path)
