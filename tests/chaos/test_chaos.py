"""Real processes are killed or frozen while they train: each run still ends as it should, and says what happened."""

import contextlib
import os
import signal

import pytest
from small_work import Small, distance, kinds, plain

import rayps
from rayps import AllReduce, ParameterServer

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
EXACT = 1e-12
WORKERS = 2
WORK = Small(n=120, batch=4, optimizer="adam", pause=0.05)  # fifteen rounds an epoch with two workers


class Harm:
    """Sends a signal to one process, once the run has come so far; given as `progress`."""

    def __init__(self, members, index, number, at_round=8):
        self.members, self.index, self.number, self.at_round = members, index, number, at_round
        self.pid = None

    def __call__(self, progress):
        if self.pid is None and progress.get("round", 0) >= self.at_round and progress["status"] == "RUNNING":
            self.pid = progress[self.members][self.index]["pid"]
            os.kill(self.pid, self.number)


class OneAfterTheOther:
    """Two harms: the second one once all workers are running again after the first."""

    def __init__(self, first, second):
        self.first, self.second, self.pid = first, second, None

    def __call__(self, progress):
        self.first(progress)
        workers = [worker["pid"] for worker in progress.get("workers", ())]
        if self.first.pid and self.first.pid not in workers and len(workers) == WORKERS and all(workers):
            self.second(progress)
            self.pid = self.second.pid


def train(cluster, strategy, harm, **options):
    result = rayps.train(WORK, strategy=strategy, workers=WORKERS, epochs=3, cluster=cluster, progress=harm, **options)
    assert harm.pid is not None
    assert result.history.column("round").to_pylist() == list(range(45))
    return result


def told(result, kind):
    return [event for event in result.events if event["kind"] == kind]


def test_a_worker_is_killed_in_all_reduce(ray_cluster):
    result = train(ray_cluster, AllReduce(), Harm("workers", 1, signal.SIGKILL))
    assert distance(result.model(), plain(WORK, WORKERS, epochs=3)[0]) < EXACT
    assert [event["lost"] for event in told(result, "restarted")] == [["worker-1"]]


def test_a_shard_is_killed_in_step(ray_cluster):
    result = train(ray_cluster, ParameterServer(shards=2), Harm("shards", 1, signal.SIGKILL))
    assert distance(result.model(), plain(WORK, WORKERS, epochs=3)[0]) < EXACT
    assert [event["lost"] for event in told(result, "restarted")] == [["shard-1"]]


def test_a_worker_and_then_a_shard_are_killed_out_of_step(ray_cluster):
    first, second = Harm("workers", 1, signal.SIGKILL), Harm("shards", 1, signal.SIGKILL, at_round=9)
    result = train(ray_cluster, ParameterServer(shards=2, staleness=None), OneAfterTheOther(first, second))
    assert "restarted" not in kinds(result)
    assert [event["lost"] for event in told(result, "replaced")] == [["worker-1"], ["shard-1"]]
    assert not told(result, "lost")  # whatever was pushed is in the model: see also test_exactly_once


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(shards=2, staleness=1)], ids=["ring", "ssp"])
def test_a_worker_is_frozen(ray_cluster, strategy):
    harm = Harm("workers", 1, signal.SIGSTOP)
    try:
        result = train(ray_cluster, strategy, harm, timeout=10.0, max_failures=20)
    finally:
        if harm.pid is not None:
            end(harm.pid)
    events = [event for event in result.events if event["kind"] in ("restarted", "replaced")]
    assert any("worker-1" in event["lost"] for event in events), events
    if strategy.topology.in_step:
        assert distance(result.model(), plain(WORK, WORKERS, epochs=3)[0]) < EXACT


def end(pid):
    with contextlib.suppress(ProcessLookupError):  # as it should be: the run has ended it
        os.kill(pid, signal.SIGKILL)
