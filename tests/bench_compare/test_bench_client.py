"""`python -m benchmarks client`: rows and bad input. What it measures is in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rayps_client.errors import ClusterError

from benchmarks.__main__ import main
from benchmarks.federated.client_flower import run_flower

pytestmark = pytest.mark.bench


def test_a_client_is_measured_until_its_update_has_arrived(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["client", "--runs", "1", "--parameters", "100", "--contenders", "rayps-client, numpy", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert code == 0 and row["contender"] == "rayps-client, numpy" and row["processes"] == 1
    assert 0 < row["joined"] <= row["order"] <= row["update"]
    assert 0 < row["private_mb"] <= row["memory_mb"]


def test_a_contender_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "--contenders", "other"]) == 2
    assert "contender 'other': give some of rayps-client, numpy" in capsys.readouterr().err


def test_a_peer_that_does_not_start_is_an_error_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.federated.client_flower.READY_SECONDS", 0.5)
    for name in ("flower-superlink", "flwr"):
        (tmp_path / name).write_text("#!/bin/sh\necho no such option\nexit 2\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "run").mkdir()
    with (
        pytest.raises(ClusterError, match="Flower's server side did not start:\nno such option"),
        run_flower(tmp_path / "python", tmp_path / "run", "numpy", 9, 64),
    ):
        pass
