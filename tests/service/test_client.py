"""The client: one call each, errors as ours, and following across lost connections and restarts."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rayps_client.errors import ConfigError, Conflict, NotFound, Unauthorized, Unreachable
from service_site import Site

import rayps
from rayps.core.job.job_status import Status
from rayps.service import client as client_module
from rayps.service.client import Client
from rayps.strategies.catalogue import parse


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("state"))
    yield site
    site.close()


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with Client(site.url, site.token) as client:
        yield client


def rounds(path: Path, begin: int, end: int) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"kind": "round", "round": i}) + "\n" for i in range(begin, end))


def test_submit_show_list_stop(client: Client, tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("")
    job = client.submit(
        "w.py:W", strategy={"name": "all_reduce"}, workers=2, epochs=1, name="mine", working_dir=tmp_path
    )
    assert job.status is Status.QUEUED and job.data["spec"]["working_dir"] is None and job.data["spec"]["code"]
    there = client.submit("w.py:W", working_dir=tmp_path, upload=False)
    assert there.data["spec"]["working_dir"] == str(tmp_path) and there.data["spec"]["code"] is None
    there.stop()
    assert client.job(job.id).data["name"] == "mine"
    assert [each.id for each in client.jobs()[:2]] == [there.id, job.id]
    assert job.stop().data["stop_requested"]
    assert job.wait(timeout=60).status is Status.STOPPED and job.result == {}
    with pytest.raises(Conflict):
        job.stop()
    assert [e["kind"] for e in job.events()][:2] == ["queued", "stop_requested"]
    assert client.strategies() and client.cluster()["owned"]
    assert "#code=" in client.page_address()


def test_a_strategy_object_is_sent_as_what_parse_reads(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "import rayps\nclass Mine(rayps.LocalSGD):\n    name = 'mine'\n"
    (tmp_path / "own_strategy_of_the_client.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    own_class = importlib.import_module("own_strategy_of_the_client").Mine
    for given, form in [
        (rayps.AllReduce(bucket_mb=1), "all_reduce:bucket_mb=1"),
        (rayps.Pipeline(stages=1), "pipeline:stages=1"),
        ([(1, rayps.AllReduce()), rayps.LocalSGD(period=2)], "1*all_reduce > local_sgd:period=2"),
        ({"name": "local_sgd", "period": 2}, "local_sgd:period=2"),
        (own_class(period=3), "own_strategy_of_the_client:Mine:period=3"),
    ]:
        job = client.submit("a:B", working_dir=tmp_path, strategy=given)
        assert parse(job.data["spec"]["strategy"], tmp_path) == parse(form, tmp_path)

    class Nowhere(rayps.LocalSGD):
        name = "nowhere"

    with pytest.raises(ConfigError, match=r"'file.py:Nowhere'"):
        client.submit("a:B", working_dir=None, strategy=Nowhere())


def test_lists_go_over_pages(client: Client) -> None:
    made = [client.submit("a:B", working_dir=None, seed=i).id for i in range(7)]
    assert [job.id for job in client.jobs(limit=7)] == made[::-1]
    assert len(client.jobs(limit=3)) == 3


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (lambda c: c.job("01J00000000000000000000000"), NotFound),
        (lambda c: c.job("../x"), NotFound),
        (lambda c: c.job(""), NotFound),
        (lambda c: c.submit("a:B", workers=0), ConfigError),
        (lambda c: c.submit("a:B", strategy="nothing"), ConfigError),
        (lambda c: c.submit("a:B", wokers=1), ConfigError),
        (lambda c: c.submit("a:B", working_dir="/nowhere"), ConfigError),
        (lambda c: c.submit("a:B", timeout=float("nan")), ConfigError),
        (lambda c: c.submit("a:B", resources={"cpu": float("inf")}), ConfigError),
        (lambda c: c.submit("a:B", strategy={"name": object()}), ConfigError),
        (lambda c: Client(c.url, "rps_wrong").jobs(), Unauthorized),
        (lambda c: next(c.stream("01J00000000000000000000000", "logs")), NotFound),
    ],
)
def test_errors_are_ours(client: Client, work: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        work(client)
    assert len(str(caught.value).splitlines()) <= 3


def test_wait_gives_up_in_time(client: Client) -> None:
    job = client.submit("a:B", working_dir=None)
    with pytest.raises(TimeoutError, match="QUEUED"):
        job.wait(timeout=0.2, pause=0.05)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_pause", lambda attempt: 0.0)
    with pytest.raises(Unreachable, match="rayps serve") as caught:
        Client("http://127.0.0.1:1", "rps_x").jobs()
    assert caught.value.exit_code == 4


def test_a_submit_that_is_repeated_makes_one_job(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_pause", lambda attempt: 0.0)
    sent: list[int] = []
    request = client._http.request

    def lossy(*args: Any, **kwargs: Any) -> Any:
        answer = request(*args, **kwargs)
        sent.append(answer.status_code)
        if len(sent) < 3:
            raise httpx2.ReadError("the answer was lost")
        return answer

    monkeypatch.setattr(client._http, "request", lossy)
    before = client.submit("a:B", working_dir=None, seed=4711)
    assert sent == [201, 200, 200]
    assert len([j for j in client.jobs() if j.data["spec"]["seed"] == 4711]) == 1 and before.id


def test_a_stop_is_not_repeated(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    job = client.submit("a:B", working_dir=None)
    calls = []

    def lost(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        raise httpx2.ReadError("lost")

    monkeypatch.setattr(client._http, "request", lost)
    with pytest.raises(Unreachable):
        job.stop()
    assert len(calls) == 1


def test_following_survives_a_restart_without_a_hole(tmp_path: Path) -> None:
    site = Site(tmp_path)
    client = Client(site.url, site.token)
    job = client.submit("a:B", working_dir=None)
    home = site.start(job.id)
    rounds(home, 0, 50)
    seen: list[int] = []
    follower = threading.Thread(target=lambda: seen.extend(p["round"] for p in job.metrics(follow=True)))
    follower.start()
    time.sleep(0.7)
    site.close()
    rounds(home, 50, 80)  # written while nobody serves
    time.sleep(0.3)
    again = Site(tmp_path, port=site.port)
    rounds(home, 80, 100)
    time.sleep(0.5)
    again.store("change_status", job.id, Status.SUCCEEDED, message="done", metrics={"accuracy": 0.9})
    follower.join(60)
    assert not follower.is_alive() and seen == list(range(100))
    assert job.wait(timeout=60).result == {"accuracy": 0.9}
    assert [p["round"] for p in job.metrics()] == list(range(100))
    client.close()
    again.close()


def test_address_and_token_come_from_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_STATE_DIR", str(site.settings.state_dir))
    assert isinstance(Client().jobs(), list)
    monkeypatch.setenv("RAYPS_TOKEN", "rps_wrong")
    with pytest.raises(Unauthorized):
        Client().jobs()


def test_a_token_is_read_from_the_file_after_an_at_sign(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    tmp_path = tmp_path / "with a space"
    tmp_path.mkdir()
    (tmp_path / "mine").write_text(f"{site.token}\n")
    monkeypatch.setenv("RAYPS_TOKEN", f"@{tmp_path / 'mine'}")
    assert isinstance(Client().jobs(), list)
    assert isinstance(Client(token=f"@{tmp_path / 'mine'}").jobs(), list)
    monkeypatch.setenv("RAYPS_TOKEN", f"@{tmp_path / 'none'}")
    with pytest.raises(ConfigError, match=f"RAYPS_TOKEN: the token's file {tmp_path / 'none'} cannot be read: No such"):
        Client()
    for text in (b"", b"two words", b"\xff\xfe"):
        (tmp_path / "mine").write_bytes(text)
        with pytest.raises(ConfigError, match=r"mine (should hold a token|cannot be read: it is not text)"):
            Client(token=f"@{tmp_path / 'mine'}")


def test_jobs_are_filtered_and_counted_by_the_service(client: Client) -> None:
    for name in ("one", "two", "other"):
        workload = "größe:Digits" if name != "other" else "digits:Digits"
        client.submit(workload, working_dir=None, name=name, strategy="parameter_server:staleness=3")
    assert [job.data["name"] for job in client.jobs(text="GRÖßE digits")] == ["two", "one"]
    found = client.jobs(text="Größe:D one", limit=1)
    assert [job.data["name"] for job in found] == ["one"]
    found[0].stop().wait(60)
    counts = client.count_jobs(text="größe parameter_server")
    assert counts[Status.STOPPED] == 1 and counts[Status.QUEUED] == 1 and sum(counts.values()) == 2
    assert [job.id for job in client.jobs(text="größe", status=Status.STOPPED)] == [found[0].id]
    assert client.jobs(text="größe %") == [] and client.jobs(text="größe e_s") == [], "no letter stands for others"


def test_the_client_loads_neither_torch_nor_ray() -> None:
    code = "import sys, rayps; rayps.Client('http://127.0.0.1:1', 'x'); print({'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
