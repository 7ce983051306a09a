"""Actors on threads and on Ray: one protocol, one set of tests."""

import os
import signal
import threading
import time

import pytest
from rayps_client.errors import ActorDied, ClusterError, ConfigError, DataError, NoResources, RaypsError

from rayps.cluster import local as clusters
from rayps.cluster.local import LocalCluster, resolve, until


class Echo:
    """An actor of the tests."""

    def __init__(self, *args, **kwargs):
        self.given = args, kwargs
        self.event = threading.Event()

    def say(self, *args, **kwargs):
        return args, kwargs

    def told(self):
        return self.given

    def wait(self):
        return self.event.wait(20)

    def go(self):
        self.event.set()

    def sleep(self, seconds):
        time.sleep(seconds)

    def fail(self, kind):
        raise {"ours": DataError("a bad file", file="x"), "theirs": KeyError("nothing")}[kind]

    def pid(self):
        return os.getpid()


ECHO = "test_cluster:Echo"


@pytest.fixture(params=["threads", pytest.param("ray", marks=pytest.mark.ray)])
def cluster(request):
    if request.param == "ray":
        yield request.getfixturevalue("ray_cluster")
    else:
        made = LocalCluster(cpus=16)
        yield made
        made.close()


def test_an_actor_is_made_called_and_ended(cluster):
    actor = cluster.spawn(ECHO, 1, name="echo-1", key=2)
    assert actor.name == "echo-1"
    assert actor.call("told").result(60) == ((1,), {"key": 2})
    assert actor.call("say", "a", "b").result(60) == (("a", "b"), {})
    waiting = actor.call("wait")  # its methods run at once, not one after another
    assert not waiting.done()
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    actor.call("go").result(60)
    assert waiting.result(60) is True
    assert waiting.done()
    cluster.kill(actor)
    assert until(lambda: isinstance(failure(actor.call("say")), ActorDied), 60)


def failure(reply, timeout=60):
    try:
        reply.result(timeout)
    except Exception as error:
        return error
    return None


def test_errors_come_back(cluster):
    actor = cluster.spawn(ECHO)
    ours = failure(actor.call("fail", "ours"), 60)
    assert isinstance(ours, DataError)
    assert ours.data == {"file": "x"}
    assert str(ours) == "a bad file"
    theirs = failure(actor.call("fail", "theirs"))
    assert isinstance(theirs, (KeyError, ClusterError))
    assert "nothing" in str(theirs)
    cluster.kill(actor)


def test_a_death_ends_the_calls_that_wait(cluster):
    actor = cluster.spawn(ECHO)
    actor.call("say").result(60)
    waiting = actor.call("wait")
    cluster.kill(actor)
    died = failure(waiting)
    assert isinstance(died, ActorDied)
    assert len(str(died).splitlines()) == 1


def test_actors_are_found_by_name(cluster):
    assert cluster.find("nobody") is None
    actor = cluster.spawn(ECHO, 5, name="somebody")
    actor.call("say").result(60)
    assert cluster.find("somebody").call("told").result(60) == ((5,), {})
    cluster.kill(actor)
    assert until(lambda: cluster.find("somebody") is None, 60)


def test_resources_are_counted_together(cluster):
    assert cluster.total()["cpu"] == 16
    assert cluster.free()["cpu"] <= 16
    for bundles in ([{"cpu": 17.0}], [{"cpu": 6.0}] * 3, [{"cpu": 1.0, "gpu": 1.0}]):
        with pytest.raises(NoResources) as caught:
            cluster.reserve(bundles, 1.0)
        assert len(str(caught.value).splitlines()) <= 3
    gang = cluster.reserve([{"cpu": 2.0}, {"cpu": 1.0}], 20)
    actors = [cluster.spawn(ECHO, cpus=c, gang=gang, index=i) for i, c in enumerate([2.0, 1.0])]
    for actor in actors:
        actor.call("say").result(60)
        cluster.kill(actor)
    gang.release()


def test_a_value_is_shared_once(cluster):
    shared = cluster.share({"big": list(range(1000))})
    actor = cluster.spawn(ECHO)
    assert actor.call("say", shared).result(60) == (({"big": list(range(1000))},), {})
    cluster.kill(actor)


@pytest.mark.ray
def test_ray_actors_cannot_be_more_than_free(ray_cluster):
    assert until(lambda: ray_cluster.free()["cpu"] == 16, 60)
    gang = ray_cluster.reserve([{"cpu": 10.0}], 20)
    with pytest.raises(NoResources, match=r"needs 8 CPUs at once, and 6 are free"):
        ray_cluster.reserve([{"cpu": 4.0}, {"cpu": 4.0}], 1.0)
    gang.release()
    assert until(lambda: ray_cluster.free()["cpu"] == 16, 60)
    ray_cluster.reserve([{"cpu": 16.0}], 20).release()


@pytest.mark.ray
def test_a_process_that_is_killed_is_an_actor_that_died(ray_cluster):
    actor = ray_cluster.spawn(ECHO)
    pid = actor.call("pid").result(60)
    assert pid != os.getpid()
    waiting = actor.call("wait")
    os.kill(pid, signal.SIGKILL)
    assert isinstance(failure(waiting), ActorDied)


@pytest.mark.ray
def test_two_actors_of_one_name_are_refused(ray_cluster):
    actor = ray_cluster.spawn(ECHO, name="twin")
    actor.call("say").result(60)
    with pytest.raises(ClusterError, match="twin"):
        ray_cluster.spawn(ECHO, name="twin")
    ray_cluster.kill(actor)


@pytest.mark.ray
def test_inside_ray_the_surroundings_are_rays(ray_cluster):
    values = clusters.rendezvous()
    values.put("key", b"value")
    assert values.get("key") == b"value"
    values.delete("key")
    assert values.get("key") is None
    assert clusters.surrounding().total()["cpu"] == 16
    assert clusters.host_address() == "127.0.0.1"


def test_outside_ray_the_surroundings_are_threads(monkeypatch):
    monkeypatch.setattr(clusters, "_providers", [lambda: None])
    values = clusters.rendezvous()
    values.put("key", b"value")
    assert clusters.rendezvous().get("key") == b"value"
    values.delete("key")
    values.delete("key")
    assert values.get("key") is None
    assert isinstance(clusters.surrounding(), LocalCluster)
    assert clusters.host_address() == "127.0.0.1"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere:X", "nowhere"),
        ("rayps.cluster.local:Nobody", "Nobody"),
        ("rayps.cluster.local:until", "not a class"),
        ("x", "x"),
    ],
)
def test_actor_classes_that_are_none(target, words):
    with pytest.raises(ConfigError, match=words):
        resolve(target)


def test_waiting_until():
    assert until(lambda: True, 0)
    assert not until(lambda: False, 0.05)


def test_an_actor_that_cannot_be_made(cluster):
    error = None
    try:
        actor = cluster.spawn("rayps.runtime.driver.driver_actor:DriverActor", {"workload": 3}, "/nowhere", 1)
        error = failure(actor.call("ping"), 60)
    except Exception as raised:
        error = raised
    assert isinstance(error, RaypsError)
