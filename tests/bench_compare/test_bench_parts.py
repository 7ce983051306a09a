"""`python -m benchmarks parts`: its rows on a few images, and what it refuses. The law is in test_plain_twin.py."""

import json

import pytest
from rayps_client.errors import ConfigError

from benchmarks.__main__ import main
from benchmarks.algorithms.parts import bench_parts


def test_rows_on_a_few_images(capsys):
    assert main(["parts", "--seeds=3,4", "--rows=320", "--epochs=2", "--decay=0.9", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert [row["parts"] for row in rows] == ["batchnorm", "schedule", "ema"] and err.count("difference") == 3
    for row in rows:
        assert row["difference"] == pytest.approx(row["rayps"] - row["plain"]) and row["error"] > 0
        assert row["plain"] > 20 and row["rayps"] > 20  # guessing gives 10
    assert [row["last"] is None for row in rows] == [True, True, False]


def test_what_is_refused():
    with pytest.raises(ConfigError, match="no part 'dropout'; use some of batchnorm, schedule, ema"):
        bench_parts(["dropout"])
    with pytest.raises(ConfigError, match="at least two seeds"):
        bench_parts(seeds=(1,))
