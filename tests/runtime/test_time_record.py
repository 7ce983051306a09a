"""The account of time in whole runs: on threads, over deaths, restarts and drivers; what rings and servers report."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
from rayps_client.errors import ActorDied
from small_work import SEEN, Small, Watched, train
from typer.testing import CliRunner

from rayps.cli.main import app
from rayps.cluster.local import LocalCluster
from rayps.cluster.members import GroupMember
from rayps.core.time.goodput import FILE, read_job_time
from rayps.core.time.member_times import MemberTimes
from rayps.core.time.time_account import PARTS
from rayps.core.time.time_verdict import reach_verdict
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.time_record import TimeRecord
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec


def drive(folder, workload, strategy="all_reduce", cluster=None, *, again=False, resume=None, **options):
    """Run a job with its driver and journal as the service does, without Ray."""
    phases = parse(strategy, Path.cwd())
    spec = JobSpec("small_work:Small", wire(phases), options.pop("workers", 2), options.pop("epochs", 1), **options)
    journal = Journal(folder)
    driver = Driver(WorkloadJob(workload, spec, journal, phases=phases, capture=False, again=again, resume=resume))
    own = cluster or LocalCluster()
    try:
        outcome = driver.run(own)
    finally:
        journal.close()
        if cluster is None:
            own.close()
    return driver, outcome


def must_add_up(found):
    """Each member's parts are its wall time, by the driver's clock."""
    assert found.members
    for each in found.members:
        assert set(each.parts) <= set(PARTS) and min(each.parts.values()) >= 0
        assert each.counted == pytest.approx(each.wall, rel=0.01, abs=0.02)


class SlowRank(Small):
    """One rank sleeps in its loss."""

    def loss(self, model, batch):
        if threading.current_thread().name == "worker-1":
            time.sleep(0.02)
        return super().loss(model, batch)


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:staleness=0,shards=2", "local_sgd:period=2"])
def test_the_parts_of_a_run_add_up_and_the_wait_is_for_the_slow_worker(tmp_path, strategy):
    driver, outcome = drive(tmp_path, SlowRank(n=120), strategy)
    assert outcome.status == "SUCCEEDED"
    found = read_job_time(tmp_path / FILE)
    must_add_up(found)
    first, second = found.workers
    assert first.times.rounds == second.times.rounds == 20
    assert first.times.waits["worker-1"] > second.times.waits.get("worker-0", 0.0)
    assert first.parts["waiting"] == pytest.approx(sum(first.times.waits.values()), abs=0.01)
    assert second.parts["compute"] >= 20 * 0.02
    assert ("worker-1",) in [finding.guilty for finding in reach_verdict(found).findings]
    assert driver.job_time().goodput == pytest.approx(found.goodput, abs=0.01)
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["account"]["goodput"] == pytest.approx(found.goodput, abs=0.01)
    assert progress["account"]["verdict"] and set(progress["account"]["guilty"]) <= {"worker-1"}
    assert {"phase", "finished"} <= {event.kind for event in found.events}
    if strategy.startswith("parameter_server"):
        assert [each.name for each in found.servers] == ["shard-0", "shard-1"]
        for server in found.servers:
            assert server.times.waits["worker-1"] > server.times.waits.get("worker-0", 0.0)


def test_a_repeated_round_is_work_done_again_and_the_way_to_it_recovery(tmp_path):
    cluster = Watched()
    SEEN.clear()
    work = Small(n=120, pause=0.004, tag="time-again")
    killer = cluster.kill_when("time-again", 24, ("WorkerActor", 1))
    _, outcome = drive(tmp_path, work, "all_reduce", cluster, epochs=1)
    killer.join()
    cluster.close()
    assert outcome.status == "SUCCEEDED"
    found = read_job_time(tmp_path / FILE)
    must_add_up(found)
    assert sum(each.processes for each in found.workers) == 3
    for each in found.workers:
        assert each.parts["recovery"] > 0 and each.parts["again"] > 0
        assert each.parts["again"] < each.parts["compute"] + each.parts["again"]
        assert each.times.rounds >= 20  # those that were repeated count twice
    assert "restarted" in {event.kind for event in found.events} or "mended" in {event.kind for event in found.events}


def test_the_account_continues_under_the_next_driver(tmp_path):
    drive(tmp_path, Small(n=36))
    before = read_job_time(tmp_path / FILE)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"name": "worker-0", "beg')  # the driver was killed in the middle of a line
    drive(tmp_path, Small(n=36), again=True)
    found = read_job_time(tmp_path / FILE)
    must_add_up(found)
    for first, both in zip(before.workers, found.workers, strict=True):
        assert both.processes == 2 and both.began == first.began and both.counted > first.counted
        assert both.parts["recovery"] > 0 and both.parts["again"] > 0  # the first driver has trained these rounds
        assert both.times.rounds == 2 * first.times.rounds
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert sum(progress["account"]["members"]["worker-0"].values()) > before.workers[0].counted


def test_train_has_the_report_in_its_result_and_in_the_folder_of_its_checkpoints(tmp_path):
    result = train(Small(n=36), workers=2, checkpoint=tmp_path / "kept")
    must_add_up(result.time)
    assert result.report["goodput"] == result.time.goodput > 0
    assert read_job_time(tmp_path / "kept" / FILE).goodput == pytest.approx(result.time.goodput)
    again = train(Small(n=36), workers=2, checkpoint=tmp_path / "kept", resume=True, epochs=2)
    assert all(each.processes == 1 for each in read_job_time(tmp_path / "kept" / FILE).members)  # of the last run only
    assert train(Small(n=36)).time.members and again.time.members  # without a folder too


def test_the_command_shows_a_runs_folder(tmp_path):
    train(Small(n=36), workers=2, checkpoint=tmp_path / "kept")
    run = CliRunner()
    shown = run.invoke(app, ["report", str(tmp_path / "kept")])
    assert shown.exit_code == 0 and "goodput:" in shown.output and "worker-1" in shown.output
    page = tmp_path / "page.html"
    shown = run.invoke(app, ["report", str(tmp_path / "kept" / FILE), "--json", "--html", str(page)])
    assert json.loads(shown.stdout)["members"] and page.read_text().startswith("<!doctype html>")
    refused = run.invoke(app, ["report", str(tmp_path)])
    assert refused.exit_code != 0 and f"has no {FILE}" in str(refused.exception)


# ---- the driver's record, without a run


class Reply:
    def __init__(self, value):
        self.value = value

    def done(self):
        return True

    def result(self, timeout):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Handle:
    def __init__(self, answer):
        self.answer = answer

    def call(self, method, *args):
        assert method == "times"
        return Reply(self.answer)


class Facts:
    def __init__(self, times, position=0):
        self.times, self.position = times, position


class Watch:
    now = 1000.0

    def __call__(self):
        return self.now


def worker(rank, spawned, times, last=None):
    member = GroupMember(f"worker-{rank}", Handle(last), spawned=spawned)
    member.facts = Facts(times)
    return member


def test_the_time_before_the_account_is_start_and_delayed_reports_do_not_lengthen_it():
    watch = Watch()
    record = TimeRecord(None, clock=watch)
    watch.now = 1013.0
    member = worker(0, 1000.0, MemberTimes({"start": 1.0, "compute": 1.5}))  # 10 s to start, reported 0.5 s late
    record.add([member])
    [found] = record.job_time().members
    assert found.parts == {"start": 11.5, "compute": 1.5} and found.wall == 13.0
    watch.now, member.facts = 1015.0, Facts(MemberTimes({"start": 1.0, "compute": 4.0}))
    record.add([member])
    assert record.job_time().members[0].parts == {"start": 11.0, "compute": 4.0}
    assert member.facts.times is None  # taken once


def test_what_follows_the_last_report_is_idle():
    watch = Watch()
    record = TimeRecord(None, clock=watch)
    watch.now = 1010.0
    living = worker(0, 1000.0, None, MemberTimes({"compute": 10.0}))
    dead = worker(1, 1000.1, MemberTimes({"compute": 10.0}), ActorDied("gone"))
    record.add([living, dead])
    watch.now = 1012.0
    record.end([living, dead])
    first, second = record.job_time().members
    assert first.parts == {"compute": 10.0, "start": 2.0, "idle": 0.0}
    assert second.parts == {"compute": 10.0, "start": 0.0, "idle": pytest.approx(1.9)}


def test_a_new_process_of_a_member_was_started_because_of_a_failure():
    watch = Watch()
    record = TimeRecord(None, clock=watch)
    watch.now = 1010.0
    first = worker(0, 1000.0, MemberTimes({"compute": 10.0}))
    record.add([first])
    first.dead = "killed"
    record.add([first])
    watch.now = 1020.0
    record.add([worker(0, 1014.0, MemberTimes({"compute": 2.0}))])
    [found] = record.job_time().members
    assert found.parts["compute"] == 12.0 and found.processes == 2
    assert found.parts["recovery"] == pytest.approx(8.0)  # 4 s between them, 4 s until the account began


def test_a_process_that_died_before_its_first_report_counts_as_long_as_it_was_seen():
    watch = Watch()
    record = TimeRecord(None, clock=watch)
    first = worker(0, 1000.0, None)
    watch.now = 1003.0
    record.add([first])
    first.dead = "killed"
    watch.now = 1004.0
    record.add([first])
    watch.now = 1010.0
    record.add([worker(0, 1006.0, MemberTimes({"recovery": 1.0, "compute": 3.0}))])
    [found] = record.job_time().members
    assert found.parts == {"start": 3.0, "recovery": pytest.approx(3.0 + 1.0), "compute": 3.0}


def test_a_worker_that_gets_another_rank_keeps_its_account():
    watch = Watch()
    record = TimeRecord(None, clock=watch)
    watch.now = 1010.0
    members = [worker(rank, 1000.0 + rank, MemberTimes({"compute": 10.0 - rank})) for rank in range(3)]
    record.add(members)
    members[2].name = "worker-1"  # worker-1 has left
    joined = worker(2, 1012.0, MemberTimes({"start": 2.0}))  # and another worker has joined as worker-2
    watch.now, members[2].facts = 1014.0, Facts(MemberTimes({"compute": 12.0}))
    record.add([members[0], members[2], joined])
    record.end([])
    found = {each.name: each.parts["compute"] for each in record.job_time().members if "compute" in each.parts}
    assert found == {"worker-0": 10.0, "worker-1": 9.0, "worker-2": 12.0}
    assert record.job_time().members[-1].name == "worker-2.2"


def test_the_servers_of_a_group_count_from_when_the_driver_saw_them():
    watch = Watch()
    record = TimeRecord(None, clock=watch)

    def totals(compute, idle, delay):
        return {
            "server-0": ("h", MemberTimes({"compute": compute, "idle": idle}, delays={"worker-0": {"worker-1": delay}}))
        }

    record.add_servers(totals(100.0, 900.0, 50.0))  # of other jobs
    watch.now += 10
    record.add_servers(totals(103.0, 906.0, 54.0))
    watch.now += 1
    record.add_servers(totals(103.0, 907.0, 2.0))  # a new space, whose delays begin at 0
    watch.now += 1
    record.end([])
    [found] = record.job_time().servers
    assert (found.name, found.host, found.wall) == ("server-0", "h", 12.0)
    assert found.parts == {"compute": 3.0, "idle": pytest.approx(9.0)}
    assert found.times.delays == {"worker-0": {"worker-1": 6.0}}


def test_rounds_of_earlier_generations_and_drivers_are_known_by_rank():
    record = TimeRecord(None)
    assert record.begin_generation(2) == (False, (0, 0))
    member = worker(1, 1000.0, None)
    member.facts = Facts(None, 7)
    record.add([member])
    record.recovering = True
    assert record.begin_generation(2) == (True, (0, 7))
    assert record.begin_generation(2) == (False, (0, 7))
    record.continues([{"kind": "round", "round": 9}, {"kind": "evaluation", "round": 30}])
    assert record.begin_generation(2) == (True, (10, 10))


def test_a_long_run_writes_a_line_for_a_hundredth_of_its_age_and_at_least_each_half_minute(tmp_path):
    watch = Watch()
    record = TimeRecord(tmp_path, clock=watch)
    member = worker(0, 1000.0, None)
    for second in range(1, 8001):
        watch.now = 1000.0 + second
        member.facts = Facts(MemberTimes({"compute": float(second)}))
        record.add([member])
    record.end([])
    record.close()
    count = len((tmp_path / FILE).read_text().splitlines())
    assert 300 < count < 600
    assert read_job_time(tmp_path / FILE).members[0].parts["compute"] == 8000.0


def test_a_folder_that_does_not_exist_yet_gets_all_lines_when_it_does(tmp_path):
    watch = Watch()
    record = TimeRecord(tmp_path / "later", anew=True, clock=watch)
    record.add_event({"time": 1.0, "kind": "phase", "message": "a"})
    record.add_event({"time": 1.0, "kind": "costs", "message": "not shown"})
    assert [event.message for event in record.job_time().events] == ["a"]
    (tmp_path / "later").mkdir()
    record.add_event({"time": 2.0, "kind": "finished", "message": "b"})
    record.close()
    assert [event.message for event in read_job_time(tmp_path / "later" / FILE).events] == ["a", "b"]


def test_the_progress_tells_planned_changes_from_failures():
    watch = Watch()
    record = TimeRecord(None, clock=watch)
    watch.now = 1010.0
    record.add([worker(0, 1000.0, MemberTimes({"compute": 4.0, "recovery": 6.0}, rounds=4))])
    record.add_event({"time": 1.0, "kind": "resized", "message": "a", "lost": []})
    assert "changes of the number of workers" in record.account()["verdict"]
    record.add_event({"time": 2.0, "kind": "resized", "message": "b", "lost": ["worker-1"]})
    record.add_event({"time": 3.0, "kind": "resized", "message": "c", "lost": []})
    watch.now += 1
    assert "failures" in record.account()["verdict"]
    assert [event.lost for event in record.job_time().events] == [False, True, False]


def test_a_full_disk_ends_no_job_and_loses_no_line(tmp_path, monkeypatch):
    full, write = True, os.write

    def limited(descriptor, data):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", limited)
    record = TimeRecord(tmp_path)
    for number in range(3):
        record.add_event({"seq": number, "time": float(number), "kind": "warning", "message": str(number)})
    full = False
    record.add_event({"seq": 3, "time": 3.0, "kind": "warning", "message": "3"})
    record.close()
    assert [event.message for event in read_job_time(tmp_path / "time.jsonl").events] == ["0", "1", "2", "3"]
