import itertools
import random

import pytest
from rayps_client.errors import ConfigError

from benchmarks.servers.backup_workers import bench_backup_workers, compute_step_seconds, simulate_step_seconds
from benchmarks.servers.backup_workers import yield_factors as slow_gradients
from benchmarks.servers.stragglers import SCENES, bench_stragglers, draw_factors
from rayps.cluster.local import LocalCluster


def test_a_random_tenth_of_the_rounds_is_slow():
    dealt = [
        draw_factors("come_and_go", rank, 80, seed, epoch) for rank in range(4) for seed in (0, 1) for epoch in (0, 1)
    ]
    assert all(sorted(found) == [1.0] * 72 + [5.0] * 8 for found in dealt)
    assert len({tuple(found) for found in dealt}) == len(dealt)
    assert draw_factors("come_and_go", 2, 80, 1, 0) == draw_factors("come_and_go", 2, 80, 1, 0)


def test_one_worker_is_slow_throughout():
    assert [set(draw_factors("one_slow", rank, 5, 0, 0)) for rank in range(3)] == [{3.0}, {1.0}, {1.0}]


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


# ---- backup workers


def test_the_formula_is_that_of_the_paper_and_of_a_simulation():
    assert compute_step_seconds(4, 0) / compute_step_seconds(4, 1) == pytest.approx(1.79, abs=0.005)
    assert compute_step_seconds(2, 0) / compute_step_seconds(2, 1) == pytest.approx(1.58, abs=0.005)
    assert compute_step_seconds(3, 1, chance=0) == 1 and compute_step_seconds(3, 1, chance=1, factor=7) == 7
    for members, backup, chance in ((4, 1, 0.1), (2, 1, 0.1), (3, 2, 0.4), (5, 0, 0.2)):
        ways = itertools.product((1, 5), repeat=members + backup)  # every way in which workers can be slow
        expected = sum(sorted(way)[members - 1] * chance ** way.count(5) * (1 - chance) ** way.count(1) for way in ways)
        assert compute_step_seconds(members, backup, chance=chance) == pytest.approx(expected)


def test_a_simulation_of_late_workers_that_finish_their_gradients():
    assert simulate_step_seconds(4, 0) == pytest.approx(compute_step_seconds(4, 0), rel=0.02)  # nobody is late
    assert (
        compute_step_seconds(4, 1) * 1.2 < simulate_step_seconds(4, 1) < compute_step_seconds(4, 0)
    )  # a slow worker is missed for longer


def test_a_tenth_of_the_gradients_is_slow():
    blocks = [sorted(itertools.islice(slow_gradients("a"), 20)) for _ in range(2)]
    assert blocks == [[1.0] * 18 + [5.0] * 2] * 2
    assert len({tuple(itertools.islice(slow_gradients(str(random.random())), 20)) for _ in range(9)}) > 5


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server"])
def test_rows_without_with_and_of_all_workers(strategy):
    cluster = LocalCluster()
    try:
        rows = bench_backup_workers(cluster, 2, 1, strategy=strategy, pace=0.002, steps=10)
    finally:
        cluster.close()
    assert [(row.workers, row.backup) for row in rows] == [(2, 0), (3, 1), (3, 0)]
    assert rows[1].times_none == rows[0].seconds / rows[1].seconds and rows[1].dropped == 1
    assert rows[1].times_formula == pytest.approx(1.58, abs=0.005)


def test_a_strategy_without_backup_workers_is_refused():
    with pytest.raises(ConfigError, match="give all_reduce or parameter_server"):
        bench_backup_workers(LocalCluster(), 2, 1, strategy="hogwild", pace=0.002, steps=10)
