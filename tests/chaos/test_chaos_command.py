"""`rayps chaos` finds the processes of the named job only, plans, and refuses the rest. With Ray: test_service."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rayps_chaos.command import seconds_of
from rayps_chaos.faults import FaultOn, FaultRole
from rayps_chaos.history import JobHistory
from rayps_chaos.measure_recovery import InjectedFault
from rayps_chaos.plan import PlannedFault
from rayps_chaos.soak import faults_on
from rayps_chaos.targets import JobProcesses
from rayps_client.errors import ConfigError
from service_site import Site

from rayps.cli import main as cli
from rayps.core.job.job_status import Status
from rayps.service import processes
from rayps.service.local_ray.ray_daemon import RayRecord


@contextlib.contextmanager
def actor(*titles: str) -> Iterator[list[int]]:
    """Processes below this one, which wait; each has a title in its command line."""
    made = [
        subprocess.Popen([sys.executable, "-S", "-c", "input()", title], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for title in titles
    ]
    try:
        yield [each.pid for each in made]
    finally:
        for each in made:
            each.kill()
            each.wait()
            for pipe in (each.stdin, each.stdout):
                assert pipe is not None
                pipe.close()


def write(home: Path, daemon: int, **progress: Any) -> None:
    """Write what a service and a driver write about a job: this Ray's daemon, and the job's members."""
    home.mkdir(parents=True, exist_ok=True)
    RayRecord("ready", daemon, processes.start_time(daemon), "/tmp/none", 4).write(home.parent.parent)
    (home / "progress.json").write_text(json.dumps({"time": time.time() + 1, **progress}))


def worker(rank: int, pid: int, status: str = "running") -> dict[str, Any]:
    return {"rank": rank, "host": "vm", "pid": pid, "status": status, "round": 3}


def test_only_what_the_job_names_and_its_ray_holds_is_found(tmp_path: Path) -> None:
    home = tmp_path / "jobs" / "J"
    with actor("ray::WorkerActor", "ray::WorkerActor", "ray::ShardActor", "vim", "ray::WorkerActor") as pids:
        mine, dead, shard, editor, _ = pids  # the last one is another job's
        write(
            home,
            os.getpid(),
            workers=[
                worker(0, mine),
                worker(1, dead, "dead"),
                worker(2, editor),
                worker(3, 2**22 + 1),
                worker(4, None),
            ],  # type: ignore[arg-type]
            shards=[{"index": 0, "host": "vm", "pid": shard}],
        )
        (home / "driver.json").write_text(
            json.dumps({"attempt": 1, "pid": mine, "started": processes.start_time(mine)})  # not a driver by its title
        )
        found = JobProcesses(tmp_path, "J")
        assert [(each.number, each.pid) for each in found.find(FaultRole.WORKER)] == [(0, mine)]
        assert [each.pid for each in found.find(FaultRole.SERVER)] == [shard]
        for role in (FaultRole.DRIVER, FaultRole.MANAGER, FaultRole.SERVICE, FaultRole.RAYLET, FaultRole.GCS):
            assert found.find(role) == []
        assert found.counts()[FaultRole.MACHINE] == 1 and not found.shared_group
        with actor("daemon") as (other,):  # a daemon below which nothing is
            write(home, other, workers=[worker(0, mine)])
            assert found.find(FaultRole.WORKER) == []


def test_servers_of_a_group_are_found_and_known_to_be_shared(tmp_path: Path) -> None:
    home = tmp_path / "jobs" / "J"
    with actor("ray::ServerActor", "ray::ManagerActor") as (server, manager):
        servers = [{"name": "server-1", "pid": server, "state": "alive"}, {"name": "s", "pid": 1, "state": "dead"}]
        write(home, os.getpid(), server_group={"own": False, "manager_pid": manager, "servers": servers})
        found = JobProcesses(tmp_path, "J")
        assert [each.pid for each in found.find(FaultRole.SERVER)] == [server]
        assert [each.pid for each in found.find(FaultRole.MANAGER)] == [manager]
        assert found.shared_group


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path / "state")
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    monkeypatch.setenv("RAYPS_STATE_DIR", str(tmp_path / "state"))
    yield site
    site.close()


def test_the_plan_of_a_running_job_is_shown_and_nothing_is_done(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = site.add()
    home = site.start(job)
    with actor("ray::WorkerActor") as (pid,):
        write(home, os.getpid(), status="RUNNING", workers=[worker(0, pid)])
        (home / "metrics.jsonl").write_text('{"kind": "round", "round": 0, "generation": 1, "time": 1.0}\n')
        call = ["chaos", job, "--seed", "7", "--faults", "kill,stop:worker", "--every", "5", "--for", "60", "--dry-run"]
        assert cli.main([*call, "--json"]) == 0
        first = capsys.readouterr()
        plan = json.loads(first.out)
        assert {each["fault"] for each in plan["faults"]} == {"kill:worker", "stop:worker"}
        assert "--allow service" in plan["left_out"]["kill:service"] or "no service" in plan["left_out"]["kill:service"]
        assert cli.main([*call, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == plan  # the seed's
        assert cli.main(call) == 0
        assert "worker-0 is killed (SIGKILL)" in capsys.readouterr().out
        assert processes.start_time(pid) is not None


def test_what_cannot_be_is_refused(site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = site.add()
    home = site.start(job)
    write(home, os.getpid(), workers=[worker(0, 2**22 + 1)])
    (home / "metrics.jsonl").write_text('{"kind": "round", "round": 0, "generation": 1, "time": 1.0}\n')
    for call, code, words in (
        ([], 2, "give the id of a running job, a job file, or --soak"),
        (["01ZZZZ"], 3, "no job"),
        ([job, "--faults", "kil"], 2, "did you mean 'kill'"),
        ([job, "--allow", "all"], 2, "give some of"),
        ([job], 2, "no fault can be injected"),
        ([job, "--state-dir", str(tmp_path / "elsewhere")], 2, "is not in"),
        (["--soak", "never"], 2, "write a time such as 8h"),
        ([str(tmp_path / "none.yaml")], 2, "there is no job file"),
        ([job, "--every", "nan"], 2, "--every is nan"),
        ([job, "--every", "-1"], 2, "--every is -1"),
        ([job, "--for", "0"], 2, "--for is 0"),
        ([job, "--deadline", "-2"], 2, "--deadline is -2"),
        ([job, "--longest-gap", "0"], 2, "--longest-gap is 0"),
        (["--soak", "90s", "--every-service", "inf"], 2, "--every-service is inf"),
    ):
        assert cli.main(["chaos", *call]) == code, call
        assert words in capsys.readouterr().err, call
    site.store("change_status", job, Status.SUCCEEDED, message="")
    assert cli.main(["chaos", job]) == 2 and "has ended already" in capsys.readouterr().err


LEDGER = """
workload: rayps_chaos.ledger_work:LedgerWork
strategy: {name: parameter_server, staleness: 0, shards: 2}
workers: 2
epochs: 1
checkpoint_every: 20
max_failures: 9
params: {step_rows: 2, rows: 400, pause: 0.03}
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job file, of which no service may be started."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a service was started")

    monkeypatch.setattr("rayps_chaos.run.ChaosService", refuse)
    (tmp_path / "job.yaml").write_text(LEDGER)
    return str(tmp_path / "job.yaml")


