"""What is a user's own on the page of a job: the code and its difference from the commit, metrics, best checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_site import Site

from rayps.cli import show
from rayps.cluster.local import LocalCluster
from rayps.cluster.local import until as wait
from rayps.core.job.job_status import Status
from rayps.core.job.records import read_json
from rayps.runtime.driver.driver import Driver
from rayps.runtime.own_loop.loop_job import LoopJob
from rayps.runtime.own_loop.named import load
from rayps.runtime.records.journal import Journal
from rayps.service.client import Client
from rayps.strategies.job import JobSpec

pytestmark = pytest.mark.browser
LOOP = """import time
from pathlib import Path

import rayps
import torch


def train_fn(lr: float = 0.1, until: str = ""):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    rayps.wrap(model, optimizer, "local_sgd:period=4", steps=8)
    for step in range(1, 9):
        optimizer.zero_grad()
        loss = model(torch.ones(8, 2)).square().mean()
        loss.backward()
        optimizer.step()
        rayps.log(loss=loss, perplexity=51.0 - step, grad_norm=2.0, samples=8)
        rayps.save({"step": step})
    while not Path(until).exists():
        time.sleep(0.05)
"""


@pytest.fixture
def site(tmp_path: Path, chromium: Any) -> Iterator[Site]:
    running = Site(tmp_path / "state")
    yield running
    running.close()


def committed(folder: Path) -> Path:
    """A folder with one commit, of which one file has changed since and one is new."""
    folder.mkdir()
    (folder / "loop.py").write_text(LOOP)
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    for command in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=folder, check=True, env={**os.environ, **who})
    (folder / "loop.py").write_text(LOOP.replace("0.1", "0.25"))
    (folder / "more.py").write_text("")
    return folder


@contextlib.contextmanager
def running(site: Site, folder: Path, until: Path) -> Iterator[str]:
    """A job of a loop that has taken eight steps and runs until the file `until` exists, with its driver's files."""
    params: dict[str, Any] = {"lr": 0.5, "until": str(until)}
    with Client(site.url, site.token) as client:
        job = client.submit(run="loop.py:train_fn", working_dir=folder, params=params, workers=2).id
    home = site.start(job)
    site.store("change_status", job, Status.RUNNING, message="")
    spec = JobSpec(run="loop.py:train_fn", workers=2, params=params)
    cluster, checkpoints = LocalCluster(), home / "checkpoints"
    driver = Driver(LoopJob(load("loop.py:train_fn", str(folder)), spec, Journal(home), checkpoints=checkpoints))
    thread = threading.Thread(target=driver.run, args=(cluster,))
    thread.start()
    try:
        last = '"round": 8,'  # the point of the last step, which is merged from both workers
        assert wait(lambda: last in (home / "metrics.jsonl").read_text() and len(driver.journal.points) == 8, 60)
        assert wait(lambda: min(line["round"] for line in read_json(home / "progress.json")["workers"]) == 8, 60)
        yield job
    finally:
        until.touch()
        thread.join(60)
        cluster.close()


