"""Server groups over REST, the client and the command line, with a manager that is made up; and with none at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_manager import DRIVER, MANAGER, ThreadPlace
from rayps_client.errors import ClusterError, ConfigError, Conflict, NotFound
from service_site import Site

from rayps.cli import main as cli
from rayps.cli.servers import parse_server_count
from rayps.cluster.local import surrounding
from rayps.core.job.job_status import Status
from rayps.service import drivers as drivers_module
from rayps.service import groups as groups_module
from rayps.service.client import Client
from rayps.service.groups import name_manager
from rayps.service.plan import Dependencies, EndJob, OpenJob, SetReason, Start, plan
from rayps.service.remote_group import summarize
from rayps.strategies.job import JobSpec

GROUPS = "/api/v1/server-groups"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> ThreadPlace:
    monkeypatch.setattr(groups_module.Groups.__init__, "__kwdefaults__", {"manager": MANAGER})
    monkeypatch.setattr(groups_module, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(groups_module, "_WATCHED_SECONDS", 0.05)
    return ThreadPlace()


@pytest.fixture
def site(tmp_path: Path, place: ThreadPlace) -> Iterator[Site]:
    site = Site(tmp_path, place=place)
    yield site
    site.close()


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with Client(site.url, site.token) as client:
        yield client


@pytest.fixture
def run(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_STATE_DIR", str(site.settings.state_dir))

    def once(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        return code, *capsys.readouterr()

    return once


def until(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 10
    while not (found := look()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
    return found


def test_a_group_is_started_shown_resized_drained_and_stopped(site: Site, client: Client, place: ThreadPlace) -> None:
    answer = site.http.post(GROUPS, json={"name": "shared", "servers": 3, "replicas": 1})
    assert answer.status_code == 201 and answer.headers["location"] == f"{GROUPS}/shared"
    group = client.servers("shared").wait(10)
    assert [each["name"] for each in group.data["servers"]] == ["server-0", "server-1", "server-2"]
    assert (group.data["status"], group.data["wanted"], group.data["reason"]) == ("ready", 3, None)
    row = client.server_groups()[0]
    assert (row["alive"], row["bytes"], row["operations_s"], row["spaces"]) == (3, 3000, 7.5, 0)
    assert len(group.resize(4).wait(10).data["servers"]) == 4
    assert len(group.drain("server-1").wait(10).data["servers"]) == 3
    with pytest.raises(NotFound, match="it has server-0, server-1, server-2"):
        group.drain("server-9")
    with pytest.raises(Conflict, match="already"):
        client.start_servers("shared")
    manager = place.threads.find(name_manager("shared")).actor  # type: ignore[union-attr]
    assert group.stop().data["status"] == "stopping"
    group.wait(10)
    assert manager.stopped and place.threads.find(name_manager("shared")) is None
    assert client.server_groups() == [] and not (site.settings.servers_dir / "shared").exists()
    with pytest.raises(NotFound, match="there is none yet; start one with `rayps servers start"):
        client.servers("shared")


def test_a_group_with_a_range_and_with_a_number_that_stays(site: Site, client: Client, place: ThreadPlace) -> None:
    group = client.start_servers("shared", servers=(2, 6), cpus=0.5).wait(10)
    assert (group.data["wanted"], group.data["range"], group.data["pinned"]) == (2, [2, 6], False)
    assert summarize(group.data) == "ready, 2 of 2 servers (2 to 6 by load)"
    manager = place.threads.find(name_manager("shared")).actor  # type: ignore[union-attr]
    assert manager.options == {"silence": 10.0, "cpus": 0.5}
    group.resize(4).wait(10)
    assert (group.data["wanted"], group.data["range"], group.data["pinned"]) == (4, [2, 6], True)
    assert "(fixed by a call)" in summarize(group.data) and client.server_groups()[0]["pinned"]
    assert json.loads((site.settings.servers_dir / "shared" / "wanted.json").read_text())["most"] == 6
    group.resize((3, 5)).wait(10)
    assert (group.data["wanted"], group.data["range"], group.data["pinned"]) == (4, [3, 5], False)
    with pytest.raises(ConfigError, match="from servers to 1000"):
        group.resize((5, 3))
    with pytest.raises(ConfigError, match="the least and the most, such as"):
        group.resize((1, 2, 3))  # type: ignore[arg-type]
    client.start_servers("usual").wait(10)
    manager = place.threads.find(name_manager("usual")).actor  # type: ignore[union-attr]
    assert manager.options == {"silence": 10.0, "cpus": 0.0}  # jobs may need all CPUs of the service's own Ray


@pytest.mark.parametrize(
    ("text", "expected"), [("3", 3), ("2..8", (2, 8)), ("2..2", (2, 2)), ("", None), ("2..", None), ("0", None)]
)
def test_servers_on_the_command_line(text: str, expected: Any) -> None:
    if expected is not None:
        assert parse_server_count(text) == expected
        return
    with pytest.raises(ConfigError, match=r"write a number such as 3, or a range such as 2\.\.8"):
        parse_server_count(text)


BAD = [
    ({}, "/name", "name is missing"),
    ({"name": "a", "x": 1}, "/x", "the fields are bytes, cpus, most, name, operations, replicas, server, servers"),
    ({"name": "a", "replica": 1}, "/replica", "did you mean 'replicas'?"),
    ({"name": "../x"}, "/name", "pattern"),
    ({"name": "x" * 41}, "/name", "pattern"),
    ({"name": "a", "servers": 0}, "/servers", "greater"),
    ({"name": "a", "servers": 2.5}, "/servers", "integer"),
    ({"name": "a", "servers": 1, "replicas": 1}, "/servers", "give at least 2 servers"),
    ({"name": "a", "servers": 3, "replicas": -1}, "/replicas", "greater"),
    ({"name": "a", "servers": 3, "most": 2}, "/most", "from servers to 1000"),
    ({"name": "a", "servers": 3, "cpus": -1}, "/cpus", "greater"),
]


@pytest.mark.parametrize(("body", "pointer", "says"), BAD)
def test_bad_groups_are_refused_with_the_way_out(site: Site, body: Any, pointer: str, says: str) -> None:
    answer = site.http.post(GROUPS, json=body)
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"
    assert says in answer.json()["detail"] and answer.json()["errors"][0]["pointer"] == pointer


def test_a_manager_that_does_not_answer_in_time_is_a_conflict(
    client: Client, place: ThreadPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = client.start_servers("shared", servers=3, replicas=1).wait(10)
    manager = until(lambda: place.threads.find(name_manager("shared")), "a manager")
    monkeypatch.setattr(groups_module, "_ANSWER_SECONDS", 0.2)
    manager.call("be_slow", 2.0).result(60)
    with pytest.raises(Conflict, match=r"its manager has not answered within 0\.2 s"):
        group.resize(4)


def test_what_cannot_be_is_refused_and_changes_nothing(site: Site, client: Client, place: ThreadPlace) -> None:
    group = client.start_servers("shared", servers=3, replicas=1).wait(10)
    with pytest.raises(ConfigError, match="give at least 2 servers"):
        group.resize(1)
    until(lambda: place.threads.find(name_manager("shared")), "a manager").call("hang")
    with pytest.raises(Conflict, match="resizing already"):
        group.resize(5)
    assert group.refresh().data["wanted"] == 3
    job = site.http.post("/api/v1/jobs", json={"workload": "a:B", "server_group": "other"})
    assert job.status_code == 422 and job.json()["errors"][0]["pointer"] == "/server_group"
    assert "no server group 'other'" in job.json()["detail"] and "give one of shared" in job.json()["detail"]


def test_a_group_that_a_job_uses_is_not_stopped_without_force(
    site: Site, client: Client, place: ThreadPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers_module, "DRIVER", DRIVER)
    group = client.start_servers("shared").wait(10)
    job = site.add(server_group="shared", strategy="parameter_server")
    place.threads.find(name_manager("shared")).actor.open_space(job)  # type: ignore[union-attr]
    shown = until(lambda: group.refresh().data["spaces"], "the space")
    assert shown[0]["name"] == job and group.data["jobs"][0]["id"] == job
    with pytest.raises(Conflict, match=f"used by {job}"):
        group.stop()
    with pytest.raises(Conflict, match="has not ended"):
        group.drop(job)
    assert group.set_quota(job, operations=50).data["spaces"][0]["quota"] == {"bytes": None, "operations": 50}
    with pytest.raises(NotFound, match=f"no space 'other': it has {job}"):
        group.set_quota("other", bytes=1)
    gauges = site.http.get("/metrics").text
    assert f'rayps_space_bytes{{group="shared",space="{job}"}} 800.0' in gauges
    assert 'rayps_group_servers{group="shared",state="alive"} 2.0' in gauges
    body = {"workload": "a:B", "strategy": "parameter_server", "server_group": "shared", "branch": job[:-3].lower()}
    branch = site.http.post("/api/v1/jobs", json=body)
    assert branch.json()["spec"]["branch"] == job
    for wrong, pointer, says in [
        (
            {"branch": "nothing"},
            "/branch",
            f"no such job and no such space; the spaces of server group 'shared' are {job}",
        ),
        ({"strategy": "all_reduce", "branch": None}, "/server_group", "all_reduce stores nothing on servers"),
        ({"strategy": "all_reduce"}, "/branch", "all_reduce has no parameters on servers"),
        ({"strategy": "hybrid"}, "/branch", "hybrid has no parameters on servers"),
    ]:
        refused = site.http.post("/api/v1/jobs", json=body | wrong)
        assert refused.status_code == 422 and refused.json()["errors"][0]["pointer"] == pointer, refused.text
        assert says in refused.json()["detail"]
    assert group.set_quota(job[:8].lower(), operations=60).data["spaces"][0]["quota"]["operations"] == 60
    with pytest.raises(Conflict, match="has not ended"):
        group.drop(job[:8])
    until(lambda: client.job(job).data["status"] == "RUNNING", "its driver")
    group.stop(force=True)
    ended = until(lambda: (found := client.job(job)).data["status"] == "FAILED" and found, "the job's end")
    assert ended.data["reason"] == "the server group 'shared' was stopped with --force"
    assert ended.data["progress"]["round"] == 7  # as far as it came
    assert [event["kind"] for event in ended.events()][-1] == "failed"
    assert place.threads.find(f"driver-{job}") is None
    group.wait(10)


def test_the_spaces_of_a_divided_job_are_told_apart(
    site: Site, client: Client, place: ThreadPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a job has the spaces JOB and JOB/1."""
    monkeypatch.setattr(drivers_module, "DRIVER", DRIVER)
    group = client.start_servers("shared").wait(10)
    job = site.add(server_group="shared", strategy="parameter_server")
    for name in (job, f"{job}/1", "left", "left/1"):
        place.threads.find(name_manager("shared")).actor.open_space(name)  # type: ignore[union-attr]
    until(lambda: len(group.refresh().data["spaces"]) == 4, "the spaces")
    for name, operations in ((job[:8].lower(), 50), (f"{job}/1", 60)):
        group.set_quota(name, operations=operations)
    quotas = {space["name"]: space["quota"]["operations"] for space in group.refresh().data["spaces"]}
    assert quotas == {job: 50, f"{job}/1": 60, "left": None, "left/1": None}
    for name in (job, f"{job}/1"):
        with pytest.raises(Conflict, match="has not ended"):
            group.drop(name)
    group.drop("left/1")
    until(lambda: "left/1" not in [space["name"] for space in group.refresh().data["spaces"]], "its end")


