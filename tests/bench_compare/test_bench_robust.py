import gzip

import pytest
from rayps_client.errors import ConfigError

from benchmarks.federated.robust import bench_robust, read_digits
from rayps.cluster.local import LocalCluster


def run(**options):
    cluster = LocalCluster()
    try:
        given = {"rules": ["mean", "median"], "rounds": 2, "rows": 600, "batch": 10, **options}
        return bench_robust(cluster, 1, **given)
    finally:
        cluster.close()


def test_a_row_for_each_scene_and_rule():
    rows = run()
    assert [(row.scene, row.rule) for row in rows] == [
        (scene, rule) for scene in ("iid", "attack", "shards") for rule in ("mean", "median")
    ]
    mean = rows[0].best
    for row in rows:
        assert 0 <= row.last <= row.best <= 1 and row.rejected == 0 and row.seconds > 0
        assert row.below == pytest.approx(100 * (mean - row.best))
        assert row.warned == (row.scene == "shards" and row.rule != "mean")
        assert (row.attack == "none") == (row.scene != "attack")
    assert rows[2].last < mean and rows[3].best > rows[2].last


@pytest.mark.parametrize("attack", ["false_buffers(clients=4)", "false_c(clients=4)"])
def test_attackers_that_lie_about_what_they_send_beside(attack):
    """The network then has buffers, or the strategy a c: the mean breaks down, the median does not."""
    mean, median, attacked, borne = run(scenes=["iid", "attack"], attack=attack, rows=1000, rounds=3)
    assert attacked.last < mean.last - 0.2 and borne.last > median.last - 0.1 and borne.attack == attack


def test_digits_as_they_are_published(tmp_path):
    for name, n in (("train", 5), ("t10k", 3)):
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + bytes([51] * 784 * n)))
        (tmp_path / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + bytes(range(n))))
    x, y = read_digits(tmp_path, learnt=True, rows=4)
    assert x.shape == (4, 784) and x.unique().tolist() == pytest.approx([0.2]) and y.tolist() == [0, 1, 2, 3]
    assert len(read_digits(tmp_path, learnt=False, rows=9)[1]) == 3


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"scenes": ["moon"]}, "moon"),
        ({"rules": ["krum(f=9)"]}, "2f"),
        ({"rules": ["krum(f=3)"]}, "tolerates 3"),
        ({"rounds": 0}, "rounds is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, word, tmp_path):
    with pytest.raises(ConfigError, match=word):
        run(**options)
    with pytest.raises(ConfigError, match="neither"):
        run(folder=tmp_path)
