"""The whole way with a real Ray: by HTTP alone to a result, and through every death on the way.

One service for all tests, which kill it or its Ray; each leaves it running, and the last one ends it and looks for what
is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_service import Serve, shared_memory, until

from rayps.cli import main as cli
from rayps.core.job.job_status import Status
from rayps.service import processes
from rayps.service.local_ray.ray_daemon import read_record

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[2]

WORK = """
import time
import torch
import rayps

class Line(rayps.Workload):
    pause = 0.0
    def model(self):
        return torch.nn.Linear(4, 1)
    def data(self):
        x = torch.randn(320, 4, generator=torch.Generator().manual_seed(0))
        return rayps.data.tensors(x, x.sum(dim=1, keepdim=True), batch_size=8)
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)
    def loss(self, model, batch):
        time.sleep(self.pause)
        return ((model(batch.x) - batch.y) ** 2).mean()
    def evaluate(self, model, batch):
        return {"error": ((model(batch.x) - batch.y) ** 2).mean()}

class Slow(Line):
    pause = 0.1
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(WORK)
    return tmp_path


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    state = tmp_path_factory.mktemp("service") / "state"
    state.mkdir()
    serve = Serve(state)
    yield serve
    if serve.process is not None and serve.process.poll() is None:
        serve.end()
    found = read_record(serve.state)
    if found is not None and found.alive:
        os.kill(found.pid, signal.SIGTERM)
        until(lambda: not found.alive, 30)


@pytest.fixture
def serve(one: Serve) -> Serve:
    return one.start() if one.process is None or one.process.poll() is not None else one


