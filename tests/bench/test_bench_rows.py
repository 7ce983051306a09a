"""The bench of rows measures what it says, on a cluster of threads; nothing here is timed."""

import pytest
from rayps_client.errors import ConfigError

from rayps.bench.reads import bench_reads
from rayps.bench.rows import bench_rows
from rayps.cluster.local import LocalCluster


def test_each_contender_gives_a_row():
    cluster = LocalCluster()
    rows = bench_rows(cluster, 2, 2, 50, 4, repeats=1, turns=4)
    cluster.close()
    assert [row.contender for row in rows] == ["own", "fresh", "ray"]
    for row in rows:
        assert (row.rows, row.dim, row.workers, row.shards) == (50, 4, 2, 2)
        assert row.bandwidth == pytest.approx(2 * 4 * 50 * 4 * row.turns)
    assert rows[2].times_ray == 1.0


@pytest.mark.parametrize(("rows", "contenders", "words"), [(0, ["own"], "rows is 0"), (5, ["mpi"], "own, fresh, ray")])
def test_bad_input_is_named(rows, contenders, words):
    with pytest.raises(ConfigError, match=words):
        bench_rows(LocalCluster(), 1, 1, rows, 4, contenders)


def test_reads_are_measured_with_and_without_holding_the_shards():
    cluster = LocalCluster()
    rows = bench_reads(cluster, 2, 2, [400], repeats=1)
    cluster.close()
    assert [(row.bytes, row.contender) for row in rows] == [(400, "independent"), (400, "consistent")]
    assert rows[0].share == 1.0
    assert rows[1].share == pytest.approx(rows[1].turns / rows[0].turns)
