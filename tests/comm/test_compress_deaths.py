"""Compressed training goes on after deaths; what was left out begins anew, so that it stays near the law."""

import pytest
from small_work import Small, Watched, distance, kinds, plain, train

from rayps import AllReduce, ParameterServer


@pytest.mark.parametrize(
    "strategy", [AllReduce(compression="int8"), ParameterServer(shards=2, compression="int8")], ids=str
)
def test_in_step_everyone_goes_on_from_the_last_snapshot(strategy, request):
    work = Small(n=60, optimizer="momentum", pause=0.004, tag=request.node.name)
    cluster = Watched()
    killer = cluster.kill_when(work.tag, 40, ("WorkerActor", 1))
    result = train(work, strategy, cluster, workers=3, epochs=3)
    killer.join()
    assert kinds(result).count("restarted") == 1
    assert result.history.column("round").to_pylist() == list(range(21))
    assert 0 < distance(result.model(), plain(work, 3, epochs=3)[0]) < 0.1


@pytest.mark.parametrize("victim", ["ShardActor", "WorkerActor"])
@pytest.mark.parametrize("compression", ["int8", "top_k:0.5"])
def test_out_of_step_the_others_go_on_and_encoded_pushes_are_said_again(victim, compression, request):
    work = Small(n=120, pause=0.004, tag=request.node.name)
    cluster = Watched()
    killer = cluster.kill_when(work.tag, 60, (victim, 1))
    result = train(
        work, ParameterServer(shards=2, staleness=None, compression=compression), cluster, workers=3, epochs=3
    )
    killer.join()
    assert "restarted" not in kinds(result)
    assert kinds(result).count("replaced") == 1
    assert result.history.num_rows == 42
    assert result.metrics["loss"] == pytest.approx(plain(work, 3, epochs=3)[2][-1], rel=0.3)
