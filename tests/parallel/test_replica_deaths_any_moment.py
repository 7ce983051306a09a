"""Deaths at any moment of a run on threads; mirrors on other hosts; what can be told of a mending afterwards."""

import functools
import random
import threading
import types

import pytest
from rayps_client.errors import PeerLost, TrainingError
from small_work import SEEN, Small, Watched, distance, kinds, plain, train
from torch import nn

from rayps import AllReduce, Pipeline, TensorParallel
from rayps.cluster.local import until
from rayps.core.job.continuation import Source
from rayps.core.job.user_module import pack
from rayps.core.rows.phase_rounds import Boundary
from rayps.recovery import worker_backup
from rayps.recovery.backup_assignment import BackupAssignment
from rayps.recovery.peer_replication import BackupConnection
from rayps.runtime.driver import worker_actor
from rayps.worker import run as worker_run
from rayps.worker.connections import WorkerConnections
from rayps.worker.plan import EvaluationPlan, PeerAddresses, SnapshotPlan, WorkerPlan

pytestmark = pytest.mark.chaos

PIPE = Pipeline(stages=2, micro_batches=2)
BOTH = Pipeline(stages=2, micro_batches=2, stage=TensorParallel(size=2))


@pytest.fixture
def tag(request):
    SEEN.clear()
    return request.node.nodeid


class Deeper(Small):
    """Without random numbers, which threads share."""

    def model(self):
        return nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)
        ).double()


def lives(work, replica, workers, *deaths, **options):
    """The run with deaths, each after so many losses, beside the run without: must be the same to the bit."""
    law = train(
        Deeper(n=work.n, batch=work.batch, optimizer=work.kind), AllReduce(replica=replica), workers=workers, epochs=2
    )
    cluster = Watched()
    killers = [cluster.kill_when(work.tag, at, *victims) for at, *victims in deaths]
    result = train(work, AllReduce(replica=replica), cluster, workers=workers, epochs=2, **options)
    for killer in killers:
        killer.join()
    cluster.close()
    assert distance(result.model(), law.model()) == 0.0
    for column in ("round", "loss", "samples", "evaluation_loss"):
        assert result.history.column(column).to_pylist() == law.history.column(column).to_pylist(), column
    return result


def test_no_run_continues_after_a_round_whose_point_was_refused(tag, monkeypatch):
    """A worker whose plan is ended within a round may finish the round, and its loss must not be lost."""
    work = Deeper(n=96, batch=6, optimizer="adam", tag=tag)
    law = train(work, AllReduce(replica=BOTH), workers=4, epochs=2)
    cluster, made, ended = Watched(), worker_run.PlanRun.__init__, []

    def init(run, loop, report, retain, stopped, gate):
        plan = loop.w.plan

        def late(point):
            if (plan.rank, plan.generation, point["kind"], point.get("round")) == (2, 1, "round", 1):
                ender = threading.Thread(target=cluster.kill, args=(cluster.actors["WorkerActor", 2],))
                ender.start()
                ended.append(ender)
                assert until(stopped, 60)
            return report(point)

        made(run, loop, late, retain, stopped, gate)

    monkeypatch.setattr(worker_run.PlanRun, "__init__", init)
    result = train(work, AllReduce(replica=BOTH), cluster, workers=4, epochs=2)
    [ender] = ended
    ender.join()
    cluster.close()
    assert kinds(result).count("mended") == 1
    assert distance(result.model(), law.model()) == 0.0
    assert result.history.column("loss").to_pylist() == law.history.column("loss").to_pylist()


BEGUN = 8  # losses by which everybody has made a step; who dies before may have left nothing to mend from
GRIDS = [(PIPE, 2), (PIPE, 4), (TensorParallel(size=2), 4), (BOTH, 4)]


