"""A driver moves: no round is computed twice, and the next driver continues as if nothing had happened."""

import itertools
import json
import os
import threading

import pytest
import torch
from small_work import SEEN, Small, plain

from rayps import AllReduce, ParameterServer
from rayps.cluster.local import LocalCluster, surrounding, until
from rayps.cluster.notices import Notice
from rayps.core.job.job_status import Status
from rayps.core.rows.phase_rounds import Boundary
from rayps.runtime.driver import driver_move
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.driver_actor import DriverActor
from rayps.runtime.driver.driver_move import (
    ARRIVAL,
    DEPARTURE,
    NoticeWatch,
    can_leave,
    find_last_departure,
    move_seconds,
    save_delay,
)
from rayps.runtime.driver.last_checkpoint import MOST_LEAD, choose_last_rounds, count_repeated_rounds
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.runtime.results.snapshots import SnapshotSchedule
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps.worker.plan import WorkerFacts

EXACT = 1e-12
IN_STEP = [AllReduce(), ParameterServer(shards=2)]
WORK = """
import time
import torch
import rayps

class Line(rayps.Workload):
    def model(self):
        return torch.nn.Linear(3, 1)
    def data(self):
        return rayps.data.tensors(torch.ones(160, 3), torch.ones(160, 1), batch_size=2)
    def loss(self, model, batch):
        time.sleep(0.01)
        return ((model(batch.x) - batch.y) ** 2).mean()
    def evaluate(self, model, batch):
        return {"error": ((model(batch.x) - batch.y) ** 2).mean()}
"""


@pytest.fixture
def tag(request):
    SEEN.clear()
    return request.node.nodeid


def begin(work, strategy, folder, *, again=False, start=True):
    """A driver in a thread; return it with its thread, its outcome when the thread has ended, and its journal."""
    spec = JobSpec("x:Small", wire(parse(strategy)), 3, epochs=1)
    statuses = []
    journal = Journal(folder, on_progress=lambda progress: statuses.append(progress["status"]))
    newest, _ = checkpoint.usable(folder / "checkpoints") if again else (None, [])
    driver = Driver(
        WorkloadJob(work, spec, journal, checkpoints=folder / "checkpoints", resume=newest, capture=False, again=again)
    )
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(driver.run(LocalCluster())))
    if start:
        thread.start()
    journal.statuses = statuses
    return driver, thread, outcomes, journal


def points(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "strategy",
    [AllReduce(), ParameterServer(shards=2), ParameterServer(shards=2, staleness=2), ParameterServer(staleness=None)],
    ids=["all_reduce", "in-step", "bounded", "asynchronous"],
)
def test_no_round_is_computed_twice(tag, tmp_path, strategy):
    work = Small(n=1800, optimizer="momentum", pause=0.002, tag=tag)
    driver, thread, outcomes, journal = begin(work, strategy, tmp_path)
    assert until(lambda: SEEN[tag] > 90, 60)
    driver.move("this process ends (a test)", 20.0)
    thread.join(60)
    assert outcomes[0].status is Status.STOPPED and driver.moved
    assert not (tmp_path / "outcome.json").exists()
    assert json.loads((tmp_path / "progress.json").read_text())["status"] == "RECOVERING"
    left = journal.events[-1]
    assert (left["kind"], left["repeated"]) == (DEPARTURE, 0) and 0 < left["round"] < 200, left
    assert find_last_departure(tmp_path) == left
    assert "STOPPING" not in journal.statuses  # a job that is stopping never runs again
    journal.close()
    computed = SEEN[tag]
    second, thread, outcomes, journal = begin(work, strategy, tmp_path, again=True)
    thread.join(120)
    assert outcomes[0].status is Status.SUCCEEDED and not second.moved
    [came] = [event for event in journal.events if event["kind"] == ARRIVAL]
    assert (came["round"], came["repeated"]) == (left["round"], 0) and came["seconds"] > 0
    assert find_last_departure(tmp_path) is None
    assert SEEN[tag] == 600 + 600, computed  # each batch of 3 rows once, and once more in the evaluation at the end
    rounds = [point["round"] for point in points(tmp_path) if point["kind"] == "round"]
    assert sorted(rounds) == list(range(200))
    if strategy in IN_STEP:
        law = torch.nn.utils.parameters_to_vector(plain(work, 3)[0].parameters())
        assert torch.allclose(outcomes[0].snapshot.params, law, atol=EXACT, rtol=0)
    journal.close()


def test_a_driver_that_has_not_trained_yet_moves_at_once(tag, tmp_path):
    driver, thread, outcomes, journal = begin(Small(tag=tag), AllReduce(), tmp_path, start=False)
    driver.move("this process ends (a test)", 20.0)
    thread.start()
    thread.join(60)
    assert driver.moved and outcomes[0].status is Status.STOPPED and not (tmp_path / "outcome.json").exists()
    left = journal.events[-1]  # after no round, or the first one
    assert left["round"] <= 1 and left["repeated"] == 0
    journal.close()


def test_a_save_while_training_goes_on(tag, tmp_path):
    work = Small(n=3600, pause=0.003, tag=tag)
    driver, thread, _, journal = begin(work, AllReduce(), tmp_path)
    assert until(lambda: SEEN[tag] > 90, 60)
    driver.save_soon()
    assert until(lambda: [event for event in journal.events if event["kind"] == "checkpoint"], 60)
    at = SEEN[tag]
    assert until(lambda: SEEN[tag] > at + 90, 60)  # training goes on
    driver.stop()
    thread.join(60)
    saved = [event["round"] for event in journal.events if event["kind"] == "checkpoint"]
    assert len(saved) == 2 and 0 < saved[0] < saved[1] < 400  # once, and at the stop
    journal.close()


