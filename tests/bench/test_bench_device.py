"""`python -m benchmarks device` without a GPU: its rows, and that a row that fails leaves the others."""

import json

import pytest
from rayps_client.errors import ConfigError
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.gpu.device_ring import bench_device_sums
from benchmarks.gpu.device_step import TransformerSize, bench_device_step

SMALL = TransformerSize(layers=1, width=16, heads=2, words=32, length=8, batch=2)


def test_sums_are_told_by_transport_beside_their_copies():
    rows = bench_device_sums("cpu", [2], megabytes=0.1, seconds=0.1)
    assert [(row.transport, row.vector) for row in rows] == [
        (transport, vector) for transport in ("ipc", "staging", "nccl", "own") for vector in ("resident", "plain")
    ]
    for row in rows:
        assert row.error == ""
        assert row.times_copies == pytest.approx(row.ms / row.copies_ms)
        assert (row.adds_ms is not None) == (row.transport == "staging")


def test_a_step_is_told_beside_plain_torch():
    torch, own = bench_device_step("cpu", seconds=0.1, steps=1, size=SMALL)
    assert (torch.contender, own.contender) == ("torch", "own")
    assert own.of_torch == pytest.approx(torch.ms / own.ms)
    assert torch.error == own.error == ""


def test_a_contender_that_fails_has_its_error(monkeypatch):
    monkeypatch.setattr("rayps.bench.worker_steps.SyncGradients", None)
    torch, own = bench_device_step("cpu", seconds=0.1, steps=1, size=SMALL)
    assert torch.ms is not None
    assert own.ms is None
    assert "NoneType" in own.error


def test_a_transport_that_fails_has_its_error(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.device_ring._START_SECONDS", 0.0)
    rows = bench_device_sums("cpu", [2], megabytes=0.1, seconds=0.1)
    assert len(rows) == 8
    assert all(row.error == "TimeoutError" and row.ms is None for row in rows)


def test_the_command():
    found = CliRunner().invoke(app, ["device", "--what", "layers", "--batches", "1", "--repeats", "1", "--json"])
    assert found.exit_code == 0, found.output
    assert len(json.loads(found.output)["layers"]) == 5


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="a sum needs at least 2"):
        bench_device_sums("cpu", [1])
    with pytest.raises(ConfigError, match="give numbers above 0"):
        bench_device_step("cpu", seconds=0)
    with pytest.raises(ConfigError, match="there is no part 'gpu': use some of layers, sum, step"):
        CliRunner().invoke(app, ["device", "--what", "gpu"], catch_exceptions=False)
