import pytest
import torch
from rayps_client.errors import ConfigError

from benchmarks.servers.staleness import bench_staleness, make_workloads, simulate_staleness
from benchmarks.servers.stragglers import BATCH, FOLDER
from benchmarks.servers.virtual_staleness import EXCHANGE, VirtualJob
from rayps.cluster.local import LocalCluster
from rayps.data import parquet
from rayps.strategies.catalogue import parse


def test_a_row_for_each_staleness():
    cluster, scene = LocalCluster(), "momentum"
    try:
        rows = bench_staleness(cluster, 2, [scene], pace=0.002, seeds=[0], target=1.8)
    finally:
        cluster.close()
    assert [(row.scene, row.staleness) for row in rows] == [(scene, name) for name in ("0", "2", "8", "none", "auto")]
    best = min(row.seconds for row in rows[:-1])
    for row in rows:
        assert row.seconds > 0 and row.rounds > 1 and row.times_best == row.seconds / best
        assert row.staleness == "auto" or (row.moves == 0 and row.last == row.staleness)


def test_in_virtual_time_the_result_depends_on_the_seeds_alone():
    first, second = (simulate_staleness(2, ["one_slow"], pace=0.2, seeds=[3], target=1.6) for _ in range(2))
    assert first == second
    seconds = {row.staleness: row.seconds for row in first}
    assert seconds["none"] < seconds["2"] <= seconds["0"]  # worker 0 is slow throughout


def test_in_virtual_time_the_synchronous_job_is_plain_sgd():
    """N pushes of a round are one step of their mean, at the times at which the slowest worker ends its rounds."""
    [(_, work)] = make_workloads(["one_slow"], FOLDER, 0.1)
    rows = parquet(FOLDER / "digits.parquet", features="pixels", label="digit", scale=1 / 255, batch_size=BATCH)
    job = VirtualJob(work, rows, parse("parameter_server")[0].strategy, 3, seed=1)
    while job.shard.version < 4:
        job.advance()
    assert job.now == pytest.approx(4 * (3 + EXCHANGE) * 0.1)
    model, dealt = work.model(), [rows.batches(rank=rank, size=3, seed=1, epoch=0) for rank in range(3)]
    optimizer = work.optimizer(list(model.parameters()))
    for _ in range(4):
        optimizer.zero_grad()
        for each in dealt:
            (work.loss(model, next(each)) / 3).backward()
        optimizer.step()
    law = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.allclose(job.shard.params, law, atol=1e-6)
    assert not job.events


def test_what_cannot_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no scene 'rush'; use some of come_and_go, one_slow, momentum"):
        bench_staleness(LocalCluster(), 2, ["rush"])
    with pytest.raises(ConfigError, match=r"no digits\.parquet .* --data"):
        bench_staleness(LocalCluster(), 2, folder=tmp_path)
