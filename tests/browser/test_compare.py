"""Jobs beside each other, in a browser: from the list to the comparison, sorted, over another axis, reloaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_site import Site

from rayps.service.client import Client

pytestmark = pytest.mark.browser
RATES = (0.1, 0.3, 0.2)


@pytest.fixture
def site(tmp_path: Path, chromium: Any) -> Iterator[Site]:
    running = Site(tmp_path / "state")
    yield running
    running.close()


def trained(site: Site) -> list[str]:
    """A sweep of three jobs, with the files that drivers would have written."""
    with Client(site.url, site.token) as client:
        sweep = client.sweep({"workload": "digits:Digits", "working_dir": None}, name="rates", lr=RATES)
    for number, job in enumerate(sweep.jobs):
        points: list[dict[str, Any]] = [
            {"kind": "round", "round": i, "loss": (number + 1) / (i + 1), "samples": 8, "seconds": 0.5}
            for i in range(8)
        ]
        points += [
            {"kind": "evaluation", "round": at, "time": 0.0, "metrics": {"loss": 1 / at, "accuracy": 0.9 - number / 10}}
            for at in (4, 8)
        ]
        folder = site.settings.jobs_dir / job.id
        (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
        progress = {"params": {"lr": RATES[number], "width": 4}, "round": 8, "rounds": 8, "epochs": 2}
        (folder / "progress.json").write_text(json.dumps(progress))
    return [job.id for job in sweep.jobs]


def column(page: Any, heading: str) -> list[str]:
    heads = [text.strip(" ↑↓") for text in page.locator(".compared th").all_inner_texts()]
    return [
        text.strip() for text in page.locator(f".compared td:nth-child({heads.index(heading) + 1})").all_inner_texts()
    ]


def test_from_the_list_to_the_comparison_and_back_by_its_address(site: Site, tab: Callable[..., Any]) -> None:
    ids = trained(site)
    page = tab()
    with Client(site.url, site.token) as client:
        page.goto(client.page_address())
    for job in ids[:2]:
        page.locator(f"[data-job='{job}'] .cell-pick label").click()
    assert "/jobs/" not in page.url, "a click on the box does not open the job"
    page.get_by_role("link", name="Compare").click()
    page.locator(".compared tbody tr").nth(1).wait_for()
    page.locator(".chart canvas").wait_for()
    assert page.locator(".compared tbody tr").count() == 2
    assert column(page, "lr") == ["0.1", "0.3"] and column(page, "accuracy") == ["90.00%", "80.00%"]

    page.goto(f"{site.url}/sweeps/rates")  # a plain path, as it is typed
    page.locator(".compared tbody tr").nth(2).wait_for()
    assert column(page, "lr") == ["0.1", "0.3", "0.2"]
    page.get_by_role("button", name="lr").click()
    assert column(page, "lr") == ["0.1", "0.2", "0.3"]
    page.get_by_role("button", name="lr").click()
    assert column(page, "lr") == ["0.3", "0.2", "0.1"]
    page.get_by_label("Metric").select_option("batch loss")
    page.get_by_label("Horizontal axis").select_option("seconds")
    assert page.locator(".readout-jobs dt").first.inner_text() == "seconds"
    assert page.locator(".readout-jobs dd").all_inner_texts()[1:] == ["0.1250", "0.2500", "0.3750"]
    page.get_by_label("Horizontal axis").select_option("epoch")
    page.reload()
    page.locator(".chart canvas").wait_for()
    assert column(page, "lr") == ["0.3", "0.2", "0.1"]
    assert page.get_by_label("Metric").input_value() == "batch loss"
    assert page.locator(".readout-jobs dt").first.inner_text() == "epoch"

    page.locator(f"[data-job='{ids[0]}'] a").click()
    page.locator("#params").wait_for()
    facts = page.locator("#params .facts div").all_inner_texts()
    assert [text.split() for text in facts] == [["lr", "0.1"], ["width", "4"]]
    page.locator(".job-line a", has_text="rates").click()
    page.get_by_role("heading", name="rates").wait_for()


def test_a_sweep_that_is_not_there(site: Site, tab: Callable[..., Any]) -> None:
    page = tab()
    with Client(site.url, site.token) as client:
        page.goto(client.page_address())
    page.goto(f"{site.url}/#/sweeps/nothing")
    page.get_by_text("There is no such sweep").wait_for()
    page.goto(f"{site.url}/#/compare")
    page.get_by_text("No jobs to compare").wait_for()
