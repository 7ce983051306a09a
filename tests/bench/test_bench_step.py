import pytest
from rayps_client.errors import ConfigError

from benchmarks.runs.memory import bench_memory, read_resident
from rayps.bench.gpt import Gpt
from rayps.bench.mlp import Mlp
from rayps.bench.step import bench_step
from rayps.cluster.local import LocalCluster


def test_rows_tell_rates_and_ratios():
    cluster = LocalCluster()
    try:
        rows = bench_step(cluster, 2, ["own", "one_bucket", "alone"], hidden=16, steps=3, repeats=2, timeout=60)
    finally:
        cluster.close()
    own, one, alone = rows
    assert [row.contender for row in rows] == ["own", "one_bucket", "alone"]
    assert all(row.rate == pytest.approx(1000 / row.step) and row.cpu > 0 and row.repeats == 2 for row in rows)
    assert own.parameters == sum(p.numel() for p in Mlp(16, 2).model().parameters())
    for row in (own, one):
        assert row.compute > 0 and row.waiting >= 0 and row.moving >= 0
        assert row.of_alone == pytest.approx(alone.step / row.step) and row.times_ddp is None
    assert alone.compute is None and alone.of_alone == 1


def test_a_language_model_beside_ddp_in_plain_processes():
    cluster = LocalCluster()
    try:
        rows = bench_step(cluster, 2, ["own", "ddp_plain"], model="lm", hidden=16, steps=2, repeats=2, timeout=300)
    finally:
        cluster.close()
    own, ddp = rows
    assert own.parameters == sum(p.numel() for p in Gpt(16, 2).model().parameters()) > 100_000
    assert ddp.times_ddp == 1 and own.times_ddp == pytest.approx(ddp.step / own.step)
    assert all(row.cpu > 0 and 0 < row.data < row.step for row in rows)
    with pytest.raises(ConfigError, match="no model 'gpt'; use one of mlp, lm"):
        bench_step(LocalCluster(), 2, ["own"], model="gpt")


def test_memory_is_told_beside_that_of_workers_alone():
    cluster = LocalCluster()
    try:
        rows = bench_memory(cluster, 2, ["own", "alone"], hidden=256, timeout=60)
    finally:
        cluster.close()
    assert [row.contender for row in rows] == ["own", "alone"]
    assert all(row.model_bytes == 4 * (64 * 256 + 256 + 256 * 256 + 256 + 2560 + 10) for row in rows)
    assert rows[1].extra == 0 and rows[0].extra == rows[0].grown - rows[1].grown


def test_resident_bytes_grow_with_what_is_touched():
    before = read_resident()
    held = bytearray(64 << 20)
    assert read_resident() - before > 60 << 20
    del held


def test_unknown_contenders_are_refused():
    with pytest.raises(ConfigError, match="no contender 'mpi'; use some of own"):
        bench_step(LocalCluster(), 2, ["mpi"])
    with pytest.raises(ConfigError, match="no contender 'ray_train'; use some of own"):
        bench_memory(LocalCluster(), 2, ["ray_train"])
