"""`rayps bench tables` measures what it says. No figure is judged here."""

import json

import pytest
from typer.testing import CliRunner

from rayps.bench.tables import bench_files, bench_tables, filled, skew
from rayps.cli.main import app
from rayps.elastic.space import Table
from rayps.errors import ConfigError


def test_rows_are_measured_beside_torch():
    found = bench_tables(2000, 300, 8, [1, 4], ["sgd", "adagrad"], repeats=2)
    assert [(row.optimizer, row.segments, row.ids) for row in found] == [
        ("sgd", 1, 300), ("sgd", 4, 300), ("adagrad", 1, 300), ("adagrad", 4, 300)]  # fmt: skip
    assert all(min(row.pull, row.push, row.torch_pull, row.torch_push, row.of_limit, row.made) > 0 for row in found)
    assert all(row.row_bytes >= 4 * 8 * (1 + (row.optimizer == "adagrad")) for row in found)
    (zipf,) = bench_tables(2000, 300, 8, [2], ["sgd"], zipf=1.2, repeats=2)
    assert zipf.ids < 300  # each once


def test_a_table_is_filled_whole():
    segments, seconds = filled(Table("bench", 4, 3), 1000)
    assert sorted(key for each in segments for key in each.store.export().ids.tolist()) == list(range(1000))
    assert seconds > 0
    assert 1.0 <= skew(100_000, 50_000, 1.2, 4) < 4.0


def test_files_are_measured(tmp_path):
    found = bench_files(3000, 8, 4, 3, tmp_path)
    assert (found.rows, found.segments, found.loaded_on) == (3000, 4, 3)
    assert found.file_bytes > 8 * 4 * 2 and found.save > 0 and found.load > 0
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_is_said():
    for call in (lambda: bench_tables(0, 1, 1, [1], ["sgd"]), lambda: bench_files(0, 1, 1, 1),
                 lambda: bench_tables(10, 1, 1, [0], ["sgd"]),
                 lambda: bench_tables(10, 1, 1, [1], ["lamb"])):  # fmt: skip
        with pytest.raises(ConfigError):
            call()


def test_the_command():
    run = CliRunner().invoke(app, ["bench", "tables", "--rows", "1000", "--ids", "100", "--segments", "2",
                                   "--optimizers", "sgd", "--repeats", "1", "--json"])  # fmt: skip
    assert run.exit_code == 0, run.output
    (row,) = json.loads(run.stdout)
    assert row["segments"] == 2 and row["of_limit"] > 0
