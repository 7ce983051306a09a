"""A process that dies in its first seconds, at each attempt, in each kind of job: the job recovers, or says why not."""

import importlib
import os
import signal
import sys
import threading

import pytest
import torch
from client_site import All
from newborn_site import HOOKS, KINDS, SPAWNED, Newborn, Plain, moments_of
from rayps_client.errors import ActorDied, TrainingError, WorkloadError

import rayps
from rayps.cluster.local import LocalCluster, until
from rayps.core.job.job_status import Status
from rayps.runtime.driver import decide_recovery, driver_actor
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.runtime.size import newcomers
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec

pytestmark = pytest.mark.chaos


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """No pause between two attempts: how long it is has a law of its own."""
    monkeypatch.setattr(decide_recovery, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(newcomers, "BACKOFF_SECONDS", 0.0)


@pytest.fixture
def tag(request):
    yield request.node.nodeid
    HOOKS.pop(request.node.nodeid, None)


def run(kind, cluster, tag, **options):
    HOOKS[tag] = cluster.learns
    try:
        return kind.run(cluster, tag, **options)
    finally:
        cluster.close()


STARTS = [("worker", method) for method in ("place", "initial", "begin")]  # of a federated job
LAWS = {}  # by the name of a kind: what a job without deaths gives, and what its driver has asked for


def law_of(kind, tag):
    if kind.name not in LAWS:
        cluster = Newborn()
        params, rounds = run(kind, cluster, tag)
        LAWS[kind.name] = params, rounds, tuple(cluster.asked)
    return LAWS[kind.name]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_process_that_dies_at_each_step_of_its_start(kind, tag):
    """The first process of a role dies at the first step, the one in its place at the second step, and so on."""
    params, rounds, asked = law_of(kind, tag)
    roles = dict.fromkeys(role for role, _ in asked)
    assert "worker" in roles
    for role in roles:
        moments = moments_of(asked, role)
        cluster = Newborn(role, moments, kind.newcomers)
        found, seen = run(kind, cluster, tag, max_failures=len(moments))
        if kind.elastic:  # it goes on without those that were lost, and may end before the last one dies
            assert len(cluster.killed) >= 2
        else:
            assert cluster.killed == moments, role
        if kind.exact:
            assert seen == rounds, role
            assert (found - params).abs().max() < 1e-12, role


def test_the_same_with_clients_that_are_processes_of_their_own(clinic, monkeypatch):
    """Real clients of a job service wait while the job's process dies at each step of its start."""
    cluster = Newborn("worker", moments_of(STARTS, "worker"))
    expected = list(cluster.moments)
    monkeypatch.setattr(driver_actor, "surrounding", lambda: cluster)
    job = clinic.job("fedavg:clients=remote(least=2,wait=100)", seed=5, max_failures=len(expected))
    clinic.hospitals(job, 2)
    learnt = clinic.trained(job)
    cluster.close()
    assert cluster.killed == expected and len(expected) == 7
    whole = rayps.train(All(2), strategy="fedavg", epochs=3, workers=1, seed=5, cluster=LocalCluster(), progress=False)
    assert torch.equal(learnt, whole.snapshot.params)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.elastic], ids=str)
def test_a_job_whose_process_always_dies_ends_after_max_failures(kind, tag):
    cluster = Newborn("worker", [SPAWNED] * 10)
    with pytest.raises(TrainingError, match="failure 2, and max_failures is 1"):
        run(kind, cluster, tag, max_failures=1)
    assert len(cluster.killed) == 2


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_without_failures_to_spare_the_first_death_is_the_error(kind, tag):
    cluster = Newborn("worker", [SPAWNED] * 10)
    with pytest.raises((TrainingError, ActorDied), match="worker-0"):
        run(kind, cluster, tag, max_failures=0)
    assert len(cluster.killed) == 1


class Refuses(Plain):
    """Its model can be made once: in the driver, and not in a worker."""

    def model(self):
        importlib.import_module("newborn_site").told(self)
        return super().model()


def test_what_the_users_code_says_ends_the_job_at_once(tag):
    calls, cluster = [], Newborn()

    def model_is_made(thread):
        calls.append(thread)
        if len(calls) > 1:
            raise ValueError("the model refuses")

    HOOKS[tag] = model_is_made
    with pytest.raises(WorkloadError, match="the model refuses"):
        rayps.train(Refuses(n=36, tag=tag), workers=2, cluster=cluster, progress=False, max_failures=3)
    cluster.close()
    assert len(cluster.spawned) == 2


def restarts(journal):
    return [event for event in list(journal.events) if event["kind"] == "restarted"]


def test_a_stop_ends_the_wait_before_another_attempt(tag, monkeypatch):
    monkeypatch.setattr(decide_recovery, "PAUSE_SECONDS", 600.0)
    cluster, journal = Newborn("worker", [SPAWNED] * 10), Journal()
    driver = Driver(
        WorkloadJob(Plain(n=36, tag=tag), JobSpec("x:Plain", wire(parse("all_reduce")), 2), journal, capture=False)
    )
    thread = threading.Thread(target=driver.run, args=(cluster,))
    thread.start()
    assert until(lambda: len(restarts(journal)) == 2, 60)  # the first one follows at once, the second one waits
    driver.stop()
    thread.join(60)
    assert not thread.is_alive() and driver.status is Status.STOPPED
    cluster.close()
    assert len(cluster.killed) == len(restarts(journal)) == 2


class Breaks(Plain):
    """Ends its process while it makes the model in a worker, and says why."""

    def __init__(self, driver, **options):
        super().__init__(**options)
        self.driver = driver

    def model(self):
        if os.getpid() != self.driver and "rayps-trial" not in sys.argv:
            print("no such accelerator: /dev/none", file=sys.stderr, flush=True)
            os._exit(3)
        return super().model()


@pytest.mark.ray
def test_the_error_after_the_last_attempt_quotes_what_the_process_wrote(ray_cluster):
    with pytest.raises(TrainingError) as caught:
        rayps.train(Breaks(os.getpid()), workers=1, cluster=ray_cluster, progress=False, max_failures=1, timeout=30.0)
    said = str(caught.value)
    assert "worker-0 died while the members started" in said and "failure 2, and max_failures is 1" in said
    assert "the last output of worker-0:\n" in said and "no such accelerator: /dev/none" in said


@pytest.mark.ray
def test_an_actor_that_has_died_is_not_found_by_its_name(ray_cluster):
    """A manager's client asks so whether its manager is gone; Ray itself finds the dead while a handle is held."""
    handle = ray_cluster.spawn("rayps.runtime.driver.worker_actor:WorkerActor", 0, b"secret" * 6, b"", name="dies-soon")
    place = handle.call("place").result(120)
    assert ray_cluster.find("dies-soon") is not None
    os.kill(place.pid, signal.SIGKILL)
    with pytest.raises(ActorDied):
        handle.call("hold").result(60)
    assert until(lambda: ray_cluster.find("dies-soon") is None, 30)
