"""The ledger test: each push adds 1 to slots of its own, whatever is killed at whichever moment.

Real processes, real links, the real driver. Every row of the data is one push: the gradient of its loss is -N in the
row's own slots, one on each server, and the optimizer is SGD with a rate of 1, so that a push adds exactly 1 there.
"""

import random
import time

import covers
import pytest
import torch
from process_cluster import ProcessCluster
from torch import nn

import rayps
from rayps import ParameterServer
from rayps.cluster.local import LocalCluster

WORKERS, SHARDS, ROWS = 3, 2, 36


class Slots(nn.Module):
    def __init__(self):
        super().__init__()
        self.slots = nn.Parameter(torch.zeros(SHARDS * ROWS, dtype=torch.float64))


class Tally(rayps.Workload):
    """One slot a row and server; the mean loss of a batch of one row pushes that row's slots up by 1."""

    def __init__(self, scale, pause=0.0):
        self.scale, self.pause = scale, pause  # what the server divides by; seconds

    def model(self):
        return Slots()

    def data(self):
        return rayps.data.tensors(torch.arange(ROWS), torch.zeros(ROWS), batch_size=1)

    def loss(self, model, batch):
        time.sleep(self.pause)
        return -self.scale * sum(model.slots[batch.x + shard * ROWS].sum() for shard in range(SHARDS))

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1.0)


def tally(strategy, arm, epochs=2, every=3):
    cluster = ProcessCluster(arm)
    try:
        # in step, the three rows of a round share a mean: a third of three is one again
        result = rayps.train(
            Tally(WORKERS),
            strategy=strategy,
            workers=WORKERS,
            epochs=epochs,
            cluster=cluster,
            checkpoint_every=every,
            progress=False,
            timeout=60.0,
            max_failures=9,
        )
    finally:
        cluster.close()
    return result, result.snapshot.params


PLACES = {
    "ShardActor": ["host: applied, not forwarded", "host: acknowledged, not saved", "host: state kept, not collected"],
    "WorkerActor": ["session: between servers", "session: sent, not answered", "session: acknowledged"],
}


def died(result):
    return [event for event in result.events if event["kind"] in ("replaced", "restarted")]


@pytest.mark.chaos
@covers.by(lambda kind, place, staleness: (place, staleness == 0), lambda kind, place, staleness: (kind, staleness))
@pytest.mark.parametrize("staleness", [0, 1, None])
@pytest.mark.parametrize(("kind", "place"), [(kind, place) for kind, places in PLACES.items() for place in places])
def test_a_death_at_a_named_place(kind, place, staleness):
    visit = 2 if "kept, not collected" in place else 7
    result, slots = tally(ParameterServer(shards=SHARDS, staleness=staleness), {(kind, 1): f"{place}={visit}"})
    assert [event["lost"] for event in died(result)] == [[f"{kind[:-5].lower()}-1"]]
    assert torch.equal(slots, torch.full_like(slots, 2.0)), slots  # two epochs


@pytest.mark.chaos
@pytest.mark.parametrize("round_", range(3))
def test_several_deaths(round_):
    """A worker and a shard that die within one snapshot may lose what only that worker kept; nothing is added twice."""
    chance = random.Random(random.getrandbits(32) + round_)
    arm = {
        (kind, i): f"{chance.choice(PLACES[kind][:2])}={chance.randint(2, 20)}"
        for kind, i in (("ShardActor", 0), ("ShardActor", 1), ("WorkerActor", chance.randrange(WORKERS)))
    }
    result, slots = tally(ParameterServer(shards=SHARDS, staleness=chance.choice([1, 2, None])), arm)
    assert len(died(result)) >= 2, (arm, result.events)
    lost = sum(event["pushes"] for event in result.events if event["kind"] == "lost")
    assert slots.max() <= 2, arm
    assert (2 - slots).sum() == lost, (arm, result.events)


@pytest.mark.parametrize("staleness", [2, None])
def test_shards_that_die_one_after_the_other_in_threads(staleness):
    cluster, ends = LocalCluster(), []

    def harm(progress):
        worst = min((worker["round"] for worker in progress["workers"]), default=0)
        if len(ends) < 3 and progress["status"] == "RUNNING" and worst > 3 * len(ends) + 2:
            shards = [handle for name, handle in cluster._handles.items() if name.startswith("ShardActor")]
            ends.append(shards[len(ends) % SHARDS].name)
            cluster.kill(cluster.find(ends[-1]))

    try:
        result = rayps.train(
            Tally(WORKERS, 0.02),
            strategy=ParameterServer(shards=SHARDS, staleness=staleness),
            workers=WORKERS,
            epochs=2,
            cluster=cluster,
            checkpoint_every=5,
            progress=harm,
            timeout=60.0,
        )
    finally:
        cluster.close()
    assert len(ends) == 3 and len(died(result)) == 3
    assert torch.equal(result.snapshot.params, torch.full((SHARDS * ROWS,), 2.0, dtype=torch.float64))
    assert not [event for event in result.events if event["kind"] == "lost"]


def test_without_deaths_the_same():
    for staleness in (0, 2, None):
        _, slots = tally(ParameterServer(shards=SHARDS, staleness=staleness), {}, epochs=1)
        assert torch.equal(slots, torch.ones_like(slots))