def trained(site: Site) -> str:
    """A job of a workload that runs, with evaluations and a best checkpoint."""
    job = site.add(workers=2)
    home = site.start(job)
    site.store("change_status", job, Status.RUNNING, message="")
    points: list[dict[str, Any]] = [
        {"kind": "round", "round": i, "loss": 4 / (i + 1), "samples": 8, "seconds": 0.5, "data": 0.2, "data_share": 0.4}
        | {"perplexity": 50.0 - i, "grad_norm": 2.0}
        for i in range(8)
    ]
    points += [
        {"kind": "evaluation", "round": at, "time": 0.0, "metrics": {"loss": 1 / at, "perplexity": 60.0 - at}}
        for at in (4, 8)
    ]
    (home / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    worker = {"host": "here", "pid": 1, "status": "running", "round": 8, "samples_per_second": 16.0}
    workers = [{**worker, "rank": rank, "compute": 0.4, "data": 0.4, "wait": 0.1, "move": 0.1} for rank in range(2)]
    progress = {"status": "RUNNING", "round": 8, "loss": 0.5, "workers": workers, "best": "/states/step-00000004"}
    (home / "progress.json").write_text(json.dumps(progress))
    return job


def test_the_page_of_a_loop_shows_its_code_and_what_it_logs(
    site: Site, tab: Callable[..., Any], tmp_path: Path
) -> None:
    with running(site, committed(tmp_path / "project"), tmp_path / "until") as job:
        look_at_loop(site, tab(), job)


def look_at_loop(site: Site, page: Any, job: str) -> None:
    with Client(site.url, site.token) as client:
        page.goto(client.page_address())
        (strategy,) = client.job(job).strategies
        assert isinstance(strategy, dict) and (strategy["name"], strategy["period"]) == ("local_sgd", 4)
        assert show.strategy_of(client.job(job).data) == "local_sgd:period=4"
        assert client.job(job).data["spec"]["strategy"] != strategy, "the job was submitted with the default"
    row = page.locator(f"[data-job='{job}']")
    row.get_by_text("loop.py:train_fn").wait_for()
    assert row.locator(".cell-strategy > span").first.inner_text() == "Local SGD, averages every 4 rounds"
    page.goto(f"{site.url}/jobs/{job}")
    page.locator(".job-line").get_by_text("Local SGD, averages every 4 rounds").wait_for()
    code = page.locator("#code")
    code.get_by_text("Commit", exact=True).wait_for()
    assert "2 files" in code.inner_text() and "on trunk, changed since, with 1 new file" in code.inner_text()
    assert page.locator(".diff").count() == 0, "it is shown on request"
    code.get_by_text("What differs from the commit").click()
    page.locator(".diff-old").first.wait_for()
    assert '+def train_fn(lr: float = 0.25, until: str = ""):' in page.locator(".diff-new").all_inner_texts()[0]
    assert '-def train_fn(lr: float = 0.1, until: str = ""):' in page.locator(".diff-old").all_inner_texts()[0]
    with page.expect_download() as download:
        code.get_by_role("link").first.click()
    with tarfile.open(download.value.path()) as archive:
        assert sorted(archive.getnames()) == ["loop.py", "more.py"]

    metrics = page.locator("#metrics")
    metrics.locator(".chart canvas").wait_for()
    assert metrics.get_by_label("Metric").input_value() == "perplexity", "the loss chart has the loss"
    assert metrics.locator(".readout dd").all_inner_texts() == ["8", "43.00"], "a loop has no evaluations"
    metrics.get_by_label("Metric").select_option("grad_norm")
    assert metrics.locator(".readout dd").all_inner_texts() == ["8", "2.000"]
    assert page.url.endswith("metric=grad_norm")
    assert page.locator("#throughput .readout dd").first.inner_text() == "8"
    lines = page.locator("#workers tbody tr")
    assert [lines.nth(rank).locator("td").nth(3).inner_text() for rank in range(lines.count())] == ["8", "8"]

    facts = page.locator("#spec").inner_text()
    assert "Function" in facts and "loop.py:train_fn" in facts and "the loop's own" in facts and "Workload" not in facts
    assert page.locator(".job-line").get_by_text("loop.py:train_fn").count() == 1
    assert "0.5" in page.locator("#params").inner_text()
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_page_of_a_job_shows_evaluations_and_the_best_checkpoint(site: Site, tab: Callable[..., Any]) -> None:
    job, page = trained(site), tab()
    with Client(site.url, site.token) as client:
        page.goto(client.page_address())
    page.locator(f"[data-job='{job}']").wait_for()
    page.goto(f"{site.url}/jobs/{job}")
    metrics = page.locator("#metrics")
    metrics.locator(".chart canvas").wait_for()
    metrics.get_by_label("Metric").select_option("perplexity")
    assert metrics.locator(".readout dd").all_inner_texts() == ["7", "43.00", "52.00"]
    assert page.locator("#throughput .readout").inner_text().split()[-1] == "40.0%"
    assert page.locator("#workers .split").first.get_attribute("title") == "compute 40%, data 40%, move 10%, wait 10%"
    assert "/states/step-00000004" in page.locator("#result").inner_text()
