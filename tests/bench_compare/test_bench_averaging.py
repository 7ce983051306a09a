"""`python -m benchmarks averaging`: rows, the picture, bad input. What it measures is in benchmarks/results."""

import pytest
from rayps_client.errors import ConfigError
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.algorithms.averaging import bench_averaging, draw
from rayps.cluster.local import LocalCluster

TEXT = "to be or not to be, that is the question. " * 64


def test_rows_and_picture(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    cluster = LocalCluster()
    try:
        rows = bench_averaging(
            cluster,
            text,
            2,
            ["all_reduce", "local_sgd:period=4,compression=int8"],
            epochs=2,
            blocks=1,
            width=16,
            batch=2,
        )
    finally:
        cluster.close()
    plain, local = rows
    assert (plain.steps, plain.samples) == (local.steps, local.samples) and plain.steps == 2 * 10
    assert (plain.fewer, plain.worse) == (1.0, 0.0) and local.fewer == plain.bytes / local.bytes > 10
    assert local.worse == pytest.approx(local.loss / plain.loss - 1)
    assert [moved for moved, _ in plain.curve] == [plain.bytes // 2, plain.bytes]
    assert plain.loss < 4 and plain.curve[-1][1] == plain.loss
    drawn = draw(rows)
    assert drawn.startswith("<svg") and drawn.count("<circle") == 4 and "local_sgd 4 int8" in drawn


def test_bad_input(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("to be")
    with pytest.raises(ConfigError, match="has 5 characters"):
        bench_averaging(None, short)
    with pytest.raises(ConfigError, match="cannot be read"):
        bench_averaging(None, tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="period is 0"):
        bench_averaging(None, short, strategies=["local_sgd:period=0"])


def test_the_command_is_there():
    found = CliRunner().invoke(app, ["averaging", "--help"])
    assert found.exit_code == 0 and "bytes sent" in found.output
