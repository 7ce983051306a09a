"""What all tests share: a seed that is told, one local Ray, and what to do where something is missing."""

import os
import random
from pathlib import Path

import pytest
import torch
from traces import Traces

from rayps.runtime import driver

SEED = int(os.environ.get("RAYPS_TEST_SEED", random.SystemRandom().randrange(2**31)))


def pytest_report_header():
    return f"seed of random tests: {SEED} (set RAYPS_TEST_SEED to repeat)"


def pytest_collection_modifyitems(items):
    # tests without Ray come first: once Ray runs in this process, actors would be looked for there
    items.sort(key=lambda item: any(item.get_closest_marker(mark) for mark in ("ray", "browser")))


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    random.seed(SEED)
    torch.manual_seed(SEED)
    monkeypatch.setattr(driver, "POLL_SECONDS", 0.02)


def missing(what):
    """Skip, or fail where everything is required."""
    if os.environ.get("RAYPS_REQUIRE_ALL") == "1":
        pytest.fail(f"RAYPS_REQUIRE_ALL=1, and there is no {what}")
    pytest.skip(f"there is no {what}")


@pytest.fixture(scope="session")
def ray_cluster():
    """One Ray for all tests that need one; nothing of it may be left at the end."""
    try:
        from rayps.ray_cluster import RayCluster  # loads ray, which most tests do without
    except ImportError:
        missing("ray")
    traces = Traces()
    with pytest.MonkeyPatch.context() as patch:  # actors of the tests' own classes find their module there
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        cluster = RayCluster.local(cpus=16)
    yield cluster
    cluster.close()
    assert not traces.left()
