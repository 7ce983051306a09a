"""The pages of server groups in a browser, against a stand-in service whose groups can be resized and lose servers."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Tab = Callable[..., Any]
Fake = Callable[..., str]


def until(page: Any, check: str, argument: Any = None, seconds: float = 60) -> None:
    """Wait for a condition in the page. (Playwright's own wait evaluates text there, which the policy forbids.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(check, argument):
        assert time.monotonic() < deadline, f"never true within {seconds} s: {check}"
        page.wait_for_timeout(50)


def list_page(tab: Tab, url: str, **options: Any) -> Any:
    page = tab(**options)
    page.goto(f"{url}#code=letmein")
    page.wait_for_selector(".top-nav")
    page.click(".top-nav >> text=Servers")
    page.wait_for_selector("h1:has-text('server group'), h1:has-text('Server groups')")
    return page


def group_page(tab: Tab, url: str, name: str = "shared", **options: Any) -> Any:
    page = list_page(tab, url, **options)
    page.click(f"[data-group={name}] a")
    page.wait_for_selector(f"h1:has-text('{name}')")
    return page


def arcs(page: Any) -> int:
    return int(page.locator(".ring .arc").count())


def test_the_list_leads_to_a_group_and_back(tab: Tab, fake: Fake) -> None:
    page = list_page(tab, fake())
    until(page, "() => document.querySelectorAll('[data-group]').length === 2")
    assert "3 of 3" in page.inner_text("[data-group=shared]") and "none" in page.inner_text("[data-group=spare]")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".ring")
    assert page.url.endswith("#/servers/shared")
    page.keyboard.press("u")
    page.wait_for_selector("[data-group=shared]")


def test_no_group_yet_shows_how_to_start_one(tab: Tab, fake: Fake) -> None:
    page = list_page(tab, fake(empty=True))
    page.wait_for_selector("text=Start a first server group")  # until the list has come, the page only has its title
    shown = page.inner_text("main")
    assert "Start a first server group" in shown and "rayps servers start shared --servers 3 --replicas 1" in shown


def test_a_group_is_drawn_and_lives(tab: Tab, fake: Fake) -> None:
    page = group_page(tab, fake())
    page.wait_for_selector(".ring")
    assert arcs(page) == 88
    assert "Segments by primary: server-0" in (page.get_attribute(".ring", "aria-label") or "")
    assert "Any one server may die" in page.inner_text("#replication")
    assert page.locator("#servers tbody tr").count() == 3
    assert "flights-hybrid" in page.inner_text("#spaces") and "190.7 MiB" in page.inner_text("#spaces")
    assert "users 0" in page.inner_text("#hot")
    before = page.inner_text(".tiles")
    until(page, "(old) => document.querySelector('.tiles').innerText !== old", before)
    page.click("#spaces >> text=digits-phased")
    page.wait_for_selector(".job h1:has-text('digits-phased')")


def test_the_choice_of_a_job_is_in_the_address(tab: Tab, fake: Fake) -> None:
    page = group_page(tab, fake())
    page.wait_for_selector(".ring")
    page.select_option("#ring select", label="digits-phased")
    until(page, "() => document.querySelectorAll('.ring .arc').length === 32")
    assert "job=01JD8Q4V7M3K2X9A5T6B8C0DEF" in page.url
    page.reload()
    until(page, "() => document.querySelectorAll('.ring .arc').length === 32")


def test_the_ring_is_walked_by_keys_and_read_as_a_table(tab: Tab, fake: Fake) -> None:
    page = group_page(tab, fake())
    page.focus(".ring-host")
    page.keyboard.press("ArrowRight")
    until(page, "() => document.querySelector('.ring-name')?.innerText === 'parameters 0'")
    page.keyboard.press("ArrowLeft")
    until(page, "() => document.querySelector('.ring-name')?.innerText === 'items 15'")
    assert "operations a second" in page.inner_text(".ring-host [role=status]")
    page.click("#ring >> text=As a table")
    until(page, "() => document.querySelectorAll('#ring tbody tr').length === 88")
    page.click(".ring-legend >> text=server-1")
    assert page.locator(".ring .is-dim").count() > 20
    page.click("#load >> text=Jobs")
    until(page, "() => document.querySelectorAll('#load tbody tr').length === 3")