def test_a_service_that_is_started_again_finds_its_group(tmp_path: Path, place: ThreadPlace) -> None:
    first = Site(tmp_path, place=place)
    with Client(first.url, first.token) as client:
        client.start_servers("shared", servers=3).wait(10)
    manager = place.threads.find(name_manager("shared"))
    first.close()
    unseen = Site(tmp_path)  # it may be well: nobody has looked yet
    try:
        group = unseen.service.groups.get("shared")
        assert (group["status"], group["reason"]) == ("unreachable", "Ray is starting")
        assert summarize(group) == "unreachable, 3 servers: Ray is starting"
    finally:
        unseen.close()
    again = Site(tmp_path, place=place)
    try:
        with Client(again.url, again.token) as client:
            assert len(client.servers("shared").wait(10).data["servers"]) == 3
        assert place.threads.find(name_manager("shared")) is manager
    finally:
        again.close()


def test_a_manager_that_died_is_started_again_from_its_record(client: Client, place: ThreadPlace) -> None:
    group = client.start_servers("shared", servers=3).wait(10).resize(5).wait(10)
    before = place.threads.find(name_manager("shared"))
    assert before is not None
    place.threads.kill(before)
    until(lambda: place.threads.find(name_manager("shared")) not in (None, before), "another manager")
    assert len(group.wait(10).data["servers"]) == 5


