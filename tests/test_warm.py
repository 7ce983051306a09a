"""Processes that wait for a job: when they start, who takes them, and what ends them."""

import os
import time
from itertools import product

import pytest

from rayps.cluster.code_folder import JobCode
from rayps.cluster.local import LocalCluster, until
from rayps.cluster.warm import QUIET_SECONDS, WarmFacts, free_memory, own_memory, to_start
from rayps.core.errors import ActorDied, ClusterError, RaypsError
from rayps.runtime.worker_group import WorkerGroup


@pytest.mark.parametrize(
    ("ready", "starting", "since", "free"), list(product([0, 1, 3], [0, 1], [0.0, 1e3], [0.1, 0.9]))
)
def test_one_process_starts_at_a_time_when_cores_and_memory_are_free(ready, starting, since, free):
    found = to_start(WarmFacts(3, ready, starting, since, free))
    assert found == int(ready < 3 and not starting and since >= QUIET_SECONDS and free > 0.5)


def test_none_is_wanted_none_is_started():
    assert to_start(WarmFacts(0, 0, 0, 1e3, 1.0)) == 0


def test_memory_is_read_from_the_system():
    assert 0 < free_memory() <= 1
    assert own_memory() > 10_000_000


class Boss:
    """An actor that takes a warm process."""

    def __init__(self):
        self.handle = None

    def hire(self, name=None):
        from rayps.cluster.local import surrounding

        self.handle = surrounding().spawn("test_warm:Hand", 7, name=name, warm=True)
        return self.handle.call("tell").result(30)


class Hand:
    """What becomes of a warm process."""

    def __init__(self, number, code=None):
        if code is not None:
            number += code["number"]
        if number < 0:
            raise RaypsError("negative")
        self.number = number

    def tell(self):
        return os.getpid(), self.number


@pytest.fixture
def warm(ray_cluster, monkeypatch):
    """A cluster with two warm processes."""
    monkeypatch.setattr("rayps.cluster.ray_cluster.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("rayps.cluster.warm.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("rayps.cluster.ray_cluster.MODULES", ())
    ready(ray_cluster, 2)
    return ray_cluster


def ready(cluster, count):
    from rayps.cluster import ray_cluster as module

    node = module.ray.get_runtime_context().get_node_id()

    def filled():
        cluster.keep_warm(count)
        return len(module._warm_here(node)) >= count

    until(filled, 60)
    assert filled()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.ray
def test_a_detached_actor_takes_a_process_and_is_found_by_its_name(warm):
    handle = warm.spawn("test_warm:Hand", 3, name="hand-3", detached=True, warm=True)
    pid, number = handle.call("tell").result(30)
    assert number == 3
    assert warm.find("hand-3").call("tell").result(30) == (pid, 3)
    warm.kill(warm.find("hand-3"))
    until(lambda: not alive(pid), 20)
    assert not alive(pid)
    until(lambda: warm.find("hand-3") is None or _dead(warm.find("hand-3")), 20)


def _dead(handle):
    try:
        handle.call("tell").result(5)
    except ActorDied:
        return True
    return False


@pytest.mark.ray
def test_shared_values_arrive_as_in_a_new_process(warm):
    """A job with code shares it once on each host: a warm worker got the reference instead of the code."""
    shared = warm.share({"number": 5})
    handles = [warm.spawn("test_warm:Hand", 3, code=shared, detached=True, warm=flag) for flag in (True, False)]
    assert [handle.call("tell").result(30)[1] for handle in handles] == [8, 8]
    for handle in handles:
        warm.kill(handle)


@pytest.mark.ray
def test_two_callers_never_get_one_process(warm):
    handles = [warm.spawn("test_warm:Hand", i, name=f"two-{i}", detached=True, warm=True) for i in range(3)]
    found = [handle.call("tell").result(60) for handle in handles]
    assert [number for _, number in found] == [0, 1, 2] and len({pid for pid, _ in found}) == 3
    for handle in handles:
        warm.kill(handle)


@pytest.mark.ray
def test_the_error_of_a_constructor_reaches_the_caller(warm):
    handle = warm.spawn("test_warm:Hand", -1, name="wrong", detached=True, warm=True)
    with pytest.raises(RaypsError, match="negative"):
        handle.call("tell").result(30)
    warm.kill(handle)


@pytest.mark.ray
def test_a_taken_process_ends_with_the_actor_that_took_it(warm):
    boss = warm.spawn("test_warm:Boss", name="boss", detached=True)
    pid, number = boss.call("hire").result(60)
    assert number == 7 and alive(pid)
    warm.kill(boss)
    until(lambda: not alive(pid), 60)
    assert not alive(pid)


@pytest.mark.ray
def test_without_a_warm_process_a_new_one_starts(ray_cluster):
    began = time.monotonic()
    handle = ray_cluster.spawn("test_warm:Hand", 5, name="cold", detached=True, warm=True)
    assert handle.call("tell").result(60)[1] == 5 and time.monotonic() >= began
    ray_cluster.kill(handle)


@pytest.mark.parametrize(("requirements", "warm"), [((), True), (("cryptography==44.0.0",), False)])
def test_workers_with_requirements_start_in_new_processes(requirements, warm):
    """What a process has imported keeps its version, and a warm process has imported what a driver needs."""
    asked = []

    class Recording(LocalCluster):
        def spawn(self, target, *args, **options):
            asked.append(options["warm"])
            raise ClusterError("recorded")

    cluster = Recording()
    try:
        group = WorkerGroup(cluster, b"", 1, {"cpu": 1.0}, code=JobCode("job", requirements=requirements))
        with pytest.raises(ClusterError, match="recorded"):
            group.start(5.0)
    finally:
        cluster.close()
    assert asked == [warm]
