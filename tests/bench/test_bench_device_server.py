"""The measurements of servers and rows on a device give complete rows, also with a device's code on the CPU."""

import pytest
import torch
from rayps_client.errors import ConfigError

from benchmarks.gpu import device_server
from benchmarks.gpu.device_server import bench_device_server
from rayps.tensors.device import CpuDevice, Device

pytestmark = pytest.mark.bench

OPERATIONS = [
    "copy to the host",
    "copy from the host",
    "push, until it has left",
    "push, acknowledged",
    "pull",
    "push and pull",
    "compute",
    "step",
]


@pytest.mark.parametrize("device", ["cpu", "twin", "cuda"])
def test_the_rows_of_servers(device, monkeypatch):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    if device == "twin":
        monkeypatch.setattr(Device, "of", lambda place: CpuDevice())
    rows = bench_device_server("cpu" if device == "cpu" else "cuda", megabytes=9, shards=2, repeats=1)
    assert [row.operation for row in rows] == OPERATIONS
    assert all(row.ms > 0 and row.bytes == 4 * 2 * (1024 * 1024 + 1024) for row in rows)
    assert [row.operation for row in rows if row.of_copy is not None] == OPERATIONS[2:5]
    assert [row.operation for row in rows if row.hidden is not None] == ["step"]
    by = {row.operation: row for row in rows}
    assert by["pull"].of_copy == pytest.approx(by["copy from the host"].ms / by["pull"].ms)
    exposed = by["step"].ms - by["compute"].ms
    assert by["step"].hidden == pytest.approx(1 - exposed / by["push and pull"].ms)


def test_what_is_not_valid_is_refused():
    with pytest.raises(ConfigError, match="give numbers of at least 1"):
        bench_device_server("cpu", shards=0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="there is no CUDA device"):
            bench_device_server("cuda")


def test_the_input_is_sized_by_the_time_of_a_computation():
    class Work:
        place = torch.device("cpu")

        def compute(self, x):
            self.rows = len(x)

    found = device_server._make_sized_input(Work(), 0.0)
    assert found.shape == (16, 1024)
