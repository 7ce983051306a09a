"""`python -m benchmarks tables` measures what it says. No figure is judged here."""

import json

import numpy as np
import pytest
import torch
from rayps_client.errors import ConfigError
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.tables import hot_table
from benchmarks.tables.calls import RayRows, _cut, bench_calls
from benchmarks.tables.hot_table import bench_hot
from benchmarks.tables.tables import Dense, bench_files, bench_tables, fill_segments, measure_skew
from rayps.cluster.local import LocalCluster
from rayps.ps.manager.assign_segments import Balance
from rayps.ps.protocol.space import SparseTable


def test_rows_are_measured_beside_torch():
    found = bench_tables(2000, 300, 8, [1, 4], ["sgd", "adagrad"], repeats=2)
    assert [(row.optimizer, row.segments, row.ids) for row in found] == [
        ("sgd", 1, 300),
        ("sgd", 4, 300),
        ("adagrad", 1, 300),
        ("adagrad", 4, 300),
    ]
    assert all(min(row.pull, row.push, row.torch_pull, row.torch_push, row.of_limit, row.made) > 0 for row in found)
    assert all(row.row_bytes >= 4 * 8 * (1 + (row.optimizer == "adagrad")) for row in found)
    (zipf,) = bench_tables(2000, 300, 8, [2], ["sgd"], zipf=1.2, repeats=2)
    assert zipf.ids < 300  # each once


def test_a_table_is_filled_whole():
    segments, seconds = fill_segments(SparseTable("bench", 4, 3), 1000)
    assert sorted(key for each in segments for key in each.store.export().ids.tolist()) == list(range(1000))
    assert seconds > 0
    assert 1.0 <= measure_skew(100_000, 50_000, 1.2, 4) < 4.0


def test_files_are_measured(tmp_path):
    found = bench_files(3000, 8, 4, 3, tmp_path)
    assert (found.rows, found.segments, found.loaded_on) == (3000, 4, 3)
    assert found.file_bytes > 8 * 4 * 2 and found.save > 0 and found.load > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_torch_does_the_same_arithmetic(name):
    """The fair limit steps the rows of a dense table as torch's own optimizer steps a whole one."""
    dense, ids = Dense(12, 3, name, 0.1), torch.tensor([1, 4, 7])
    whole = torch.nn.Parameter(torch.zeros(3, 3))
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[name]
    optimizer = kind([whole], lr=0.1)
    for step in range(4):
        grad = torch.randn(3, 3, generator=torch.Generator().manual_seed(step))
        dense.step(ids, grad)
        whole.grad = grad
        optimizer.step()
    torch.testing.assert_close(dense.rows[ids], whole.detach())
    assert not dense.rows[[0, 2, 3, 5, 11]].any()


def test_what_cannot_be_measured_is_said():
    for call in (
        lambda: bench_tables(0, 1, 1, [1], ["sgd"]),
        lambda: bench_files(0, 1, 1, 1),
        lambda: bench_tables(10, 1, 1, [0], ["sgd"]),
        lambda: bench_tables(10, 1, 1, [1], ["lamb"]),
    ):
        with pytest.raises(ConfigError):
            call()


def test_the_command():
    run = CliRunner().invoke(
        app,
        [
            "tables",
            "--rows",
            "1000",
            "--ids",
            "100",
            "--segments",
            "2",
            "--optimizers",
            "sgd",
            "--repeats",
            "1",
            "--json",
        ],
    )
    assert run.exit_code == 0, run.output
    (row,) = json.loads(run.stdout)
    assert row["segments"] == 2 and row["of_limit"] > 0 and row["of_same"] > 0


def test_rows_through_servers_and_through_calls():
    row = bench_calls(LocalCluster(), rows=400, ids=100, dim=4, workers=2, servers=2, segments=4, repeats=2, turns=3)
    assert row.own > 0 and row.calls > 0 and row.times_calls > 0 and row.own_cpu_s is not None
    assert row.own == pytest.approx(2 * row.ids * row.workers / row.own_turn_s)


def test_the_calls_do_what_the_servers_do():
    """Both ways the same rows: what was pulled before, less the learning rate times what was pushed."""
    parts, ids = [RayRows(6, 3), RayRows(6, 3)], np.array([7, 2, 11, 4])
    cut = _cut(ids, 2)
    grads = np.arange(12, dtype=np.float32).reshape(4, 3)
    for part, (places, local) in zip(parts, cut, strict=True):
        part.push(local, grads[places])
    for part, (places, local) in zip(parts, cut, strict=True):
        assert np.allclose(part.pull(local), -0.01 * grads[places])
    assert sorted(np.concatenate([places for places, _ in cut]).tolist()) == [0, 1, 2, 3]


def test_a_hot_table(monkeypatch):
    monkeypatch.setattr(hot_table, "WARM_SECONDS", 0.5)
    monkeypatch.setattr(hot_table, "CALM_SECONDS", 1.5)
    policy = Balance(hot=1.05, cool=1.01, every=0.2, patience=12, floor=1.0, rest=2.0)
    row = bench_hot(LocalCluster(), ids=2, rows=500, workers=2, servers=3, segments=16, seconds=1.0, balance=policy)
    assert row.moves > 0 and row.ids_skew_before > 1 and row.ids_skew_after >= 1
    assert row.bound_gain == pytest.approx(row.skew_before / row.skew_after)
    assert row.busiest_before == row.loads_before[0] >= row.loads_before[-1] > 0
    assert row.turns_before > 0 and row.turns_after > 0 and len(row.loads_after) == 3


def test_what_cannot_be_asked_of_a_cluster():
    for call in (
        lambda: bench_calls(LocalCluster(), rows=10, ids=11),
        lambda: bench_calls(LocalCluster(), workers=0),
        lambda: bench_hot(LocalCluster(), zipf=1.0),
        lambda: bench_hot(LocalCluster(), servers=1),
    ):
        with pytest.raises(ConfigError):
            call()
