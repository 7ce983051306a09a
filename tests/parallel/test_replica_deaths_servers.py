"""Under servers only the replica of a worker that died begins anew; the others are not disturbed.

Servers are fixed (`replicas` None), or a group with copies of each segment (1) or without (0).
"""

import covers
import pytest
import torch
from small_work import SEEN, Small, Watched, distance, kinds, plain, train
from torch import nn

from rayps import Downpour, ParameterServer, Pipeline, TensorParallel
from rayps.ps.group import start

pytestmark = pytest.mark.chaos

PIPE, WIDE = Pipeline(stages=2, micro_batches=2), TensorParallel(size=2)


@pytest.fixture
def tag(request):
    SEEN.clear()
    return request.node.nodeid


@pytest.mark.parametrize("replica", [PIPE, WIDE], ids=str)
@pytest.mark.parametrize(("staleness", "replicas", "at"), [(2, None, 3), (2, 1, 40), (None, None, 40), (None, 1, 3)])
def test_out_of_step_a_replica_begins_anew_from_the_servers(tag, replica, staleness, at, replicas):
    work, cluster = Small(n=160, batch=4, pause=0.003, tag=tag), Watched()
    killer = cluster.kill_when(tag, at, ("WorkerActor", 1))
    strategy = ParameterServer(shards=2, staleness=staleness, replicas=replicas, replica=replica)
    result = train(work, strategy, cluster, workers=4, epochs=2)
    killer.join()
    cluster.close()
    assert "restarted" not in kinds(result)
    assert [event["lost"] for event in result.events if event["kind"] == "replaced"] == [["worker-1"]]
    [event] = [event for event in result.events if event["kind"] == "rejoined"]
    assert 0 < event["seconds"] < 60
    assert result.history.column("round").to_pylist() == list(range(40))
    assert [cluster.spawned["WorkerActor", rank] for rank in range(4)] == [1, 2, 1, 1]
    assert all(torch.isfinite(p).all() for p in result.model().parameters())


class Add(nn.Module):
    """Adds what it learns; its gradient is the same everywhere, so that only the number of steps counts."""

    def __init__(self):
        super().__init__()
        self.summand = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self, x):
        return x + self.summand


class Adds(Small):
    def model(self):
        return nn.Sequential(Add(), Add())

    def loss(self, model, batch):
        super().loss(nn.Flatten(), batch)
        return model(batch.x).sum(dim=1).mean()

    def evaluate(self, model, batch):
        return {}


