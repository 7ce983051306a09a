"""A real job of a real service, watched in a browser: from the login code to the stop button."""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_service import Serve

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.browser, pytest.mark.ray]

WORKLOAD = """
import time
import torch
import rayps

class Digits(rayps.Workload):
    '''Ten digits from pixels, slowed down so that one can watch.'''

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def data(self):
        return rayps.data.parquet({train!r}, features=["pixels"], label="digit", batch_size=64)

    def evaluation_data(self):
        return rayps.data.parquet({test!r}, features=["pixels"], label="digit", batch_size=500)

    def loss(self, model, batch):
        time.sleep(0.02)
        return torch.nn.functional.cross_entropy(model(batch.x.float() / 255), batch.y.long())

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def evaluate(self, model, batch):
        found = model(batch.x.float() / 255).argmax(1)
        return {"accuracy": (found == batch.y).float().mean()}
"""


CLIENTS = """
import torch
import rayps
from digits import Digits

class Clients(Digits):
    '''The digits of 20 clients, two shards each.'''

    def data(self):
        shards = rayps.data.shards(2, clients=20)
        return rayps.data.parquet({train!r}, features=["pixels"], label="digit", batch_size=20, client=shards)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch.x.float() / 255), batch.y.long())
"""


class Site:
    """The shared service, with the workloads of these tests and a login code."""

    def __init__(self, home: Path, service: Serve) -> None:
        self.home = home
        data = ROOT / "examples/data"
        (home / "digits.py").write_text(
            textwrap.dedent(WORKLOAD)
            .replace("{train!r}", repr(str(data / "digits.parquet")))
            .replace("{test!r}", repr(str(data / "digits_test.parquet")))
        )
        (home / "clients.py").write_text(CLIENTS.replace("{train!r}", repr(str(data / "digits.parquet"))))
        self.url = f"{service.url}/"
        assert f"dashboard: {self.url}" in service.log.read_text()
        self.http = httpx2.Client(base_url=self.url, headers={"Authorization": f"Bearer {service.token}"}, timeout=60)
        self.code = self.http.post("api/v1/codes").raise_for_status().json()["code"]  # no terminal: none was printed

    def submit(self, **fields: Any) -> str:
        whole = {"workload": "digits.py:Digits", "working_dir": str(self.home), **fields}
        answer = self.http.post("api/v1/jobs", json=whole)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


@pytest.fixture
def site(tmp_path: Path, chromium: Any, ray_service: Serve) -> Iterator[Site]:
    running = Site(tmp_path, ray_service)
    yield running
    running.http.close()


