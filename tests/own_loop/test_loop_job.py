"""What a user's own loop has from the driver that all jobs share: the account of its time, and a driver that moves."""

import functools
import threading
import time

import torch

import rayps
from rayps.cluster.local import LocalCluster, until
from rayps.core.job.job_status import Status
from rayps.runtime.driver.driver import Driver
from rayps.runtime.own_loop.loop_job import LoopJob
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


def test_the_time_of_each_worker_is_accounted(tmp_path):
    def train_fn():
        model = torch.nn.Linear(4, 1)
        model, optimizer = rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
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