@pytest.mark.parametrize(("replica", "workers"), GRIDS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_a_death_at_any_moment(tag, replica, workers, seed):
    rng = random.Random(seed * 100 + workers)
    at, victim = rng.randrange(1, 40), rng.randrange(workers)
    print("seed", seed, "at", at, "victim", victim)
    work = Deeper(n=96, batch=6, optimizer="adam", pause=0.002, tag=tag)
    result = lives(work, replica, workers, (at, ("WorkerActor", victim)))
    [event] = [event for event in result.events if event["kind"] in ("mended", "restarted")]
    assert event["kind"] == "mended" or at < BEGUN
    assert event["lost"] == [f"worker-{victim}"]


@pytest.mark.parametrize("workers", [2, 4])
def test_the_state_comes_from_another_host(tag, monkeypatch, workers):
    monkeypatch.setattr(worker_backup, "BackupConnection", functools.partial(BackupConnection, prefer="tcp"))
    work = Deeper(n=96, batch=6, optimizer="adam", pause=0.002, tag=tag)
    result = lives(work, PIPE, workers, (20, ("WorkerActor", 1)))
    [event] = [event for event in result.events if event["kind"] == "mended"]
    [upkeep] = [event for event in result.events if event["kind"] == "upkeep"]
    assert event["twins"] == (["worker-1"] if workers == 4 else [])
    assert "to another host" in upkeep["message"]
    assert upkeep["sent_bytes"] > 0
    if workers == 2:
        assert upkeep["sent_bytes"] <= upkeep["kept_bytes"]
    else:
        assert upkeep["sent_bytes"] < upkeep["kept_bytes"]  # only what the twin lacks


def test_a_death_while_the_others_are_mended(tag):
    work = Deeper(n=96, batch=6, pause=0.004, tag=tag)
    result = lives(work, PIPE, 4, (20, ("WorkerActor", 1)), (21, ("WorkerActor", 2)))
    assert "restarted" not in kinds(result)


def test_a_worker_and_its_twin_with_all_mirrors_gone_mean_the_snapshot(tag):
    work = Deeper(n=96, batch=6, pause=0.004, tag=tag)
    result = lives(work, PIPE, 4, (20, ("WorkerActor", 1), ("WorkerActor", 3)))
    assert kinds(result).count("restarted") == 1
    assert "mended" not in kinds(result)


def test_mendings_count_as_failures(tag):
    work, cluster = Deeper(n=96, batch=6, pause=0.004, tag=tag), Watched()
    cluster.kill_when(tag, 10, ("WorkerActor", 1))
    with pytest.raises(TrainingError, match="max_failures is 0"):
        train(work, AllReduce(replica=PIPE), cluster, workers=2, epochs=2, max_failures=0)
    cluster.close()


def test_what_it_costs_is_said_and_is_what_is_copied(tag):
    result = train(Deeper(n=96, batch=6, optimizer="adam", tag=tag), AllReduce(replica=PIPE), workers=2, epochs=2)
    [event] = [event for event in result.events if event["kind"] == "upkeep"]
    elements = max(sum(p.numel() for p in half.parameters()) for half in (result.model()[:4], result.model()[4:]))
    assert event["kept_bytes"] >= 3 * 8 * elements  # parameters and Adam's two moments
    assert event["kept_bytes"] < 3 * 8 * elements + 20_000  # and the random state, names, points
    assert event["sent_bytes"] == 0
    assert 0 < event["share"] < 1
    assert distance(result.model(), plain(Deeper(n=96, batch=6, optimizer="adam"), 1, epochs=2)[0]) < 1e-12


def test_what_a_dead_worker_had_said_is_heard_however_long_the_others_are_waited_for(monkeypatch):
    """The one that takes its place is asked again and again while it waits, and then all must begin anew."""
    said = [{"kind": "round", "round": 3, "loss": 0.5}, {"kind": "round", "round": 4, "loss": 0.25}]
    state = types.SimpleNamespace(facts={"points": said})
    recalled, over = threading.Event(), threading.Event()

    class Waiting(WorkerConnections):
        def form(self, plan, snapshot, listener, device="cpu"):
            recalled.set()
            over.wait(30)
            raise PeerLost("the others began anew", peer="worker-0")

    monkeypatch.setattr(worker_backup, "fetch_state", lambda *_: state)
    monkeypatch.setattr(worker_backup, "with_state", lambda snapshot, *_: snapshot)
    monkeypatch.setattr(worker_run, "WorkerConnections", Waiting)
    work = Deeper(n=96, batch=6)
    actor = worker_actor.WorkerActor(1, b"secret" * 6, pack(work))
    backup_assignment = BackupAssignment(1, ("", ""), 0, False, restores_state=True, source=Source(0, 1))
    peers = PeerAddresses(b"secret" * 6, ["", ""])
    plan = WorkerPlan(
        2,
        1,
        2,
        AllReduce(),
        peers,
        0,
        5,
        16,
        SnapshotPlan(Boundary(16, 16)),
        EvaluationPlan(0),
        30.0,
        backup_assignment=backup_assignment,
    )
    heard = []
    try:
        for _ in range(2):
            recalled.clear(), over.clear()
            actor.begin(plan, actor.initial(0))
            heard.append(actor.poll(0).points)  # perhaps before it has recalled
            assert recalled.wait(30)
            heard += [actor.poll(0).points for _ in range(3)]
            over.set()
    finally:
        over.set()
        actor.close()
    told = [point["round"] for points in heard for point in points]
    assert told[:2] == [3, 4]
    assert all(point["again"] for points in heard for point in points)
