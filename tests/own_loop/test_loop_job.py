"""What a user's own loop has from the driver that all jobs share.

The account of its time, the rows of its workers, traces of its steps, and a driver that moves.
"""

import functools
import json
import threading
import time

import pytest
import torch
from rayps_client.errors import ConfigError, WorkloadError

import rayps
from rayps.cluster.local import LocalCluster, until
from rayps.core.job.job_status import Status
from rayps.runtime.driver.driver import Driver
from rayps.runtime.own_loop.loop_job import LoopJob
from rayps.runtime.own_loop.step_measure import NEWEST, StepMeasure, StepRates
from rayps.runtime.records.journal import Journal
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint

SPEC = JobSpec(run="test:loop", workers=2, timeout=20.0, max_failures=1)


class Death(BaseException):
    """What ends a worker that is a thread, as a kill ends a process."""


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2"])
def test_the_time_of_each_worker_is_accounted(tmp_path, strategy):
    def train_fn():
        model = torch.nn.Linear(4, 1)
        model, optimizer = rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        for _ in range(3):
            if rayps.world().rank:
                time.sleep(0.2)
            step(model, optimizer)
            rayps.save()

    shown = []
    driver = Driver(LoopJob(train_fn, SPEC, Journal(tmp_path, on_progress=shown.append)))
    assert driver.run(LocalCluster()).status is Status.SUCCEEDED
    account = shown[-1]["account"]
    assert set(account["members"]) == {"worker-0", "worker-1"}
    first, second = account["members"]["worker-0"], account["members"]["worker-1"]
    assert first["waiting"] > 0.3 > second.get("waiting", 0.0), "the first worker waits for the second"
    assert second["compute"] > 0.5
    assert min(first["checkpoint"], second["checkpoint"], first["start"], second["start"]) >= 0
    assert 0 < account["goodput"] < 1
    assert (tmp_path / "time.jsonl").exists() and driver.job_time().goodput is not None
    rows = shown[-1]["workers"]
    assert rows[0]["wait"] > rows[1]["wait"] and rows[1]["compute"] > rows[0]["compute"]
    assert [row["round"] for row in rows] == [3, 3] and "samples_per_second" not in rows[0], "no samples were logged"


def test_the_time_after_a_failure_is_recovery(tmp_path):
    def train_fn(folder):
        if rayps.world().rank and not (folder / "died").exists():
            (folder / "died").touch()
            raise Death("a worker's death")
        time.sleep(0.1)

    shown = []
    job = LoopJob(functools.partial(train_fn, tmp_path), SPEC, Journal(tmp_path, on_progress=shown.append))
    assert Driver(job).run(LocalCluster()).status is Status.SUCCEEDED
    members = shown[-1]["account"]["members"]
    assert all("recovery" in members[name] and members[name]["compute"] > 0 for name in ("worker-0", "worker-1"))


def test_a_driver_that_moves_leaves_with_the_next_saved_state(tmp_path):
    def train_fn():
        begun = (rayps.restore() or {"step": 0})["step"]
        for number in range(begun, 30):
            rayps.log(loss=float(number))
            rayps.save({"step": number + 1})
            time.sleep(0.05)

    folder, journal = tmp_path / "states", Journal(tmp_path)
    driver, outcomes = Driver(LoopJob(train_fn, SPEC, journal, checkpoints=folder)), []
    thread = threading.Thread(target=lambda: outcomes.append(driver.run(LocalCluster())))
    thread.start()
    assert until(lambda: not thread.is_alive() or "checkpoint" in [each["kind"] for each in journal.events], 60)
    assert not outcomes, outcomes
    driver.move("the host ends", 10.0)
    thread.join(60)
    assert driver.moved and outcomes[0].status is Status.STOPPED and not (tmp_path / "outcome.json").exists()
    [event] = [event for event in journal.events if event["kind"] == "driver_moves"]
    assert "the driver moves to another process" in event["message"]
    newest, _ = checkpoint.usable(folder)
    following = Journal(tmp_path)
    driver = Driver(LoopJob(train_fn, SPEC, following, checkpoints=folder, resume=newest))
    assert driver.run(LocalCluster()).status is Status.SUCCEEDED and not driver.moved
    assert "driver_moved" in [event["kind"] for event in following.events]
    assert [point["round"] for point in following.points][-1] == 29


