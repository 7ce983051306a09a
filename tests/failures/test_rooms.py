"""The tree stands without each of its rooms: all modules import, and all other tests are found."""

import subprocess
import sys

import pytest
from folders import TESTS

ROOT = TESTS.parent
SCRIPT = ROOT / "scripts" / "without.py"
ROOMS = ("loggers", "tables", "chaos")


@pytest.mark.parametrize("room", ROOMS)
def test_the_rest_imports_and_is_collected(room, tmp_path):
    command = [sys.executable, str(SCRIPT), room, "--no-lint", "--into", str(tmp_path / "rest")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "imports: passes" in run.stdout and "collection: passes" in run.stdout


def test_a_room_that_is_not_one_is_refused():
    run = subprocess.run([sys.executable, str(SCRIPT), "core"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert all(room in run.stderr for room in ROOMS)