@pytest.mark.parametrize(
    ("staleness", "replicas", "at"),
    [
        (0, None, 7),
        (0, 0, 12),
        (0, 1, 33),
        (2, None, 12),
        (2, 0, 33),
        (2, 1, 50),
        (None, None, 33),
        (None, 0, 50),
        (None, 1, 7),
    ],
)
def test_nothing_is_pushed_twice_and_nothing_is_missing(tag, staleness, at, replicas):
    work, cluster = Adds(n=80, batch=4, pause=0.003, tag=tag), Watched()
    killer = cluster.kill_when(tag, at, ("WorkerActor", 1))
    strategy = ParameterServer(shards=2, staleness=staleness, replicas=replicas, replica=PIPE)
    result = train(work, strategy, cluster, workers=2, epochs=2)
    killer.join()
    cluster.close()
    assert kinds(result).count("replaced") == 1
    for parameter in result.model().parameters():
        assert torch.allclose(parameter, torch.full((5,), -0.1 * 40, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("replicas", [None, 1])
@pytest.mark.parametrize("replica", [PIPE, WIDE], ids=str)
@pytest.mark.parametrize(("at", "victim"), [(7, 1), (30, 2)])
def test_in_step_the_round_is_replayed_by_that_replica_alone_to_the_bit(tag, replica, at, victim, replicas):
    work, cluster = Small(n=80, batch=2, optimizer="adam", pause=0.003, tag=tag), Watched()
    law = train(work, ParameterServer(shards=2, replica=replica), workers=4, epochs=2)
    SEEN.clear()
    killer = cluster.kill_when(tag, at, ("WorkerActor", victim))
    strategy = ParameterServer(shards=2, replicas=replicas, replica=replica)
    result = train(work, strategy, cluster, workers=4, epochs=2)
    killer.join()
    cluster.close()
    if "restarted" not in kinds(result):  # in a moment when some parts have the push and others lack it, it must be so
        assert kinds(result).count("rejoined") == 1
        assert set(result.history.column("generation").to_pylist()) == {1}
    assert sum(cluster.spawned["WorkerActor", rank] for rank in range(4)) == 5
    assert distance(result.model(), law.model()) == 0.0
    assert distance(law.model(), plain(work, 2, epochs=2)[0]) < 1e-12


def test_in_step_a_dead_server_still_means_the_snapshot(tag):
    work, cluster = Small(n=80, batch=2, pause=0.003, tag=tag), Watched()
    killer = cluster.kill_when(tag, 20, ("ShardActor", 0))
    result = train(work, ParameterServer(shards=2, replica=PIPE), cluster, workers=4, epochs=2)
    killer.join()
    cluster.close()
    assert kinds(result).count("restarted") == 1
    assert distance(result.model(), plain(work, 2, epochs=2)[0]) < 1e-12


@covers.values
@pytest.mark.parametrize("replica", [PIPE, WIDE], ids=str)
@pytest.mark.parametrize("replicas", [0, 1])
def test_in_step_a_dead_server_of_a_group_changes_no_bit(tag, replica, replicas):
    """With copies another server goes on; without, segments come back from the checkpoint and the workers."""
    work, cluster = Small(n=80, batch=2, optimizer="adam", pause=0.008, tag=tag), Watched()
    law = train(work, ParameterServer(shards=2, replica=replica), workers=4, epochs=3)
    SEEN.clear()
    killer = cluster.kill_when(tag, 60, ("ServerActor", "server-1"))
    strategy = ParameterServer(shards=2, replicas=replicas, replica=replica)
    result = train(work, strategy, cluster, workers=4, epochs=3, checkpoint_every=4, timeout=30.0)
    killer.join()
    cluster.close()
    assert torch.equal(result.snapshot.params, law.snapshot.params)
    assert "server_lost" in kinds(result) and not {"restarted", "replaced"} & set(kinds(result))
    assert ("restored" in kinds(result)) == (replicas == 0)


@covers.values
@pytest.mark.parametrize("staleness", [2, None])
@pytest.mark.parametrize("replicas", [0, 1])
def test_out_of_step_each_push_is_applied_once_whichever_server_dies(tag, staleness, replicas):
    work, cluster = Adds(n=120, batch=4, pause=0.008, tag=tag), Watched()
    killer = cluster.kill_when(tag, 60, ("ServerActor", "server-1"))
    strategy = ParameterServer(shards=2, staleness=staleness, replicas=replicas, replica=PIPE)
    result = train(work, strategy, cluster, workers=4, epochs=4, checkpoint_every=4, timeout=30.0)
    killer.join()
    cluster.close()
    assert {"server_lost"} <= set(kinds(result)) and not {"restarted", "replaced"} & set(kinds(result))
    assert sum(event["pushes"] for event in result.events if event["kind"] == "restored") == 0
    for parameter in result.model().parameters():
        assert torch.allclose(parameter, torch.full((5,), -0.1 * 60, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_server_and_a_worker_of_a_divided_model_may_both_die(tag):
    work, cluster = Adds(n=120, batch=4, pause=0.008, tag=tag), Watched()
    killers = [cluster.kill_when(tag, 40, ("ServerActor", "server-0")), cluster.kill_when(tag, 90, ("WorkerActor", 3))]
    strategy = ParameterServer(shards=3, staleness=2, replicas=1, replica=PIPE)
    result = train(work, strategy, cluster, workers=4, epochs=4, checkpoint_every=4, timeout=30.0)
    for killer in killers:
        killer.join()
    cluster.close()
    assert {"server_lost", "replaced", "rejoined"} <= set(kinds(result)) and "restarted" not in kinds(result)
    for parameter in result.model().parameters():
        assert torch.allclose(parameter, torch.full((5,), -0.1 * 60, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("replicas", [0, 1])
def test_each_gradient_of_a_divided_downpour_counts_once_whoever_dies(tag, replicas):
    work, cluster = Adds(n=120, batch=4, pause=0.008, tag=tag), Watched()
    strategy = Downpour(n_push=3, n_fetch=2, replica=PIPE)
    with start(cluster, "common", servers=3, replicas=replicas, detached=False):
        killers = [
            cluster.kill_when(tag, 40, ("ServerActor", "server-1")),
            *([cluster.kill_when(tag, 90, ("WorkerActor", 1))] if replicas else []),
        ]
        options = {"server_group": "common", "checkpoint_every": 4, "timeout": 30.0}
        result = train(work, strategy, cluster, workers=4, epochs=4, **options)
    for killer in killers:
        killer.join()
    cluster.close()
    assert "server_lost" in kinds(result) and "restarted" not in kinds(result)
    for parameter in result.model().parameters():
        assert torch.allclose(parameter, torch.full((5,), -0.1 * 120, dtype=torch.float64), rtol=0, atol=1e-12)


def test_out_of_step_a_divided_job_resumes_on_a_group_what_it_saved_on_fixed_servers_and_back(tmp_path):
    work, cluster = Adds(n=120, batch=4), Watched()
    for at, replicas in enumerate([None, 1, None, 0]):
        strategy = ParameterServer(shards=2, staleness=2, replicas=replicas, replica=PIPE)
        result = train(work, strategy, cluster, workers=4, epochs=at + 1, checkpoint=tmp_path, resume=at > 0)
        assert result.snapshot.round == 15 * (at + 1)
        for parameter in result.model().parameters():
            expected = torch.full((5,), -0.1 * 15 * (at + 1), dtype=torch.float64)
            assert torch.allclose(parameter, expected, rtol=0, atol=1e-12)
    cluster.close()
