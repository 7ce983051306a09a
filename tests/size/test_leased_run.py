"""Elastic jobs whose workers are not in step: workers join, leave and die, and the servers apply each row once."""

import importlib
import itertools
import threading
import time
from collections import defaultdict
from dataclasses import replace

import pytest
from leased_work import HOOKS, LOG, SECONDS, Counted, Counting, Job, rounds_of
from process_cluster import ProcessCluster
from rayps_client.errors import ConfigError
from small_work import SEEN, Paced, Small, plain, train

import rayps
from rayps.cluster.local import until
from rayps.cluster.notices import Notice
from rayps.core.job.job_status import Status
from rayps.ps.client.member_requests import MemberRequests
from rayps.ps.server.shard_actor import ShardActor
from rayps.runtime.driver.worker_actor import WorkerActor
from rayps.runtime.driver.worker_group import WorkerGroup
from rayps.runtime.size.leased_run import WorkerStage

SSP, ASP = Counting(shards=2, staleness=2), Counting(shards=2, staleness=None)


@pytest.fixture
def tag(request):
    yield request.node.name
    LOG[:] = [entry for entry in LOG if entry[0] != request.node.name]
    HOOKS.pop(request.node.name, None)


class Slow(Counted):
    """The model of a newcomer is complete after the other workers have computed ten more batches."""

    def model(self):
        work = importlib.import_module("leased_work")
        before = work.rounds_of(self.tag)
        assert before < 5 or until(lambda: work.rounds_of(self.tag) >= before + 10, SECONDS)
        return super().model()


@pytest.mark.parametrize("strategy", [SSP, ASP], ids=["ssp", "asp"])
def test_a_job_grows_and_shrinks_while_its_workers_train(tag, strategy):
    """A newcomer's model is complete only after the old workers have trained on: nobody waits for it."""
    job = Job(Slow(n=700, tag=tag), strategy, epochs=1)
    job.wait(lambda: rounds_of(tag, 0, 1) > 10)
    before = rounds_of(tag)
    job.driver.allow(4, "the test")
    job.wait(lambda: rounds_of(tag, 2) and rounds_of(tag, 3))
    first = {rank: next(i for i, each in enumerate(LOG) if each[:2] == (tag, rank)) for rank in (2, 3)}
    assert sum(1 for each in LOG[: min(first.values())] if each[0] == tag) >= before + 10
    job.driver.allow(2, "the test")
    job.wait(lambda: len(job.resized()) == 4)
    assert job.resized() == [(2, 3), (3, 4), (4, 3), (3, 2)]
    left = len(LOG)
    job.wait(lambda: rounds_of(tag) > left + 10)
    assert {rank for each, rank, _ in LOG[left:] if each == tag} == {0, 1}
    assert job.counts() == [1] * 700
    assert job.outcome.status is Status.SUCCEEDED and job.journal.events[-1]["kind"] == "finished"


def killed(job, rank):
    [member] = [each for each in job.group.workers if each.rank == rank]
    job.cluster.kill(member.handle)


@pytest.mark.parametrize("strategy", [SSP, ASP], ids=["ssp", "asp"])
@pytest.mark.parametrize("seed", range(2))
def test_the_rows_of_dead_workers_come_back(tag, strategy, seed):
    """Workers die at any moment; newcomers take their places, in the same slots."""
    job = Job(Counted(n=500, tag=tag), strategy, workers=(2, 3), epochs=2, start=3, max_failures=9)
    for victim in ((0, 1, 2), (2, 1, 0))[seed]:
        seen = rounds_of(tag, victim)
        job.wait(lambda seen=seen, victim=victim: rounds_of(tag, victim) > seen + 5)
        killed(job, victim)
    assert job.counts() == [2] * 500
    assert job.outcome.status is Status.SUCCEEDED
    assert sum(1 for before, after in job.resized() if after < before) == 3