@pytest.mark.parametrize(
    ("begun", "at", "stops"),
    [
        ({0: 0}, 1, {0: 1}),
        ({0: 7, 1: 8, 2: 7}, 9, {0: 9, 1: 9, 2: 9}),
        ({0: 5, 1: 5 + MOST_LEAD}, 6 + MOST_LEAD, {0: 6 + MOST_LEAD, 1: 6 + MOST_LEAD}),
        ({0: 5, 1: 6 + MOST_LEAD}, 6, {0: 6, 1: 6 + MOST_LEAD}),
        ({0: 5, 1: 500, 2: 6}, 6, {0: 6, 1: 500, 2: 6}),
    ],
)
def test_after_which_rounds_workers_stop(begun, at, stops):
    assert choose_last_rounds(begun) == (at, stops)


def test_in_the_chosen_round_every_worker_takes_part():
    for begun in itertools.product(range(4), (0, 1, 2, 30), (0, 3, 60)):
        at, stops = choose_last_rounds(dict(enumerate(begun)))
        assert at > min(begun)  # a round that some worker has not begun: it retains its part
        assert all(stops[rank] >= max(at, own) for rank, own in enumerate(begun))  # and nobody stops before it
        assert all(stops[rank] <= max(own, at) for rank, own in enumerate(begun))


def test_how_many_rounds_are_repeated():
    facts = [WorkerFacts(0, 1, "paused", 9), WorkerFacts(1, 1, "paused", 12)]
    assert count_repeated_rounds(facts, [9, 12], 9) == 0
    assert count_repeated_rounds(facts, [9, 11], 9) == 1
    assert count_repeated_rounds(facts, [], 9) == 3
    assert count_repeated_rounds([None, *facts], [9, 9, 9], 9) == 3


def test_one_further_snapshot_and_then_boundaries_again():
    schedule = SnapshotSchedule(Boundary(50, 100))
    assert schedule.choose_round([(3, [])], 0) == 50
    schedule.snapshot_once()
    assert schedule.choose_round([(3, [])], 0) == 4
    assert schedule.choose_round([(4, [4])], 0) == 4
    assert schedule.choose_round([(9, [4])], 4) == 50
    schedule.take_at(12)
    assert schedule.choose_round([(11, [])], 4) == 12


@pytest.mark.parametrize(
    ("notice", "hosts", "others", "anywhere", "leaves"),
    [
        (Notice("a", "", 9.0, "", pid=7), "a", (), False, True),  # another process of this host
        (Notice("a", "", 9.0, ""), "ab", (), False, False),
        (Notice("a", "", 9.0, ""), "ab", (), True, True),
        (Notice("a", "", 9.0, ""), "a", (), True, False),  # nowhere to go
        (Notice("a", "", 9.0, ""), "ab", (Notice("b", "", 9.0, ""),), True, False),
        (Notice("a", "", 9.0, ""), "ab", (Notice("b", "", 9.0, "", pid=3),), True, True),
        (Notice("a", "", 9.0, ""), "abc", (Notice("b", "", 9.0, ""),), True, True),
    ],
)
def test_where_the_next_driver_can_live(notice, hosts, others, anywhere, leaves):
    assert can_leave(notice, frozenset(hosts), (notice, *others), anywhere=anywhere) is leaves


def test_how_long_a_driver_has():
    def seconds(left):
        notice = Notice("a", "", left, "")
        return move_seconds(notice), save_delay(notice)

    assert [seconds(left) for left in (None, 0.0, 10.0, 600.0)] == [(30.0, 0.0), (0.0, 0.0), (8.0, 0.0), (30.0, 585.0)]


def test_each_notice_is_heard_once(monkeypatch):
    monkeypatch.setattr(driver_move, "_LOOK_SECONDS", 0.005)
    cluster, heard, looks = LocalCluster(), [], []
    real = cluster.notices
    monkeypatch.setattr(cluster, "notices", lambda: looks.append(1) or real())
    watch = NoticeWatch(cluster, heard.append)
    cluster.announce(Notice("", "nowhere", 5.0, "another host"))
    cluster.announce(Notice("", "127.0.0.1", 60.0, "this host"))
    assert until(lambda: heard, 60)
    at = len(looks)
    assert until(lambda: len(looks) > at + 3, 60)
    watch.close()
    assert [notice.reason for notice in heard] == ["this host"]


def test_the_actor_leaves_without_an_outcome_and_the_next_one_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_move, "_LOOK_SECONDS", 0.01)
    (tmp_path / "work.py").write_text(WORK)
    spec = {"workload": "work.py:Line", "workers": 2, "epochs": 2, "working_dir": str(tmp_path)}
    job, cluster = tmp_path / "moves", surrounding()
    actor = DriverActor(spec, str(job), 1)
    assert until(lambda: (job / "metrics.jsonl").exists() and points(job), 60)
    notice = Notice("", "127.0.0.1", 20.0, "a test", pid=os.getpid())
    cluster.announce(notice)
    try:
        assert actor.run() == Status.STOPPED
    finally:
        cluster.withdraw(notice)
    begun = json.loads((job / "driver.json").read_text())
    assert (begun["attempt"], begun["moved"]) == (1, "this process ends in 20 s (a test)")
    assert not (job / "outcome.json").exists()
    assert DriverActor(spec, str(job), 2).run() == Status.SUCCEEDED
    assert "moved" not in json.loads((job / "driver.json").read_text())
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    assert [(each["kind"], each["repeated"]) for each in events if "repeated" in each] == [(DEPARTURE, 0), (ARRIVAL, 0)]
    assert sorted(each["round"] for each in points(job) if each["kind"] == "round") == list(range(80))
