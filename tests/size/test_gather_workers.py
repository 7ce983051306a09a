"""The workers with which a generation of an elastic job begins: the dead are dropped, and newcomers are awaited."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from rayps_client.errors import NoResources
from small_work import Small, Watched

import rayps
from rayps.core.job.continuation import Continuation, Source
from rayps.core.job.job_status import Status
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.runtime.size import gather_workers
from rayps.runtime.size.gather_workers import BeginFacts, BeginStep, decide_begin
from rayps.runtime.size.job_size import JobSize
from rayps.runtime.size.membership import Membership
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec


def test_the_living_go_on_without_the_dead() -> None:
    assert decide_begin(BeginFacts(3, 1, 2)) == BeginStep(begin=True, drop=True, keep=3)
    assert decide_begin(BeginFacts(2, 0, 2, ready=1)) == BeginStep(begin=True, drop=True, keep=2)  # it joins later


def test_too_few_wait_for_newcomers() -> None:
    assert decide_begin(BeginFacts(1, 1, 3)) == BeginStep(drop=True, keep=1, start=2)
    assert decide_begin(BeginFacts(1, 0, 3, starting=2)) == BeginStep(drop=True, keep=1)
    assert decide_begin(BeginFacts(1, 0, 3, ready=1, may_start=False)) == BeginStep(drop=True, keep=1)
    assert decide_begin(BeginFacts(1, 0, 3, ready=2)) == BeginStep(begin=True, drop=True, keep=1, join=2)


def test_states_are_rebuilt_in_the_places_of_the_dead_if_there_is_room() -> None:
    facts = {"rebuilds": True}
    assert decide_begin(BeginFacts(3, 1, 2, **facts)) == BeginStep(keep=3, start=1)  # type: ignore[arg-type]
    assert decide_begin(BeginFacts(3, 1, 2, ready=1, **facts)) == BeginStep(begin=True, keep=3, join=1)  # type: ignore[arg-type]
    given_up = decide_begin(BeginFacts(3, 1, 2, may_start=False, **facts))  # type: ignore[arg-type]
    assert given_up == BeginStep(begin=True, drop=True, keep=3)


def test_a_stop_ends_the_wait() -> None:
    assert decide_begin(BeginFacts(1, 1, 3, stops=True)) == BeginStep(begin=True, drop=True, keep=1)
    assert decide_begin(BeginFacts(0, 2, 3, stops=True)) == BeginStep(stop=True, drop=True)


def test_a_replay_begins_with_exactly_its_number() -> None:
    assert decide_begin(BeginFacts(4, 0, 2, exact=True)) == BeginStep(begin=True, drop=True, keep=2)
    assert decide_begin(BeginFacts(2, 0, 4, exact=True)) == BeginStep(drop=True, keep=2, start=2)


def test_what_holds_for_all_facts() -> None:
    few, flags = range(4), (False, True)
    for *counts, may_start, rebuilds, exact, stops in itertools.product(*[few] * 5, flags, flags, flags, flags):
        living, dead, wanted, ready, _ = counts
        facts = BeginFacts(*counts, may_start, rebuilds, exact, stops)
        step = decide_begin(facts)
        assert not (step.begin and step.stop)
        assert step.join <= ready
        assert step.keep <= living
        assert (step.keep == living) or exact
        if step.begin and not stops:
            assert step.keep + step.join >= min(wanted, living + ready)
        if step.begin and not step.drop:
            assert (rebuilds, step.join) == (True, dead)
        if step.start:
            assert may_start
            assert not (step.begin or step.stop)
        if stops:
            assert step.begin or step.stop
        if living >= wanted and not (rebuilds and dead):
            assert step.begin


def test_the_holders_of_a_state_among_other_workers() -> None:
    handover = Continuation(7, (0, 2))
    assert handover.among([2, 1, None]) == Continuation(7, (0,))
    assert handover.among([1, None]) is None
    rebuild = Continuation(7, (0, 2), keeps_places=True, sources={1: Source(2, 1)})  # each place has a state of its own
    assert rebuild.among([0, 1, 2]) is rebuild
    for order in ([0, 1], [2, 1, 0], [0, None, 2], [0, 1, 2, None]):
        assert rebuild.among(order) is None


@pytest.mark.parametrize(("done", "workers"), [(0, 2), (2, 2), (3, 4), (8, 4), (9, 3), (50, 3)])
def test_the_workers_of_a_replay_after_some_rounds(done: int, workers: int) -> None:
    elastic = ElasticWorkers(4, replay=((3, 4), (9, 3)))
    assert Membership(elastic, 100, 2, 2).replayed_at(done) == workers


class Homes(Watched):
    """Threads on hosts of one CPU each. A host that is gone takes its worker with it, and has no room any more."""

    def __init__(self, hosts: int) -> None:
        super().__init__()
        self.left = hosts  # free hosts
        self.tried = 0  # reservations without room

    def hosts(self, free: bool = True):
        return {f"free-{i}": {"cpu": 1.0, "gpu": 0.0} for i in range(self.left)}

    def reserve(self, bundles, timeout, avoid=()):
        if self.left < len(bundles):
            self.tried += 1
            raise NoResources("no room", needed=bundles, free={"cpu": float(self.left)})
        self.left -= len(bundles)
        return super().reserve(bundles, timeout)  # a host that is gone does not come back

    def spawn(self, target, *args, gang=None, index=None, **options):
        if gang is not None and getattr(gang, "used", False):
            raise AssertionError("a process was started in the place of a dead one, whose host is gone")
        if gang is not None:
            gang.used = True
        return super().spawn(target, *args, gang=gang, index=index, **options)


def train(work, workers, cluster, **options):
    try:
        return rayps.train(work, workers=workers, seed=5, cluster=cluster, progress=False, timeout=20, **options)
    finally:
        cluster.close()


def alone(n: int, epochs: int, kind: str = "adam"):
    work = Small(n=n, batch=4, optimizer=kind)
    return train(work, 1, Watched(), epochs=epochs, elastic={"most": 1}, global_batch=12).snapshot.params


class EvaluatedOn(Small):
    """A worker dies in its first evaluation after the last round."""

    def evaluate(self, model, batch):
        shared = importlib.import_module("test_gather_workers")
        if shared.DYING:
            shared.DYING.pop()()
        return super().evaluate(model, batch)


DYING: list = []


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("all_reduce", {"global_batch": 12, "elastic": {"replay": [[1, 2]]}}), ("parameter_server:staleness=2", {})],
    ids=["in-step", "leased"],
)
def test_a_death_in_the_last_evaluation_is_not_awaited(strategy: str, options: dict[str, Any]) -> None:
    """No process starts in the dead worker's place, whose host is gone."""
    cluster = Homes(2)

    def die():
        cluster.kill(cluster.actors["WorkerActor", max(rank for kind, rank in cluster.actors if kind == "WorkerActor")])

    DYING.append(die)
    work, least = EvaluatedOn(n=36, batch=4, optimizer="adam"), 1 if options else 2
    found = train(work, (least, 2), cluster, strategy=strategy, epochs=1, evaluate_every=100, **options)
    assert not DYING
    assert found.metrics
    [restarted] = [event for event in found.events if event["kind"] == "restarted"]
    assert len(restarted["lost"]) == 1
    if strategy == "all_reduce":
        torch.testing.assert_close(found.snapshot.params, alone(36, 1), rtol=1e-10, atol=1e-12)


