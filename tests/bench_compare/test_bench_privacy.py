"""`python -m benchmarks privacy`: its rows on a few steps, and what it refuses."""

import pytest
from rayps_client.errors import ConfigError

from benchmarks.algorithms.privacy import bench_privacy
from benchmarks.federated.robust import FOLDER


def test_rows():
    (row,) = bench_privacy(str(FOLDER), [8.0], ["rayps"], epochs=0.03, steps=3, lot=50, physical=20)
    assert row.contender == "rayps" and row.steps == 3 and 0 <= row.accuracy <= 1 and row.step_ms > 0
    assert 0 < row.spent < 8.0  # 3 of the 6 steps for which the noise was found


def test_bad_input(tmp_path):
    with pytest.raises(ConfigError, match="contender 'other' is unknown"):
        bench_privacy(str(FOLDER), [8.0], ["other"])
    with pytest.raises(ConfigError, match="give the folder with --data"):
        bench_privacy(str(tmp_path), [8.0])
