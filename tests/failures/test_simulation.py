"""The deterministic simulation: the real scheduler, driver, manager, servers and sessions on a virtual clock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation import seeds
from simulation.disk import Disk, SimPath
from simulation.kernel import Process, Simulation, enter, leave
from simulation.planted import PLANTED
from simulation.substitutes import FIRST_DESCRIPTOR, SimOs

COUNT = int(os.environ.get("RAYPS_SIMULATE_SEEDS", "100"))


@pytest.fixture(autouse=True)
def one_thread():
    with seeds.prepared():
        yield


def test_todays_seeds_keep_all_invariants():
    """Other seeds each day; `RAYPS_SIMULATE_SEEDS` sets their number. The failure has the command that repeats it."""
    today = seeds.rotating(COUNT)
    failed = seeds.run_many(today, os.cpu_count() or 1, show=False) if COUNT > 500 else seeds.run_here(today)
    assert not failed, "\n\n".join(text for _, text in failed[:3])


def test_seeds_that_failed_before():
    failed = seeds.run_here(seeds.failed_before())
    assert not failed, "\n\n".join(text for _, text in failed)


@pytest.mark.parametrize("seed", [0, 1])
def test_equal_seeds_have_equal_traces(seed):
    """Also if other seeds have run in between."""
    first = seeds.run_seed(seed).digest
    seeds.run_seed(seed + 2)
    assert seeds.run_seed(seed).digest == first


def test_a_seed_has_one_trace_in_each_process():
    """Also with other hashes of texts, and if other seeds have run before."""
    command = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "simulate.py"), "--seed", "3"]
    environment = os.environ | {"PYTHONHASHSEED": "17"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    assert f"trace {seeds.run_seed(3).digest[:16]}" in printed


def test_descriptors_belong_to_their_process():
    """A descriptor of the system, such as that of shared memory which is freed, has no number of the simulated disk."""
    sim = Simulation(0)
    sim.disk, found = Disk(), dict[str, object]()
    one, other = Process(sim, "one", "host-a"), Process(sim, "other", "host-a")
    system = os.open(os.devnull, os.O_RDONLY)

    def opens() -> None:
        found["open"] = SimOs.open(SimPath("/file"), os.O_CREAT | os.O_APPEND)
        SimOs.write(found["open"], b"text")
        SimOs.close(system)

    def uses() -> None:
        with pytest.raises(OSError, match="which it has not open"):
            SimOs.close(found["open"])
        found["refused"] = True

    enter(sim)
    try:
        one.start("opens", opens)
        other.start("uses", uses, 1.0)
        sim.run(lambda: False, 10.0)
    finally:
        leave()
    assert found["refused"] and found["open"] in sim.disk.opened and system < FIRST_DESCRIPTOR
    assert sim.disk.files == {"/file": b"text"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(system)


def test_jobs_of_the_simulation_succeed():
    """A driver that always crashed would keep most invariants."""
    events = [event for seed in (1, 5, 7) for event in seeds.run_seed(seed, keep_trace=True).lines]
    assert any(kind == "status" and text.endswith("SUCCEEDED") for _, kind, text in events)


FOUND_SOON = ["ledger", "greedy", "two drivers", "job file", "idempotency", "resume", "adoption", "rows"]


@pytest.mark.parametrize("name", FOUND_SOON)
def test_a_planted_bug_is_found(name):
    """These are found by few seeds; `simulate.py --planted` searches for all."""
    assert seeds.find(PLANTED[name], range(240)) is not None, f"no seed finds that {PLANTED[name].what}"
