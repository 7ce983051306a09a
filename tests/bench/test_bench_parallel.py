import pytest
from rayps_client.errors import ConfigError

from benchmarks.gpu.device import bench_device
from benchmarks.parallel.pipeline import bench_pipeline
from benchmarks.parallel.tensor import bench_tensor
from rayps.cluster.local import LocalCluster


@pytest.fixture
def cluster():
    found = LocalCluster()
    yield found
    found.close()


def test_a_pipelines_time_is_told_beside_what_its_table_allows(cluster):
    schedules = ["gpipe", "1f1b", "interleaved"]
    rows = bench_pipeline(cluster, 2, ["own"], schedules=schedules, micros=4, width=8, batch=8, steps=2, repeats=2)
    assert [row.schedule for row in rows] == schedules
    for row in rows:
        assert row.beyond == pytest.approx(row.step - row.ideal) and row.ideal > 0 and row.times_torch is None


def test_split_layers_are_told_beside_the_unsplit_ones(cluster):
    rows = bench_tensor(cluster, 2, ["own", "alone"], widths=[8, 12], batch=4, steps=2, repeats=2)
    assert [(row.width, row.contender) for row in rows] == [(8, "own"), (8, "alone"), (12, "own"), (12, "alone")]
    for own, alone in (rows[:2], rows[2:]):
        assert own.times_alone == pytest.approx(alone.step / own.step) and own.times_dtensor is None


def test_a_device_is_told_layer_by_layer():
    rows = bench_device([1, 2], repeats=1)
    assert len(rows) == 10 and all(row.cpu > 0 for row in rows)
    assert {row.parameters for row in rows if row.layer == "linear 1024 to 1024"} == {1024 * 1024 + 1024}


def test_what_cannot_be_measured_is_refused(cluster):
    with pytest.raises(ConfigError, match="no contender 'jax'; use some of own, torch"):
        bench_pipeline(cluster, 2, ["jax"])
    with pytest.raises(ConfigError, match="use some of gpipe, 1f1b, interleaved"):
        bench_pipeline(cluster, 2, ["own"], schedules=["zero_bubble"])
    with pytest.raises(ConfigError, match="no contender 'gspmd'"):
        bench_tensor(cluster, 2, ["gspmd"])
    with pytest.raises(ConfigError, match="at least 1"):
        bench_device([0])
