"""How tests are divided among processes, and the table of durations by which that is done."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import hypothesis
import lanes
import pytest


@pytest.mark.parametrize(
    ("case", "function"),
    [
        ("tests/test_x.py::test_a", "test_x.py::test_a"),
        ("tests/test_x.py::test_a@group", "test_x.py::test_a"),
        ("tests/test_x.py::test_a[b::c@d]@test_x.py::test_a", "test_x.py::test_a"),
        ("tests/browser/test_x.py::TestPage::test_a[1]@browser", "browser/test_x.py::test_a"),
    ],
)
def test_a_case_is_of_a_function(case, function):
    assert lanes.function_of(case) == function


def test_a_function_lasts_as_long_as_all_of_its_cases_with_their_fixtures_and_skipped_ones_last_nothing():
    watch = lanes.Stopwatch()
    for case, seconds, skipped in (
        ("tests/test_x.py::test_a[1]", (1.0, 2.0, 0.5), False),
        ("tests/test_x.py::test_a[2]", (0.0, 0.26, 0.0), False),
        ("tests/test_x.py::test_a[3]", (9.0,), True),
        ("tests/test_x.py::test_b", (9.0,), True),
        ("tests/test_x.py::test_c", (0.0, 0.01, 0.0), False),
    ):
        for each in seconds:
            watch.pytest_runtest_logreport(SimpleNamespace(nodeid=case, duration=each, skipped=skipped))
    assert watch.durations() == {"test_x.py::test_a": 3.8, "test_x.py::test_c": 0.0}


TESTS = """
import pytest

@pytest.mark.parametrize("x", range(3))
def test_many(x): pass

class TestPage:
    def test_page(self): pass

@pytest.mark.skip
def test_skipped(): pass
"""
CONFTEST = """
from pathlib import Path
import hypothesis
import lanes

def pytest_configure(config):
    config.pluginmanager.register(lanes.Stopwatch(Path(__file__).with_name("durations.json")))
"""


def test_a_run_in_processes_keeps_what_it_did_not_run(tmp_path):
    folder, table = tmp_path / "tests", tmp_path / "tests" / "durations.json"
    folder.mkdir()
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {lanes.TABLE.parent}\n")
    (folder / "conftest.py").write_text(CONFTEST)
    for name in ("test_one.py", "test_other.py"):
        (folder / name).write_text(TESTS)
    table.write_text(json.dumps({"test_one.py::test_gone": 5.0, "test_gone.py::test_a": 5.0}))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", "-n", "1"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    place = {"cwd": tmp_path, "env": clean | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, "check": True, "timeout": 120}
    subprocess.run([*command, "--dist", "loadgroup", "tests"], **place)
    every = {f"{file}::{name}" for file in ("test_one.py", "test_other.py") for name in ("test_many", "test_page")}
    assert json.loads(table.read_text()).keys() == every
    table.write_text(json.dumps(dict.fromkeys(every, 7.0)))
    subprocess.run([*command, "tests", "-k", "test_many and test_one"], **place)
    assert json.loads(table.read_text()) == {**dict.fromkeys(every, 7.0), "test_one.py::test_many": 0.0}


@pytest.mark.parametrize(
    ("fixtures", "params", "group"),
    [
        (["ray_cluster"], {}, "ray"),
        (["cluster"], {"cluster": "ray"}, "ray"),  # the fixture asks for the shared Ray when it runs
        (["cluster"], {"cluster": "threads"}, None),
        (["ray_service", "chromium"], {}, "service"),
        (["chromium"], {}, "browser"),
        ([], {}, None),
    ],
)
def test_all_that_share_something_dear_are_one_group(fixtures, params, group):
    item = SimpleNamespace(
        fixturenames=fixtures,
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda name: None,
        _fixtureinfo=SimpleNamespace(name2fixturedefs={}),
        path="test_x.py",
    )
    assert lanes.shared(item) == group


@hypothesis.given(hypothesis.strategies.booleans())
def test_no_example_of_a_property_has_a_deadline(value):
    chosen = hypothesis.settings()
    assert chosen.deadline is None and hypothesis.HealthCheck.too_slow in chosen.suppress_health_check
