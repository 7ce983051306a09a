"""Divide the tests among pytest-xdist's workers: which tests stay together, and which start first.

Tests that share something expensive (the local Ray cluster, Chromium, a module's fixture) are one group, and one worker
runs a group in order. The groups that take longest start first, by the durations of an earlier run (`durations.json`,
written by `make durations`); then no worker is left with a long group at the end.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("durations.json")
UNKNOWN = 1.0  # seconds that a test function is taken to last, all parameters together, while the table lacks it
UNKNOWN_PROCESSES = 30.0  # the same for a function that starts a Ray, a service or a browser, or kills processes
LONG = 60.0  # seconds from which a file without shared fixtures is divided by test function


def key(item):
    """The test function of an item, as the table names it: its file below `tests`, and its name without parameters."""
    return f"{Path(item.path).relative_to(TABLE.parent).as_posix()}::{getattr(item, 'originalname', None) or item.name}"


def known():
    """Seconds by test function, all parameters together; empty without a table."""
    try:
        return json.loads(TABLE.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def shared(item):
    """What this item shares with others for longer than one test; None = nothing."""
    names = item.fixturenames
    if "ray_cluster" in names:
        return "ray"
    if "chromium" in names and not item.get_closest_marker("ray"):
        return "browser"
    found = item._fixtureinfo.name2fixturedefs
    wide = any(
        definition.scope in ("module", "package", "session") and definition.baseid
        for name in names
        for definition in found.get(name, ())[-1:]
    )
    return Path(item.path).stem if wide else None


def guess(item):
    """Seconds of a function that the table does not have: a dear one that starts last would leave the others idle."""
    dear = any(map(item.get_closest_marker, ("ray", "chaos", "browser")))
    return UNKNOWN_PROCESSES if dear else UNKNOWN


def group(items):
    """Give each item a group, and order the items so that the longest groups come first."""
    table = known()
    calls = defaultdict(int)
    for item in items:
        calls[key(item)] += 1
    cost = {item: table.get(key(item), guess(item)) / calls[key(item)] for item in items}
    files, bound = defaultdict(float), set()
    for item in items:
        files[item.path] += cost[item]
        if shared(item):
            bound.add(item.path)
    names = {}
    for item in items:
        alone = files[item.path] > LONG and item.path not in bound
        names[item] = shared(item) or (key(item) if alone else Path(item.path).stem)
    total = defaultdict(float)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(names[item]))
        total[names[item]] += cost[item]
    items.sort(key=lambda item: (-total[names[item]], names[item]))  # stable: a group keeps its order


class Stopwatch:
    """Collects how long each test function took; writes the table at the end where that is asked for."""

    def __init__(self):
        self.seconds = defaultdict(float)

    def pytest_runtest_logreport(self, report):
        path, _, rest = report.nodeid.removeprefix("tests/").partition("::")
        name = rest.partition("@")[0].partition("[")[0]
        self.seconds[f"{path}::{name.rpartition('::')[2]}"] += report.duration

    def pytest_sessionfinish(self, session):
        if os.environ.get("PYTEST_XDIST_WORKER") is None:
            table = {name: round(value, 1) for name, value in sorted(self.seconds.items()) if value >= 0.5}
            TABLE.write_text(json.dumps(table, indent=0) + "\n", encoding="utf-8")
