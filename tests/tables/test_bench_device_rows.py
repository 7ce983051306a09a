"""The measurement of rows on a device gives complete rows."""

import math

import pytest
import torch
from rayps_client.errors import ConfigError

from benchmarks.tables.device_rows import bench_device_rows

pytestmark = pytest.mark.bench


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_rows_of_an_embedding(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    rows = bench_device_rows(device, ids=100, dim=8, vocabulary=1000, repeats=1)
    assert [row.lookup for row in rows] == ["torch", "rayps", "copy of the rows"]
    assert rows[0].of_torch == 1 and all(math.isfinite(row.of_torch) for row in rows)


def test_a_vocabulary_with_too_few_ids_is_refused():
    with pytest.raises(ConfigError, match="give at least ids=65536"):
        bench_device_rows("cpu", vocabulary=10)