def test_the_death_of_the_slowest_releases_the_others(tag):
    """The slowest worker hangs in its round, and the others wait for its clock, until it dies."""
    job, hung = Job(Counted(n=600, tag=tag), SSP, workers=(1, 3), start=3), threading.Event()
    over = threading.Event()

    def hook(rank):
        if rank == 2 and rounds_of(tag, 2) > 3:
            hung.set()
            over.wait(SECONDS)

    HOOKS[tag] = hook
    job.wait(hung.is_set)
    job.driver.allow(2, "the test")  # no newcomer replaces it
    seen = [-1]
    job.wait(lambda: rounds_of(tag, 0, 1) == seen[0] or seen.__setitem__(0, rounds_of(tag, 0, 1)) or time.sleep(0.3))
    killed(job, 2)
    job.wait(lambda: rounds_of(tag, 0, 1) > seen[0] + 10)
    over.set()
    assert job.counts() == [1] * 600
    assert job.resized()[-1] == (3, 2)


def test_the_last_worker_may_die_before_the_end(tag):
    job = Job(Counted(n=200, tag=tag), ASP, workers=(1, 2), start=1)
    job.wait(lambda: rounds_of(tag) > 5)
    killed(job, 0)
    assert job.counts() == [1] * 200


def test_a_run_resumes_in_the_middle_of_an_epoch_with_other_workers(tag, tmp_path):
    work = Counted(n=500, tag=tag)
    job = Job(work, SSP, workers=(2, 3), epochs=2, folder=tmp_path, start=3)
    job.wait(lambda: rounds_of(tag) > 280)
    killed(job, 1)
    job.driver.stop()  # also if the death is found after the stop
    outcome = job.end()
    assert outcome.status is Status.STOPPED and outcome.checkpoint is not None
    again = Job(work, ASP, workers=(1, 3), epochs=2, folder=tmp_path, options={"resume": outcome.checkpoint})
    assert again.counts() == [2] * 500
    done = Job(work, ASP, workers=(1, 3), epochs=2, folder=tmp_path, options={"resume": again.outcome.checkpoint})
    assert done.counts() == [2] * 500  # nothing is left to learn from


def test_steps_are_those_of_the_least_number_of_workers(tag):
    job = Job(Counted(n=40, tag=tag), ASP, workers=(2, 3), epochs=None, steps=25)
    assert sum(job.counts()) == 25 * 2 * 2 and set(job.counts()) <= {2, 3}


def test_rows_are_applied_once_with_backups_when_a_server_dies(tag):
    strategy = Counting(shards=2, staleness=2, replicas=1)
    job = Job(Counted(n=500, tag=tag), strategy, workers=(1, 3), epochs=2, start=3)
    job.wait(lambda: rounds_of(tag, 2) > 10)
    job.cluster.kill(next(handle for (kind, _), handle in job.cluster.actors.items() if kind == "ServerActor"))
    job.wait(lambda: rounds_of(tag) > 250)
    killed(job, 1)
    job.driver.allow(1, "the test")
    assert job.counts() == [2] * 500


def test_a_fixed_server_that_dies_knows_the_members(tag):
    """The workers repeat the pushes that the restored server lacks, also those of a newcomer."""

    def hook(rank):
        if rank == 0 and rounds_of(tag, 0) > 100 and min(rounds_of(tag, 1), rounds_of(tag, 2)) <= 10:
            time.sleep(0.05)  # so that rows are left for the newcomers, which are not ahead of it by more than two

    HOOKS[tag] = hook
    job = Job(Counted(n=500, tag=tag), SSP, workers=(1, 3), epochs=2)
    job.wait(lambda: rounds_of(tag) > 100)
    job.driver.allow(3, "the test")
    job.wait(lambda: rounds_of(tag, 1) > 10 and rounds_of(tag, 2) > 10)
    job.cluster.kill(job.group.shards[1].handle)
    assert job.counts() == [2] * 500
    assert "replaced" in [event["kind"] for event in job.journal.events]