def test_a_resize_asks_first_and_its_moves_are_followed(tab: Tab, fake: Fake) -> None:
    page = group_page(tab, fake())
    page.click("text=Resize")
    assert page.locator("dialog[open] .button-primary").is_disabled()
    page.click("[aria-label='One server more']")
    assert "about 25% of the data moves" in page.inner_text("dialog[open]")
    page.click("text=Resize to 4")
    page.wait_for_selector(".job-head [data-status=resizing]")
    page.wait_for_selector("#moves .moves li")
    page.wait_for_selector(".ring .rim")
    assert "server-3" in page.inner_text("#moves")
    page.click("text=Resize")
    page.click("[aria-label='One server more']")
    page.click("text=Resize to 5")
    page.wait_for_selector("dialog[open] [role=alert]:has-text('resizing already')")
    page.click("text=Cancel")
    until(page, "() => document.querySelector('.job-head [data-status=ready]')", seconds=40)
    assert page.locator("#servers tbody tr").count() == 4


def test_a_server_is_drained_after_a_question(tab: Tab, fake: Fake) -> None:
    page = group_page(tab, fake())
    page.click("[aria-label='Drain server-2']")
    page.click("text=Drain the server")
    page.wait_for_selector("#servers tr:has-text('leaving')")
    until(page, "() => document.querySelectorAll('#servers tbody tr').length === 2", seconds=40)


def test_a_lost_server_is_seen_and_healed(tab: Tab, fake: Fake) -> None:
    url = fake()
    page = group_page(tab, url)
    page.wait_for_selector(".ring")
    urllib.request.urlopen(f"{url}fake/kill?group=shared&server=server-1").close()
    page.wait_for_selector(".job-head [data-status=healing]")
    page.wait_for_selector("#servers tr:has-text('dead')")
    until(page, "() => /lacks? a backup/.test(document.querySelector('.held-risk').innerText)")
    assert "server-1" in page.inner_text("#events")
    until(page, "() => document.querySelector('.job-head [data-status=ready]')", seconds=40)
    assert "server-3" in page.inner_text("#servers")


def test_an_idle_group_says_so(tab: Tab, fake: Fake) -> None:
    page = group_page(tab, fake(), "spare")
    shown = page.inner_text("main")
    assert "No segments yet" in shown and "rayps submit job.yaml --server-group spare" in shown


def test_a_group_that_is_stopped_says_what_is_gone(tab: Tab, fake: Fake) -> None:
    page = group_page(tab, fake(), "spare")
    page.click(".job-title >> text=Stop")
    page.click("text=Stop the group")
    page.wait_for_selector(".job-reason:has-text('The group has ended')")
    page.reload()
    page.wait_for_selector("text=There is no such server group")
    page.click("text=All server groups")
    until(page, "() => document.querySelectorAll('[data-group]').length === 1")


@pytest.mark.parametrize("name", ["shared", "spare"])
def test_nothing_is_wider_than_a_phone(tab: Tab, fake: Fake, name: str) -> None:
    page = list_page(tab, fake(), width=390)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    page.wait_for_selector(f"[data-group={name}]")
    assert page.evaluate(wide) == 0
    page.click(f"[data-group={name}] a")
    page.wait_for_selector("#servers table")
    assert page.evaluate(wide) == 0


def test_everything_that_can_be_used_has_a_name(tab: Tab, fake: Fake) -> None:
    page = group_page(tab, fake())
    page.wait_for_selector(".ring")
    nameless = page.evaluate("""() => {
        const used = 'button, a, input, select, [role=img], [role=progressbar], [tabindex="0"], section';
        const named = (e) => e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
            || e.innerText?.trim() || e.labels?.length;
        return [...document.querySelectorAll(used)].filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 120));
    }""")
    assert nameless == []


def test_a_job_leads_to_its_group(tab: Tab, fake: Fake) -> None:
    page = tab()
    page.goto(f"{fake()}#code=letmein")
    page.click("text=flights-hybrid")
    page.wait_for_selector("#elastic table")
    line = page.inner_text(".job-line")  # the servers are the group's, whatever the strategy would have of its own
    assert "Hybrid, asynchronous" in line and "shared (3 servers, 1 backup)" in line and "tables on" not in line
    assert page.locator("#elastic tbody tr").count() == 3 and page.locator("#shards").count() == 0
    page.click("text=Open shared")
    until(page, "() => document.querySelectorAll('.ring .arc').length === 56")


def test_push_ages_of_shards(tab: Tab, fake: Fake) -> None:
    page = tab()
    page.goto(f"{fake()}#code=letmein")
    page.click("text=digits-ssp")
    page.wait_for_selector("#shards .ages")
    assert page.locator("#shards .ages").count() == 3
    assert "0 behind" in (page.get_attribute("#shards .ages", "aria-label") or "")
