"""The list of more jobs than a page has, and charts of more rounds than a message has: nothing is left out unsaid."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_site import Site

from rayps.core.job.job_status import Status
from rayps.strategies.job import JobSpec

pytestmark = pytest.mark.browser
ROWS = "(n) => document.querySelectorAll('table.jobs tbody tr').length === n"
TAB = "([name, n]) => [...document.querySelectorAll('.tab')].some((e) => e.textContent === `${name}${n}`)"
LOOKS = os.environ.get("RAYPS_TEST_LOOKS")  # a folder for pictures, to look at


@pytest.fixture
def site(tmp_path: Path, chromium: Any) -> Iterator[Site]:
    running = Site(tmp_path / "state")
    yield running
    running.close()


def look(page: Any, name: str) -> None:
    if LOOKS:
        page.screenshot(path=f"{LOOKS}/{name}.png")


def opened(site: Site, tab: Callable[..., Any], address: str, **options: Any) -> Any:
    page = tab(**options)
    code = site.http.post("/api/v1/codes").json()["code"]
    page.goto(f"{site.url}/#code={code}")
    page.wait_for_selector("table.jobs")
    page.goto(f"{site.url}/{address}")
    return page


def until(page: Any, script: str, *given: Any) -> None:
    page.wait_for_function(script, arg=given[0] if len(given) == 1 else list(given) or None, timeout=120_000)


def tabs(page: Any, **numbers: int) -> None:
    for name, number in numbers.items():
        until(page, TAB, name, number)


def end(site: Site, job: str, status: Status, reason: str = "", **facts: Any) -> None:
    if status is not Status.STOPPED:
        site.start(job)
    site.store("change_status", job, status, message=reason, reason=reason or None, **facts)


def test_the_service_counts_and_filters_three_hundred_jobs(site: Site, tab: Callable[..., Any]) -> None:
    jobs = [(JobSpec("digits:Digits", params={"lr": at / 100}), f"digits lr={at / 100:g}") for at in range(310)]
    ids = [record.id for record in site.store("add_all", jobs, sweep="rates")[0]]
    for job in ids[:20]:
        end(site, job, Status.SUCCEEDED, metrics={"loss": 0.25, "accuracy": 0.9})
    for number, job in enumerate(ids[20:25]):
        end(site, job, Status.FAILED, "the disk is full" if number < 2 else "a gradient is not finite")
    page = opened(site, tab, "#/jobs")
    until(page, ROWS, 100)
    tabs(page, All=310, Queued=285, Running=0, Succeeded=20, Failed=5, Stopped=0)
    look(page, "list")

    page.click("text=Load older jobs (100 of 310 are shown)")
    until(page, ROWS, 200)
    end(site, ids[150], Status.STOPPED, "stopped before it started")  # beyond the first page, and still live
    page.wait_for_selector(f"tr[data-job='{ids[150]}'] [data-status=STOPPED]")
    tabs(page, Queued=284, Stopped=1)

    page.click("role=button[name=/^Failed/]")
    until(page, ROWS, 5)
    assert "status=failed" in page.url
    look(page, "failed")
    end(site, ids[30], Status.FAILED, "the disk is full")
    until(page, ROWS, 6)
    tabs(page, All=310, Failed=6)
    assert site.http.delete(f"/api/v1/jobs/{ids[20]}").is_success
    until(page, ROWS, 5)
    tabs(page, All=309, Failed=5)

    page.fill("input[type=search]", "DISK digits")
    until(page, ROWS, 2)
    tabs(page, All=2, Failed=2, Queued=0)
    page.reload()  # a deep link with both filters
    until(page, ROWS, 2)
    assert page.input_value("input[type=search]") == "DISK digits"
    tabs(page, All=2, Failed=2, Succeeded=0)
    page.click("role=button[name=/^Succeeded/]")
    page.wait_for_selector("text=No job matches")
    page.click("text=Show all jobs")
    until(page, ROWS, 100)
    tabs(page, All=309)

    small = opened(site, tab, "#/jobs?status=failed", width=400, height=800)
    until(small, ROWS, 5)
    assert small.evaluate("document.documentElement.scrollWidth") <= 400
    look(small, "narrow-failed")
    small.goto(f"{site.url}/#/jobs")
    until(small, ROWS, 100)
    tabs(small, All=309, Failed=5)
    assert small.evaluate("document.documentElement.scrollWidth") <= 400
    look(small, "narrow")
    small.locator("text=Load older jobs").scroll_into_view_if_needed()
    look(small, "narrow-end")


def test_a_running_job_that_ends_leaves_the_tab_of_running_jobs(site: Site, tab: Callable[..., Any]) -> None:
    job = site.add(name="only")
    site.start(job)
    page = opened(site, tab, "#/jobs?status=running")
    until(page, ROWS, 1)
    site.store("change_status", job, Status.FAILED, message="it broke", reason="it broke")
    page.wait_for_selector("text=No job matches")
    tabs(page, All=1, Running=0, Failed=1)


def test_the_column_of_metrics_shows_a_measure_and_no_other_number(site: Site, tab: Callable[..., Any]) -> None:
    numbers = {"loss": 0.5, "grad_norm": 7.25, "val_error": 0.125}
    loop = site.http.post("/api/v1/jobs", json={"run": "loop:train", "name": "loop"}).json()["id"]
    bare = site.http.post("/api/v1/jobs", json={"run": "loop:train", "name": "bare"}).json()["id"]
    end(site, loop, Status.SUCCEEDED, metrics=numbers)
    end(site, bare, Status.SUCCEEDED, metrics={"loss": 0.5, "grad_norm": 7.25})
    page = opened(site, tab, "#/jobs")
    until(page, ROWS, 2)
    cells = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('table.jobs tbody tr')].map((row) => "
        "[row.dataset.job, row.querySelector('.cell-accuracy').innerText]))"
    )
    assert cells[loop].split() == ["0.1250", "val_error"] and cells[bare] == "–"


def test_a_chart_says_that_it_is_loading_until_it_is_complete(site: Site, tab: Callable[..., Any]) -> None:
    job, rounds = site.add(name="long"), 60_000
    home = site.start(job)
    with (home / "metrics.jsonl").open("w") as file:
        for at in range(rounds):
            file.write(
                json.dumps({"kind": "round", "round": at, "loss": 1 / (at + 1), "samples": 8, "seconds": 1}) + "\n"
            )
    progress = {"status": "RUNNING", "time": time.time(), "round": rounds, "rounds": rounds}
    (home / "progress.json").write_text(json.dumps(progress))
    page = opened(site, tab, "#/jobs")
    page.evaluate("""() => {
        window.said = [];
        new MutationObserver(() => {
            const found = document.querySelector('.loss-card .loading-rounds');
            const button = document.querySelector('.loss-card [title^="Download"]');
            if (found) window.said.push([found.textContent, button.disabled]);
        }).observe(document.body, {subtree: true, childList: true, characterData: true});
    }""")
    page.evaluate(f"location.hash = '#/jobs/{job}'")
    page.wait_for_selector(".loss-card .loading-rounds")
    look(page, "loading")
    until(page, "() => document.querySelector('.loss-card .uplot') && !document.querySelector('.loading-rounds')")
    look(page, "loaded")
    said = page.evaluate("window.said")
    assert any(text.startswith("loading: ") and "100" not in text.split(",")[-1] for text, _ in said)
    assert all(disabled for _, disabled in said) and page.is_enabled(".loss-card [title^=Download]")
