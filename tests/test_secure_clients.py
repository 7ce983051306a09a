"""Secure aggregation with real clients: real HTTP, real files, and no update on the service's side."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_site import Clinic

from rayps.core.logs import LogBuffer

ROOT = Path(__file__).resolve().parent.parent
SECURE = "fedavg:local_epochs=2,secure=secagg(clip=5,bits=20),clients=remote(least={least},wait=100)"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(LogBuffer, "capture", lambda self: None)  # actors are threads: this process's own words
    yield
    os.chdir(ROOT)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    made = Clinic(tmp_path_factory.mktemp("clinic"))
    yield made
    made.close()


def test_masked_sums_learn_what_plain_ones_learn(clinic: Clinic) -> None:
    job = clinic.job(SECURE.format(least=3), seed=5)
    hospitals = clinic.hospitals(job, 3)
    learnt = clinic.trained(job)
    print([h.over().said for h in hospitals], [e["message"] for e in job.events()])
