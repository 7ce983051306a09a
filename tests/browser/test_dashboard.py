"""The dashboard in a browser, against a stand-in service that can fail on demand."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Tab = Callable[..., Any]
Fake = Callable[..., str]

SHOWN = "(count) => document.querySelectorAll('tr[data-job]').length === count"


def jobs_page(tab: Tab, url: str, **options: Any) -> Any:
    page = tab(**options)
    page.goto(f"{url}#code=letmein")
    page.wait_for_selector("table.jobs")
    return page


def job_page(tab: Tab, url: str, name: str, **options: Any) -> Any:
    page = jobs_page(tab, url, **options)
    page.click(f"text={name}")
    page.wait_for_selector("#loss .u-over")
    return page


def rounds_of(page: Any) -> list[int]:
    """The rounds that the page holds, by its own CSV."""
    with page.expect_download() as download:
        page.click("[aria-label='Download the rounds as CSV']")
    lines = Path(download.value.path()).read_text().splitlines()[1:]
    return [int(line.split(",")[0]) for line in lines]


def until(page: Any, check: str, argument: Any = None, seconds: float = 60) -> None:
    """Wait for a condition in the page. (Playwright's own wait evaluates text there, which the policy forbids.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(check, argument):
        assert time.monotonic() < deadline, f"never true within {seconds} s: {check}"
        page.wait_for_timeout(50)


def overflow(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_without_a_session_the_page_says_how_to_get_one(tab: Tab, fake: Fake) -> None:
    url = fake()
    page = tab()
    page.goto(url)
    assert page.wait_for_selector("h1").inner_text() == "Sign in to rayps"
    assert "rayps serve" in page.inner_text("main")
    page.fill("#code", "wrong")
    page.click("text=Sign in >> nth=-1")
    until(page, "() => document.querySelector('[role=alert]').innerText.includes('too old')")
    page.fill("#code", f"{url}#code=letmein")
    page.keyboard.press("Enter")
    page.wait_for_selector("table.jobs")


def test_the_code_leaves_the_address_bar(tab: Tab, fake: Fake) -> None:
    page = jobs_page(tab, fake())
    assert "letmein" not in page.url and page.url.endswith("#/jobs")
    page.reload()
    page.wait_for_selector("table.jobs")  # the cookie holds


def test_a_used_code_is_explained(tab: Tab, fake: Fake) -> None:
    page = tab()
    page.goto(f"{fake()}#code=used")
    until(page, "() => document.querySelector('[role=alert]')?.innerText.includes('too old')")
    assert "used" not in page.url


def test_the_list_filters_by_address_and_keys(tab: Tab, fake: Fake) -> None:
    page = jobs_page(tab, fake())
    statuses = page.evaluate("async () => (await (await fetch('/api/v1/jobs')).json()).jobs.map((job) => job.status)")
    assert 0 < statuses.count("SUCCEEDED") < len(statuses)
    until(page, SHOWN, len(statuses))
    assert "needs 32 CPUs, 12 free" in page.inner_text("tr:has-text('digits-wide')")
    page.click("role=button[name=/^Succeeded/]")
    until(page, SHOWN, statuses.count("SUCCEEDED"))
    assert "status=succeeded" in page.url
    page.keyboard.press("/")
    page.keyboard.type("ssp")
    until(page, SHOWN, 1)
    assert "q=ssp" in page.url
    page.reload()
    until(page, SHOWN, 1)  # the address is the state
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    assert page.wait_for_selector(".job h1").inner_text() == "digits-ssp"
    page.keyboard.press("u")
    page.wait_for_selector("table.jobs")
    page.keyboard.press("?")
    assert page.wait_for_selector("dialog[open] h2").inner_text() == "Keys"


def test_no_job_yet_shows_the_two_commands(tab: Tab, fake: Fake) -> None:
    page = tab()
    page.goto(f"{fake(empty=True)}#code=letmein")
    page.wait_for_selector("text=Submit a first job")
    shown = page.inner_text("main")
    assert "rayps submit examples/digits.yaml --follow" in shown and "curl -X POST http://127.0.0.1:" in shown


def test_a_running_job_is_drawn_live(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-phased")
    before = page.inner_text(".job-progress")
    until(page, "(old) => document.querySelector('.job-progress').innerText !== old", before)
    ink = """() => {
        const c = document.querySelector('#loss canvas');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        let n = 0; for (let i = 3; i < d.length; i += 4) if (d[i]) n++; return n / (c.width * c.height) > 0.02; }"""
    until(page, ink)
    page.wait_for_selector("#workers:has-text('Worker 2 needs')")
    until(page, "() => document.querySelectorAll('#workers tbody tr').length === 4")
    until(page, "() => document.querySelectorAll('#staleness li').length === 7")
    assert "Loss by round, from" in (page.get_attribute("#loss [role=img]", "aria-label") or "")
    page.click("#loss >> text=As a table")
    until(page, "() => document.querySelectorAll('#loss table.plain tbody tr').length > 10")
    page.locator("#loss input[type=range]").fill("0.5")
    until(page, "() => location.href.includes('smooth=0.5')")


def test_no_round_is_missing_after_the_service_was_away(tab: Tab, fake: Fake) -> None:
    url = fake(speed=40)
    page = job_page(tab, url, "digits-phased")
    page.wait_for_timeout(500)
    before = rounds_of(page)
    urllib.request.urlopen(f"{url}fake/offline?seconds=4").close()
    page.wait_for_selector(".banner:has-text('cannot be reached')")
    page.wait_for_selector(".banner", state="detached", timeout=15_000)
    page.wait_for_timeout(1500)
    after = rounds_of(page)
    assert after == list(range(1, after[-1] + 1)) and after[-1] > before[-1]


def test_a_loss_that_is_not_a_number_is_said(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "income-adam")
    assert "not a number in 29 rounds, first in round 312" in page.inner_text("#loss")
    assert "Lower the learning rate" in page.inner_text(".job-reason")
    assert page.locator(".job-stop").count() == 0


def test_stop_asks_first(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-phased")
    page.click(".job-stop")
    page.click("text=Keep it running")
    assert page.locator(".job-head [data-status=RUNNING]").count() == 1
    page.click(".job-stop")
    page.click("text=Stop the job")
    page.wait_for_selector(".job-head [data-status=STOPPED]")
    page.wait_for_selector(".job-reason:has-text('Stopped by request')")


def test_logs_are_searched_followed_and_downloaded(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-ssp")
    page.fill("#logs input", "accuracy")
    until(page, "() => document.querySelectorAll('.log mark').length > 5")
    assert page.locator(".log li").count() < 80  # only what is in view
    page.fill("#logs input", "nothing like this")
    page.wait_for_selector("#logs >> text=No line matches")
    page.fill("#logs input", "")
    with page.expect_download() as download:
        page.click("#logs >> text=Download")
    text = Path(download.value.path()).read_text()
    assert text.count("\n") == int(page.inner_text("#logs .card-note").split()[0].replace(",", ""))


def test_nothing_is_wider_than_a_phone(tab: Tab, fake: Fake) -> None:
    url = fake()
    page = jobs_page(tab, url, width=420)
    assert overflow(page) == 0
    page.click("text=digits-phased")
    page.wait_for_selector("#loss .u-over")
    assert overflow(page) == 0


def test_the_theme_is_kept(tab: Tab, fake: Fake) -> None:
    page = jobs_page(tab, fake(), color_scheme="light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("[aria-label^='Theme: as the system']")
    page.click("[aria-label^='Theme: light']")
    page.reload()
    page.wait_for_selector("[aria-label^='Theme: dark']")
    until(page, "(light) => getComputedStyle(document.body).backgroundColor !== light", light)


def test_everything_that_can_be_used_has_a_name(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-phased")
    nameless = page.evaluate("""() => {
        const used = 'button, a, input, select, [role=img], canvas.heat, section';
        const named = (e) => e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
            || e.innerText?.trim() || e.labels?.length;
        return [...document.querySelectorAll(used)].filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 120));
    }""")
    assert nameless == []


def test_a_job_that_is_not_there(tab: Tab, fake: Fake) -> None:
    page = jobs_page(tab, fake())
    page.goto(page.url.split("#")[0] + "#/jobs/NOSUCHJOB")
    page.wait_for_selector("text=There is no such job")
    page.click("text=All jobs")
    page.wait_for_selector("table.jobs")


def test_a_lost_session_leads_back_to_the_sign_in(tab: Tab, fake: Fake) -> None:
    page = jobs_page(tab, fake())
    page.context.clear_cookies()
    page.reload()
    page.wait_for_selector("text=Sign in to rayps")


def test_a_pipeline_is_drawn_by_its_table_and_as_it_went(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-pipeline")
    page.wait_for_selector("#schedule svg")
    assert page.locator("#schedule svg").count() == 2
    assert page.locator("#schedule svg").first.locator("g[class^=gantt-] rect").count() == 2 * 4 * 8
    label = page.locator("#schedule svg").first.get_attribute("aria-label")
    assert label.startswith("By the schedule: stage 0 is idle 27.3% and holds 4")
    assert "Messages between stages" in page.inner_text("#costs")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    plain = job_page(tab, page.url.split("#")[0], "digits-ssp")
    assert plain.locator("#schedule").count() == 0 and plain.locator("#costs").count() == 0