def test_rows_of_a_worker_that_waits_are_applied_once_when_a_server_dies(tag):
    """Worker 0 has pushed its rows and waits, so servers have removed it; the restored server lacks its pushes."""
    job = Job(Counted(n=60, tag=tag), Counting(shards=2, staleness=None), workers=(2, 2))
    hung, over = threading.Event(), threading.Event()

    def hook(rank):
        if rank == 1 and rounds_of(tag, 1) > 3:
            hung.set()
            over.wait(SECONDS)

    HOOKS[tag] = hook
    try:
        job.wait(hung.is_set)
        leased = job.driver.job._plan.changes
        job.wait(lambda: leased._workers[0].stage is WorkerStage.WAITS and rounds_of(tag, 0) > 3)
        job.cluster.kill(job.group.shards[1].handle)
        job.wait(lambda: "replaced" in [event["kind"] for event in job.journal.events])
    finally:
        over.set()
    assert job.counts() == [1] * 60


def test_servers_that_do_not_answer_the_driver_cost_no_worker(tag, monkeypatch):
    """The driver waits for their parts of a state, and polls no worker meanwhile: the workers' rows run out."""
    part, asked, over = ShardActor.part, [], threading.Event()

    def frozen(shard, rounds):
        if len(asked) < 2:
            asked.append(rounds)
            over.wait(20)
        return part(shard, rounds)

    monkeypatch.setattr(ShardActor, "part", frozen)
    job = Job(Counted(n=300, tag=tag), Counting(shards=2, staleness=None), workers=(2, 2), epochs=2, timeout=2.0)
    try:
        assert job.counts() == [2] * 300
    finally:
        over.set()
    assert asked
    lost = [event for event in job.journal.events if event["kind"] == "resized" and event["to"] < event["from"]]
    assert not lost and "restarted" not in [event["kind"] for event in job.journal.events]


@pytest.mark.parametrize(("owner", "name"), [(MemberRequests, "end"), (WorkerGroup, "take_at")], ids=["end", "take"])
def test_a_fixed_server_that_dies_at_the_end_does_not_hang_the_job(tag, monkeypatch, owner, name):
    """It dies before the servers are told to end, or after all have answered; its values are not collected yet."""
    job, call, deaths = None, getattr(owner, name), []

    def dies(*args):
        if not deaths:
            deaths.append(name)
            job.cluster.kill(job.group.shards[1].handle)
        return call(*args)

    monkeypatch.setattr(owner, name, dies)
    job = Job(Counted(n=40, tag=tag), SSP, workers=(2, 2))
    assert job.counts() == [1] * 40
    assert "restarted" in [event["kind"] for event in job.journal.events]


PLACES = ["session: between servers", "session: sent, not answered"]


@pytest.mark.chaos
@pytest.mark.parametrize("place", PLACES)
def test_a_push_that_only_some_servers_have_counts_once(tag, place):
    """A worker's process is killed between two servers; another worker repeats its block."""
    cluster = ProcessCluster({("WorkerActor", 1): f"{place}=31", ("WorkerActor", 2): f"{place}=32"})
    job = Job(Counted(n=240, pause=0.001, tag=tag), SSP, workers=(2, 3), epochs=2, cluster=cluster, start=3)
    try:
        assert job.counts() == [2] * 240
    finally:
        cluster.close()
    assert any(after < before for before, after in job.resized())


def test_a_leaver_pushes_what_the_compression_has_left_out(tag):
    strategy = Counting(shards=2, staleness=None, compression="top_k:0.01")
    job = Job(Counted(n=300, batch=4, tag=tag), strategy, workers=(1, 2), epochs=2, start=2)
    job.wait(lambda: rounds_of(tag, 1) > 8)
    job.driver.allow(1, "the test")
    job.wait(lambda: len(job.resized()) == 2)
    events = [event["message"] for event in job.journal.events if event["kind"] == "resized"]
    assert "had left out was pushed" in events[-1]
    assert job.end().status is Status.SUCCEEDED