def test_without_room_states_are_not_rebuilt_and_the_living_go_on() -> None:
    tag, cluster, strategy = "gone", Homes(3), "all_reduce:shard=optimizer,slice_backup=true"
    work = Small(n=120, batch=4, optimizer="adam", tag=tag, pause=0.005)
    killer = cluster.kill_when(tag, 60, ("WorkerActor", 1))
    found = train(work, (1, 3), cluster, strategy=strategy, epochs=4, global_batch=12, elastic={"replay": [[1, 3]]})
    killer.join()
    changes = [event for event in found.events if event["kind"] == "resized"]
    assert [(event["from"], event["to"]) for event in changes] == [(1, 3), (3, 2)]
    lost = changes[1]["lost"]  # newcomers get their ranks in the order in which they are ready
    assert len(lost) == 1
    assert [event["lost"] for event in found.events if event["kind"] == "restarted"] == [lost]
    assert not any(event["kind"] == "mended" for event in found.events)
    torch.testing.assert_close(found.snapshot.loaded().params, alone(120, 4), rtol=1e-10, atol=1e-12)


def test_if_all_die_others_begin_wherever_there_is_room() -> None:
    tag, cluster = "all-gone", Homes(3)
    work = Small(n=120, batch=4, optimizer="adam", tag=tag, pause=0.005)
    killer = cluster.kill_when(tag, 40, ("WorkerActor", 0), ("WorkerActor", 1))
    options = {"replay": [[1, 2]]}
    found = train(work, (1, 2), cluster, epochs=3, global_batch=12, elastic=options, checkpoint_every=5)
    killer.join()
    changes = [(event["from"], event["to"]) for event in found.events if event["kind"] == "resized"]
    assert changes in ([(1, 2), (2, 1)], [(1, 2), (2, 1), (1, 1)])  # the second may die a moment later
    assert cluster.left == 0
    torch.testing.assert_close(found.snapshot.params, alone(120, 3), rtol=1e-10, atol=1e-12)


