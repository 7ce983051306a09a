"""Under servers only the replica of a worker that died begins anew; the others are not disturbed."""

import pytest
import torch
from small_work import SEEN, Small, Watched, distance, kinds, plain, train

from rayps import ParameterServer, Pipeline, TensorParallel

PIPE, WIDE = Pipeline(stages=2, micro_batches=2), TensorParallel(size=2)


@pytest.fixture
def tag(request):
    SEEN.clear()
    return request.node.nodeid


@pytest.mark.parametrize("replica", [PIPE, WIDE], ids=str)
@pytest.mark.parametrize("staleness", [2, None])
@pytest.mark.parametrize("at", [3, 40])
def test_out_of_step_a_replica_begins_anew_from_the_servers(tag, replica, staleness, at):
    work, cluster = Small(n=160, batch=4, pause=0.003, tag=tag), Watched()
    killer = cluster.kill_when(tag, at, ("WorkerActor", 1))
    result = train(work, ParameterServer(shards=2, staleness=staleness, replica=replica), cluster, workers=4, epochs=2)
    killer.join()
    cluster.close()
    assert "restarted" not in kinds(result)
    assert [event["lost"] for event in result.events if event["kind"] == "replaced"] == [["worker-1"]]
    [event] = [event for event in result.events if event["kind"] == "rejoined"]
    assert 0 < event["seconds"] < 60
    assert result.history.column("round").to_pylist() == list(range(40))
    assert [cluster.spawned["WorkerActor", rank] for rank in range(4)] == [1, 2, 1, 1]
    assert all(torch.isfinite(p).all() for p in result.model().parameters())


@pytest.mark.parametrize("replica", [PIPE, WIDE], ids=str)
@pytest.mark.parametrize("staleness", [2, None])
@pytest.mark.parametrize("at", [7, 30])
def test_of_one_replica_nothing_is_pushed_twice_and_nothing_is_missing(tag, replica, staleness, at):
    work, cluster = Small(n=80, batch=4, optimizer="adam", pause=0.003, tag=tag), Watched()
    killer = cluster.kill_when(tag, at, ("WorkerActor", 1))
    result = train(work, ParameterServer(shards=2, staleness=staleness, replica=replica), cluster, workers=2, epochs=2)
    killer.join()
    cluster.close()
    assert [event["lost"] for event in result.events if event["kind"] == "replaced"] == [["worker-1"]]
    assert distance(result.model(), plain(work, 1, epochs=2)[0]) < 1e-12


@pytest.mark.parametrize("replica", [PIPE, WIDE], ids=str)
@pytest.mark.parametrize("at", [7, 30])
def test_in_step_with_servers(tag, replica, at):
    work, cluster = Small(n=80, batch=2, optimizer="adam", pause=0.003, tag=tag), Watched()
    killer = cluster.kill_when(tag, at, ("WorkerActor", 1))
    result = train(work, ParameterServer(shards=2, replica=replica), cluster, workers=4, epochs=2)
    killer.join()
    cluster.close()
    print(kinds(result))
    assert distance(result.model(), plain(work, 2, epochs=2)[0]) < 1e-12
