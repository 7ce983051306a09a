"""A POST of a job parses its strategy once, and asks about members only where a job has real clients."""

from collections.abc import Iterator

import pytest
from rayps_api.routes import routes_jobs
from rayps_api.service import Service
from service_site import Site

from rayps.strategies import catalogue


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Service, "loops", lambda _: [])  # the scheduler reads jobs anew
        running = Site(tmp_path_factory.mktemp("once") / "state")
        (running.settings.state_dir / "work.py").write_text("class Work: ...\n")
        yield running
        running.close()


def job(site: Site, strategy: object, **more: object) -> dict[str, object]:
    return {"workload": "work.py:Work", "working_dir": str(site.settings.state_dir), "strategy": strategy, **more}


@pytest.mark.parametrize(
    ("strategy", "phases"),
    [
        ("all_reduce", 1),
        ({"name": "parameter_server", "shards": 2, "staleness": 3}, 1),
        ({"name": "parameter_server", "shards": 2, "shard_resources": {"gpu": 0.5}}, 1),
        ("2*parameter_server:staleness=none > all_reduce", 2),
        ([{"epochs": 1, "strategy": {"name": "local_sgd"}}, {"strategy": {"name": "all_reduce"}}], 2),
        ("fedavg:local_epochs=2", 1),
    ],
)
def test_a_strategy_is_parsed_once(site: Site, monkeypatch: pytest.MonkeyPatch, strategy: object, phases: int) -> None:
    parsed, parse = [], catalogue._strategy
    monkeypatch.setattr(catalogue, "_strategy", lambda *given: parsed.append(given[0]) or parse(*given))
    answer = site.http.post("/api/v1/jobs", json=job(site, strategy, epochs=4 if phases > 1 else None))
    assert answer.status_code == 201, answer.text
    assert len(parsed) == phases, parsed


def test_only_a_job_with_real_clients_asks_about_members(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(routes_jobs, "refuse_without_authority", lambda spec, *_: asked.append(spec.strategy["name"]))
    for strategy in ("all_reduce", "fedavg", "fedavg:clients=remote"):
        assert site.http.post("/api/v1/jobs", json=job(site, strategy)).status_code == 201
    assert asked == ["fedavg"]
    remote = site.http.post("/api/v1/jobs", json=job(site, "fedavg:clients=remote(members=true)"))
    assert remote.status_code == 201 and len(asked) == 2
