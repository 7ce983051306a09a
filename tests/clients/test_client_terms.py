"""What a job asks of its real clients: read from each kind of strategy, and parsed once for many requests."""

import pytest
from rayps_api import client_terms
from rayps_api.client_terms import ClientTerms, terms_of
from rayps_api.membership import needs_certificate
from rayps_client.errors import ConfigError

from rayps.strategies.catalogue import federations, parse, wire
from rayps.strategies.job import JobSpec


def spec(strategy, **more):
    return JobSpec("work.py:Work", wire(parse(strategy)) if isinstance(strategy, str) else strategy, **more)


def test_terms_of_each_kind_of_strategy():
    assert terms_of(spec("all_reduce")) == terms_of(spec("fedavg:fraction=0.5")) == ClientTerms()
    assert terms_of(spec({"name": "mine.py:Own"})) == ClientTerms()
    assert terms_of(spec("fedavg:clients=remote")) == ClientTerms(remote=True)
    found = terms_of(spec("fedavg:clients=remote(least=2,members=true),secure=secagg(clip=1.0,verify=true)"))
    assert found.remote and found.members and found.verify and [each.clip for each in found.secure] == [1.0]
    both = terms_of(spec("2*fedavg:clients=remote(members=true) > fedavg:clients=remote"))
    assert both.remote and both.members and both.secure == ()
    with pytest.raises(ConfigError, match="remote"):
        terms_of(spec({"name": "fedavg", "clients": "near"}))


def test_a_strategy_is_parsed_once_for_all_requests_of_its_job(monkeypatch):
    parsed = []
    monkeypatch.setattr(client_terms, "federations", lambda given: parsed.append(given) or federations(given))
    strategy = "fedavg:local_epochs=7,clients=remote(least=2,members=true)"
    for _ in range(3):  # a store returns a new spec for each request
        assert needs_certificate(spec(strategy)) and terms_of(spec(strategy)).remote
    assert len(parsed) == 1
    assert not terms_of(spec("fedavg:local_epochs=8,clients=remote")).members and len(parsed) == 2
    assert needs_certificate(spec("fedavg:local_epochs=8,clients=remote", statement="Use the data for this job."))
