"""A run that returns to an earlier state: whatever reads its points shows each round once, the later one.

The table of runs is `fixtures/returned_rounds.json`, which the dashboard's tests read too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import TESTS
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_api import rollup
from rayps_api.rollup import Rollup
from service_site import Site

from rayps.cli import main as cli_main
from rayps.core import metrics
from rayps.core.job.job_status import Status
from rayps.core.job.records import Point
from rayps.core.job.returned_rounds import RETURNED, is_void, select_counted
from rayps.runtime.records.journal import Journal
from rayps.service.client import Client
from rayps.service.sweeps.comparison import BATCH_LOSS

Part = tuple[int, int, int, int]  # (attempt of the driver, generation, first round, end): rounds in order
Truth = tuple[dict[int, float], dict[int, float]]  # losses by round, and errors by evaluated round
TABLE = TESTS / "fixtures" / "returned_rounds.json"
RUNS: dict[str, list[Part]] = {
    "none": [(1, 1, 0, 9)],
    "one return": [(1, 1, 0, 8), (1, 2, 4, 10)],
    "to the beginning": [(1, 1, 0, 5), (1, 2, 0, 7)],
    "no round is repeated": [(1, 1, 0, 5), (1, 2, 5, 9)],
    "ends before it was": [(1, 1, 0, 12), (1, 2, 3, 6)],
    "twice, further back": [(1, 1, 0, 8), (1, 2, 6, 9), (1, 3, 2, 11)],
    "another driver": [(1, 1, 0, 7), (2, 1, 3, 9)],
    "another driver returns too": [(1, 1, 0, 7), (1, 2, 6, 9), (2, 1, 4, 8), (2, 2, 6, 10)],
    "resumed from another job": [(1, 1, 20, 28), (1, 2, 24, 30)],
}


def points_of(parts: list[Part]) -> list[tuple[int, list[Point]]]:
    """Return the points of each part, with its attempt: each has its own number. Every third state is evaluated."""
    found, number = [], 0
    for attempt, generation, begin, end in parts:
        points: list[Point] = []
        for at in range(begin, end):
            number += 1
            points.append(
                {"kind": "round", "round": at, "epoch": 0, "loss": float(number), "samples": 1, "seconds": 1.0}
                | {"staleness": {}, "generation": generation, "strategy": "all_reduce"}
            )
            if (at + 1) % 3 == 0:
                points.append({"kind": "evaluation", "round": at + 1, "metrics": {"error": float(number)}})
        found.append((attempt, points))
    return found


def truth(parts: list[Part]) -> Truth:
    """The slow version: each part takes the place of what was from its first round on."""
    losses: dict[int, float] = {}
    errors: dict[int, float] = {}
    for (_, _, begin, _), (_, points) in zip(parts, points_of(parts), strict=True):
        losses = {at: loss for at, loss in losses.items() if at < begin}
        errors = {at: error for at, error in errors.items() if at <= begin}
        losses |= {point["round"]: point["loss"] for point in points if point["kind"] == "round"}
        errors |= {point["round"]: point["metrics"]["error"] for point in points if point["kind"] == "evaluation"}
    return losses, errors


def write(folder: Path, parts: list[Part]) -> None:
    """Write the points as drivers do: a journal for each attempt."""
    journal, last = Journal(folder), 1
    for attempt, points in points_of(parts):
        if attempt != last:
            journal.close()
            journal, last = Journal(folder), attempt
        journal.event("generation", "a generation begins")
        for point in points:
            journal.add_points([point])
    journal.close()


def told(points: Iterable[Point]) -> Truth:
    """What a reader has who cannot take a point back, and follows what it is told of returns."""
    losses: dict[int, float] = {}
    errors: dict[int, float] = {}
    for point in points:
        if point["kind"] == RETURNED:
            back = point["round"]
            losses = {at: loss for at, loss in losses.items() if at < back}
            errors = {at: error for at, error in errors.items() if at <= back}
        elif point["kind"] == "round":
            assert point["round"] not in losses, "it was not told that the run has returned"
            losses[point["round"]] = point["loss"]
        else:
            errors[point["round"]] = point["metrics"]["error"]
    return losses, errors


def once(points: Iterable[Point]) -> Truth:
    """What a reader has who gets each round once."""
    points = list(points)
    assert not [point for point in points if point["kind"] == RETURNED]
    keys = [(point["kind"], point["round"]) for point in points]
    assert len(set(keys)) == len(keys), "a round twice"
    return told(points)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    running = Site(tmp_path_factory.mktemp("returned") / "state")
    yield running
    running.close()


@pytest.fixture(scope="module")
def jobs(site: Site) -> dict[str, str]:
    """A job of the service for each run of the table, which has ended."""
    made = {}
    for name, parts in RUNS.items():
        job = made[name] = site.add()
        write(site.start(job), parts)
        site.store("change_status", job, Status.RUNNING, message="")
        site.store("change_status", job, Status.SUCCEEDED, message="")
    return made


def test_the_table_is_what_journals_write(tmp_path: Path) -> None:
    """The dashboard's tests read it. Delete the file and run this test to write it again."""
    found = {}
    for name, parts in RUNS.items():
        write(tmp_path / name, parts)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses, errors = truth(parts)
        for line in lines:
            line.pop("time", None)
        found[name] = {"points": lines, "losses": sorted(losses.items()), "errors": sorted(errors.items())}
    text = json.dumps(found, indent=1).replace("\n    ", " ").replace("\n   ]", " ]").replace("\n   }", " }") + "\n"
    if not TABLE.exists():
        TABLE.write_text(text)
    assert json.loads(TABLE.read_text()) == json.loads(text)
    markers = {name: sum(line["kind"] == RETURNED for line in each["points"]) for name, each in found.items()}
    assert markers["none"] == markers["no round is repeated"] == 0 and markers["another driver returns too"] == 3