def rounds(home: Path) -> list[int]:
    try:
        lines = (home / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [point["round"] for point in map(json.loads, lines) if point["kind"] == "round"]


def driver_pid(state: Path) -> int:
    found = read_record(state)
    assert found is not None
    drivers = [pid for pid in processes.list_descendants(found.pid) if "DriverActor" in _line(pid)]
    return max(drivers, key=lambda pid: processes.start_time(pid) or 0)  # an earlier job's may not have left yet


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_by_http_alone_from_submit_to_result(serve: Serve, work: Path) -> None:
    assert httpx2.get(f"{serve.url}/healthz").status_code == 200  # before Ray is up
    token = (serve.state / "token").read_text().strip()
    said = serve.log.read_text()
    assert f"token: in {serve.state / 'token'}" in said and token not in said and "#code=" not in said
    with httpx2.Client(base_url=serve.url, headers={"Authorization": f"Bearer {token}"}, timeout=90) as http:
        made = http.post(
            "/api/v1/jobs",
            json={
                "workload": "line.py:Line",
                "working_dir": str(work),
                "workers": 2,
                "epochs": 2,
                "strategy": "parameter_server:staleness=3,shards=2",
            },
        )
        assert made.status_code == 201, made.text
        big = http.post("/api/v1/jobs", json={"workload": "line.py:Line", "working_dir": str(work), "workers": 9})
        assert big.status_code == 422 and big.json()["code"] == "too_large"
        seen: list[int] = []
        kinds: list[str] = []
        with http.stream("GET", f"/api/v1/stream?job={made.json()['id']}") as stream:
            kind = ""
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    kind = line[7:]
                    kinds.append(kind)
                elif line.startswith("data: ") and kind == "metrics":
                    points = json.loads(line[6:])["points"]
                    seen += [point["round"] for point in points if point["kind"] == "round"]
        assert kinds[-1] == "end" and {"job", "metrics", "events"} <= set(kinds)
        job = http.get(made.headers["location"]).json()
        assert job["status"] == "SUCCEEDED" and job["metrics"]["error"] < 1.0, job
        assert sorted(set(seen)) == list(range(40)) and job["progress"]["workers"]
        assert httpx2.get(f"{serve.url}/readyz").json()["ready"]
        assert http.get("/api/v1/cluster").json()["total"]["cpu"] == 4


DAMPED = """
from dataclasses import dataclass
import rayps
from rayps.core.strategy.apply_pushes import apply_push
from rayps.core.strategy.topology import SSP, Servers

@dataclass(frozen=True)
class Damped(rayps.Strategy):
    damping: float = 0.5
    topology = Servers(count=2, consistency=SSP(2))
    def round(self, w):
        w.params = w.server.pull()
        w.server.push(w.grad(w.batch()))
    def on_push(self, shard, value, weight):
        apply_push(shard, self.damping * value, weight)
"""


def test_strategies_of_ones_own_are_submitted_by_name(serve: Serve, work: Path) -> None:
    (work / "easgd.py").write_text((ROOT / "examples" / "easgd.py").read_text())
    (work / "damped.py").write_text(DAMPED)
    client = serve.client()
    group = client.start_servers("common", servers=2, replicas=0)
    try:
        for name, more in (
            ("easgd.py:EASGD:beta=0.8", {}),
            ("damped.py:Damped:damping=0.7", {}),
            ("damped.py:Damped:damping=0.9", {"server_group": "common"}),
        ):
            job = client.submit("line.py:Line", working_dir=work, strategy=name, workers=2, epochs=4, **more)
            found = job.wait(120).data
            assert found["status"] == "SUCCEEDED" and found["metrics"]["error"] < 2.0, (name, found)
            assert name.split(":")[1] in str(found["spec"]["strategy"]), found["spec"]
    finally:
        group.stop()


def test_a_job_that_must_wait_says_why_and_a_stop_stops(serve: Serve, work: Path) -> None:
    client = serve.client()
    first = client.submit("line.py:Slow", working_dir=work, workers=3, epochs=50)
    second = client.submit("line.py:Line", working_dir=work, workers=2, epochs=1)
    until(lambda: first.status == "RUNNING", 90)
    until(lambda: second.refresh().data["reason"] == "needs 2 CPUs, 1 free")
    assert second.status == "QUEUED"
    first.stop()
    assert first.wait(60).data["status"] == "STOPPED"
    assert second.wait(90).data["status"] == "SUCCEEDED"


@pytest.mark.chaos
def test_a_service_that_is_killed_and_then_its_database_is_lost_leaves_no_hole(serve: Serve, work: Path) -> None:
    job = serve.client().submit("line.py:Slow", working_dir=work, workers=2, epochs=6)
    home = serve.state / "jobs" / job.id
    until(lambda: len(rounds(home)) > 5, 90)
    daemon = read_record(serve.state)
    serve.kill()
    before = len(rounds(home))
    until(lambda: len(rounds(home)) > before + 5)  # the job goes on with nobody to look
    serve.start()
    assert read_record(serve.state) == daemon
    job = serve.client().job(job.id)
    assert job.data["attempt"] == 1

    def told() -> list[int]:
        return [p["round"] for p in job.metrics() if p["kind"] == "round"]

    until(lambda: len(told()) > before + 5)
    assert (found := told()) == list(range(len(found)))  # also what came while nobody looked
    serve.kill()
    for path in serve.state.glob("rayps.db*"):
        path.unlink()
    serve.start()
    assert job.id in serve.log.read_text()
    job = serve.client().job(job.id)
    assert job.wait(200).data["status"] == "SUCCEEDED", job.data
    assert job.data["attempt"] == 1 and "adopted" in [event["kind"] for event in job.events()]
    assert serve.process is not None
    assert "libtorch" not in Path(f"/proc/{serve.process.pid}/maps").read_text()  # its jobs' processes have it
    assert [p["round"] for p in job.metrics() if p["kind"] == "round"] == list(range(120))
    until(lambda: serve.client().cluster()["free"].get("cpu") == 4)


@pytest.mark.chaos
@pytest.mark.parametrize("place", ["launch: stored, not started", "launch: started, not noted"])
def test_a_service_that_is_killed_while_a_driver_starts_leaves_no_job_starting(
    serve: Serve, work: Path, place: str
) -> None:
    """The other steps: `test_service_kills.py`. With `max_failures=0`: its death is no failure of the job."""
    serve.kill()
    serve.start(f"{place}=1")
    job = serve.client().submit("line.py:Line", working_dir=work, workers=2, epochs=1, max_failures=0)
    assert serve.process is not None and serve.process.wait(120) == -signal.SIGKILL
    serve.start()
    job = serve.client().job(job.id)
    assert job.wait(180).data["status"] == "SUCCEEDED", job.data
    assert job.data["attempt"] in ((1, 2) if "noted" in place else (2,))  # Ray may not have begun to create it
    assert sorted(p["round"] for p in job.metrics() if p["kind"] == "round") == list(range(20))


@pytest.mark.chaos
def test_a_driver_that_is_killed_is_started_again(serve: Serve, work: Path) -> None:
    job = serve.client().submit("line.py:Slow", working_dir=work, workers=2, epochs=3, checkpoint_every=5)
    home = serve.state / "jobs" / job.id
    until(lambda: len(rounds(home)) > 12, 90)
    os.kill(driver_pid(serve.state), signal.SIGKILL)
    assert job.wait(120).data["status"] == "SUCCEEDED", job.data
    assert job.data["attempt"] == 2
    assert sorted({p["round"] for p in job.metrics() if p["kind"] == "round"}) == list(range(60))
    kinds = [event["kind"] for event in job.events()]
    assert kinds.count("driver_restarted") == 1 and kinds.count("resumed") == 1
    assert kinds[-1] == "finished" and "succeeded" not in kinds
    assert job.data["progress"]["failures"] == 1


@pytest.mark.chaos
def test_chaos_by_a_seed_costs_a_running_job_nothing(
    serve: Serve, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other kinds of faults: test_chaos_inject. All at once, for hours: `make soak`."""
    job = serve.client().submit(
        "line.py:Slow", working_dir=work, workers=2, epochs=3, checkpoint_every=5, max_failures=9
    )
    monkeypatch.setenv("RAYPS_URL", serve.url)
    monkeypatch.setenv("RAYPS_TOKEN", (serve.state / "token").read_text().strip())
    faults = "stop:driver,kill:worker,cut_line:worker"
    call = ["chaos", job.id, "--state-dir", str(serve.state), "--faults", faults, "--every", "1.5", "--for", "5"]
    code = cli.main([*call, "--seed", "3", "--deadline", "200", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["good"], found
    assert {"kill:worker", "stop:driver"} <= {each["fault"] for each in found["faults"]}
    assert all(each["recovery"] is not None for each in found["faults"])
    job = serve.client().job(job.id)
    assert job.data["status"] == "SUCCEEDED" and job.data["attempt"] == 1
    assert sorted({p["round"] for p in job.metrics() if p["kind"] == "round"}) == list(range(60))


VICTIMS = {
    "gcs": ["gcs_server"],
    "raylet": ["/raylet/raylet"],
    "all at once": ["gcs_server", "/raylet/raylet", "DashboardAgent", "ray_daemon"],
    "dashboard agent": ["DashboardAgent"],
}
LONG = """
from pathlib import Path

class Long(Line):
    def loss(self, model, batch):
        time.sleep(0.0 if Path(END).exists() else 0.1)
        return super().loss(model, batch)
"""


@pytest.mark.chaos
def test_a_ray_that_loses_a_process_costs_neither_the_service_nor_a_job(serve: Serve, work: Path) -> None:
    """Of one job, one process after the other, and the daemon alone. Ten times each: `make kills`."""
    service, end, attempt = serve.process, work / "end", 1
    assert service is not None
    (work / "line.py").write_text(f"{WORK}{LONG}\nEND = {str(end)!r}\n")
    job = serve.client().submit(
        "line.py:Long", working_dir=work, workers=1, epochs=50, checkpoint_every=5, max_failures=9
    )
    home = serve.state / "jobs" / job.id
    for victim, parts in {"daemon": ["ray_daemon"], **VICTIMS}.items():
        last = max(rounds(home), default=0)
        until(lambda last=last: max(rounds(home), default=0) > last + 12, 180)
        assert job.refresh().data["attempt"] == attempt
        daemon = read_record(serve.state)
        assert daemon is not None
        doomed = [
            pid
            for pid in [daemon.pid, *processes.list_descendants(daemon.pid)]
            if any(part in " ".join(processes.read_command(pid)[:3]) for part in parts)
        ]
        assert len(doomed) >= len(parts), victim
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        if victim != "dashboard agent":  # the job may not notice that; it is the last
            attempt += 1
            until(lambda attempt=attempt: job.refresh().data["attempt"] == attempt, 200)
            assert service.poll() is None and httpx2.get(f"{serve.url}/healthz").json() == {"ok": True}, victim
        if victim == "daemon":
            until(lambda daemon=daemon: not Path(daemon.temp_dir).exists())
    end.touch()
    assert job.wait(200).data["status"] == "SUCCEEDED", job.data
    assert job.data["attempt"] >= attempt
    assert sorted({p["round"] for p in job.metrics() if p["kind"] == "round"}) == list(range(2000))
    assert service.poll() is None and httpx2.get(f"{serve.url}/healthz").json() == {"ok": True}
    until(lambda: httpx2.get(f"{serve.url}/readyz").status_code == 200, 180)


def test_an_orderly_end_interrupts_and_the_next_service_goes_on(serve: Serve, work: Path) -> None:
    job = serve.client().submit(
        "line.py:Slow", working_dir=work, workers=1, epochs=1, checkpoint_every=5, max_failures=0
    )
    home = serve.state / "jobs" / job.id
    until(lambda: len(rounds(home)) > 12, 90)
    assert serve.end() == 0 and "interrupted jobs: 1" in serve.log.read_text()
    assert read_record(serve.state) is None
    serve.start()
    job = serve.client().job(job.id)
    assert job.wait(120).data["status"] == "SUCCEEDED", job.data
    assert sorted({p["round"] for p in job.metrics() if p["kind"] == "round"}) == list(range(40))


@pytest.mark.parametrize(
    ("fields", "says"), [({"workload": "broken:W"}, "broken"), ({"workload": "line.py:Nobody"}, "Nobody")]
)
def test_a_job_that_cannot_begin_fails_with_the_reason(
    serve: Serve, work: Path, fields: dict[str, Any], says: str
) -> None:
    (work / "broken.py").write_text("import nothing_of_that_name\n")
    job = serve.client().submit(working_dir=work, **fields)
    assert job.wait(90).data["status"] == "FAILED"
    assert says in job.data["reason"] and len(job.data["reason"].splitlines()) <= 3


def test_an_orderly_end_leaves_no_trace(serve: Serve) -> None:
    found = until(lambda: read_record(serve.state))
    until(lambda: httpx2.get(f"{serve.url}/readyz").status_code == 200)
    tree = [*processes.list_descendants(found.pid), found.pid]
    assert serve.end() == 0
    until(lambda: not any(processes.start_time(pid) for pid in tree), 10)
    assert not Path(found.temp_dir).exists() and read_record(serve.state) is None
    assert shared_memory() <= serve.shared and "SIGTERM received" not in serve.log.read_text()
    assert not (serve.state / "service.json").exists()


PARAMETERS = (
    WORK
    + """
class Rated(Line):
    lr: float = 0.05
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr)
"""
)


def test_a_sweep_trains_each_job_with_its_parameters(serve: Serve, work: Path) -> None:
    (work / "line.py").write_text(PARAMETERS)
    job = {"workload": "line.py:Rated", "working_dir": str(work), "steps": 20}
    with serve.client() as client:
        sweep = client.sweep(job, name="rates", lr=[0.0, 0.05]).wait(300)
        assert [each.status for each in sweep.jobs] == [Status.SUCCEEDED] * 2, [each.data for each in sweep.jobs]
        still, learns = sweep.jobs
        assert still.params == {**still.params, "lr": 0.0, "pause": 0.0, "clip_norm": None}
        assert sweep.best("error").id == learns.id
        found = sweep.compare()
        assert found["differing"] == ["lr"]
        assert found["metrics"][:2] == ["loss", "error"]
        assert {*found["metrics"]} == {"loss", "error", "lr", "grad_norm", "batch loss"}
        assert [row["rounds"] for row in found["rows"]] == [20, 20]
        assert len(found["curves"][still.id]["batch loss"]["value"]) == 20
        event = next(event for event in learns.events() if event["kind"] == "parameters")
        assert event["params"] == learns.params and "lr = 0.05" in event["message"]
        trained, best = (work / "trained.json"), learns.result["error"]
        plain = subprocess.run(
            [sys.executable, "-c", PLAIN, "line.py:Rated", str(trained)],
            cwd=work,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
        assert plain.returncode == 0
        assert json.loads(trained.read_text()) == pytest.approx([still.result["error"], best], rel=1e-5)


PLAIN = """
import json, sys
import rayps
from rayps.cluster.local import LocalCluster

errors = []
for lr in (0.0, 0.05):
    cluster = LocalCluster()
    result = rayps.train(sys.argv[1], params={"lr": lr}, steps=20, cluster=cluster, progress=False)
    cluster.close()
    assert result.params["lr"] == lr and json.loads(result.history.schema.metadata[b"rayps.params"])["lr"] == lr
    errors.append(result.metrics["error"])
open(sys.argv[2], "w").write(json.dumps(errors))
"""


def test_a_parameter_that_only_the_driver_can_check_ends_the_job_with_the_reason(serve: Serve, work: Path) -> None:
    missing = (
        "import sys\nif any('strategy_child' in each for each in sys.orig_argv):\n    import not_on_this_machine\n"
    )
    (work / "line.py").write_text(missing + PARAMETERS)
    with serve.client() as client:
        job = client.submit("line.py:Rated", working_dir=work, params={"lr": "fast"}).wait(300)
        assert job.status is Status.FAILED
        assert "params.lr is 'fast' (text), and Rated.lr is float" in job.data["reason"]
