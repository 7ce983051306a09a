"""A service and the actors of another version of rayps: left to finish, or ended with the reason; never called."""

from __future__ import annotations

import inspect
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_manager import FakeManager, ThreadPlace
from rayps_client.errors import ClusterError
from service_process import ProcessPlace, held
from service_site import Site

from rayps.cluster import ray_cluster
from rayps.cluster.local import FIRST_PROTOCOL, PROTOCOL, surrounding
from rayps.core.job.job_status import Status
from rayps.ps.manager.manager import ManagerActor
from rayps.runtime.driver import driver_actor
from rayps.runtime.driver.driver_actor import DriverActor
from rayps.service import groups as groups_module
from rayps.service.drivers import explain_version_conflict
from rayps.service.local_ray import ray_process
from rayps.service.local_ray.ray_process import ClusterProcess
from rayps.service.plan import EndJob, Kill, OpenJob, RequestStop, plan

OTHER = PROTOCOL + 1
# What a service calls, by protocol. A changed or removed name or argument is another protocol: add a row. A new method,
# or a new argument with a default, is not, if it is not called for jobs that an earlier version started.
METHODS = {
    1: {
        "DriverActor": "(spec, folder, attempt, failures=0, *, anywhere=False, variables=None)",
        "DriverActor.stop": "()",
        "DriverActor.allow": "(workers, reason)",
        "ManagerActor": "(name, servers=2, replicas=1, folder=None, *, cluster=None, options=None)",
        "ManagerActor.facts": "()",
        "ManagerActor.resize": "(servers)",
        "ManagerActor.drain": "(server)",
        "ManagerActor.set_quota": "(name, quota)",
        "ManagerActor.drop": "(name)",
        "ManagerActor.stop": "()",
        "_Shell": "(target, *args, **kwargs)",
        "_Shell.call": "(method, *args, **kwargs)",
    }
}


def until(ready: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return found


def test_a_change_of_the_methods_is_another_protocol() -> None:
    actors = {"DriverActor": DriverActor, "ManagerActor": ManagerActor, "_Shell": ray_cluster._Shell}
    found = {}
    for path in METHODS[PROTOCOL]:
        kind, _, method = path.partition(".")
        named = inspect.signature(getattr(actors[kind], method or "__init__"))
        plain = [each.replace(annotation=inspect.Parameter.empty) for each in named.parameters.values()][1:]
        plain = [each for each in plain if each.name != "_ray_trace_ctx"]  # Ray adds it to classes of actors
        found[path] = str(inspect.Signature(plain))
    assert found == METHODS[PROTOCOL], "raise PROTOCOL, and add a row"


# ---------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("begun", "launched", "called"),
    [
        ({"attempt": 2, "protocol": PROTOCOL}, {}, True),
        ({"attempt": 2, "protocol": OTHER}, {}, False),
        ({"attempt": 2, "protocol": "x" * 99}, {}, False),
        ({"attempt": 2, "protocol": None}, {}, False),
        ({"attempt": 2}, {}, FIRST_PROTOCOL == PROTOCOL),  # rayps 0.1.0 writes none
        ({"attempt": 2, "protocol": OTHER}, {"attempt": 2, "protocol": PROTOCOL}, False),  # the driver knows better
        ({"attempt": 1, "protocol": OTHER}, {"attempt": 2, "protocol": PROTOCOL}, True),  # of the attempt before
        ({"attempt": 1, "protocol": PROTOCOL}, {"attempt": 2, "protocol": OTHER}, False),
        ({}, {}, True),
    ],
)
def test_whose_methods_are_known(begun: dict[str, Any], launched: dict[str, Any], called: bool) -> None:
    why = explain_version_conflict(2, begun, launched)
    assert (why is None) is called
    assert why is None or (f"this service has protocol {PROTOCOL}" in why and "another version of rayps" in why)


def test_a_driver_of_another_version_is_never_asked() -> None:
    cases = itertools.product(Status, (None, 0.5, 1000.0), (True, False), (True, False))
    for status, stopping, alive, launched in cases:
        if status.terminal or status is Status.QUEUED:
            continue
        job = OpenJob(
            "a", status=status, attempt=1, stopping=stopping, launched=launched, version_conflict="of another version"
        )
        actions = plan([job], ["a"] if alive else [], {}, {})
        assert not any(isinstance(action, RequestStop) for action in actions)
        kills = [action for action in actions if isinstance(action, Kill)]
        assert kills == ([Kill("a", "of another version")] if alive and stopping is not None else [])
        if not alive and stopping is not None:
            assert isinstance(actions[0], EndJob) and actions[0].status is Status.STOPPED
    mine = OpenJob("a", status=Status.STOPPING, attempt=1, stopping=1.0, launched=False)
    assert plan([mine], ["a"], {}, {}) == []  # until its version is known


# ---------------------------------------------------------------------------------------- drivers


@pytest.fixture
def place(tmp_path: Path) -> Iterator[ProcessPlace]:
    found = ProcessPlace(tmp_path / "actors")
    yield found
    for lock in (tmp_path / "actors").glob("*.lock"):
        if held(lock):
            found.kill(type("Left", (), {"name": lock.stem}))


def running_elsewhere(site: Site, place: ProcessPlace, protocol: int) -> str:
    """A job whose driver is a process that says this protocol."""
    job = site.add(workload="work:Hold")
    folder = site.settings.jobs_dir / job
    until(lambda: site.http.get(f"/api/v1/jobs/{job}").json()["status"] == "RUNNING")
    begun = json.loads((folder / "driver.json").read_text())
    (folder / "driver.json").write_text(json.dumps(begun | {"protocol": protocol}))
    return job