@pytest.mark.parametrize("ranks", [[1], [0, 1, 2]], ids=["one", "all"])
def test_workers_under_notice_leave_after_their_round(tag, monkeypatch, ranks):
    """They are no failure, and nothing is computed twice. If all will end, newcomers take their places."""
    place, numbers = WorkerActor.place, itertools.count()
    names = defaultdict(lambda: f"host-{next(numbers)}")
    monkeypatch.setattr(WorkerActor, "place", lambda self: replace(place(self), host=names[id(self)]))
    job = Job(Counted(n=700, tag=tag), SSP, workers=(1, 3), start=3, max_failures=0)
    job.wait(lambda: rounds_of(tag) > 20)
    of_rank = {worker.rank: worker.place.host for worker in job.group.workers}
    for rank in ranks:
        job.cluster.announce(Notice("", of_rank[rank], 600.0, "a test preempts it"))
    job.wait(lambda: sum(1 for before, after in job.resized() if after < before) == len(ranks))
    assert job.counts() == [1] * 700 and job.outcome.status is Status.SUCCEEDED
    assert len([entry for entry in LOG if entry[0] == tag]) == 350
    reasons = [event["message"] for event in job.journal.events if event["kind"] == "resized"]
    assert any("notice for worker-" in reason for reason in reasons)
    assert [event["rank"] for event in job.journal.events if event["kind"] == "notice"] == ranks


REFUSED = [
    ({"strategy": "downpour"}, "has a copy of the parameters"),
    ({"strategy": rayps.ParameterServer(staleness=1), "global_batch": 64}, "leave out global_batch"),
    ({"strategy": rayps.ParameterServer(staleness=1), "elastic": {"lr_scaling": "linear"}}, "leave out global_batch"),
    ({"strategy": [(1, "all_reduce"), "parameter_server:staleness=2"]}, "not in step"),
    ({"strategy": [(1, "parameter_server:staleness=2"), "all_reduce"], "epochs": 2}, "several phases"),
    ({"strategy": "parameter_server:staleness=auto"}, "the staleness bound moves"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_change_its_workers_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        train(Counted(), workers=(2, 4), **options)


def test_a_schedule_by_epoch_is_refused():
    with pytest.raises(ConfigError, match="give a schedule by step"):
        train(Paced(every="epoch"), rayps.ParameterServer(staleness=1), workers=(2, 4))


def test_a_model_learns_beside_the_unbroken_run(tag):
    """The loss of an elastic run is near that of the plain loop, although workers come and go."""
    work = Small(n=240, batch=6, pause=0.002, tag=tag)
    job = Job(work, rayps.ParameterServer(shards=2, staleness=2), workers=(1, 3), epochs=8)
    job.wait(lambda: SEEN[tag] > 40)
    job.driver.allow(3, "the test")
    job.wait(lambda: len(job.resized()) == 2)
    job.driver.allow(1, "the test")
    outcome = job.end()
    _, _, evaluations = plain(work, 1, epochs=8)
    assert outcome.metrics["loss"] < 2 * evaluations[-1] + 0.05


def test_a_job_on_ray_grows_and_shrinks(ray_cluster, tag):
    job = Job(Counted(n=3000, batch=4, pause=0.005, tag=tag), SSP, workers=(1, 2), cluster=ray_cluster, close=False)
    job.wait(lambda: job.driver.status is Status.RUNNING)
    job.driver.allow(2, "the test")
    job.wait(lambda: job.resized() == [(1, 2)])
    job.driver.allow(1, "the test")
    job.wait(lambda: len(job.resized()) == 2)
    assert job.resized() == [(1, 2), (2, 1)]
    assert job.counts() == [1] * 3000
