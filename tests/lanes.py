"""Divide the tests among pytest-xdist's workers: which tests stay together, and which start first.

Tests that share something expensive (the local Ray cluster, Chromium, a module's fixture) are one group, and one worker
runs a group in order. The groups that take longest start first, by the durations of an earlier run (`durations.json`,
written by `make durations`); then no worker is left with a long group at the end.
"""

import json
import os
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("durations.json")
UNKNOWN = 1.0  # seconds that a test function is taken to last, all parameters together, while the table lacks it
UNKNOWN_PROCESSES = 30.0  # the same for a function that starts a Ray, a service or a browser, or kills processes
LONG = 60.0  # seconds from which a file without shared fixtures is divided by test function


def key(item):
    """The test function of an item, as the table names it: its file below `tests`, and its name without parameters."""
    return f"{Path(item.path).relative_to(TABLE.parent).as_posix()}::{getattr(item, 'originalname', None) or item.name}"


def known(table=TABLE):
    """Seconds by test function, all parameters together; empty without a table."""
    try:
        return json.loads(table.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def uses_ray(item):
    """Whether this item runs on the shared Ray."""
    if "ray_cluster" in getattr(item, "fixturenames", ()):
        return True
    return hasattr(item, "callspec") and item.callspec.params.get("cluster") == "ray"  # it asks for Ray when it runs


def uses_service(item):
    """Whether this item submits to the shared service."""
    return "ray_service" in getattr(item, "fixturenames", ())


def shared(item):
    """What this item shares with others for longer than one test; None = nothing."""
    names = item.fixturenames
    if uses_ray(item):
        return "ray"
    if uses_service(item):
        return "service"
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
        if shared(item) == Path(item.path).stem:
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
    """Collects how long each test function took, and merges that into the table at the end.

    A function whose every case was skipped has no duration of this run: it keeps the one of an earlier run, if any.
    """

    def __init__(self, table=TABLE):
        self.table = table
        self.seconds = defaultdict(float)  # by case: the name that pytest gives it
        self.skipped = set()

    def pytest_runtest_logreport(self, report):
        case = report.nodeid
        self.seconds[case] += report.duration
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.add(case)

    def durations(self):
        """Seconds by test function, all cases together that ran."""
        found = defaultdict(float)
        for case, seconds in self.seconds.items():
            if case not in self.skipped:
                found[function_of(case)] += seconds
        return {name: round(seconds, 1) for name, seconds in found.items()}

    def pytest_sessionfinish(self):
        if os.environ.get("PYTEST_XDIST_WORKER") is None:
            table = merged(known(self.table), self.durations(), self.table.parent)
            self.table.write_text(json.dumps(table, indent=0) + "\n", encoding="utf-8")


def function_of(case):
    """The test function of a case, as the table names it; pytest-xdist adds the group to a case's name, after an @."""
    path, _, rest = case.removeprefix("tests/").partition("::")
    return f"{path}::{rest.partition('@')[0].partition('[')[0].rpartition('::')[2]}"


def merged(before, now, folder):
    """The table of an earlier run and of this one; a function that is not in the tests any more is left out."""
    return {name: seconds for name, seconds in sorted({**before, **now}.items()) if exists(name, folder)}


def exists(name, folder):
    path, _, function = name.partition("::")
    try:
        return re.search(rf"^\s*(async )?def {re.escape(function)}\(", text_of(folder / path), re.MULTILINE) is not None
    except FileNotFoundError:
        return False


@cache
def text_of(path):
    return path.read_text(encoding="utf-8")
