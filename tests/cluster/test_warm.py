"""Processes that wait for a job: when they start, who takes them, and what ends them."""

import os
from itertools import product

import pytest
from rayps_client.errors import ActorDied, ClusterError, RaypsError

from rayps.cluster import ray_cluster as module
from rayps.cluster.code_folder import JobCode
from rayps.cluster.local import LocalCluster, until
from rayps.cluster.warm import (
    QUIET_SECONDS,
    WarmFacts,
    WarmState,
    environment_key,
    free_memory,
    memory_share,
    own_memory,
    to_end,
    to_start,
)
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.worker_group import WorkerGroup
from rayps.runtime.own_loop.loop_job import LoopJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.job import JobSpec


@pytest.mark.parametrize(
    ("ready", "starting", "since", "free", "one"),
    list(product([0, 1, 3], [0, 1], [0.0, 1e3], [0.1, 0.25, 0.9], [0.0, 0.1])),
)
def test_one_process_starts_at_a_time_when_cores_and_memory_are_free(ready, starting, since, free, one):
    facts = WarmFacts(3, ready, starting, since, free, one)
    assert to_start(facts) == int(ready < 3 and not starting and since >= QUIET_SECONDS and free - one >= 0.2)
    assert to_end(facts) == int(ready > 0 and free < 0.2)
    assert not (to_start(facts) and to_end(facts))


def test_processes_beyond_the_wanted_number_end():
    assert to_end(WarmFacts(3, 3, 0, 0.0, 1.0)) == 0
    assert to_end(WarmFacts(3, 4, 0, 0.0, 1.0)) == 1


def test_none_is_wanted_none_is_started():
    assert to_start(WarmFacts(0, 0, 0, 1e3, 1.0)) == 0


def test_the_key_of_an_environment():
    """It differs by packages, environment variables and Python path, and not by the order of a dict's entries."""
    plain = environment_key("{}", [])
    assert plain == environment_key("", []) and len(plain) == 16
    others = [
        environment_key('{"env_vars": {"A": "1"}}', []),
        environment_key('{"env_vars": {"A": "2"}}', []),
        environment_key('{"pip": ["x==1"]}', []),
        environment_key("{}", ["/a", "/b"]),
        environment_key("{}", ["/b", "/a"]),
    ]
    assert len({plain, *others}) == 6
    assert environment_key('{"a": 1, "b": 2}', []) == environment_key('{"b": 2, "a": 1}', [])


def test_memory_is_read_from_the_system():
    assert 0 < free_memory() <= 1
    assert own_memory() > 10_000_000
    assert 0 < memory_share(own_memory()) < 1


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
    found = WarmState()

    def filled():
        nonlocal found
        found = cluster.keep_warm(count)
        return found.ready >= count

    until(filled, 60)
    assert found.ready >= count and found.memory > count * 10_000_000
    return found


def waiting():
    """The names of the warm processes of this host that are registered."""
    return module._warm_at(module._warm_place(None))


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
    for name in waiting():
        module.ray.kill(module._named(name))
    until(lambda: ray_cluster.keep_warm(0).ready == 0, 30)
    handle = ray_cluster.spawn("test_warm:Hand", 5, name="cold", detached=True, warm=True)
    assert handle.call("tell").result(60)[1] == 5
    assert not module._alias("cold")
    ray_cluster.kill(handle)


@pytest.mark.ray
def test_a_dead_process_is_not_counted_and_is_replaced(warm):
    names = waiting()
    module._named(names[0]).__ray_call__.remote(lambda _: os._exit(1))
    until(lambda: module._named(names[0]) is None, 30)
    assert warm.keep_warm(len(names)).ready == len(names) - 1
    assert names[0] not in waiting()
    ready(warm, len(names))


@pytest.mark.ray
def test_a_driver_that_finds_a_dead_process_removes_its_key(warm):
    """The key had the host None, for an actor without a reservation."""
    place = module._warm_place(None)
    module._RayKeyValues().put(f"{place}0-died", b"1")
    handle = warm.spawn("test_warm:Hand", 3, name="after", detached=True, warm=True)
    assert handle.call("tell").result(30)[1] == 3
    assert "0-died" not in waiting() and module._alias("after")
    warm.kill(handle)


@pytest.mark.ray
def test_processes_end_when_memory_is_short(warm, monkeypatch):
    monkeypatch.setattr("rayps.cluster.ray_cluster.free_memory", lambda: 0.1)
    until(lambda: warm.keep_warm(2).ready == 0, 60)
    assert warm.keep_warm(2) == WarmState(2)


@pytest.mark.ray
@pytest.mark.parametrize("same", [True, False])
def test_an_actor_takes_a_process_of_its_own_environment_only(warm, same):
    """The environment of an actor is that of the actor that starts it."""
    options = {"num_cpus": 0, "namespace": module.NAMESPACE, "max_concurrency": 4}
    if not same:
        options["runtime_env"] = {"env_vars": {"TEST_WARM": "1"}}
    shell = module.ray.remote(module._Shell).options(**options).remote("test_warm:Boss")
    boss = module.RayHandle("boss", shell)
    before = waiting()
    boss.call("hire", f"hand-{same}").result(120)
    assert bool(module._alias(f"hand-{same}")) == same
    assert len(waiting()) == len(before) - same
    warm.kill(boss)


class Recording(LocalCluster):
    """Records whether actors may take a warm process, and starts none."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def spawn(self, target, *args, **options):
        self.asked.append(options["warm"])
        raise ClusterError("recorded")


@pytest.mark.parametrize(("requirements", "warm"), [((), True), (("cryptography==44.0.0",), False)])
def test_workers_with_requirements_start_in_new_processes(tmp_path, requirements, warm):
    """What a process has imported keeps its version, and a warm process has imported what a driver needs."""
    cluster, code = Recording(), JobCode("job", requirements=requirements)
    try:
        group = WorkerGroup(cluster, b"", 1, {"cpu": 1.0}, code=code)
        with pytest.raises(ClusterError, match="recorded"):
            group.start(5.0)
        loop = Driver(LoopJob(alive, JobSpec("", params={"pid": 1}), Journal(tmp_path), code=code))
        assert loop.run(cluster).message == "recorded"
    finally:
        cluster.close()
    assert cluster.asked == [warm, warm]