def test_without_room_the_job_waits_and_then_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_workers, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr("rayps.runtime.size.newcomers.BACKOFF_SECONDS", 0.02)
    tag, cluster = "no-room", Homes(2)
    work = Small(n=120, batch=4, tag=tag, pause=0.005)
    killer = cluster.kill_when(tag, 20, ("WorkerActor", 1))
    with pytest.raises(NoResources) as caught:
        rayps.train(work, workers=(2, 2), seed=5, cluster=cluster, progress=False, timeout=1, epochs=4)
    killer.join()
    cluster.close()
    assert "the least number of workers is 2, and the job has 1 after a wait of" in str(caught.value)
    assert "room for 0 more" in str(caught.value)
    assert "raise timeout, which is 1 s" in str(caught.value)
    assert cluster.tried


# ---- a replay


@pytest.mark.parametrize("done", [2, 3, 6, 9])
def test_a_resumed_replay_has_the_workers_of_the_round(tmp_path, done: int) -> None:
    """It has the bits of the whole run, whose rounds have other rows with another number of workers."""
    options = {"replay": [[3, 4], [9, 3]]}
    whole = train(Small(n=120, batch=4), (2, 4), Watched(), epochs=1, elastic=options)
    train(Small(n=120, batch=4), (2, 4), Watched(), steps=done, elastic=options, checkpoint=tmp_path)
    found = train(Small(n=120, batch=4), (2, 4), Watched(), epochs=1, elastic=options, checkpoint=tmp_path, resume=True)
    assert found.snapshot.round == whole.snapshot.round
    assert torch.equal(found.snapshot.params, whole.snapshot.params)


def test_a_replay_without_room_ends_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayps.runtime.size.newcomers.BACKOFF_SECONDS", 0.02)
    cluster, options = Homes(2), {"replay": [[3, 3]]}
    with pytest.raises(NoResources) as caught:
        rayps.train(
            Small(), workers=(2, 3), seed=5, cluster=cluster, progress=False, timeout=0.5, epochs=2, elastic=options
        )
    cluster.close()
    text = str(caught.value)
    assert "replay has 3 workers after round 3, and the job has 2 after a wait of" in text
    assert "room for 0 more, and the last newcomer did not start: the resources of one more worker are not free" in text
    assert "raise timeout, which is 0.5 s" in text


class StopsTheRun(rayps.Callback):
    """Stops the run when the workers have stopped for a change that has no room."""

    def on_round(self, run, point):
        if point["round"] == 2:
            run.stop("a test stops it")


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2"])
@pytest.mark.parametrize("asks", ["callback", "driver"])
def test_a_stop_in_the_pause_of_a_replay_ends_the_run(tmp_path, monkeypatch, asks: str, strategy: str) -> None:
    cluster, journal = Homes(2), Journal()
    elastic = ElasticWorkers(3, replay=((3, 3),))
    spec = JobSpec("x:Work", wire(parse(strategy)), 2, epochs=2, seed=5, elastic=elastic)
    callbacks = [StopsTheRun()] if asks == "callback" else []
    driver = Driver(WorkloadJob(Small(), spec, journal, checkpoints=tmp_path, capture=False, callbacks=callbacks))
    if asks == "driver":
        monkeypatch.setattr(JobSize, "report_wait", lambda self, text: driver.stop())
    outcome = driver.run(cluster)
    cluster.close()
    assert outcome.status is (Status.SUCCEEDED if asks == "callback" else Status.STOPPED), outcome.message
    assert outcome.snapshot is not None
    assert outcome.snapshot.round == 3
    assert outcome.checkpoint is not None