def test_the_plan_of_a_job_file_is_shown_and_nothing_is_started(
    job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["chaos", job_file, "--seed", "7", "--faults", "kill,clock", "--every", "5", "--dry-run", "--json"]
    assert cli.main(call) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert len(plan["faults"]) == 20
    targets = {each["target"] for each in plan["faults"]}
    assert targets == {"worker-0", "worker-1", "server-0", "server-1", "the driver"}
    assert set(plan["left_out"]) == {f"kill:{role}" for role in ("manager", "service", "raylet", "gcs")} | {
        "clock:service"
    }
    assert "about as long as the job without faults takes" in shown.err
    assert "20 of the planned faults count as failures of the job, and its max_failures is 9" in shown.err
    assert cli.main([*call, "--for", "30"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["faults"] == [each for each in plan["faults"] if each["at"] < 30]
    assert "without faults" not in shown.err and "max_failures" not in shown.err


def test_what_a_job_file_can_never_have_is_refused_before_a_service_starts(
    job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for call, words in (
        (["--faults", "kill:server", "--set", "strategy=all_reduce"], "there is no server process"),
        (["--faults", "kill:service"], "--allow service"),
        (["--every", "nan"], "--every is nan"),
        (["--every", "9", "--for", "1"], "no fault fits into --for 1"),
    ):
        assert cli.main(["chaos", job_file, *call]) == 2, call
        assert words in capsys.readouterr().err, call


@pytest.mark.ray
@pytest.mark.chaos
def test_a_job_file_runs_on_a_service_of_its_own_without_and_with_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is killed and started again; the bits are those of the run without faults, and nothing is left."""
    (tmp_path / "job.yaml").write_text(LEDGER)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    call = ["chaos", str(tmp_path / "job.yaml"), "--faults", "kill:service", "--allow", "service", "--every", "1"]
    code = cli.main([*call, "--for", "2", "--deadline", "200", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["good"], found
    checks = {check["name"]: check["words"] for check in found["checks"]}
    assert "bits of the run without faults" in checks["result of the law"]
    assert checks["each push once"].endswith("0 have fewer, 0 have more")
    assert "kill:service" in {each["fault"] for each in found["faults"]}
    assert 0 < found["goodput"] < 1.5
    assert not list(tmp_path.glob("rayps-*"))


def test_faults_of_a_soak_are_those_that_hit_the_job() -> None:
    history = JobHistory("J", "SUCCEEDED", [], [], None, 1, 10.0, 20.0)
    kill = PlannedFault(0.0, FaultOn("kill", FaultRole.WORKER), 0, 0.0)

    def fault(at: float, pid: int) -> InjectedFault:
        return InjectedFault(kill, at, at, "", pid=pid)

    mine, others, service = fault(12.0, 1), fault(13.0, 2), fault(14.0, 3)
    early, late = fault(5.0, 1), fault(25.0, 1)
    found = faults_on(history, [early, mine, others, service, late], {1: "J", 2: "K"})
    assert found == [mine, service]


def test_times() -> None:
    assert [seconds_of(text) for text in ("8h", "30m", "90s", "1.5h")] == [28800.0, 1800.0, 90.0, 5400.0]
    for text in ("", "8", "0s", "-1h", "8 hours"):
        with pytest.raises(ConfigError, match="8h, 30m or 90s"):
            seconds_of(text)