@pytest.mark.parametrize("protocol", [PROTOCOL, OTHER])
def test_a_stop_ends_a_driver_of_another_version_and_says_so(
    tmp_path: Path, place: ProcessPlace, protocol: int
) -> None:
    site = Site(tmp_path / "state", place=place)
    try:
        job = running_elsewhere(site, place, protocol)
    finally:
        site.close()
    site = Site(tmp_path / "state", place=place)  # a later service finds it
    try:
        assert site.http.get(f"/api/v1/jobs/{job}").json()["status"] == "RUNNING"
        assert site.http.post(f"/api/v1/jobs/{job}/stop").status_code == 202
        until(lambda: site.http.get(f"/api/v1/jobs/{job}").json()["status"] == "STOPPED")
        reason = site.http.get(f"/api/v1/jobs/{job}").json()["reason"]
        asked = (tmp_path / "actors" / f"driver-{job}.stop").exists()
        assert asked is (protocol == PROTOCOL)
        assert (f"has protocol {OTHER} and this service has protocol {PROTOCOL}" in reason) is (protocol == OTHER)
        until(lambda: place.find(f"driver-{job}") is None)
    finally:
        site.close()


WORK = """
import time
from pathlib import Path
import torch
import rayps

class Line(rayps.Workload):
    def __init__(self):
        self.hold = Path("hold").absolute()
    def model(self):
        return torch.nn.Linear(4, 1)
    def data(self):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return rayps.data.tensors(x, x.sum(dim=1, keepdim=True), batch_size=8)
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)
    def loss(self, model, batch):
        while self.hold.exists() and model.training:
            time.sleep(0.01)
        return ((model(batch.x) - batch.y) ** 2).mean()
"""


def test_a_driver_of_another_version_finishes_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "held_work.py").write_text(WORK)
    (tmp_path / "hold").touch()
    monkeypatch.chdir(tmp_path)  # a driver in a thread goes to its job's directory
    monkeypatch.setattr(driver_actor, "PROTOCOL", OTHER)
    place = ThreadPlace()
    place.threads = surrounding()  # type: ignore[assignment]  # where a driver in a thread starts its workers
    site = Site(tmp_path / "state", place=place)
    try:
        job = site.add(workload="held_work.py:Line", working_dir=str(tmp_path), epochs=2)
        until(lambda: site.http.get(f"/api/v1/jobs/{job}").json()["status"] == "RUNNING")
    finally:
        site.close()
    assert json.loads((tmp_path / "state/jobs" / job / "driver.json").read_text())["protocol"] == OTHER
    assert json.loads((tmp_path / "state/jobs" / job / "launch.json").read_text())["protocol"] == PROTOCOL
    site = Site(tmp_path / "state", place=place)
    try:
        until(lambda: site.http.get("/api/v1/cluster").json()["ready"])
        assert site.http.get(f"/api/v1/jobs/{job}").json()["status"] == "RUNNING"
        (tmp_path / "hold").unlink()
        until(lambda: site.http.get(f"/api/v1/jobs/{job}").json()["status"] == "SUCCEEDED")
        assert site.http.get(f"/api/v1/jobs/{job}").json()["attempt"] == 1
    finally:
        site.close()


# ---------------------------------------------------------------------------------------- managers


class Uncalled(FakeManager):
    """A manager of another version: none of its methods may be called."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("facts", "resize", "drain", "set_quota", "drop", "stop"):
            raise AssertionError(f"{name} of a manager of another version was called")
        return super().__getattribute__(name)


def test_a_manager_of_another_version_is_left_alone_until_its_group_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(groups_module.Groups.__init__, "__kwdefaults__", {"manager": "test_versions:Uncalled"})
    place, folder = ThreadPlace(), tmp_path / "servers" / "old"
    folder.mkdir(parents=True)
    (tmp_path / "service.lock").touch()
    wanted = {"name": "old", "servers": 2, "replicas": 1, "created_at": 1.0, "launched": True, "protocol": OTHER}
    (folder / "wanted.json").write_text(json.dumps(wanted))
    name = groups_module.name_manager("old")
    place.threads.spawn("test_versions:Uncalled", "old", 2, 1, str(folder), name=name, detached=True)
    site = Site(tmp_path, place=place)
    try:
        job = site.add(workload="a:B", strategy="parameter_server", server_group="old")
        group = until(lambda: told(site, "old"))
        assert group["status"] == "unreachable" and "stop the group and start it again" in group["reason"]
        refused = site.http.patch("/api/v1/server-groups/old", json={"servers": 3})
        assert refused.status_code == 409 and f"protocol {OTHER}" in refused.json()["detail"]
        shown = until(lambda: site.http.get(f"/api/v1/jobs/{job}").json()["reason"])
        until(lambda: "another version of rayps" in site.http.get(f"/api/v1/jobs/{job}").json()["reason"])
        assert "waits for server group 'old'" in shown
        assert place.threads.find(name) is not None
        assert site.http.post(f"/api/v1/jobs/{job}/stop").status_code == 202
        until(lambda: site.http.get(f"/api/v1/jobs/{job}").json()["status"] == "STOPPED")
        assert site.http.delete("/api/v1/server-groups/old").status_code in (200, 202, 204)
        until(lambda: place.threads.find(name) is None)
    finally:
        site.close()
        place.threads.close()


def told(site: Site, name: str) -> Any:
    group = site.http.get(f"/api/v1/server-groups/{name}").json()
    return group if "another version" in (group["reason"] or "") else None


# ---------------------------------------------------------------------------------------- the child that calls Ray


def test_a_service_whose_rayps_was_replaced_is_told_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_process, "PROTOCOL", OTHER)
    with pytest.raises(ClusterError, match=rf"protocol {OTHER}, and .* {PROTOCOL}: restart `rayps serve`"):
        ClusterProcess("here:1", cluster="faulty_cluster:HurtCluster")