def until(what: str, look: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait for something to be true, and give it."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return found


def test_a_job_is_watched_from_the_start_to_its_end(site: Site, tab: Callable[..., Any]) -> None:
    strategy = [
        {"epochs": 1, "strategy": {"name": "parameter_server", "shards": 2, "staleness": 2}},
        {"strategy": "all_reduce"},
    ]
    job = site.submit(name="digits watched", strategy=strategy, workers=2, epochs=2)
    page = tab(width=1280, height=900)
    page.goto(f"{site.url}#code={site.code}")
    page.click("text=digits watched")

    def text(selector: str) -> str:
        return str(page.inner_text(selector))

    until("the first rounds", lambda: page.locator("#loss .u-over").count(), 240)
    one = until("a round", lambda: re.search(r"Round ([\d,]+) of", text(".job-progress")))[1]
    until("another round", lambda: f"Round {one} of" not in text(".job-progress"))
    until("both workers", lambda: page.locator("#workers tbody tr").count() == 2)
    until("both shards", lambda: page.locator("#shards tbody tr").count() == 2)
    until("staleness", lambda: "within the bound of 2" in text("#staleness"))
    until("the end", lambda: page.locator(".job-head [data-status=SUCCEEDED]").count(), 240)
    until("the last event", lambda: "Finished" in text("#events"))
    shown = site.http.get(f"api/v1/jobs/{job}").json()
    assert f"{shown['metrics']['accuracy']:.2%}" in text(".tiles")
    assert shown["checkpoint"] in text("#result")
    assert len({worker["pid"] for worker in shown["progress"]["workers"]}) == 2  # actors, each in a process of its own

    with page.expect_download() as download:
        page.click("[aria-label='Download the rounds as CSV']")
    drawn = [int(line.split(",")[0]) for line in Path(download.value.path()).read_text().splitlines()[1:]]
    points = site.http.get(f"api/v1/jobs/{job}/metrics?limit=10000").json()["points"]
    assert drawn == sorted({point["round"] for point in points if point["kind"] == "round"})  # no hole, nothing twice


def test_a_federated_job_is_watched(site: Site, tab: Callable[..., Any]) -> None:
    strategy = "fedavg:fraction=0.5,dropout=0.3,attack=nan(clients=4)"
    job = site.submit(name="digits of clients", workload="clients.py:Clients", strategy=strategy, workers=2, epochs=8)
    page = tab(width=1280, height=900)
    page.goto(f"{site.url}#code={site.code}")
    page.click("text=digits of clients")
    until("the end", lambda: page.locator(".job-head [data-status=SUCCEEDED]").count(), 240)
    until("its rounds", lambda: "8 rounds" in page.inner_text("#cohorts"))
    until("its clients", lambda: page.locator("#clients tbody tr").count() == 20)
    events = site.http.get(f"api/v1/jobs/{job}/events?limit=1000").json()["events"]
    told = [event for event in events if event["kind"] == "cohort"]
    sums = [sum(each[key] for each in told) for key in ("sampled", "replied")]
    rejected = sum(len(each["rejected"]) for each in told)
    said = f"{sums[0]} sampled, {sums[1]} counted, {rejected} rejected, {sums[0] - sums[1] - rejected} dropped"
    assert rejected > 0 and said in page.get_attribute("#cohorts [role=img]", "aria-label")
    newest = told[-1]
    names = page.locator("#cohorts .who .client").all_inner_texts()
    assert sorted(name.split()[0] for name in names) == sorted(
        {*newest["trained"], *(name for name, _ in newest["dropped"] + newest["rejected"])}
    )
    why = page.inner_text("#cohorts .card-foot")
    assert "dropped out" in why and "finite" in why
    assert "FedAvg, 50% of the clients" in page.inner_text(".job-line")
    page.locator("#learnt").scroll_into_view_if_needed()
    until("accuracy by round", lambda: page.locator("#learnt .u-over").count())
    if shown := os.environ.get("RAYPS_SCREENSHOT"):
        page.set_viewport_size({"width": 1280, "height": 4000})
        page.wait_for_timeout(1000)
        page.screenshot(path=shown, full_page=True)


def test_the_stop_button_stops_a_real_job(site: Site, tab: Callable[..., Any]) -> None:
    job = site.submit(name="digits stopped", strategy="all_reduce", workers=2, epochs=50)
    page = tab()
    page.goto(f"{site.url}#code={site.code}")
    page.click("text=digits stopped")
    until("the first rounds", lambda: page.locator("#loss .u-over").count(), 240)
    page.click(".job-stop")
    page.click("text=Stop the job")
    until("the end", lambda: page.locator(".job-head [data-status=STOPPED]").count())
    assert site.http.get(f"api/v1/jobs/{job}").json()["status"] == "STOPPED"


def test_a_real_server_group_is_watched_and_resized(site: Site, tab: Callable[..., Any]) -> None:
    answer = site.http.post("api/v1/server-groups", json={"name": "shared", "servers": 2, "replicas": 1})
    assert answer.status_code == 201, answer.text
    page = tab()
    page.goto(f"{site.url}#code={site.code}")
    page.click(".top-nav >> text=Servers")
    page.click("[data-group=shared] a")
    until("both servers", lambda: page.locator("#servers .state-run").count() == 2, 180)
    strategy = {"name": "parameter_server", "staleness": 2}
    job = site.submit(name="digits shared", strategy=strategy, workers=2, epochs=1000, server_group="shared")
    until("its segments", lambda: page.locator(".ring .arc").count() >= 8, 240)
    page.click("text=Resize")
    page.click("[aria-label='One server more']")
    page.click("text=Resize to 3")
    until("the third server", lambda: page.locator("#servers .state-run").count() == 3)
    until("rest", lambda: page.locator(".job-head [data-status=ready]").count())
    page.click("#spaces >> text=digits shared")
    until("the servers of the job", lambda: page.locator("#elastic tbody tr").count() == 3)

    def accuracy() -> float:
        found = site.http.get(f"api/v1/jobs/{job}").json()["progress"] or {}
        return float((found.get("metrics") or {}).get("accuracy") or 0.0)

    until("it has learned", lambda: accuracy() > 0.8, 240)
    site.http.post(f"api/v1/jobs/{job}/stop").raise_for_status()  # it runs on until then, however slow the machine is
    until("the end", lambda: page.locator(".job-head [data-status=STOPPED]").count(), 240)
    page.click(".top-nav >> text=Servers")
    page.click("[data-group=shared] a")
    until("its memory is free", lambda: page.locator("text=No job uses this group").count())