def test_a_stop_before_the_first_step_starts_no_worker():
    called = []
    driver = Driver(LoopJob(lambda: called.append(1), SPEC, Journal()))
    driver.stop()
    outcome = driver.run(LocalCluster())
    assert (outcome.status, outcome.message) == (Status.STOPPED, "stopped on request: nothing was saved")
    assert not called


# ---- the rows of the workers


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def measured(steps):
    """A measure of `steps`: (seconds, seconds held by part, samples or None) of each."""
    clock = Clock()
    found = StepMeasure(clock)
    found.account.enter("compute")
    for seconds, held, samples in steps:
        clock.now += seconds
        found.add_logged(samples)
        found.end_step(held)
    return found, clock


def test_rates_are_of_the_newest_steps():
    early = [(1.0, {"waiting": 1.0}, 9)] * 3
    late = [(2.0, {"waiting": 0.5, "communication": 0.25}, 4)] * NEWEST
    found = measured(early + late)[0].rates(7)
    assert (found.compute, found.wait, found.move, found.data) == pytest.approx((0.625, 0.25, 0.125, 0.0))
    assert found.samples_per_second == pytest.approx(2.0) and found.logged == 7


def test_rates_of_one_step_and_of_none():
    found = measured([(4.0, {"waiting": 1.0}, 8)])[0].rates(-1)
    assert (found.compute, found.wait, found.samples_per_second) == pytest.approx((0.75, 0.25, 2.0))
    assert measured([(1.0, {}, None)])[0].rates(0).samples_per_second is None
    measure, clock = measured([])
    assert measure.rates(-1).added_to({"round": 0}) == {"round": 0}, "nothing is known yet"
    clock.now += 5.0
    assert measure.rates(-1).compute == 1.0, "a loop without steps has the shares of its time so far"


def test_the_first_point_has_the_start_of_the_process():
    assert measured([(50.0, {}, 1), (1.0, {}, 3)])[0].rates(0).samples_per_second == pytest.approx(3.0)


def test_the_round_of_a_row_is_the_newest_logged_step_if_nothing_is_wrapped():
    assert StepRates(logged=5).added_to({"round": 0})["round"] == 5
    assert StepRates(logged=5).added_to({"round": 3})["round"] == 3
    assert StepRates(logged=-1).added_to({"round": 0})["round"] == 0


def test_waits_for_batches_and_for_means_are_in_the_row():
    class Slow:
        def __init__(self, data):
            self.ahead, self.data = None, data

        def part(self, place, start):
            for item in self.data.part(place, start):
                time.sleep(0.1)
                yield item

    def train_fn(elsewhere):
        slow = Slow(rayps.data.tensors(torch.randn(12, 3), batch_size=2))
        source = rayps.batches(slow)
        if elsewhere:  # a wait in another thread does not hold up the loop
            read = []
            thread = threading.Thread(target=lambda: read.extend(source))
            thread.start()
            thread.join()
            source = read
        for number, _ in enumerate(source):
            rayps.log(number=number, samples=2)
        if rayps.world().rank:
            time.sleep(0.2)
        rayps.mean(1.0)
        rayps.log(end=1.0)

    for elsewhere in (False, True):
        shown = []
        driver = Driver(LoopJob(functools.partial(train_fn, elsewhere), SPEC, Journal(on_progress=shown.append)))
        assert driver.run(LocalCluster()).status is Status.SUCCEEDED
        first, second = shown[-1]["workers"]
        assert (first["data"] == 0) is (second["data"] == 0) is elsewhere
        assert first["wait"] > second["wait"] and first["round"] == 3


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), "failed"), (Death("a worker's death"), "dead")])
def test_the_row_of_a_worker_that_fails_says_so(error, status):
    def train_fn():
        if rayps.world().rank:
            raise error
        time.sleep(0.3)

    shown = []
    spec = JobSpec(run="test:loop", workers=2, timeout=20.0, max_failures=0)
    assert Driver(LoopJob(train_fn, spec, Journal(on_progress=shown.append))).run(LocalCluster()).error is not None
    assert shown[-1]["workers"][1]["status"] == status