@pytest.mark.parametrize("method", ["facts", "stop", "spawn"])
def test_a_slow_group_holds_up_neither_another_one_nor_a_job(
    site: Site, client: Client, place: ThreadPlace, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Its manager hangs until the end of the test: no deadline passes meanwhile."""
    monkeypatch.setattr(drivers_module, "DRIVER", DRIVER)
    go_on, hung = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> dict[str, Any]:
        hung.set()
        go_on.wait(60)
        raise ClusterError("it hung")

    monkeypatch.setattr(groups_module, "_ANSWER_SECONDS", 60.0)
    spawn = place.threads.spawn
    if method == "spawn":
        monkeypatch.setattr(
            place.threads,
            "spawn",
            lambda *args, **more: hang() if more["name"] == name_manager("a-slow") else spawn(*args, **more),
        )
        site.http.post(GROUPS, json={"name": "a-slow"})
    else:
        slow = client.start_servers("a-slow").wait(10)
        monkeypatch.setattr(place.threads.find(name_manager("a-slow")).actor, method, hang)  # type: ignore[union-attr]
        if method == "stop":
            slow.stop()
    try:
        assert hung.wait(30)
        other = client.start_servers("other", servers=2).wait(30)
        for size in (3, 2):  # is looked at again and again
            assert len(other.resize(size).wait(30).data["servers"]) == size
        assert site.service.groups.get("a-slow")["name"] == "a-slow"
        other.stop().wait(30)
        job = site.add()
        until(lambda: place.threads.find(f"driver-{job}"), "the job's driver")
    finally:
        go_on.set()


def test_a_group_that_is_larger_than_the_own_ray_is_refused(site: Site, client: Client) -> None:
    with pytest.raises(ConfigError) as caught:
        client.start_servers("shared", servers=1000)
    said = str(caught.value)
    assert "1000 servers" in said and "has 8" in said and "--cpus" in said and caught.value.data["code"] == "too_large"
    client.start_servers("first", servers=5).wait(10)
    with pytest.raises(ConfigError, match="4 servers, and other groups use 5"):
        client.start_servers("second", servers=4)
    second = client.start_servers("second", servers=3).wait(10)
    with pytest.raises(ConfigError, match="has 8"):
        second.resize(4)
    assert second.refresh().data["wanted"] == 3 and [each["name"] for each in client.server_groups()] == [
        "first",
        "second",
    ]
    client.servers("first").resize(4).wait(10)
    assert second.resize(4).wait(10).data["wanted"] == 4


def test_a_group_that_is_larger_than_a_joined_cluster_waits_until_that_has_grown(
    tmp_path: Path, place: ThreadPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.owned = False
    monkeypatch.setattr(place, "capacity", lambda: None)
    site = Site(tmp_path, place=place)
    try:
        with Client(site.url, site.token) as client:
            until(lambda: site.http.get("/readyz").json()["ready"], "the cluster")
            group = client.start_servers("shared", servers=9)
            until(
                lambda: (
                    "needs a CPU for each of 9 servers; the whole cluster has 8" in str(group.refresh().data["reason"])
                ),
                "the reason",
            )
            assert place.threads.find(name_manager("shared")) is None
            monkeypatch.setattr(place.threads, "total", lambda: {"cpu": 9.0, "gpu": 0.0})
            assert len(group.wait(30).data["servers"]) == 9
            with pytest.raises(ConfigError, match="when the cluster has grown"):
                group.resize(10)
    finally:
        site.close()


def test_without_ray_a_group_says_what_it_waits_for(tmp_path: Path) -> None:
    site = Site(tmp_path)
    try:
        with Client(site.url, site.token) as client:
            group = client.start_servers("shared")
            assert (group.data["status"], group.data["reason"]) == ("starting", "Ray is starting")
            with pytest.raises(Conflict, match="cannot resize now: Ray is starting"):
                group.resize(3)
            with pytest.raises(TimeoutError, match="starting, 0 of 2 servers: Ray is starting"):
                group.wait(0.1)
            group.stop().wait(10)  # it never began: nothing is left to wait for
    finally:
        site.close()


def test_the_stream_of_a_group_ends_with_it(site: Site, client: Client) -> None:
    group = client.start_servers("shared").wait(10)
    assert site.http.get("/api/v1/stream?group=nobody").status_code == 404
    seen = []
    with site.http.stream("GET", "/api/v1/stream?group=shared", timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                seen.append(line.removeprefix("event: "))
                if seen == ["group"]:
                    group.stop()
            if line.startswith("data: ") and seen[-1:] == ["end"]:
                assert "no server group" in json.loads(line.removeprefix("data: "))["reason"]
    assert seen[0] == "group" and seen[-1] == "end"


def test_the_stream_of_all_groups(site: Site, client: Client) -> None:
    client.start_servers("shared").wait(10)
    with site.http.stream("GET", "/api/v1/stream?group=*", timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                assert json.loads(line.removeprefix("data: "))["groups"][0]["name"] == "shared"
                break


def test_the_command_line(run: Callable[..., tuple[int, str, str]], place: ThreadPlace, tmp_path: Path) -> None:
    assert run("servers", "ls")[2].startswith("there is no server group yet")
    code, out, err = run("servers", "start", "shared", "--servers", "3", "--replicas", "1", "--silence", "30", "--wait")
    assert (code, out, err) == (0, "shared is ready, 3 of 3 servers\n", "")
    assert place.threads.find(name_manager("shared")).actor.options == {"silence": 30.0, "cpus": 0.0}  # type: ignore[union-attr]
    place.threads.find(name_manager("shared")).actor.open_space("mine")  # type: ignore[union-attr]
    until(lambda: "mine" in run("servers", "show", "shared")[1], "the space")
    out = run("servers", "show", "shared")[1]
    assert "server-2" in out and "9.8 KiB" in out and "started" in out
    assert json.loads(run("servers", "show", "shared", "--json")[1])["name"] == "shared"
    assert json.loads(run("servers", "ls", "--json")[1])[0]["alive"] == 3
    assert "3 of 3" in run("servers", "ls")[1]
    assert run("servers", "quota", "shared", "mine", "--bytes", "2048")[1] == "mine: quota 2.0 KiB\n"
    assert run("servers", "quota", "shared", "mine")[1] == "mine: quota none\n"
    code, out, err = run("servers", "quota", "shared", "mine", "--bytes", "10")
    assert (code, out) == (0, "mine: quota 10 B\n") and err.startswith("the space has 800 B now")
    data = json.loads(run("servers", "quota", "shared", "mine", "--operations", "5", "--json")[1])
    assert data["spaces"][0]["quota"] == {"bytes": None, "operations": 5.0}
    assert run("servers", "drop", "shared", "MIN")[0] == 3  # too few letters
    assert run("servers", "drop", "shared", "mine")[1] == "mine is deleted\n"
    assert run("servers", "drop", "shared", "mine")[0] == 3
    assert run("servers", "resize", "shared", "4", "--wait")[1] == "shared is ready, 4 of 4 servers\n"
    assert run("servers", "drain", "shared", "server-0")[0] == 0
    for arguments, wanted, says in [
        (("show", "nobody"), 3, "give one of shared"),
        (("start", "shared"), 5, "already"),
        (("resize", "shared", "1"), 2, "at least 2 servers"),
        (("resize", "shared", "x"), 2, "write a number such as 3"),
        (("start", "a b"), 2, "pattern"),
        (("drain", "shared", "server-77"), 3, "no server 'server-77'"),
    ]:
        code, out, err = run("servers", *arguments)
        assert (code, out) == (wanted, "") and says in err and len(err.strip().splitlines()) <= 3, err
    (tmp_path / "job.yaml").write_text("workload: a:B\n")
    code, out, err = run("submit", str(tmp_path / "job.yaml"), "--server-group", "other")
    assert code == 2 and "give one of shared" in err
    assert run("servers", "stop", "shared", "--wait")[1] == "shared has stopped\n"


def test_a_job_waits_for_its_group_and_holds_up_no_other() -> None:
    waits = OpenJob("1", outside=Dependencies(group="waits for server group 'g': its manager is starting"))
    actions = plan([waits, OpenJob("2")], [], {"cpu": 4.0}, {"cpu": 4.0})
    assert actions == [SetReason("1", "waits for server group 'g': its manager is starting"), Start("2", 1)]


def test_a_job_whose_driver_is_lost_is_started_again_once_its_group_is_there() -> None:
    total, why = {"cpu": 4.0}, "waits for server group 'g': its manager is starting"
    for status in (Status.STARTING, Status.RUNNING, Status.RECOVERING, Status.UNKNOWN):
        lost = OpenJob("1", status=status, attempt=1, interrupted=True, outside=Dependencies(group=why))
        assert plan([lost], [], total, total) == [SetReason("1", why)]
        assert plan([replace(lost, reason=why)], [], total, total) == []
        there = plan([replace(lost, outside=Dependencies())], [], total, total)
        assert [(type(action), getattr(action, "attempt", 0)) for action in there] == [(Start, 2)]
        assert [type(action) for action in plan([replace(lost, stopping=1.0)], [], total, total)] == [EndJob]


def test_a_real_manager_on_threads(tmp_path: Path, place: ThreadPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module.Groups.__init__, "__kwdefaults__", {"manager": groups_module.MANAGER})
    place.threads = surrounding()  # type: ignore[assignment]  # a manager starts its servers in what surrounds it
    site = Site(tmp_path, place=place)
    try:
        with Client(site.url, site.token) as client:
            group = client.start_servers("real", servers=2, replicas=1).wait(60)
            assert {"name", "state", "bytes", "operations_s", "cpu", "seen_s", "primaries", "copies"} <= set(
                group.data["servers"][0]
            )
            assert len(group.resize(3).wait(60).data["servers"]) == 3
            gone = group.data["servers"][0]["name"]
            group.drain(gone).wait(60)
            assert [each["name"] for each in group.data["servers"] if each["state"] == "alive"].count(gone) == 0
            with pytest.raises(NotFound, match="no space"):
                group.drop("nothing")
            group.stop().wait(60)
        assert place.threads.find(name_manager("real")) is None
    finally:
        site.close()


def test_what_a_queued_job_is_told(site: Site, client: Client) -> None:
    spec = JobSpec("a:B", server_group="shared")
    assert "which does not exist: there is none yet" in str(site.service.groups.wait_reason(spec))
    client.start_servers("shared").wait(10)
    assert site.service.groups.wait_reason(spec) is None
    assert site.service.groups.wait_reason(JobSpec("a:B")) is None