# ---- the readers


def by_pages(site: Site, job: str, limit: int) -> Iterator[Point]:
    cursor = 0
    while True:
        page = site.http.get(f"/api/v1/jobs/{job}/metrics", params={"cursor": cursor, "limit": limit}).json()
        yield from page["points"]
        if page["cursor"] == cursor:
            return
        cursor = page["cursor"]


def by_buckets(series: list[dict[str, Any]], evaluations: list[Point]) -> Truth:
    losses = {}
    for bucket in series:
        assert bucket["round"] == bucket["round_end"] and bucket["count"] == 1, bucket
        losses[bucket["round"]] = bucket["loss"]["mean"]
    return losses, once(evaluations)[1]


def by_rollup(site: Site, job: str) -> Truth:
    found = site.http.get(f"/api/v1/jobs/{job}/metrics", params={"max_points": 5000}).json()
    return by_buckets(found["series"], found["evaluations"])


def by_comparison(site: Site, job: str) -> Truth:
    """A comparison has the curves of its jobs."""
    found = site.http.get("/api/v1/comparison", params={"job": [job], "max_points": 2000}).json()
    curves = found["curves"][job]
    after = dict(zip(curves[BATCH_LOSS]["round"], curves[BATCH_LOSS]["value"], strict=True))
    return {end - 1: loss for end, loss in after.items()}, dict(
        zip(curves["error"]["round"], curves["error"]["value"], strict=True)
    )


def by_command(site: Site, job: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Truth:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    assert cli_main.main(["metrics", job, "-o", "json"]) == 0
    return once(map(json.loads, capsys.readouterr().out.splitlines()))


def followed(site: Site, job: str, follow: bool) -> list[Point]:
    with Client(site.url, site.token) as client:
        return list(client.job(job).metrics(follow=follow))


READERS = ["pages of 1", "pages of 7", "one page", "stream", "client", "rollup", "comparison", "command", "history"]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_shows_each_round_once_the_later_one(
    site: Site,
    jobs: dict[str, str],
    name: str,
    reader: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = jobs[name]
    if reader.startswith("pages"):
        found = told(by_pages(site, job, int(reader.split()[-1])))
    elif reader == "one page":
        found = told(by_pages(site, job, 10_000))
        whole = [point for point in by_pages(site, job, 10_000) if point["kind"] != RETURNED]
        assert once(whole) == found, "of what is in one page, each round is there once"
    elif reader == "stream":
        found = told(followed(site, job, True))
    elif reader == "client":
        found = once(followed(site, job, False))
    elif reader == "rollup":
        found = by_rollup(site, job)
    elif reader == "comparison":
        found = by_comparison(site, job)
    elif reader == "command":
        found = by_command(site, job, capsys, monkeypatch)
    else:
        points = [point for _, part in points_of(RUNS[name]) for point in part]
        table = metrics.make_history(metrics.cut_points(points, max(truth(RUNS[name])[0]) + 1)).to_pylist()
        found = {row["round"]: row["loss"] for row in table}, truth(RUNS[name])[1]
        assert len(table) == len(found[0])
    assert found == truth(RUNS[name])


# ---- the fold, and buckets of several rounds


GENERATIONS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None)
@given(drawn=GENERATIONS, most=st.sampled_from([4, 8, 16, 8192]), limit=st.integers(1, 50))
def test_buckets_of_any_size_count_each_round_once(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int]], most: int, limit: int
) -> None:
    parts, reached = [], 0
    for generation, (begin, length) in enumerate(drawn):
        begin = min(begin, reached)
        parts.append((1, generation, begin, begin + length))
        reached = begin + length
    folder = tmp_path_factory.mktemp("run")
    path = folder / "metrics.jsonl"
    write(folder, parts)
    losses, errors = truth(parts)
    lines = path.read_bytes().splitlines(keepends=True)
    found, grown = Rollup(), folder / "grown.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollup, "_MOST", most)
        for at in range(0, len(lines), limit):
            with grown.open("ab") as file:
                file.write(b"".join(lines[at : at + limit]))
            found.read(grown)
        series = found.series(5000)
    assert sum(bucket["count"] for bucket in series) == len(losses)
    for bucket in series:
        inside = [loss for at, loss in losses.items() if bucket["round"] <= at <= bucket["round_end"]]
        assert bucket["count"] == len(inside) and bucket["loss"]["mean"] == pytest.approx(sum(inside) / len(inside))
    assert {each["round"]: each["metrics"]["error"] for each in found.evaluations} == errors
    assert once(select_counted(map(json.loads, lines))) == (losses, errors)


def test_what_is_void_after_a_return() -> None:
    for kind, void in (("round", [False, True, True]), ("evaluation", [False, False, True])):
        assert [is_void({"kind": kind, "round": at}, 5) for at in (4, 5, 6)] == void
