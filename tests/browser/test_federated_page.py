"""Jobs that learn apart, on their pages: clients by round and what they hold, meetings, residuals."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Tab = Callable[..., Any]
Fake = Callable[..., str]


def job_page(tab: Tab, url: str, name: str, **options: Any) -> Any:
    page = tab(**options)
    page.goto(f"{url}#code=letmein")
    page.click(f"text={name}")
    page.wait_for_selector("#loss .u-over")
    return page


def until(what: str, look: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return found


def readout(page: Any, card: str) -> dict[str, str]:
    rows = page.locator(f"#{card} .readout > div")
    return dict(rows.evaluate_all("(found) => found.map((e) => [...e.children].map((c) => c.innerText.trim()))"))


def test_a_round_of_clients_says_who_counted_and_why_others_did_not(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-ditto")
    page.wait_for_selector("#cohorts .u-over")
    until("the last round", lambda: readout(page, "cohorts")["round"] == "39")  # counted from 0, as events do
    assert re.search(r"40 rounds: 400 sampled, \d+ counted", page.get_attribute("#cohorts [role=img]", "aria-label"))
    page.focus("#cohorts [role=img]")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    until("an earlier round", lambda: readout(page, "cohorts")["round"] == "38")
    facts = readout(page, "cohorts")
    counted, rejected, dropped = (
        page.locator(f"#cohorts .who {of}").count()
        for of in (".client:not(.client-rejected):not(.client-dropped)", ".client-rejected", ".client-dropped")
    )
    assert (str(counted), str(rejected), str(dropped)) == (facts["counted"], facts["rejected"], facts["dropped"])
    assert counted + rejected + dropped == int(facts["sampled"]) == 10
    assert "update is not finite" in page.inner_text("#cohorts .card-foot")
    assert "Simulated attack: sign_flip(clients=2,scale=5)" in page.inner_text("#cohorts")
    page.click("#cohorts >> text=As a table")
    until("the table", lambda: page.locator("#cohorts table.plain tbody tr").count() == 20)
    assert page.locator("#events li").count() < 10  # rounds of clients are no lines among the events


def test_global_and_personal_metrics_stand_beside_one_another(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-ditto")
    until("both", lambda: {"global", "personal"} <= set(readout(page, "learnt")))
    page.click("#learnt >> text=By virtual time")
    until("virtual time", lambda: "min" in readout(page, "learnt").get("virtual time", ""))
    assert readout(page, "virtual")["in all"].endswith("s")


def test_one_round_has_one_number(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-ditto", height=900)
    for card in ("loss", "cohorts", "learnt", "virtual"):
        until(card, lambda card=card: readout(page, card)["round"] == "39")
        until(f"{card} is drawn before it is scrolled to", lambda card=card: page.locator(f"#{card} .u-over").count())
    assert "after round 39" in page.inner_text(".tiles") and "40 of 40 rounds" in page.inner_text(".job-progress")


def test_workers_of_unlike_clients_are_not_judged_by_a_sample(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-ditto")
    until("workers", lambda: page.locator("#workers tbody tr").count() == 4)
    assert page.locator("#workers .verdict, #workers .is-slow").count() == 0
    assert "pace" not in page.inner_text("#workers").lower()


def test_costs_without_a_formula_have_no_column_for_it(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "digits-ditto")
    until("costs", lambda: page.locator("#costs tbody tr").count() == 2)
    assert page.locator("#costs thead th").all_inner_texts() == ["All workers together", "Measured"]


def test_seconds_of_real_clients_are_real_and_late_ones_are_shown(tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), "wards-fedavg")
    until("the late one", lambda: page.locator("#clients tbody tr").count() == 4)
    until("rounds", lambda: "time" in readout(page, "cohorts"))
    page.click("#learnt >> text=By time")
    until("by time", lambda: "time" in readout(page, "learnt"))
    page.click("#cohorts >> text=As a table")
    assert "virtual" not in page.inner_text("main").lower()
    assert page.locator("#cohorts .who").bounding_box()["height"] < 60  # nobody was dropped: no room is kept for them


def test_what_clients_hold_is_a_map(tab: Tab, fake: Fake) -> None:
    url = fake()
    page = job_page(tab, url, "digits-ditto")
    until("every client", lambda: page.locator("#clients tbody tr").count() == 20)
    first = page.locator("#clients tbody tr").first
    assert first.locator("rect.label-some").count() == 10
    said = first.locator("svg").get_attribute("aria-label")
    assert re.fullmatch(r"By label, \d: 250, \d: 250", said)
    assert re.search(r"counted in \d+ rounds?", first.locator("canvas").get_attribute("aria-label"))
    assert "most frequent label has 50%" in page.inner_text("#clients")
    many = job_page(tab, url, "writers-fedbuff")
    until("the first clients", lambda: many.locator("#clients tbody tr").count() == 60)
    assert "1,000 clients" in many.inner_text("#clients .card-note")
    assert "within the bound of 8" in many.inner_text("#staleness")


def test_residuals_and_meetings(tab: Tab, fake: Fake) -> None:
    url = fake()
    page = job_page(tab, url, "lasso-admm")
    until("the threshold", lambda: "below their thresholds in round" in page.inner_text("#residuals"))
    assert readout(page, "residuals")["primal stop"] == "3.00e-7" and page.locator("#cohorts").count() == 0
    other = job_page(tab, url, "text-diloco")
    until("meetings", lambda: "12 averages in 600 rounds" in other.inner_text("#meetings"))
    assert "50 times as much" in other.inner_text("#meetings")


@pytest.mark.parametrize("name", ["digits-ditto", "lasso-admm", "text-diloco"])
def test_they_fit_a_phone_in_the_dark_and_name_everything(name: str, tab: Tab, fake: Fake) -> None:
    page = job_page(tab, fake(), name, width=420, color_scheme="dark")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    nameless = page.locator("button, a, input, select, [role=img], canvas.heat, section").evaluate_all("""(found) => {
        const name = (e) => e.ariaLabel || e.getAttribute('aria-labelledby') || e.innerText?.trim() || e.title;
        return found.filter((e) => !name(e)).map((e) => e.outerHTML.slice(0, 120)); }""")
    assert nameless == []