# ---- traces


def traced_run(train_fn, folder, workers=1):
    """Run with traces; return the warnings, and the traced steps of rank 0 (None: no trace)."""
    journal = Journal()
    folder.mkdir(exist_ok=True)
    spec = JobSpec(run="test:loop", workers=workers, timeout=20.0)
    assert Driver(LoopJob(train_fn, spec, journal, profile=folder)).run(LocalCluster()).status is Status.SUCCEEDED
    warnings = [event["message"] for event in journal.events if "no trace" in event["message"]]
    path = folder / "rank-0.json"
    if not path.exists():
        return warnings, None
    names = {str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]}
    return warnings, sorted(int(each[13:]) for each in names if each.startswith("ProfilerStep#"))


def wrapping(steps, strategy="all_reduce", *, known=None, wraps=1):
    def train_fn():
        models = [torch.nn.Linear(4, 1) for _ in range(wraps)]
        optimizers = [
            rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, steps=known)[1] for model in models
        ]
        for number in range(steps):
            step(models[number % wraps], optimizers[number % wraps])

    return train_fn


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=2"])
def test_the_steps_of_wrapped_optimizers_are_traced(tmp_path, strategy):
    assert traced_run(wrapping(8, strategy), tmp_path) == ([], [3, 4, 5])


def test_steps_of_several_optimizers_count_together(tmp_path):
    assert traced_run(wrapping(8, wraps=2), tmp_path) == ([], [3, 4, 5])


def test_of_a_short_loop_the_number_of_steps_decides(tmp_path):
    assert traced_run(wrapping(2, known=2), tmp_path / "known") == ([], [1])
    for few in (2, 3):
        [warning], steps = traced_run(wrapping(few), tmp_path / f"unknown-{few}")
        assert steps is None and "too few steps" in warning and "rayps.wrap(model, optimizer, steps=...)" in warning
    assert traced_run(wrapping(4), tmp_path / "four")[1][0] == 3, "from the fourth step on"


def test_in_a_loop_that_wraps_nothing_each_logged_point_is_a_step(tmp_path):
    def train_fn():
        for number in range(8):
            rayps.log(number=number)

    assert traced_run(train_fn, tmp_path / "logs") == ([], [3, 4, 5])
    [warning], steps = traced_run(lambda: None, tmp_path / "nothing")
    assert steps is None and "each call of rayps.log is a step" in warning


def test_loops_of_one_process_share_one_profiler(tmp_path):
    warnings, _ = traced_run(wrapping(8), tmp_path, workers=2)
    [trace] = tmp_path.iterdir()
    other = {"rank-0.json": "worker-1", "rank-1.json": "worker-0"}[trace.name]
    assert warnings == [f"{other} has no trace: another worker of its process is traced"]


def test_a_loop_that_fails_releases_the_profiler(tmp_path):
    def train_fn():
        wrapping(4)()
        raise ValueError("no")

    options = {"workers": 1, "cluster": LocalCluster(), "timeout": 20.0, "progress": False}
    with pytest.raises(WorkloadError, match="no"):
        rayps.run(train_fn, profile=tmp_path / "failed", **options)
    rayps.run(wrapping(8), profile=str(tmp_path / "good"), **options)
    assert (tmp_path / "good" / "rank-0.json").exists()
    with pytest.raises(ConfigError, match="has traces of an earlier run"):
        rayps.run(wrapping(8), profile=tmp_path / "good", **options)
    with pytest.raises(ConfigError, match="profile is True: give a new folder"):
        rayps.run(wrapping(8), profile=True, **options)
