"""The deterministic simulation: the product's own scheduler, driver, manager, servers and sessions on a virtual clock."""

import os

import pytest
from simulation import seeds

COUNT = int(os.environ.get("RAYPS_SIMULATE_SEEDS", "100"))


@pytest.fixture(autouse=True)
def one_thread():
    with seeds.prepared():
        yield


def test_todays_seeds_keep_all_invariants():
    """Other seeds each day; `RAYPS_SIMULATE_SEEDS` sets their number. The failure has the command that repeats it."""
    failed = seeds.run_many(seeds.rotating(COUNT), os.cpu_count() or 1, show=False)
    assert not failed, "\n\n".join(text for _, text in failed[:3])


@pytest.mark.parametrize("seed", [0, 1])
def test_equal_seeds_have_equal_traces(seed):
    assert seeds.run_seed(seed).digest == seeds.run_seed(seed).digest
