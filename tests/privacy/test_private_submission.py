"""Privacy budgets that are refused at submission, in the words of the check at the job's start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from federated_work import Fed
from rayps_client.errors import ConfigError
from service_site import Site

from rayps.federated import check
from rayps.federated.private_job import must_allow_a_round
from rayps.service import strategy_check
from rayps.service.local_ray.ray_process import make_python_path
from rayps.strategies.catalogue import parse

BROKE = "fedavg:fraction=0.5,privacy=dp(noise_multiplier=0.3,epsilon=0.5,delta=0.001)"
NEVER = "fedavg:fraction=0.5,privacy=dp(epsilon=0.0001,rounds=1000000,delta=1e-9,sampling=all)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("state"))
    yield site
    site.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process that imports the accountant on a loaded machine is awaited."""
    monkeypatch.setattr(strategy_check, "PARAMS_SECONDS", 120.0)


def strategy(text: str) -> Any:
    return parse(text)[0].strategy


@pytest.mark.parametrize(
    "text",
    [
        BROKE,
        NEVER,
        "fedavg:privacy=dp(noise_multiplier=0.3,epsilon=0.5,mechanism=tree,delta=0.001)",
        "fedavg:privacy=dp(noise_multiplier=1.1,epsilon=0.01,clip=adaptive,bit_noise=5,delta=0.001)",
    ],
)
def test_the_words_are_those_of_the_start(text: str) -> None:
    with pytest.raises(ConfigError) as at_submission:
        must_allow_a_round(strategy(text))
    with pytest.raises(ConfigError) as at_start:
        check.federated(strategy(text), Fed(), Fed().data(), 0)
    assert str(at_submission.value) == str(at_start.value)
    assert at_submission.value.data["field"] == "privacy"


@pytest.mark.parametrize(
    "text",
    [
        "fedavg:fraction=0.5",
        "fedavg:fraction=0.5,privacy=dp(noise_multiplier=0.01)",  # no budget
        "fedavg:fraction=0.5,privacy=dp(noise_multiplier=1.1,epsilon=3,delta=0.001)",
        "fedavg:fraction=0.5,privacy=dp(epsilon=8,rounds=20,delta=0.01)",
        # what these cost depends on the number of clients, or on the model's size
        "fedavg:privacy=dp(noise_multiplier=0.3,epsilon=0.5,sampling=fixed)",
        "fedavg:privacy=dp(epsilon=0.0001,rounds=1000000,mechanism=tree)",
        "fedavg:privacy=dp(noise_multiplier=0.3,epsilon=0.5,noise_by=clients),secure=secagg(clip=1.0,max_weight=1),"
        "clients=remote(least=5)",
    ],
)
def test_what_the_options_alone_do_not_decide_is_left_to_the_start(text: str) -> None:
    must_allow_a_round(strategy(text))


def test_real_clients_under_tree_noise_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"epsilon=0.5 allows no release"):
        must_allow_a_round(
            strategy("fedavg:clients=remote(least=5),privacy=dp(noise_multiplier=0.3,epsilon=0.5,mechanism=tree)")
        )


def test_the_service_refuses_a_budget_that_allows_no_round(site: Site) -> None:
    job = {"workload": "digits:Digits", "epochs": 3}
    answer = site.http.post("/api/v1/jobs", json={**job, "strategy": BROKE})
    assert answer.status_code == 422 and "allows no release: one with noise_multiplier=0.3" in answer.json()["detail"]
    sweep = {"name": "s", "job": {**job, "strategy": "all_reduce"}, "over": {"strategy": ["fedavg", BROKE]}}
    answer = site.http.post("/api/v1/sweeps", json=sweep)
    assert answer.status_code == 422 and "allows no release" in answer.json()["detail"]
    assert site.http.get("/api/v1/jobs").json()["jobs"] == []


def test_without_the_accountant_the_job_is_told_that_its_start_checks(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dp_accounting.py").write_text("raise ImportError('not installed')\n")
    monkeypatch.setattr(strategy_check, "make_python_path", lambda: f"{tmp_path}:{make_python_path()}")
    job = site.add(strategy=BROKE)
    events = site.http.get(f"/api/v1/jobs/{job}/events").json()["events"]
    (said,) = [event["message"] for event in events if event["kind"] == "warning"]
    assert "is checked at the start of the job" in said and "pip install 'rayps[privacy]'" in said


def test_jobs_without_a_budget_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_check.subprocess, "Popen", None)
    for text in ("all_reduce", "fedavg", "fedavg:privacy=dp(noise_multiplier=1.1)"):
        assert strategy_check.refuse_budgets([strategy_check.check_phases(parse(text)).strategy]) is None  # type: ignore[list-item]
