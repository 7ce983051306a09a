"""Every option of `elastic` under every loop: it has the effect that it promises, or a refusal names it.

The loops are those of the strategies in the catalogue, the options the fields of `ElasticWorkers`: a new one of either
joins by itself.
"""

import importlib
import time
from dataclasses import fields

import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ConfigError
from small_work import Watched
from torch import nn

import rayps
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.core.strategy.elastic_support import check_phases, takes_leases
from rayps.core.strategy.strategy_families import SHARDED_PARAMETERS, learns_by_client
from rayps.core.strategy.topology import servers_of, shard_of
from rayps.federated.strategy_interface import FederatedView
from rayps.runtime.size import job_size
from rayps.strategies.catalogue import CATALOGUE, parse

VARIANTS = {
    "all_reduce": ["shard=optimizer", "shard=gradients", "shard=parameters", "compression=fp16"],
    "parameter_server": ["shards=2,staleness=0", "shards=2,staleness=2", "shards=2,staleness=none"],
    "local_sgd": ["period=2"],
    "fedavg": ["fraction=0.5"],
}


def family(strategy):
    """What a loop is: strategies with the same answer run the same code with the workers of an elastic job."""
    servers, topology = servers_of(strategy), type(strategy.topology).__name__
    federated = isinstance(strategy, FederatedView) and learns_by_client(strategy)
    shape = None if servers is None else (servers.in_step, servers.staleness is None, servers.own_copies)
    return strategy.loop, topology, shard_of(strategy), shape, federated


def accepted(text):
    try:
        check_phases(parse(text), ElasticWorkers(3))
    except ConfigError:
        return False
    return True


TEXTS = [text for name in CATALOGUE for text in (name, *(f"{name}:{form}" for form in VARIANTS.get(name, ())))]
FORMS = {family(parse(text)[0].strategy): text for text in reversed(TEXTS) if accepted(text)}
FORMS = sorted({*FORMS.values(), "all_reduce:compression=fp16"})
OPTIONS = sorted({each.name for each in fields(ElasticWorkers)} - {"most"})  # `most` is the range itself

ROWS, BATCH, RATE, CHANGES = 48, 4, 0.125, [[2, 2], [4, 1]]


class Level(rayps.Workload):
    """The gradient of every parameter is 1 whatever the rows: a step of rate r subtracts r from each."""

    def __init__(self, pause=0.0):
        self.pause = pause

    def model(self):
        model = nn.Sequential(nn.Linear(3, 4, bias=False)).double()
        nn.init.zeros_(model[0].weight)
        return model

    def data(self):
        rows = torch.ones(ROWS, 3, dtype=torch.float64)
        return rayps.data.tensors(rows, torch.arange(ROWS), batch_size=BATCH, client=[f"c{i % 4}" for i in range(ROWS)])

    def loss(self, model, batch):
        if self.pause and importlib.import_module("leased_work").worker_rank() == 1:
            time.sleep(self.pause * len(batch.x))
        return model(batch.x).sum(1).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=RATE)

    def evaluate(self, model, batch):
        return {"level": model(batch.x).mean()}


def train(text, work=None, **options):
    # torch has one process group in a process
    cluster = ProcessCluster() if parse(text)[0].strategy.loop == SHARDED_PARAMETERS else Watched()
    by_client = learns_by_client(parse(text)[0].strategy)
    epochs = options.pop("epochs", 8 if by_client else 2)
    given = options.pop("elastic")
    try:
        return rayps.train(
            work or Level(), strategy=text, workers=options.pop("workers", (1, 2)), epochs=epochs, seed=3,
            cluster=cluster, progress=False, timeout=30, elastic=given,
        )  # fmt: skip
    finally:
        cluster.close()


def resized(result):
    return [[event["round"], event["to"]] for event in result.events if event["kind"] == "resized"]


def moved(result):
    """By how much each parameter has moved from 0, in steps of the rate."""
    steps = -result.snapshot.loaded().params / RATE
    assert steps.max() - steps.min() < 1e-6
    return float(steps.mean())


def follows_the_rule(text, rule, factor):
    found = train(text, elastic={"lr_scaling": rule, "replay": CHANGES})
    assert resized(found) == CHANGES
    rows = found.history.column("samples").to_pylist()
    assert {4, 8} <= set(rows)
    workers = [2 if CHANGES[0][0] <= at < CHANGES[1][0] else 1 for at in range(len(rows))]
    assert moved(found) == pytest.approx(sum(factor(count) for count in workers), abs=1e-3)


def scales_the_rates(text, monkeypatch):
    follows_the_rule(text, "linear", lambda workers: workers)
    follows_the_rule(text, "sqrt", lambda workers: workers**0.5)


def keeps_the_rows_of_a_round(text, monkeypatch):
    found = train(text, elastic={"global_batch": 6, "replay": CHANGES})
    assert resized(found) == CHANGES
    assert found.history.column("samples").to_pylist() == [6] * (2 * ROWS // 6)


def changes_after_these_rounds(text, monkeypatch):
    assert resized(train(text, elastic={"replay": CHANGES})) == CHANGES


def decides_by_it(name):
    """The one decision on the number of workers gets the value, whatever the loop: see `test_decide_size.py`."""

    def check(text, monkeypatch):
        seen, decide, gain = {"cooldown": set(), "gain": set()}, job_size.decide_size, job_size.GrowthGain

        def decided(facts):
            seen["cooldown"].add(facts.cooldown)
            return decide(facts)

        def made(least):
            seen["gain"].add(least)
            return gain(least)

        monkeypatch.setattr(job_size, "decide_size", decided)
        monkeypatch.setattr(job_size, "GrowthGain", made)
        for epochs in (1, 8, 64):  # a short job may end before its first decision
            train(text, elastic={name: 0.75}, epochs=epochs)
            if seen[name]:
                break
        assert seen[name] == {0.75}

    return check


def deals_by_speed(text, monkeypatch):
    found = train(text, Level(pause=0.004), workers=(2, 2), epochs=20, elastic={"most": 2, "balance": True})
    [shares, *_] = [event["shares"] for event in found.events if event["kind"] == "shares"]
    assert shares[1] < shares[0] and sum(shares) == 2 * BATCH


PROMISES = {
    "lr_scaling": ("linear", scales_the_rates),
    "global_batch": (6, keeps_the_rows_of_a_round),
    "replay": (((2, 2), (4, 1)), changes_after_these_rounds),
    "cooldown": (0.75, decides_by_it("cooldown")),
    "gain": (0.75, decides_by_it("gain")),
    "balance": (True, deals_by_speed),
}


def test_every_option_has_a_promise_and_every_loop_a_form():
    assert sorted(PROMISES) == OPTIONS
    assert len(FORMS) >= 9 and any(takes_leases(parse(text)) for text in FORMS)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("text", FORMS)
def test_an_option_has_its_effect_or_is_refused_by_name(text, name, monkeypatch):
    value, check = PROMISES[name]
    try:
        check_phases(parse(text), ElasticWorkers(2, **{name: value}).check(1))
    except ConfigError as refusal:
        assert name in str(refusal)
        return
    check(text, monkeypatch)
