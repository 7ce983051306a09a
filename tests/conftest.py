"""What all tests share: a printed seed, one local Ray, and what to do where a program is missing."""

import compileall
import gc
import importlib.util
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import covers
import folders
import hypothesis
import lanes
import pytest
import torch
from folders import PYTHONPATH, TESTS
from lanes import uses_ray, uses_service
from traces import Traces

from rayps.cluster.local import WORKER_NICENESS
from rayps.comm.ring import choose_algorithm
from rayps.runtime.driver import workload_job

folders.add_to_path()
pytest_plugins = ["clinic_fixtures"]

# workers of pytest-xdist inherit it
os.environ.setdefault("RAYPS_TEST_SEED", str(random.SystemRandom().randrange(2**31)))
SEED = int(os.environ["RAYPS_TEST_SEED"])
# of a Ray that a test starts as others do: at Ray's own niceness for workers, busy tests almost stop them
os.environ.setdefault("RAY_worker_niceness", WORKER_NICENESS)

# no test depends on how fast the machine is: neither an example's 200 ms nor the time that drawing takes
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser):
    parser.addoption("--store-durations", action="store_true", help="write tests/durations.json from this run")


def pytest_configure(config):
    """Give each worker of pytest-xdist a temporary folder: a test looks there for what its own processes left."""
    if config.getoption("--store-durations"):
        config.pluginmanager.register(lanes.Stopwatch())
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker:
        folder = Path(os.environ["RAYPS_TEST_FOLDER"], worker)
        folder.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        torch.set_num_threads(1)
    else:
        compile_sources()
        folder = tempfile.mkdtemp(prefix="t", dir="/tmp")  # short: a unix socket's path has at most 107 characters
        os.environ["RAYPS_TEST_FOLDER"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def compile_sources():
    """Write the bytecode of what the tests' processes import: a quarter of such a process's start, without torch's.

    Under PYTHONDONTWRITEBYTECODE, as in many containers, each process would compile rayps for itself alone.
    """
    root = Path(__file__).parent.parent
    for folder in ("rayps", "api", "client", "chaos", "benchmarks", "tests"):
        compileall.compile_dir(root / folder, quiet=2, workers=0)  # 0: a process for each core


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Collect without the garbage collector, then freeze what was collected: two million objects, in each worker.

    They stay until the end, and a search among them takes seconds: half of the collection, and most of a test that
    calls `gc.collect()`. The tests' bytecode is written also under PYTHONDONTWRITEBYTECODE: without it each worker
    compiles all tests in each run, 40% of a collection.
    """
    gc.disable()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_report_header():
    return f"seed of random tests: {SEED} (set RAYPS_TEST_SEED to repeat)"


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    if item.path.name.startswith("test_bench"):
        item.add_marker("bench")


def last(item):
    """Sorts the dear tests to the end, those that share a service or a Ray together."""
    return uses_ray(item), uses_service(item), any(map(item.get_closest_marker, ("ray", "browser")))


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own hook reads the groups that this one writes
def pytest_collection_modifyitems(config, items):
    covers.mark_for_soak(items)
    if left := covers.left_for_soak(items, config.option.markexpr):
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]
        config.hook.pytest_deselected(items=left)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        lanes.group(items)
    else:
        items.sort(
            key=lambda item: (uses_ray(item), uses_service(item), any(map(item.get_closest_marker, ("ray", "browser"))))
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids):
    """Stop where pytest-xdist would divide a group: each of its processes would then start a Ray and a browser."""
    if not all("@" in name for name in ids):
        raise pytest.UsageError("pytest-xdist ignores the groups: install the pytest that pyproject.toml names")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Begin in the project's folder: a job in a thread leaves the process in its own, or in the home directory."""
    os.chdir(TESTS.parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """End what is shared before the first test that does not use it: `train()` would find that Ray in this process."""
    try:
        return (yield)
    finally:
        if not uses_service(nextitem):
            SHARED.end_service()
        if SHARED.cluster is not None and not uses_ray(nextitem):
            SHARED.end_ray()
        elif SHARED.cluster is None and (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
            ray.shutdown()  # later tests of this process would run on that Ray
            pytest.fail(f"{item.nodeid} left this process connected to a Ray")


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    random.seed(SEED)
    torch.manual_seed(SEED)
    monkeypatch.setattr(workload_job, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(choose_algorithm, "TRIES", 1)  # 40% of the processor time of a small job is this measurement


def missing(what):
    """Skip, or fail where everything is required."""
    if os.environ.get("RAYPS_REQUIRE_ALL") == "1":
        pytest.fail(f"RAYPS_REQUIRE_ALL=1, and there is no {what}")
    pytest.skip(f"there is no {what}")


class Shared:
    """One Ray and one job service for all tests of this process; nothing of them may be left at the end."""

    def __init__(self):
        self.cluster = self.traces = self.service = None

    def ray(self):
        if self.cluster is None:
            try:
                from rayps.cluster.ray_cluster import RayCluster  # loads ray, which most tests do without
            except ImportError:
                missing("ray")
            self.traces = Traces()
            with pytest.MonkeyPatch.context() as patch:  # actors of the tests' own classes find their module there
                patch.setenv("PYTHONPATH", PYTHONPATH, prepend=os.pathsep)
                self.cluster = RayCluster.local(cpus=16)
        return self.cluster

    def end_ray(self):
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.close()
            gc.collect()  # results of earlier tests, with their folders, may be in cycles
            assert not self.traces.left()

    def running_service(self):
        if self.service is None:
            if importlib.util.find_spec("ray") is None:
                missing("ray")
            from real_service import SharedService  # loads the service's client, which most tests do without

            self.service = SharedService(Path(tempfile.mkdtemp(prefix="s", dir=os.environ["RAYPS_TEST_FOLDER"])))
        return self.service

    def end_service(self):
        service, self.service = self.service, None
        if service is not None:
            service.end()


SHARED = Shared()


@pytest.fixture
def ray_cluster():
    """The shared local Ray with 16 CPUs; it starts with the first test that uses it."""
    return SHARED.ray()


@pytest.fixture
def ray_service():
    """The shared `rayps serve` with a Ray of its own, 8 CPUs; it starts with the first test that uses it.

    A test finds no job, server group or token there, and what it leaves is stopped and deleted when it ends.
    """
    with SHARED.running_service().lent() as serve:
        yield serve
